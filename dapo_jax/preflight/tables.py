"""Host: the report as markdown for people."""

from collections.abc import Sequence
from typing import Any

from dapo_jax.parallel.devices import GIB
from dapo_jax.preflight.compiled import TEMPORARIES
from dapo_jax.preflight.programs import KINDS
from dapo_jax.preflight.report import PARTS


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
