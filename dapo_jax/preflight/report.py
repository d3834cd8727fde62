"""Host: the report on a training step: memory by stage, work, a bound on its time, the time to expect, what fits.

Memory and time are those of the longest case: prompts and responses as long as the config allows. With the lengths of
`parse_lengths`, the report also has the time that is expected.

The report is a dict ready for JSON, so that a saved one can be read and shown like a new one (`tables`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import gen_batch_size, plays_episodes
from dapo_jax.config.files import SHAPES
from dapo_jax.config.places import place_of
from dapo_jax.config.sections import AlgorithmConfig, Config, DataConfig, ModelConfig, RewardConfig
from dapo_jax.errors import InputError, say
from dapo_jax.hub.names import model_name
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import count_params
from dapo_jax.parallel.devices import LIMITS, Limits, devices_of, limits_of
from dapo_jax.parallel.memory import free_bytes
from dapo_jax.parallel.slices import libtpu_name
from dapo_jax.preflight.advice import advise
from dapo_jax.preflight.calibration import ATTENTION, ELEMENTWISE, FIXED, PRODUCTS, Rates, expected_seconds, rates_of
from dapo_jax.preflight.compiled import Compiled, Program, compile_program
from dapo_jax.preflight.hlo_costs import Costs
from dapo_jax.preflight.lengths import Lengths, all_longest, parse_lengths
from dapo_jax.preflight.programs import Step, step_programs
from dapo_jax.run.base_models import read_architecture_of
from dapo_jax.run.meshes import make_meshes
from dapo_jax.run.passes import chosen_attention, compute_dtype

USABLE = 0.95  # share of a device's memory: the rest goes to the runtime and to gaps between buffers
PARTS = "products", "memory", "collectives", "total"  # of a bound on a time
CLASSES = PRODUCTS, ATTENTION, ELEMENTWISE, FIXED, "collectives", "total"  # of a time to expect


def preflight(config: Config, topology: str, *, lengths: str = "", progress: Any = None) -> dict[str, Any]:
    """The report on `config` for the devices of `topology` (see `devices_of`), ready for JSON.

    Args:
        lengths: of prompts and responses, for the expected time, as in `parse_lengths`; "" = none.
        progress: a file for a line per program.

    Raises:
        InputError: config, model, mesh and lengths do not fit together.
    """
    validate(config)
    if config.trainer.rollout_ahead:
        raise InputError(
            "trainer.rollout_ahead=1 splits the devices, but a preflight compiles for one mesh: set it to 0 and give "
            "the devices that train, or those that sample"
        )
    arch, axes = read_shape(config.model), config.mesh
    meshes = make_meshes(config, arch, devices_of(topology, max(axes.data, 1) * axes.fsdp * axes.expert * axes.tensor))
    mesh = meshes.training
    limits = limits_of(mesh.devices.flat[0]).of_dtype(compute_dtype(config.model, mesh).name)
    memory = usable_memory(config.trainer.gpu_memory_fraction, mesh, limits)
    expected = parse_lengths(lengths, config.data) if lengths else None
    usable, cache = memory * USABLE, config.trainer.compilation_cache_dir
    step = step_programs(config, arch, meshes, lengths=all_longest(config.data), memory=usable)
    other = step_programs(config, arch, meshes, lengths=expected, memory=usable) if expected else None
    programs, keys = list(step.programs), {program.key for program in step.programs}
    if other is not None:  # what only shorter lengths call must fit too
        called = [one for one in other.programs if one.calls and one.key not in keys]
        programs += [dataclasses.replace(one, calls=0.0) for one in called]
    compiled = _compile_all(programs, mesh, cache, progress)
    attention = chosen_attention(config.model, config.data, arch, mesh)[0]
    rates, calibration = rates_of(limits, compute_dtype(config.model, mesh).name)
    found: dict[str, Any] = {
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
            "response_length": config.data.max_response_length,
            "rounds": 1,
            "episodes": plays_episodes(config.environment),
            "prompts_sampled": gen_batch_size(config.data),
            "prompts_trained": config.data.train_batch_size,
        },
        "plan": _plan(step),
        "config": dataclasses.asdict(config),
        "jax": jax.__version__,
        "host_bytes_per_device": step.host_bytes,
        "programs": [as_json(one, limits, rates, other) for one in compiled],
        "calibration": calibration,
        **totals(compiled, limits, memory, rates),
        "advice": advise(config, arch, meshes, step, compiled, usable, attention=attention),
    }
    found["not_counted"] += left_out(config.reward, config.algorithm)
    if expected is not None and other is not None:
        found["expected"] = _expected(config.data, config.rollout.n, expected, other, compiled, limits, rates)
    return found


def left_out(reward: RewardConfig, algorithm: AlgorithmConfig) -> list[str]:
    """What a run has on its devices besides the programs of the preflight."""
    greedy = needs(named_estimator(algorithm.adv_estimator), "reward_baselines")
    return ["the reward model, in memory and time"] * bool(reward.model.path) + ["the greedy responses"] * greedy


def _plan(step: Step) -> dict[str, int]:
    return {**step.sizes, "micro_batches": step.micro_batches}


def _expected(
    data: DataConfig,
    num_samples: int,
    lengths: Lengths,
    step: Step,
    compiled: Sequence[Compiled],
    limits: Limits,
    rates: Rates | None,
) -> dict[str, Any]:
    """The report's entry for a step with these lengths.

    Args:
        compiled: at least the programs that the step calls.
    """
    responses, prompts = lengths.sample(gen_batch_size(data), num_samples)
    measured = {one.program.key: one for one in compiled}
    called = [dataclasses.replace(measured[one.key], program=one) for one in step.programs if one.calls]
    return {
        "lengths": lengths.text,
        "response_tokens": _spread(responses),
        "prompt_tokens": _spread(prompts),
        "plan": _plan(step),
        "efficiency": {stage: work.efficiency for stage, work in step.work.items() if work.computed},
        **costs_of(called, limits, rates),
    }


def _spread(lengths: np.ndarray) -> dict[str, float]:
    return {"mean": float(lengths.mean()), "median": float(np.median(lengths)), "max": int(lengths.max())}


def _compile_all(programs: Sequence[Program], mesh: Mesh, cache: str, progress: Any) -> list[Compiled]:
    compiled = []
    for number, program in enumerate(programs, start=1):
        if progress is not None:
            say(f"compiling program {number} of {len(programs)}: {program.name}", file=progress)
        compiled.append(compile_program(program, mesh, cache))
    return compiled


def usable_memory(share: float, mesh: Mesh, limits: Limits) -> float:
    """Bytes of a device that JAX can use: what is free if the device is here, else `share` of a GPU's."""
    device = mesh.devices.flat[0]
    if device in jax.devices():
        return free_bytes(mesh)
    usable = limits.usable_memory(device.platform, share)
    if usable is None:
        raise InputError(f"the memory of {device.device_kind} is unknown: choose one of {', '.join(LIMITS)}")
    return usable


def read_shape(model: ModelConfig) -> Architecture:
    """The architecture of model.path: of a published model without a download."""
    name = model_name(model.path)
    known = SHAPES / Path(name.repository if name else model.path).name.removesuffix("-Instruct")
    if known.exists() and not place_of(model.path).exists():
        return read_architecture(known)
    return read_architecture_of(model)


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


def realistic_seconds(costs: Costs, limits: Limits, rates: Rates | None) -> dict[str, float] | None:
    """The time of a call to expect, by class of kernels, and its collectives as in `seconds`; None without rates."""
    bound = seconds(costs, limits)
    if rates is None or bound is None:
        return None
    parts = expected_seconds(costs.kernels, limits, rates) | {"collectives": bound["collectives"]}
    return parts | {"total": sum(parts.values())}


def as_json(compiled: Compiled, limits: Limits, rates: Rates | None, expected: Step | None = None) -> dict[str, Any]:
    """The report's entry for one program, with its calls in the `expected` step if there is one."""
    program, costs = compiled.program, compiled.costs
    calls = {"calls": program.calls}
    if expected is not None:
        calls["expected_calls"] = sum(one.calls for one in expected.programs if one.key == program.key)
    return {
        "stage": program.stage,
        "name": program.name,
        **calls,
        "bytes": compiled.bytes,
        "costs": None if costs is None else dataclasses.asdict(costs) | {"kernels": costs.launches},
        "seconds": None if costs is None else seconds(costs, limits),
        "realistic": None if costs is None else realistic_seconds(costs, limits, rates),
        "compile_s": round(compiled.compile_s, 1),
    }


def totals(compiled: Sequence[Compiled], limits: Limits, memory: float, rates: Rates | None = None) -> dict[str, Any]:
    """Peak memory and costs per step of each stage, and whether the step fits."""
    found, largest = costs_of(compiled, limits, rates), max(one.total for one in compiled)
    for name, stage in found["stages"].items():
        stage["bytes"] = max((one for one in compiled if one.program.stage == name), key=lambda one: one.total).bytes
    return {
        **found,
        "peak_bytes": largest,
        "fits": largest <= USABLE * memory and all(one.costs is not None for one in compiled),
        "not_counted": sorted({note for one in compiled if one.costs is not None for note in one.costs.unknown}),
    }


def costs_of(compiled: Sequence[Compiled], limits: Limits, rates: Rates | None = None) -> dict[str, Any]:
    """Costs per step, a lower bound on its time, and with rates the time to expect, in all and of each stage."""
    stages: dict[str, Any] = {}
    for name in dict.fromkeys(one.program.stage for one in compiled):
        known = [(one.program.calls, one.costs) for one in compiled if one.program.stage == name and one.costs]
        stages[name] = {
            "calls": sum(one.program.calls for one in compiled if one.program.stage == name),
            "flops": sum(calls * costs.flops for calls, costs in known),
            "moved": sum(calls * costs.bytes for calls, costs in known),
            "sent": sum(calls * costs.sent for calls, costs in known),
            "kernels": sum(calls * costs.launches for calls, costs in known),
            "collectives": _collectives(known),
            "seconds": _added([(calls, seconds(costs, limits)) for calls, costs in known], PARTS),
            "realistic": _added([(calls, realistic_seconds(costs, limits, rates)) for calls, costs in known], CLASSES),
        }
    whole = {kind: [stage[kind] for stage in stages.values()] for kind in ("seconds", "realistic")}
    step = {kind: None if None in times else sum(one["total"] for one in times) for kind, times in whole.items()}
    return {"stages": stages, "step_seconds": step["seconds"], "realistic_seconds": step["realistic"]}


def _added(times: Sequence[tuple[float, dict[str, float] | None]], parts: Sequence[str]) -> dict[str, float] | None:
    """The parts of the time of so many calls each; None if one of them is unknown."""
    known = [(calls, found) for calls, found in times if found is not None]
    return {part: sum(calls * found[part] for calls, found in known) for part in parts} if known == times else None


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
