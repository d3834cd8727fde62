"""Writes docs/metrics.md from the metric catalogue, dapo_jax/monitor/metric_table.py.

python scripts/docs/write_metrics_doc.py
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from dapo_jax.monitor.catalogue import HISTOGRAMS, MAIN_CURVES, Metric, sections

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import write_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

HEAD = """# Metrics

Written by `scripts/docs/write_metrics_doc.py` from `dapo_jax/monitor/metric_table.py`; do not edit.

A row of `metrics.jsonl` holds the metrics of one training step; row 0 is the evaluation before the first step.

In a name, `{a|b}` means one of several parts, `{score}` a number that the verifier returns (`acc`, `score`, your own),
`{task}` a task set ([evaluation.md](evaluation.md)), and `{n}` and `{k}` numbers of samples. Standard deviations are
population standard deviations. A metric with a name of verl or Trinity-RFT has their formula, unless the table says
otherwise. "Trained" means what the group filter has kept.

TensorBoard has every metric under its name here, with `_` for `@`, and these also in the group `Main`, its first:
"""

TAIL = """
## Metrics of verl and Trinity-RFT that are missing or renamed

With one policy, one turn and no waiting, these metrics would be constants, so they are left out: `num_turns/`,
`tool_call_counts/`, `response_length_non_aborted/`, `response/aborted_ratio`, `timing_s/gen_max`,
`time/{sync_weight|explorer_sync_interval|trainer_sync_interval|read_experience}`,
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


TRACKERS = """
## Other trackers

`trainer.logger` takes the path of a class, `FILE.py:Class` or `package.module.Class`, besides `tensorboard` and
`wandb`: `--config.trainer.logger="('console','FILE.py:MLflow')"`. It has the five methods of
[`Tracker`](../dapo_jax/monitor/trackers.py) and is constructed by `Class(workdir, project=..., name=...,
first_step=...)`. `first_step` is above 0 in a run that resumes: its steps from there on come again. Process 0 alone
calls it. If it does not start, the run is refused; a later failure is one warning and never stops the run. This is one
for MLflow:

```python
import mlflow


class MLflow:
    def __init__(self, workdir, *, project, name, first_step):
        mlflow.set_experiment(project)
        known = workdir / "mlflow_run.txt"
        run_id = known.read_text() if first_step and known.exists() else None
        run = mlflow.start_run(run_id=run_id, run_name=name)
        known.write_text(run.info.run_id)

    def add_config(self, config, results):
        mlflow.set_tags({key: str(value)[:500] for key, value in config.items()})

    def add_samples(self, step, samples):
        mlflow.log_dict(list(samples), f"samples/step_{step}.json")

    def add_histograms(self, step, histograms):
        pass

    def add_scalars(self, step, values):
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def close(self):
        mlflow.end_run()
```
"""


def document() -> str:
    """The text of docs/metrics.md."""
    main = ", ".join(f"`{metric or 'eval/{task}/acc/mean@{n}'}`" for metric in MAIN_CURVES.values())
    parts = [f"{HEAD}{main}.\n"]
    for section, metrics in sections():
        parts += [f"\n## {section.strip('{}').replace('|', '/, ')}/\n", *table(metrics)]
    parts += ["\n## Histograms, only in TensorBoard\n", *table(HISTOGRAMS)]
    return "\n".join(parts) + "\n" + TRACKERS + TAIL


def table(metrics: Iterable[Metric]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| metric | unit | value | name from | logged when |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        when = f"{metric.when} ({metric.needs})" if metric.needs else metric.when
        cells = (f"`{metric.name}`", metric.unit, metric.formula, metric.source, when)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    write_page(PAGE, document, __doc__)
