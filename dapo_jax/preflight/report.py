"""Host: the report on a training step: memory by stage, work, a lower bound on its time, and whether it fits.

The report is a dict ready for JSON, so that a saved one can be read and shown like a new one (`tables`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.base_models import read_model
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import gen_batch_size
from dapo_jax.config.sections import Config
from dapo_jax.errors import InputError
from dapo_jax.meshes import check_memory, make_meshes
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.load import read_model_architecture
from dapo_jax.models.weights import count_params
from dapo_jax.other_runs import RANDOM, find_trained
from dapo_jax.parallel.devices import LIMITS, Limits, devices_of, limits_of
from dapo_jax.parallel.memory import free_bytes
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.slices import libtpu_name
from dapo_jax.places import local_model
from dapo_jax.preflight.advice import advise
from dapo_jax.preflight.compiled import Compiled, compile_program
from dapo_jax.preflight.hlo_costs import Costs
from dapo_jax.preflight.programs import Program, step_programs
from dapo_jax.settings import chosen_attention, compute_dtype

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
USABLE = 0.95  # share of a device's memory: the rest goes to the runtime and to gaps between buffers
PARTS = ("products", "memory", "collectives", "total")  # of an estimated time


def preflight(
    config: Config, topology: str, *, response_length: int | None = None, quick: bool = False, progress: Any = None
) -> dict[str, Any]:
    """The report on `config` for the devices of `topology` (see `devices_of`), ready for JSON.

    Args:
        response_length: tokens per response, for the time; None = data.max_response_length.
        quick: compile decoding only for the first and last window of the cache, and interpolate in between.
        progress: a file for a line per program.

    Raises:
        InputError: config, model and mesh do not fit together.
    """
    validate(config)
    if config.trainer.rollout_ahead:
        raise InputError(
            "trainer.rollout_ahead=1 splits the devices, but a preflight compiles for one mesh: set it to 0 and give "
            "the devices that train, or those that sample"
        )
    arch = read_shape(config)
    meshes = _meshes(config, arch, topology)
    mesh = meshes.training
    limits = limits_of(mesh.devices.flat[0]).of_dtype(compute_dtype(config.model, mesh).name)
    memory = usable_memory(config, mesh, limits)
    longest = config.data.max_response_length
    length = min(response_length or longest, longest)
    step = step_programs(config, arch, meshes, response_length=length, memory=memory * USABLE, every_window=not quick)
    programs = list(step.programs)
    if length < longest:  # longer responses do not count in the time, but must fit
        largest = step_programs(
            config, arch, meshes, response_length=longest, memory=memory * USABLE, every_window=False
        )
        names = {program.name for program in programs}
        programs += [dataclasses.replace(p, calls=0) for p in largest.programs if p.name not in names]
    compiled = _compile_all(programs, mesh, config.trainer.compilation_cache_dir, progress)
    attention = chosen_attention(config.model, arch, mesh)[0]
    return {
        "model": {
            "path": config.model.path,
            "parameters": count_params(arch),
            "dtype": compute_dtype(config.model, mesh).name,
            "attention": attention,
        },
        "topology": topology if libtpu_name(topology) == topology else f"{topology} ({libtpu_name(topology)})",
        "mesh": dict(meshes.sampling.shape),
        "training_mesh": dict(mesh.shape),
        "device": dataclasses.asdict(limits) | {"memory": memory},
        "assumed": {
            "response_length": length,
            "rounds": 1,
            "prompts_sampled": gen_batch_size(config),
            "prompts_trained": config.data.train_batch_size,
        },
        "plan": {"waves": step.waves, "rows_of_a_wave": step.rows, "micro_batches": step.micro_batches},
        "config": dataclasses.asdict(config),
        "jax": jax.__version__,
        "host_bytes_per_device": step.host_bytes,
        "programs": [as_json(one, limits) for one in compiled],
        **totals(compiled, limits, memory),
        "advice": advise(config, arch, meshes, step, compiled, memory * USABLE, attention=attention),
    }


def _meshes(config: Config, arch: Architecture, topology: str) -> Meshes:
    axes = config.mesh
    meshes = make_meshes(config, arch, devices_of(topology, max(axes.data, 1) * axes.fsdp * axes.tensor))
    check_memory(config, meshes.training)
    return meshes


def _compile_all(programs: Sequence[Program], mesh: Mesh, cache: str, progress: Any) -> list[Compiled]:
    compiled = []
    for number, program in enumerate(programs, start=1):
        if progress is not None:
            print(f"compiling program {number} of {len(programs)}: {program.name}", file=progress, flush=True)
        compiled.append(compile_program(program, mesh, cache))
    return compiled


def usable_memory(config: Config, mesh: Mesh, limits: Limits) -> float:
    """Bytes of a device that JAX can use: on a GPU, the share trainer.gpu_memory_fraction."""
    device = mesh.devices.flat[0]
    if device in jax.devices():
        return free_bytes(mesh)
    if limits.memory is None:
        raise InputError(f"the memory of {device.device_kind} is unknown: choose one of {', '.join(LIMITS)}")
    return limits.memory * (config.trainer.gpu_memory_fraction if device.platform == "gpu" else 1.0)


def read_shape(config: Config) -> Architecture:
    """The architecture of model.path, for which config.json is enough."""
    if config.model.path == RANDOM or find_trained(config.model.path) is not None:
        return read_model(config)[0]
    path = local_model(config.model.path)
    known = SHAPES / path.name.removesuffix("-Instruct")
    return read_model_architecture(known if not path.exists() and known.exists() else path)


def seconds(costs: Costs, limits: Limits) -> dict[str, float] | None:
    """A lower bound on the time of a call: the roofline of products and memory, plus collectives."""
    if limits.flops is None or limits.bandwidth is None or limits.link is None:
        return None
    parts = {
        "products": costs.flops / limits.flops,
        "memory": costs.bytes / limits.bandwidth,
        "collectives": sum(one.bytes / limits.speed(one.group, one.per_host) for one in costs.collectives),
    }
    return parts | {"total": max(parts["products"], parts["memory"]) + parts["collectives"]}


def as_json(compiled: Compiled, limits: Limits) -> dict[str, Any]:
    """The report's entry for one program."""
    program, costs = compiled.program, compiled.costs
    return {
        "stage": program.stage,
        "name": program.name,
        "calls": program.calls,
        "bytes": compiled.bytes,
        "costs": dataclasses.asdict(costs) if costs is not None else None,
        "seconds": seconds(costs, limits) if costs is not None else None,
        "compile_s": round(compiled.compile_s, 1),
    }


def totals(compiled: Sequence[Compiled], limits: Limits, memory: float) -> dict[str, Any]:
    """Peak memory and costs per step of each stage, and whether the step fits."""
    stages: dict[str, Any] = {}
    for name in dict.fromkeys(one.program.stage for one in compiled):
        of_stage = [one for one in compiled if one.program.stage == name]
        known = [(one.program.calls, one.costs) for one in of_stage if one.costs is not None]
        times = [(calls, seconds(costs, limits)) for calls, costs in known]
        stages[name] = {
            "bytes": max(of_stage, key=lambda one: one.total).bytes,
            "calls": sum(one.program.calls for one in of_stage),
            "flops": sum(calls * costs.flops for calls, costs in known),
            "moved": sum(calls * costs.bytes for calls, costs in known),
            "sent": sum(calls * costs.sent for calls, costs in known),
            "collectives": _collectives(known),
            "seconds": {part: sum(calls * found[part] for calls, found in times if found is not None) for part in PARTS}
            if limits.is_known
            else None,
        }
    largest = max(one.total for one in compiled)
    return {
        "stages": stages,
        "step_seconds": sum(stage["seconds"]["total"] for stage in stages.values()) if limits.is_known else None,
        "peak_bytes": largest,
        "fits": largest <= USABLE * memory and all(one.costs is not None for one in compiled),
        "not_counted": sorted({note for one in compiled if one.costs is not None for note in one.costs.unknown}),
    }


def _collectives(known: Sequence[tuple[float, Costs]]) -> list[dict[str, Any]]:
    """Collectives per step, by kind, group size and devices per host."""
    totals: dict[tuple[str, int, int], list[float]] = {}
    for calls, costs in known:
        for one in costs.collectives:
            found = totals.setdefault((one.kind, one.group, one.per_host), [0.0, 0.0])
            found[0] += calls * one.count
            found[1] += calls * one.bytes
    return [
        {"kind": kind, "devices": group, "per_host": per_host, "count": count, "bytes": size}
        for (kind, group, per_host), (count, size) in sorted(totals.items())
        if count
    ]
