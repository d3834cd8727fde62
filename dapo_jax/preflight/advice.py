"""Host: which setting to change first when a training step does not fit the devices."""

from collections.abc import Mapping, Sequence

from dapo_jax.config.derived import token_budget
from dapo_jax.config.sections import Config
from dapo_jax.models.architecture import Architecture
from dapo_jax.preflight.compiled import Compiled
from dapo_jax.preflight.programs import CACHE, DECODING, GRADIENTS, OPTIMIZER, PARAMETERS, Step


def advise(
    config: Config,
    arch: Architecture,
    mesh: Mapping[str, int],
    step: Step,
    programs: Sequence[Compiled],
    memory: float,
    *,
    attention: str,
) -> list[str]:
    """One line for each stage that takes more than `memory` bytes: the settings to change, the first of them first.

    Args:
        attention: what computes the attention of training on these devices.
    """
    lines = []
    for stage in dict.fromkeys(one.program.stage for one in programs):
        worst = max((one for one in programs if one.program.stage == stage), key=lambda one: one.total)
        if worst.total <= memory:
            continue
        largest = sorted(worst.bytes, key=lambda kind: -worst.bytes[kind])
        known = config, arch, mesh, step, worst, memory, attention
        cures = [cure for kind in largest[:2] for cure in _cures(kind, *known)]
        over = (worst.total - memory) / 2**30
        lines.append(
            f"{worst.program.name}: {over:.1f} GiB too many, most of them {largest[0]}; "
            + ("; then ".join(dict.fromkeys(cures)) or "take more devices")
        )
    return lines


def _cures(
    kind: str,
    config: Config,
    arch: Architecture,
    mesh: Mapping[str, int],
    step: Step,
    worst: Compiled,
    memory: float,
    attention: str,
) -> list[str]:
    if kind == CACHE:
        room = memory - (worst.total - worst.bytes[CACHE])
        rows = int(step.rows * max(room, 0.0) / worst.bytes[CACHE]) // config.rollout.n * config.rollout.n
        if rows:
            return [f"set rollout.max_num_seqs={rows}"]
        return [*_more_tensor(arch, mesh), "lower data.max_response_length"]
    if kind == DECODING:
        return _more_tensor(arch, mesh)
    if kind in (PARAMETERS, OPTIMIZER, GRADIENTS):
        cures = []
        if mesh["data"] > 1:
            cures.append(f"set mesh.fsdp={mesh['fsdp'] * mesh['data']} and mesh.data=1")
        if not config.actor.optim.offload:
            cures.append("set actor.optim.offload=True")
        if config.actor.optim.moments_dtype != "bfloat16":
            cures.append("set actor.optim.moments_dtype=bfloat16")
        return [*cures, "take more devices for mesh.fsdp"]
    if worst.program.stage in ("decode", "prefill"):
        return [f"set rollout.max_num_seqs={max(step.rows // 2, config.rollout.n)}", *_more_tensor(arch, mesh)]
    return _smaller_passes(config, arch, mesh, attention)


def _smaller_passes(config: Config, arch: Architecture, mesh: Mapping[str, int], attention: str) -> list[str]:
    """Temporaries of forward and backward passes."""
    cures, model, actor, data = [], config.model, config.actor, config.data
    if attention == "xla" and data.max_prompt_length + data.max_response_length >= 2048:
        change = "attention=fused" if model.attention == "xla" else "dtype=bfloat16"
        cures.append(f"set model.{change}: a fused kernel keeps no attention scores (on a TPU, or a GPU in bfloat16)")
    if not model.enable_gradient_checkpointing or model.remat_policy != "full":
        cures.append("set model.enable_gradient_checkpointing=True and model.remat_policy=full")
    longest, budget = data.max_prompt_length + data.max_response_length, token_budget(config)
    if budget is None and actor.ppo_micro_batch_size_per_device > 1:
        cures.append(f"set actor.ppo_micro_batch_size_per_device={actor.ppo_micro_batch_size_per_device // 2}")
    elif budget is not None and budget > longest:
        cures.append(f"set actor.ppo_max_token_len_per_device={max(budget // 2, longest)}")
    if actor.logprob_chunk_size > 1024:
        cures.append("set actor.logprob_chunk_size=1024")
    return [*cures, *_more_tensor(arch, mesh)]


def _more_tensor(arch: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """A larger mesh.tensor, if the key-value heads allow one on as many devices."""
    tensor, fsdp = mesh["tensor"], mesh["fsdp"]
    if arch.num_kv_heads % (2 * tensor) == 0 and fsdp % 2 == 0:
        return [f"set mesh.tensor={2 * tensor} and mesh.fsdp={fsdp // 2}"]
    return []
