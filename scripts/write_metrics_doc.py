"""Writes docs/metrics.md from the metric catalogue, dapo_jax/monitor/catalogue.py.

    python scripts/write_metrics_doc.py
"""

from collections.abc import Iterable
from pathlib import Path

from dapo_jax.monitor.catalogue import HISTOGRAMS, Metric, sections

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
`timing_s/{gen_max|update_weights}`, `time/{sync_weight|explorer_sync_interval|trainer_sync_interval|read_experience}`,
`rollout/time/{run|task}_execution`, `sample/model_version_drift`. Others have another name here:

| there | here |
| --- | --- |
| `val-core/`, `val-aux/` | `eval/`; `best@k/mean` is `best@k`, `best@k/std` is `best@k/bootstrap_std` |
| `training/global_step`, `training/epoch` | `step`, `data/epoch` |
| `training/off_policy/trajectory_staleness/*` | `sample/staleness/*` |
| `timing_s/dump_rollout_generations` | `timing_s/write` |
| `rollout/accuracy/*`, `eval/{task}/accuracy/*` | `rollout/acc/*`, `eval/{task}/acc/*` |
| `overlong` (verl, with `overlong_buffer.log`) | `rollout/overlong/*`; `rollout/overlong_reward/*` always |
| `actor/final_loss` | `actor/loss` |
| `critic/kl`, `critic/kl_coef` (KL in the reward) | `actor/reward_kl_penalty`, `actor/reward_kl_penalty_coeff` |
| `critic/loss` | `critic/vf_loss` |
"""


def document() -> str:
    """The text of docs/metrics.md."""
    parts = [HEAD]
    for section, metrics in sections():
        parts += [f"\n## {section.strip('{}').replace('|', '/, ')}/\n", *table(metrics)]
    parts += ["\n## Histograms, in TensorBoard alone\n", *table(HISTOGRAMS)]
    return "\n".join(parts) + "\n" + TAIL


def table(metrics: Iterable[Metric]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| metric | unit | formula | as | there when |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        when = f"{metric.when} ({metric.needs})" if metric.needs else metric.when
        cells = (f"`{metric.name}`", metric.unit, metric.formula, metric.source, when)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "metrics.md"
    path.write_text(document(), encoding="utf-8")
    print(path)
