"""Host: an estimate of the memory that training takes, from shapes alone. The preflight has the compiled figures."""

import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.config.derived import token_budget, uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.learner.choices import trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import count_params
from dapo_jax.settings import remat_policy
from dapo_jax.teacher import read_teacher

SCORES = 3  # times that the scores of a layer exist
# From programs compiled for 7B on v5e:8x8 with tensor 1, 2 and 4: they are within 2.2 GiB of the estimate.
ARRAYS = 12  # float32 arrays [tokens, hidden size] that the backward pass of a layer holds beside what is divided
TABLE_BYTES = 10  # of an entry of a table of tokens: gathered in float32, in bfloat16, and its float32 gradient


def training_bytes(config: Config, arch: Architecture, mesh: Mesh, *, stores_scores: bool) -> float:
    """Bytes of a device of `mesh` while a micro-batch is trained on.

    Args:
        stores_scores: whether attention stores its scores, as XLA's does.
    """
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = max(token_budget(config, name) for name in trained(config))
    tables = TABLE_BYTES * arch.vocab_size * arch.hidden_size / tensor
    kept = arch.num_layers * _kept_width(config, arch) / tensor
    scores = SCORES * arch.num_heads * longest / tensor if stores_scores else 0
    passes = 4 * tokens * (kept + ARRAYS * arch.hidden_size + scores)
    of_teacher = 2 * count_params(read_teacher(config)[0]) if config.algorithm.distillation.path else 0
    return (_state_bytes(config, arch) + of_teacher) / (fsdp * tensor) + tables + passes


def _state_bytes(config: Config, arch: Architecture) -> float:
    """Parameters, moments and gradients of all networks, over all shards."""
    total = 0.0
    for name in trained(config):
        optim = getattr(config, name).optim
        kept = 1 if optim.optimizer == "muon" else 2  # of a matrix of Muon only the first moment
        moments = 0 if optim.offload else kept * jnp.dtype(optim.moments_dtype).itemsize
        total += 2 if name == "actor" and config.model.lora.rank else 4 + 4 + moments
    if uses_reference(config) and not config.model.lora.rank:
        total += 2
    return total * count_params(arch)


def _kept_width(config: Config, arch: Architecture) -> int:
    """Float32 numbers that a layer keeps of a token for the backward pass."""
    attention = 2 * (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    policy = remat_policy(config.model)
    if policy in ("full", "offload"):
        return arch.hidden_size
    if policy == "attention":
        return arch.hidden_size + attention
    return 2 * arch.hidden_size + attention + 3 * arch.forward_size
