"""Device: from the parameters of training to the weights for sampling."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.learner.trainable import WithFrozen
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layers import layer_weights
from dapo_jax.models.lora import Lora, merged
from dapo_jax.models.vocabulary_blocks import with_whole_blocks
from dapo_jax.models.weights import cast_matrices, weight_shardings, weight_table
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES


def build_decode_weights(
    arch: Architecture, dtype: Any, mesh: Mesh, lora: Lora | None = None, frozen: Any = None
) -> WithFrozen:
    """Compiles (on first use) params -> weights for rollout/: cast to `dtype`, resharded over `mesh`, layers unstacked.

    The params may lie on another mesh of the same devices in the same order. They are cast before they are sent. The
    tables of tokens may have more rows, see `with_whole_blocks`.

    Args:
        lora, frozen: adapters, and the weights that they are added to, in the dtype of matrix products.
    """

    def decoding(params, frozen):
        whole = cast_matrices(params, arch, dtype) if lora is None else merged(frozen, params, lora)
        # First onto this mesh, then whole over its fsdp. Asked for both at once, XLA makes some weights whole on every
        # device; the barrier keeps it from merging the two.
        whole = jax.tree.map(jax.lax.optimization_barrier, jax.lax.with_sharding_constraint(whole, divided))
        return with_whole_blocks(unstack_layers(whole, arch), mesh.shape["tensor"])

    divided, shardings = (weight_shardings(weight_table(arch), mesh, rules) for rules in (TRAIN_RULES, DECODE_RULES))
    return WithFrozen(jax.jit(decoding, out_shardings=_unstacked_shardings(shardings, arch)), frozen)


class LatestWeights:
    """The decoding weights of the newest parameters, made once per update, as the stage `update_weights`."""

    def __init__(
        self, decode_weights: Callable[[Any], Any], stage: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._make, self._stage = decode_weights, stage
        self._params: Any = None
        self._weights: Any = None

    def __call__(self, params: Any) -> Any:
        """The decoding weights of `params`."""
        if self._params is not params:
            self.drop()
            with self._stage("update_weights"):
                self._params, self._weights = params, jax.block_until_ready(self._make(params))
        return self._weights

    def drop(self) -> None:
        """Frees them, before an update needs the memory."""
        self._params = self._weights = None


def unstack_layers(params: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """`params` with "layers" as a list of one pytree per layer, as decoding takes them."""
    return {**params, "layers": layer_weights(params["layers"], arch)}


def _unstacked_shardings(shardings: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """Shardings of `unstack_layers`' result: each layer's without the first dimension."""
    layer = jax.tree.map(
        lambda sharding: type(sharding)(sharding.mesh, type(sharding.spec)(*sharding.spec[1:])), shardings["layers"]
    )
    has = {name: arch.layers_with(name) for name in layer}
    layers = [{name: layer[name] for name in layer if number in has[name]} for number in range(arch.num_layers)]
    return {**shardings, "layers": layers}
