"""Writes the tables of docs/scaling.md, and docs/results/preflight.md, from the reports in docs/results/.

    python scripts/docs/write_preflight_doc.py

scripts/docs/preflight_reports.sh makes the reports. A report that has not been made is left out. Each file is reduced
to what the tables need: no program, and few options.
"""

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import write_page

from dapo_jax.preflight.tables import tables

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, RESULTS = DOCS / "scaling.md", DOCS / "results" / "preflight.md"
MADE = re.compile(r"(<!-- reports: .*? -->\n).*?(<!-- end of reports -->)", re.DOTALL)
MATH_7B, GSM8K = "`configs/dapo_qwen2.5_7b_math.py`", "`configs/gsm8k.py`"
RECIPES = {  # by report
    "32b_v5p": "`configs/dapo_qwen2.5_32b_math.py`",
    "32b_h100": "the same, `mesh.fsdp=4`",
    "30b_a3b_v5p": "`configs/qwen3_30b_a3b_math.py`",
    "30b_a3b_h100": "the same, `mesh.fsdp=4 mesh.expert=1 mesh.tensor=4`",
    "30b_a3b_h100_e2": "the same, `mesh.fsdp=8 mesh.expert=2`",
    "qwen3.5_35b_h100": "`configs/qwen3.5_35b_a3b_math.py`",
    "gpt_oss_h100": "`configs/gpt_oss_20b_math.py`",
    "qwen3.5_h100": "`configs/qwen3.5_0.8b_gsm8k.py`",
    "qwen3.5_v5e": "the same, `fsdp=8`",
    "smollm3_h100": "`configs/smollm3_3b_math.py`",
    "smollm3_v5e": "the same, `fsdp=4 tensor=4`",
    "gemma3_v5e": "`configs/gemma3_1b_gsm8k_lora.py`",
    "gemma3_v6e": "`configs/gemma3_1b_gsm8k_lora.py`",
    "7b_h100": MATH_7B,
    "7b_a100": MATH_7B,
    "7b_2k_h100": "`configs/dapo_qwen2.5_7b.py`",
    "clip_cov_h100": "`configs/entropy_clip_cov.py`",
    "kl_cov_h100": "`configs/entropy_kl_cov.py`",
    "cpo_h100": "`configs/cpo.py`",
    "7b_v5e": "Qwen2.5-Math-7B, `fsdp=16 tensor=4`",
    "7b_v5p": "Qwen2.5-Math-7B, `fsdp=4 tensor=4`",
    "gsm8k_l4": GSM8K,
    "gsm8k_h100": GSM8K,
    "gsm8k_v5e": f"{GSM8K}, `fsdp=4`",
    "gsm8k_v5e_8": f"{GSM8K}, `fsdp=8`",
    "gsm8k_1.5b_h100": f"{GSM8K} with Qwen2.5-1.5B-Instruct",
}
OPTIONS = {  # of a report's config that its tables read
    "data": ("task", "val_files", "max_prompt_length", "max_response_length"),
    "evaluate": ("tasks", "max_prompts", "n"),
    "rollout": ("n",),
    "trainer": ("total_training_steps", "test_freq", "val_before_train"),
}
HEAD = """# Reports of the preflight

Written by `scripts/docs/write_preflight_doc.py`; do not edit.

Reports behind the table in [scaling.md](../scaling.md#reports), as the command prints them with `--realistic`: those of
today's engine.
The JSON files in this folder have the same numbers of all.
"""


def reports() -> dict[str, dict[str, Any]]:
    """The reports that have been made, by name."""
    paths = {name: DOCS / "results" / f"preflight_{name}.json" for name in RECIPES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that tables are made of."""
    config = {section: {name: report["config"][section][name] for name in names} for section, names in OPTIONS.items()}
    return {name: value for name, value in report.items() if name != "programs"} | {"config": config}


def page() -> str:
    """docs/scaling.md with the tables of the reports."""
    found = reports()
    shown = markdown_table([_longest(name, report) for name, report in found.items()])
    if expected := [_expected(name, report) for name, report in found.items() if "expected" in report]:
        shown += f"\n\nAt other lengths, clipped at the limit of the config:\n\n{markdown_table(expected)}"
    return MADE.sub(lambda match: f"{match[1]}\n{shown}\n\n{match[2]}", PAGE.read_text())


def results() -> str:
    """docs/results/preflight.md."""
    parts = [HEAD]
    for name, report in reports().items():
        parts.append(f"## {name}: {_tokens(report)} tokens on {report['topology']}\n")
        lines = tables(report, realistic="calibration" in report).splitlines()
        parts.append("\n".join(line if line.startswith("|") else textwrap.fill(line, 120) for line in lines) + "\n")
    return "\n".join(parts)


def _longest(name: str, report: dict[str, Any]) -> dict[str, str]:
    memory = report["device"]["memory"]
    return {
        "report": f"[{name}](results/preflight_{name}.json)",
        "recipe": RECIPES[name],
        "devices": f"`{report['topology']}`",
        "tokens of prompt + response": _tokens(report),
        "GiB per device": f"{report['peak_bytes'] / 2**30:.1f} of {memory / 2**30:.1f}",
        "seconds per step, at least": f"{report['step_seconds']:.0f}",
        "about": _about(report),
    }


def _expected(name: str, report: dict[str, Any]) -> dict[str, str]:
    expected = report["expected"]
    lengths = re.search("median=[^,]*,sigma=[^,]*", expected["lengths"])
    shares = {stage: f"{share:.2f}" for stage, share in expected["efficiency"].items()}
    return {
        "report": name,
        "responses": lengths[0].replace(",", ", ") if lengths else expected["lengths"],
        "their mean": f"{expected['response_tokens']['mean']:.0f}",
        "seconds per step, at least": f"{expected['step_seconds']:.0f}",
        "about": _about(expected),
        "longest case, at least": f"{report['step_seconds']:.0f}",
        **{f"needed / computed: {stage}": shares[stage] for stage in ("update", "decode", "prefill")},
    }


def _about(report: Mapping[str, Any]) -> str:
    """The seconds of a step to expect, if they are known."""
    seconds = report.get("realistic_seconds")
    return "" if seconds is None else f"{seconds:.0f}"


def _tokens(report: dict[str, Any]) -> str:
    data = report["config"]["data"]
    return f"{data['max_prompt_length']} + {data['max_response_length']}"


if __name__ == "__main__":
    write_page(PAGE, page, __doc__)
    write_page(RESULTS, results, __doc__)
    for path in (DOCS / "results").glob("preflight_*.json"):
        path.write_text(json.dumps(kept(json.loads(path.read_text())), separators=(",", ":")) + "\n")
