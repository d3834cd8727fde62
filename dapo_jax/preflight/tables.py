"""Host: the report as markdown."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.data.published import num_test_problems
from dapo_jax.parallel.devices import GIB
from dapo_jax.preflight.compiled import KINDS, TEMPORARIES
from dapo_jax.preflight.report import CLASSES, PARTS

EPISODES = (
    "Episodes are planned as responses of one turn: what the environment says counts as drawn, without its time, and "
    "without what is computed again when a turn returns."
)
AMOUNTS = ("calls", "TFLOP", "GB moved", "GB sent")  # columns


def tables(report: Mapping[str, Any], *, realistic: bool = False) -> str:
    """A report of `preflight` as markdown; `realistic` adds the time to expect of each stage by class of kernels."""
    device, assumed, plan, model = (report[key] for key in ("device", "assumed", "plan", "model"))
    stages, axes = report["stages"], _axes(report["mesh"])
    if report["training_mesh"] != report["mesh"]:
        axes += f", in training {_axes(report['training_mesh'])}"
    numerics = f"{model['dtype']}, {model['attention']} attention"
    lines = [
        f"{model['path']} ({model['parameters'] / 1e9:.2f}B parameters, {numerics}) on {report['topology']} "
        f"({device['name']}), mesh {axes}",
        "",
        f"A step samples {assumed['prompts_sampled']} prompts once, in {_rollout(plan)}, "
        f"and trains on {assumed['prompts_trained']} in {plan['micro_batches']} "
        f"micro-batches; each response has {assumed['response_length']} tokens.",
        *((EPISODES,) if assumed.get("episodes") else ()),  # a report may be older than they are
        "",
        *("Peak memory per device and stage, in GiB:", "", *_memory(stages, device["memory"]), ""),
        *("Work per step and device, with a lower bound on its time:", "", *_work(stages), ""),
    ]
    if collectives := _collectives(stages, device["network"] is not None):
        lines += ["Collectives per step that send at least 1 % of their stage's bytes:", "", *collectives, ""]
    if "expected" in report:
        lines += [*_expected(report["expected"], stages), ""]
    if realistic:
        lines += [*_realistic(report), ""]
    if report["not_counted"]:
        lines += ["Not counted: " + "; ".join(report["not_counted"]) + ".", ""]
    if report["host_bytes_per_device"]:
        lines += [f"Host memory: {report['host_bytes_per_device'] / GIB:.2f} GiB per device.", ""]
    fits = "fits" if report["fits"] else "does NOT fit"
    verdict = f"It {fits}: {report['peak_bytes'] / GIB:.1f} of {device['memory'] / GIB:.1f} GiB per device"
    if report["step_seconds"] is not None:
        verdict += f"; a step takes {_step(report)}"
        if "expected" in report:
            verdict += f" if all are longest, {_step(report['expected'])} at the expected lengths"
    times = [*_whole_run(report), *_calibration(report)]
    return "\n".join([*lines, f"{verdict}.", *times, *(f"- {line}" for line in report["advice"])])


def _step(report: Mapping[str, Any]) -> str:
    """The time of a step: a bound, and what to expect if that is known."""
    least = f"at least {report['step_seconds']:.0f} s"
    about = report.get("realistic_seconds")
    return least if about is None else f"about {about:.0f} s ({least})"


def _calibration(report: Mapping[str, Any]) -> list[str]:
    """Where the times to expect are from, or why there are none."""
    if report["step_seconds"] is None or "calibration" not in report:
        return []
    if report["realistic_seconds"] is None:
        return ["", f"No time to expect: {report['calibration']}. Real kernels reach half of their peak or less."]
    return ["", f"About: {report['calibration']}. Links count at their peak; rewards and the host do not count."]


def _whole_run(report: Mapping[str, Any]) -> list[str]:
    """The time of all steps in hours and device-hours, if their number is known; at the expected lengths, if given.

    Evaluations count, as far as the number of their problems is known.
    """
    config, stages = report["config"], (report.get("expected") or report)["stages"]
    trainer, steps = config["trainer"], config["trainer"]["total_training_steps"]
    if report["step_seconds"] is None or steps < 1:
        return []
    responses, unknown = _responses_of_evaluation(config)
    every = trainer["test_freq"]
    evaluations = int(trainer["val_before_train"]) + (math.ceil(steps / every) if every > 0 else 1)
    evaluated = evaluations * responses
    of_step = report["assumed"]["prompts_sampled"] * config["rollout"]["n"]
    devices = math.prod(report["mesh"].values())

    def hours(kind: str) -> str:
        """By the "seconds" or the "realistic" times of the stages."""
        times = {name: stage[kind]["total"] for name, stage in stages.items()}
        sampling = (times.get("prefill", 0.0) + times.get("decode", 0.0)) * evaluated / of_step
        total = (steps * sum(times.values()) + sampling) / 3600
        return f"{total:,.{int(total < 10)}f} h, {devices * total:,.0f} device-hours"

    line = f"at least {hours('seconds')}"
    if report.get("realistic_seconds") is not None:
        line = f"about {hours('realistic')} ({line})"
    counted = [f"with {evaluations} evaluations"] * bool(responses)
    counted += [f"without evaluations on {' and '.join(unknown)}, whose problems are not counted here"] * bool(unknown)
    return ["", "; ".join([f"{steps} steps take {line}", *counted]) + "; checkpoints are written meanwhile."]


def _responses_of_evaluation(config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The responses of one evaluation, and the files whose number of problems is not known."""
    data, evaluate = config["data"], config["evaluate"]
    sets, unknown, total = [*json.loads(evaluate["tasks"]).values()], [], 0
    if data["task"] == "files":
        sets.append({"files": data["val_files"]})
    else:
        task = data[data["task"]]
        sets.append({"files": (), "generated": task["num_heldout"] * len(task.get("datasets", ["arithmetic"]))})
    for one in sets:
        files = [one["files"]] if isinstance(one["files"], str) else one["files"]
        counts = [num_test_problems(file) for file in files]
        known = sum(filter(None, counts)) + one.get("generated", 0)
        most = one.get("max_prompts", evaluate["max_prompts"])
        total += (known if most < 0 else min(known, most)) * one.get("n", evaluate["n"])
        unknown += [file for file, count in zip(files, counts, strict=True) if count is None]
    return total, unknown


def _rollout(plan: Mapping[str, int]) -> str:
    if "slot_tokens" in plan:
        return f"{plan['slots']} slots of {plan['slot_tokens']} tokens"
    return f"{plan['slots']} slots and {plan['pages']} pages of {plan['page_tokens']} tokens"


def _axes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in mesh.items())


def _memory(stages: Mapping[str, Any], available: float) -> list[str]:
    kinds = [kind for kind in (*KINDS, TEMPORARIES) if any(stage["bytes"][kind] for stage in stages.values())]
    rows = []
    for name, stage in stages.items():
        total = sum(stage["bytes"].values())
        cells = [f"{stage['bytes'][kind] / GIB:.2f}" for kind in kinds]
        rows.append([name, *cells, f"{total / GIB:.2f}", f"{100 * total / available:.0f} %"])
    return _table(["stage", *kinds, "total", "of memory"], rows)


def _work(stages: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, stage in stages.items():
        times = stage["seconds"] or {}
        rows.append([name, *_amounts(stage), *(f"{times[part]:.2f}" if part in times else "-" for part in PARTS)])
    return _table(["stage", *AMOUNTS, "s products", "s memory", "s collectives", "s"], rows)


def _realistic(report: Mapping[str, Any]) -> list[str]:
    """The time to expect of each stage, at the expected lengths if given; nothing where it is not known."""
    found = report.get("expected") or report
    if found["realistic_seconds"] is None:
        return [f"No time to expect: {report['calibration']}."]
    rows = []
    for name, stage in found["stages"].items():
        cells = [f"{stage['realistic'][part]:.2f}" for part in CLASSES]
        rows.append([name, f"{stage['kernels']:.0f}", *cells, f"{stage['seconds']['total']:.2f}"])
    head = ["stage", "kernels", *(f"s {part}" for part in CLASSES[:-1]), "s", "s, at least"]
    lengths = "at the expected lengths" if "expected" in report else "if all are longest"
    return [f"Seconds to expect {lengths}, by class of kernels; fixed: of each kernel:", "", *_table(head, rows)]


def _amounts(stage: Mapping[str, Any]) -> list[str]:
    """The cells of AMOUNTS."""
    amounts = f"{stage['flops'] / 1e12:.2f}", f"{stage['moved'] / 1e9:.1f}", f"{stage['sent'] / 1e9:.1f}"
    return [f"{stage['calls']:g}", *amounts]


def _expected(expected: Mapping[str, Any], longest: Mapping[str, Any]) -> list[str]:
    """The work at the expected lengths next to that of the longest case, and its efficiency."""
    plan, rows = expected["plan"], []
    for name, stage in expected["stages"].items():
        times, most = stage["seconds"] or {}, longest[name]["seconds"] or {}
        cells = [f"{of['total']:.2f}" if of else "-" for of in (times, most)]
        share = expected["efficiency"].get(name)
        rows.append([name, *_amounts(stage), *cells, "-" if share is None else f"{share:.3f}"])
    head = ["stage", *AMOUNTS, "s", "s, longest case", "needed / computed"]
    spread = [
        f"{what} of {found['median']:.0f} tokens in the median, {found['mean']:.0f} on average, at most {found['max']}"
        for what, found in (("responses", expected["response_tokens"]), ("prompts", expected["prompt_tokens"]))
    ]
    return [
        f"Expected at {expected['lengths']}: {'; '.join(spread)}; {_rollout(plan)}, "
        f"{plan['micro_batches']} micro-batches:",
        "",
        *_table(head, rows),
    ]


def _collectives(stages: Mapping[str, Any], has_network: bool) -> list[str]:
    """The larger collectives, if any, with the number of hosts where these have a network of their own."""
    rows = []
    for name, stage in stages.items():
        for one in stage["collectives"]:
            if one["bytes"] >= 0.01 * stage["sent"]:
                hosts = one["devices"] // one["per_host"]
                devices = f"{one['devices']} on {hosts} hosts" if has_network and hosts > 1 else str(one["devices"])
                rows.append([name, one["kind"], devices, f"{one['count']:g}", f"{one['bytes'] / 1e9:.2f}"])
    return _table(["stage", "collective", "devices", "count", "GB sent"], rows) if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
