"""Host: what the passes of training compute with (dtype, attention, what is kept), and the memory that they need."""

import dataclasses
import json
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.derived import uses_reference
from dapo_jax.config.sections import AlgorithmConfig, Config, DataConfig, ModelConfig, OptimConfig, TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.learner.trainable import Passes
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.fused_attention import bin_attention, kernels, unfit
from dapo_jax.models.token_paths import CHUNK
from dapo_jax.models.weights import count_params
from dapo_jax.parallel.compilation import ORDERED, OVERLAP
from dapo_jax.parallel.devices import limits_of, multiplies_bfloat16
from dapo_jax.parallel.mesh import platform
from dapo_jax.run.base_models import TEACHER, read_architecture_of

FILLED = 0.85  # of a device's memory, which an estimate may reach
SCORES = 3  # times that the scores of a layer exist
# From programs compiled for 7B on v5e:8x8 with tensor 1, 2 and 4: they are within 2.2 GiB of the estimate.
ARRAYS = 12  # float32 arrays [tokens, hidden size] that the backward pass of a layer holds beside what is divided
TABLE_BYTES = 10  # of an entry of a table of tokens: gathered in float32, in bfloat16, and its float32 gradient


def passes(config: Config, arch: Architecture, mesh: Mesh) -> Passes:
    """What the training passes of the policy, and of a critic, depend on.

    Raises:
        InputError: see `chosen_attention`.
    """
    arch = within_lengths(config.algorithm, config.data, arch)
    name, _ = chosen_attention(config.model, config.data, arch, mesh)
    windows, device = arch.window is not None, mesh.devices.flat[0]
    return Passes(
        arch=arch,
        dtype=compute_dtype(config.model, mesh),
        remat=remat_policy(config, arch, mesh),
        attention=bin_attention(name, device, share_prompts=config.actor.share_prompts, windows=windows),
        compiler_options=compiler_options(config.trainer, mesh),
    )


def within_lengths(algorithm: AlgorithmConfig, data: DataConfig, arch: Architecture) -> Architecture:
    """`arch` without windows that no sequence of the run leaves. Hinted prompts may have any length."""
    if needs(named_estimator(algorithm.adv_estimator), "hint_logprobs"):
        return arch
    return arch.within(data.max_prompt_length + data.max_response_length)


def compiler_options(trainer: TrainerConfig, mesh: Mesh) -> dict[str, Any]:
    """XLA's options for passes over the layers: the platform's, overridden by trainer.compiler_options."""
    ordered = {ORDERED: True} if trainer.deterministic == "on" and platform(mesh) == "gpu" else {}
    return {**OVERLAP.get(platform(mesh), {}), **ordered, **json.loads(trainer.compiler_options)}


def compute_dtype(model: ModelConfig, mesh: Mesh) -> jnp.dtype:
    """The dtype of matrix products; model.dtype=auto chooses a fast one for the devices."""
    if model.dtype != "auto":
        return jnp.dtype(model.dtype)
    return jnp.dtype(jnp.bfloat16 if multiplies_bfloat16(mesh.devices.flat[0]) else jnp.float32)


def chosen_attention(model: ModelConfig, data: DataConfig, arch: Architecture, mesh: Mesh) -> tuple[str, str]:
    """The implementation of attention in training, and why it is xla if model.attention=fused.

    Raises:
        InputError: the kernel that model.attention names cannot run on these devices.
    """
    asked, device, dtype = model.attention, mesh.devices.flat[0], compute_dtype(model, mesh)
    if asked == "xla":
        return asked, ""
    names = kernels(device, data.max_response_length) if asked == "fused" else (asked,)
    problems = {name: unfit(name, device, dtype, arch.head_dim, arch.attention_cap, sinks=arch.sinks) for name in names}
    if fit := [name for name, problem in problems.items() if not problem]:
        return fit[0], ""
    problem = next(iter(problems.values()), "")
    if asked != "fused":
        raise InputError(f"model.attention={asked} {problem}: choose fused or xla, or other devices")
    return "xla", problem


def remat_policy(config: Config, arch: Architecture, mesh: Mesh) -> str:
    """What each layer keeps for the backward pass: a name in models/remat.py's POLICIES.

    model.remat_policy=auto keeps the results of attention on accelerators where the estimate says that they fit.
    """
    policy, device = given_policy(config.model), platform(mesh)
    if policy != "auto":
        return policy
    usable = memory_by_kind(config.trainer, mesh)
    fits = device != "cpu" and usable is not None and fits_memory(config, arch, mesh, usable, "attention")
    return "attention" if fits else "full"


def given_policy(model: ModelConfig) -> str:
    """model.remat_policy, or "none" where nothing is computed again."""
    return model.remat_policy if model.enable_gradient_checkpointing else "none"


def memory_by_kind(trainer: TrainerConfig, mesh: Mesh) -> float | None:
    """Bytes that JAX may take on a device of `mesh`, by its kind; None if its memory is unknown."""
    return limits_of(mesh.devices.flat[0]).usable_memory(platform(mesh), trainer.gpu_memory_fraction)


def fits_memory(config: Config, arch: Architecture, mesh: Mesh, usable: float, policy: str = "") -> bool:
    """Whether training fits so many bytes of each device, by an estimate. `policy` as for `training_bytes`."""
    stores_scores = chosen_attention(config.model, config.data, arch, mesh)[0] == "xla"
    return training_bytes(config, arch, mesh, stores_scores=stores_scores, policy=policy) <= FILLED * usable


def training_bytes(config: Config, arch: Architecture, mesh: Mesh, *, stores_scores: bool, policy: str = "") -> float:
    """Bytes of a device of `mesh` while a micro-batch is trained on: an estimate, from shapes alone.

    The preflight has the compiled figures.

    Args:
        stores_scores: whether attention stores its scores, as XLA's does.
        policy: what each layer keeps; "" = what the config says, of model.remat_policy=auto the least.
    """
    tensor, distillation = mesh.shape["tensor"], config.algorithm.distillation
    shares = math.prod(size for axis, size in mesh.shape.items() if axis != "data")
    teacher = dataclasses.replace(config.model, path=distillation.path) if distillation.path else None
    longest = config.data.max_prompt_length + config.data.max_response_length
    tables = TABLE_BYTES * arch.vocab_size * arch.hidden_size / tensor
    kept = arch.num_layers * _kept_width(policy or given_policy(config.model), arch) / tensor
    scores = SCORES * arch.num_heads * longest / tensor if stores_scores else 0
    networks = trained(config)
    tokens = max(network.max_tokens for network in networks.values()) / mesh.shape.get("context", 1)
    recurrent = 0  # each device has all channels, and the products of chunks of its heads
    if arch.delta is not None:
        recurrent = ARRAYS * arch.delta.channels + 4 * CHUNK * arch.delta.value_heads / tensor
    of_passes = 4 * tokens * (kept + ARRAYS * arch.hidden_size + recurrent + scores)
    rank, reference = config.model.lora.rank, uses_reference(config.algorithm, config.actor)
    states = {name: _state_bytes(network.options.optim) for name, network in networks.items()}
    of_weight = sum((states | {"actor": 2} if rank else states).values()) + (2 if reference and not rank else 0)
    of_teacher = 2 * count_params(read_architecture_of(teacher, TEACHER)) if teacher else 0
    return (of_weight * count_params(arch) + of_teacher) / shares + tables + of_passes


def _state_bytes(optim: OptimConfig) -> float:
    """Of a weight that is trained, with its moments and its gradient, over all shards."""
    kept = 1 if optim.optimizer == "muon" else 2  # of a matrix of Muon only the first moment
    return 4 + 4 + (0 if optim.offload else kept * jnp.dtype(optim.moments_dtype).itemsize)


def _kept_width(policy: str, arch: Architecture) -> int:
    """Float32 numbers that a layer keeps of a token for the backward pass."""
    share = sum(not kind.delta for kind in arch.layers) / arch.num_layers
    attention = int(2 * share * (arch.num_heads + arch.num_kv_heads) * arch.head_dim)
    if policy in ("auto", "full", "offload"):
        return arch.hidden_size
    if policy == "attention":
        return arch.hidden_size + attention
    return 2 * arch.hidden_size + attention + 3 * arch.forward_size
