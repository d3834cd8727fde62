"""Device: which results of a layer are saved for the backward pass, and which it recomputes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import checkpoint_policies as policies

ATTENDED = "attended"  # the result of attention, and what its kernel saves for the backward pass
ATTENTION = ("query", "key", "value", ATTENDED, "output product")  # names of results of a layer
CUDNN = "dot_product_attention_fwd_wrapper"  # JAX's name of cuDNN's attention, whose results have no names


def _of_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == CUDNN


# name -> what is saved of each layer; None saves everything
POLICIES: Mapping[str, Any] = {
    "none": None,
    "full": policies.nothing_saveable,  # its input only
    "attention": policies.save_from_both_policies(  # what the attention's backward pass needs
        policies.save_only_these_names(*ATTENTION), _of_attention
    ),
    "dots": policies.dots_with_no_batch_dims_saveable,  # results of products with weights
    "offload": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),  # the same, in host memory
}


def rematerialized(layer_step: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """`layer_step`, which recomputes in the backward pass what the policy does not save (arXiv:1604.06174)."""
    kept = POLICIES[policy]
    return layer_step if kept is None else jax.checkpoint(layer_step, policy=kept)
