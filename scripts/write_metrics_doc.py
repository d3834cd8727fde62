"""Writes docs/metrics.md from the metric catalogue, dapo_jax/monitor/catalogue.py.

    python scripts/write_metrics_doc.py
"""

from pathlib import Path

from dapo_jax.monitor.catalogue import sections

HEAD = """# Metrics

Written by `scripts/write_metrics_doc.py` from `dapo_jax/monitor/catalogue.py`; do not edit.

A row of `metrics.jsonl` holds what was measured in one training step; row 0 is the evaluation before the first. In a
name, `{a|b}` is one of several parts; `{score}` stands for a number of the verifier (`acc`, `score`, your own),
`{task}` for a task set ([evaluation.md](evaluation.md)), `{n}` and `{k}` for numbers of samples. All standard
deviations are the population's. A name of verl or Trinity-RFT has its formula, unless the table says otherwise.
"Trained" is what the group filter has let through.
"""

TAIL = """
## What others have and this has not

Where there is one policy, one turn and no waiting, some metrics of verl and Trinity-RFT would be constants, and are
left out: `num_turns/`, `tool_call_counts/`, `response_length_non_aborted/`, `response/aborted_ratio`,
`time/sync_weight`, `sample/model_version_drift`. `rollout_corr/logprob_*` stands for verl's
`training/rollout_probs_diff_*`, `step` and `data/epoch` for `training/global_step` and `training/epoch`.
"""


def document() -> str:
    """The text of docs/metrics.md."""
    parts = [HEAD]
    for section, metrics in sections():
        title = section.strip("{}").replace("|", "/, ") + "/"
        parts += [f"\n## {title}\n", "| metric | unit | formula | as | there when |", "| --- | --- | --- | --- | --- |"]
        for metric in metrics:
            when = f"{metric.when} ({metric.needs})" if metric.needs else metric.when
            cells = (f"`{metric.name}`", metric.unit, metric.formula, metric.source, when)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n" + TAIL


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "metrics.md"
    path.write_text(document(), encoding="utf-8")
    print(path)
