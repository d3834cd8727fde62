"""Host: the preflight command: compiles every function of a training step for hardware you do not have.

    python -m dapo_jax.preflight --config FILE [--config.key=value ...] [--topology v5p:4x4x8] [--response_length N]
                                 [--quick] [--json FILE]

Prints bytes per device by kind against the device's memory, FLOPs, bytes and collectives of a step, an estimate of its
time, and whether it fits; if not, which setting to change first. It needs neither weights nor data nor a tokenizer: of
model.path only config.json is read, or, where that does not exist, configs/shapes/ of the same name. Nothing is
allocated. Absent GPUs (h100:8, a100:2x8) need pip install 'dapo_jax[cuda13]', TPU slices (v5p:4x4x8)
'dapo_jax[tpu-preflight]'.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.interrupts import end_at_once

    end_at_once("preflight")

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.command_help import about, options_help
from dapo_jax.command_line import read_config, refusals
from dapo_jax.config import Config, gen_batch_size
from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.load import read_model_architecture
from dapo_jax.models.weights import count_params
from dapo_jax.other_runs import RANDOM, find_trained
from dapo_jax.parallel.ahead_of_time import compile_ahead
from dapo_jax.parallel.devices import GIB, LIMITS, Limits, devices_of, limits_of
from dapo_jax.parallel.hlo_costs import Costs, program_costs
from dapo_jax.parallel.memory import free_bytes, reserve_gpu_memory
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.slices import libtpu_name
from dapo_jax.places import local_model
from dapo_jax.policies import read_model
from dapo_jax.preflight_advice import advise
from dapo_jax.run import check_mesh
from dapo_jax.settings import check_memory, chosen_attention, compute_dtype
from dapo_jax.step_programs import KINDS, Program, step_programs
from dapo_jax.validation import validate

SHAPES = Path(__file__).parents[1] / "configs" / "shapes"
USABLE = 0.95  # of a device's memory: the rest is the runtime's, and lost between buffers
TEMPORARIES = "temporaries"
PARTS = ("products", "memory", "collectives", "total")  # of a time


@dataclass(frozen=True)
class Measured:
    """A compiled program. `bytes` and `costs` are of one device, `costs` of one call."""

    program: Program
    bytes: dict[str, float]  # in memory during a call, by kind
    costs: Costs | None  # None if the program is larger than the device, so that XLA refuses it
    compile_s: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def preflight(
    config: Config, topology: str, *, response_length: int | None = None, quick: bool = False, progress: Any = None
) -> dict[str, Any]:
    """The report on `config` for the devices of `topology` (see `devices_of`), ready for JSON.

    Args:
        response_length: tokens of each response, for the time; None: the longest that is allowed.
        quick: compile decoding for the first and the last window of the cache alone, and interpolate between.
        progress: a file that is told of every program.

    Raises ValueError if config, model and mesh do not fit together.
    """
    validate(config)
    if config.trainer.rollout_ahead:
        raise InputError(
            "trainer.rollout_ahead=1 divides the devices, and a preflight compiles for one mesh: set it to 0 and give "
            "the devices that train, or those that sample"
        )
    arch = read_shape(config)
    mesh_config = config.mesh
    devices = devices_of(topology, max(mesh_config.data, 1) * mesh_config.fsdp * mesh_config.tensor)
    mesh = make_mesh(mesh_config.data, mesh_config.fsdp, mesh_config.tensor, devices)
    check_mesh(config, arch, mesh)
    check_memory(config, mesh)
    limits = limits_of(devices[0]).of_dtype(compute_dtype(config, mesh).name)
    memory = usable_memory(config, mesh, limits)
    longest = config.data.max_response_length
    length = min(response_length or longest, longest)
    step = step_programs(config, arch, mesh, response_length=length, memory=memory * USABLE, every_window=not quick)
    programs = list(step.programs)
    if length < longest:  # its time is not asked for, but it must fit
        largest = step_programs(config, arch, mesh, response_length=longest, memory=memory * USABLE, every_window=False)
        names = {program.name for program in programs}
        programs += [dataclasses.replace(p, calls=0) for p in largest.programs if p.name not in names]
    with jax.set_mesh(mesh):
        measured = []
        for number, program in enumerate(programs, start=1):
            if progress is not None:
                print(f"compiling program {number} of {len(programs)}: {program.name}", file=progress, flush=True)
            measured.append(measure(program, mesh, config))
    return {
        "model": {
            "path": config.model.path,
            "parameters": count_params(arch),
            "dtype": compute_dtype(config, mesh).name,
            "attention": chosen_attention(config, arch, mesh)[0],
        },
        "topology": topology if libtpu_name(topology) == topology else f"{topology} ({libtpu_name(topology)})",
        "mesh": dict(mesh.shape),
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
        "programs": [as_json(one, limits) for one in measured],
        **summary(measured, limits, memory),
        "advice": advise(
            config,
            arch,
            dict(mesh.shape),
            step,
            measured,
            memory * USABLE,
            attention=chosen_attention(config, arch, mesh)[0],
        ),
    }


def usable_memory(config: Config, mesh: Mesh, limits: Limits) -> float:
    """Bytes of a device that JAX can use. Of a GPU it takes the share that trainer.gpu_memory_fraction says."""
    device = mesh.devices.flat[0]
    if device in jax.devices():
        return free_bytes(mesh)
    if limits.memory is None:
        raise InputError(f"the memory of {device.device_kind} is not known: choose a device of {', '.join(LIMITS)}")
    return limits.memory * (config.trainer.gpu_memory_fraction if device.platform == "gpu" else 1.0)


def read_shape(config: Config) -> Architecture:
    """The architecture of model.path, of which only config.json need be there."""
    if config.model.path == RANDOM or find_trained(config.model.path) is not None:
        return read_model(config)[0]
    path = local_model(config.model.path)
    known = SHAPES / path.name.removesuffix("-Instruct")
    return read_model_architecture(known if not path.exists() and known.exists() else path)


def measure(program: Program, mesh: Mesh, config: Config) -> Measured:
    """Compiles a program and reads off what it takes. Call it under the mesh.

    Args:
        config: says where results are kept.
    """
    start = time.perf_counter()
    found: dict[str, float] = {kind: program.inside.get(kind, 0.0) + program.beside.get(kind, 0.0) for kind in KINDS}
    inside, directory = sum(program.inside.values()), config.trainer.compilation_cache_dir
    try:
        compiled = compile_ahead(program.lower(), mesh, directory=directory)
    except jax.errors.JaxRuntimeError as error:
        temporaries = refused(str(error), inside)
        if temporaries is None:
            raise
        found[TEMPORARIES] = temporaries
        return Measured(program, found, None, time.perf_counter() - start)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise InputError(
            f"{program.name} needs cuDNN to compile ({error}): pip install --no-deps 'nvidia-cudnn-cu13<10', or set "
            "model.attention=xla"
        ) from error
    found[TEMPORARIES] = max(compiled.bytes - inside, 0.0)
    seconds = time.perf_counter() - start
    hosts = [device.process_index for device in mesh.devices.flat]
    return Measured(program, found, program_costs(compiled.text, hosts), seconds)


def refused(message: str, inside: float) -> float | None:
    """The temporaries of a program that XLA refuses because of the device's memory; None for any other error.

    Args:
        inside: bytes of its arguments and results, which some messages count.
    """
    of_all = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    alone = re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM", message)
    size = of_all or alone
    if size is None:
        return None
    return max(float(size[1]) * 1024.0 ** " KMGT".index(size[2] or " ") - (inside if of_all else 0.0), 0.0)


def seconds(costs: Costs, limits: Limits) -> dict[str, float] | None:
    """The least time of a call on the roofline: products, memory, and collectives, which are added."""
    if limits.flops is None or limits.bandwidth is None or limits.link is None:
        return None
    parts = {
        "products": costs.flops / limits.flops,
        "memory": costs.bytes / limits.bandwidth,
        "collectives": sum(one.bytes / limits.speed(one.group, one.per_host) for one in costs.collectives),
    }
    return parts | {"total": max(parts["products"], parts["memory"]) + parts["collectives"]}


def as_json(measured: Measured, limits: Limits) -> dict[str, Any]:
    """One program of the report."""
    program, costs = measured.program, measured.costs
    return {
        "stage": program.stage,
        "name": program.name,
        "calls": program.calls,
        "bytes": measured.bytes,
        "costs": dataclasses.asdict(costs) if costs is not None else None,
        "seconds": seconds(costs, limits) if costs is not None else None,
        "compile_s": round(measured.compile_s, 1),
    }


def summary(measured: Sequence[Measured], limits: Limits, memory: float) -> dict[str, Any]:
    """Each stage's largest program, and its costs in a step; whether all fits."""
    stages: dict[str, Any] = {}
    for name in dict.fromkeys(one.program.stage for one in measured):
        of_stage = [one for one in measured if one.program.stage == name]
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
    largest = max(one.total for one in measured)
    return {
        "stages": stages,
        "step_seconds": sum(stage["seconds"]["total"] for stage in stages.values()) if limits.is_known else None,
        "peak_bytes": largest,
        "fits": largest <= USABLE * memory and all(one.costs is not None for one in measured),
        "not_counted": sorted({note for one in measured if one.costs is not None for note in one.costs.unknown}),
    }


def _collectives(known: Sequence[tuple[float, Costs]]) -> list[dict[str, Any]]:
    """Collectives of a step by kind and by the devices that take part, in all and on a host."""
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


def tables(report: dict[str, Any]) -> str:
    """The report as markdown for people."""
    device, mesh, assumed, plan = report["device"], report["mesh"], report["assumed"], report["plan"]
    model, axes = report["model"], ", ".join(f"{name} {size}" for name, size in mesh.items())
    numerics = f"{model['dtype']}, {model['attention']} attention"
    lines = [
        f"{model['path']} ({model['parameters'] / 1e9:.2f}B parameters, {numerics}) on {report['topology']} "
        f"({device['name']}), mesh {axes}",
        "",
        f"A step samples {assumed['prompts_sampled']} prompts once, in {plan['waves']} waves of "
        f"{plan['rows_of_a_wave']} rows, and trains on {assumed['prompts_trained']} in {plan['micro_batches']} "
        f"micro-batches; each response has {assumed['response_length']} tokens.",
        "",
        "GiB on each device at the largest moment of each stage:",
        "",
    ]
    stages = report["stages"]
    columns = [kind for kind in (*KINDS, TEMPORARIES) if any(stage["bytes"][kind] for stage in stages.values())]
    rows = []
    for name, stage in stages.items():
        total = sum(stage["bytes"].values())
        cells = [f"{stage['bytes'][kind] / GIB:.2f}" for kind in columns]
        rows.append([name, *cells, f"{total / GIB:.2f}", f"{100 * total / device['memory']:.0f} %"])
    lines += [*_table(["stage", *columns, "total", "of memory"], rows), ""]
    rows = []
    for name, stage in stages.items():
        times = stage["seconds"] or {}
        cells = [f"{times[part]:.2f}" if part in times else "-" for part in PARTS]
        amounts = [f"{stage['flops'] / 1e12:.2f}", f"{stage['moved'] / 1e9:.1f}", f"{stage['sent'] / 1e9:.1f}"]
        rows.append([name, f"{stage['calls']:g}", *amounts, *cells])
    head = ["stage", "calls", "TFLOP", "GB moved", "GB sent", "s products", "s memory", "s collectives", "s"]
    lines += ["Of a step, on each device, and its least time:", "", *_table(head, rows), ""]
    rows = [
        [name, one["kind"], _devices(one, device), f"{one['count']:g}", f"{one['bytes'] / 1e9:.2f}"]
        for name, stage in stages.items()
        for one in stage["collectives"]
        if one["bytes"] >= 0.01 * stage["sent"]
    ]
    if rows:
        head = ["stage", "collective", "devices", "count", "GB sent"]
        lines += ["Collectives of a step, those that send a hundredth of their stage's bytes or more:", ""]
        lines += [*_table(head, rows), ""]
    if report["not_counted"]:
        lines += ["Not counted: " + "; ".join(report["not_counted"]) + ".", ""]
    if report["host_bytes_per_device"]:
        lines += [f"In the host's memory: {report['host_bytes_per_device'] / GIB:.2f} GiB a device.", ""]
    fits = "fits" if report["fits"] else "does NOT fit"
    verdict = f"It {fits}: {report['peak_bytes'] / GIB:.1f} of {device['memory'] / GIB:.1f} GiB a device"
    if report["step_seconds"] is not None:
        verdict += f"; a step takes at least {report['step_seconds']:.0f} s"
    lines += [verdict + ".", *(f"- {line}" for line in report["advice"])]
    return "\n".join(lines)


def _devices(collective: dict[str, Any], device: dict[str, Any]) -> str:
    """How many take part; where hosts have a network of their own, also on how many hosts."""
    group, per_host = collective["devices"], collective["per_host"]
    return str(group) if device["network"] is None or group == per_host else f"{group} on {group // per_host} hosts"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.preflight",
        description=about(__doc__),
        epilog=options_help("preflight"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--topology", default="cpu", help="v5e:4x4, v5p-256, h100:8, a100:2x8, ..., or cpu, gpu, tpu of this machine"
    )
    parser.add_argument("--response_length", type=int, help="tokens of each response, for the time; default: the limit")
    parser.add_argument("--quick", action="store_true", help="compile decoding for the first and last window alone")
    parser.add_argument("--json", help="file for the JSON report, which is printed last unless given")
    given, rest = parser.parse_known_args(arguments)
    command = ["preflight", *rest]
    with refusals(command):
        config = read_config(command)
        reserve_gpu_memory(config.trainer.gpu_memory_fraction)
        report = preflight(
            config, given.topology, response_length=given.response_length, quick=given.quick, progress=sys.stderr
        )
        print(tables(report))
        if given.json:
            Path(given.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        else:
            print(json.dumps(report))


if __name__ == "__main__":
    main()
