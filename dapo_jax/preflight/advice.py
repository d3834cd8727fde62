"""Host: which setting to change first when a training step does not fit in memory."""

import math
from collections.abc import Mapping, Sequence

from dapo_jax.config.sections import ActorConfig, Config, DataConfig, ModelConfig, OptimConfig
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.context import undivided
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.preflight.compiled import CACHE, DECODING, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARIES, Compiled
from dapo_jax.preflight.programs import Step
from dapo_jax.run.passes import remat_policy


def advise(
    config: Config,
    arch: Architecture,
    meshes: Meshes,
    step: Step,
    programs: Sequence[Compiled],
    memory: float,
    *,
    attention: str,
) -> list[str]:
    """One line per stage that needs more than `memory` bytes, with the settings to change, the most useful first.

    Args:
        attention: the implementation of attention in training passes on these devices.
    """
    more_tensor = _more_tensor(arch, meshes.sampling.shape)
    more_shards = _more_shards(config.actor.optim, meshes.sampling.shape)
    kept = remat_policy(config, arch, meshes.training)
    smaller_passes = _smaller_passes(config.model, config.actor, config.data, attention, kept)
    smaller_passes += _more_train_tensor(arch, meshes.training.shape) or _more_context(arch, meshes.training.shape)
    fewer_rows = [f"set rollout.max_num_seqs={max(step.rows // 2, config.rollout.n)}", *more_tensor]
    lines = []
    for stage in dict.fromkeys(one.program.stage for one in programs):
        worst = max((one for one in programs if one.program.stage == stage), key=lambda one: one.total)
        if worst.total <= memory:
            continue
        cures = {
            CACHE: _smaller_cache(worst, step, memory, config.rollout.n)
            or [*more_tensor, "lower data.max_response_length"],
            DECODING: more_tensor,
            PARAMETERS: more_shards,
            OPTIMIZER: more_shards,
            GRADIENTS: more_shards,
            TEMPORARIES: fewer_rows if stage in ("decode", "prefill") else smaller_passes,
        }
        largest = sorted(worst.bytes, key=lambda kind: -worst.bytes[kind])
        chosen = dict.fromkeys(cure for kind in largest[:2] for cure in cures[kind])
        over = (worst.total - memory) / 2**30
        lines.append(
            f"{worst.program.name}: {over:.1f} GiB too much, mostly {largest[0]}; "
            + ("; then ".join(chosen) or "use more devices")
        )
    return lines


def _smaller_cache(worst: Compiled, step: Step, memory: float, num_samples: int) -> list[str]:
    """As many pages, or slots of whole groups, as fit next to everything else, if any do."""
    if not worst.bytes[CACHE]:
        return []
    room = max(memory - (worst.total - worst.bytes[CACHE]), 0.0)
    if "pages" in step.sizes:  # which fill their share of what is free, with any number of slots
        share = math.floor(100 * room / (room + worst.bytes[TEMPORARIES])) / 100 if room else 0.0
        return [f"set rollout.kv_memory_share={share}"] if share else []
    fitting = int(step.rows * room / worst.bytes[CACHE]) // num_samples * num_samples
    return [f"set rollout.max_num_seqs={fitting}"] if fitting else []


def _more_shards(optim: OptimConfig, mesh: Mapping[str, int]) -> list[str]:
    """Fewer bytes per device for parameters, gradients and moments."""
    cures = []
    if mesh["data"] > 1:
        cures.append(f"set mesh.fsdp={mesh['fsdp'] * mesh['data']} and mesh.data=1")
    if not optim.offload:
        cures.append("set actor.optim.offload=True")
    if optim.moments_dtype != "bfloat16":
        cures.append("set actor.optim.moments_dtype=bfloat16")
    return [*cures, "use more devices for mesh.fsdp"]


def _smaller_passes(model: ModelConfig, actor: ActorConfig, data: DataConfig, attention: str, kept: str) -> list[str]:
    """Fewer temporaries of forward and backward passes."""
    cures = []
    if attention == "xla" and data.max_prompt_length + data.max_response_length >= 2048:
        change = "attention=fused" if model.attention == "xla" else "dtype=bfloat16"
        cures.append(f"set model.{change}: a fused kernel stores no attention scores (on a TPU, or a GPU in bfloat16)")
    if kept != "full":
        cures.append("set model.enable_gradient_checkpointing=True and model.remat_policy=full")
    longest, budget = data.max_prompt_length + data.max_response_length, actor.ppo_max_token_len_per_device
    if budget is None and actor.ppo_micro_batch_size_per_device > 1:
        cures.append(f"set actor.ppo_micro_batch_size_per_device={actor.ppo_micro_batch_size_per_device // 2}")
    elif budget is not None and budget > longest:
        cures.append(f"set actor.ppo_max_token_len_per_device={max(budget // 2, longest)}")
    if actor.logprob_chunk_size > 1024:
        cures.append("set actor.logprob_chunk_size=1024")
    return cures


def _more_tensor(arch: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """A larger mesh.tensor on the same devices, if it divides the key-value heads."""
    tensor, fsdp = mesh["tensor"], mesh["fsdp"]
    if arch.num_kv_heads % (2 * tensor) == 0 and fsdp % 2 == 0:
        return [f"set mesh.tensor={2 * tensor} and mesh.fsdp={fsdp // 2}"]
    return []


def _more_train_tensor(arch: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """A larger mesh.train_tensor, if it divides the key-value heads."""
    larger = 2 * mesh["tensor"]
    return [f"set mesh.train_tensor={larger}"] if arch.num_kv_heads % larger == 0 and mesh["fsdp"] % 2 == 0 else []


def _more_context(arch: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """A larger mesh.context, if it divides the heads."""
    larger = 2 * mesh.get("context", 1)
    fits = mesh["fsdp"] % 2 == 0 and not undivided(arch, mesh["tensor"], larger)
    return [f"set mesh.context={larger}"] if fits else []
