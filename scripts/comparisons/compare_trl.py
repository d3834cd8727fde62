"""DAPO here and TRL's GRPOTrainer: one task, model, batch, learning rate and number of updates.

    python scripts/comparisons/compare_trl.py --trl TORCH_ENV/bin/python [--seeds 0] [--output docs/results]

configs/sums.py has the task and the settings. TRL's trainer gets the same: loss_type "dapo", clip-higher, truncated
completions left out, its soft overlong punishment, as many updates per generation, the same learning rate at each step.
It has no dynamic sampling, so each of its steps samples only one batch; a second arm here has none either. It loads the
same model and samples with transformers' generate (not vLLM). Its accuracy is measured on the same held-out
problems, two samples each at temperature 1. It mixes the rows of all groups before it splits them into updates; here an
update has whole groups. train_with_trl.py is its side.

Runs are stored and reported like those of run_ablation.py, but never reused from another comparison, because their
seconds are compared: those of training steps, without loading, evaluation and checkpoints, but with compilation (in
each run) and warm-up.

TORCH_ENV: pip install torch trl pyarrow.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("compare_trl")

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablations import NO_FILTER, Comparison
from comparison_report import report
from finished_runs import check_nothing_is_lost, finished_runs, is_finished, mark_finished, reported_runs
from run_ablation import command_of, command_options, folder_of, train

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.learner.trained_networks import trained
from dapo_jax.monitor.environment import host
from dapo_jax.run.settings import learning_rates
from dapo_jax.tools.plot import empty_figure

ROOT = Path(__file__).resolve().parents[2]
COMPARISON = Comparison(
    "configs/sums.py",
    {"dapo_jax": {}, "dapo_jax, no filter": NO_FILTER},
    shared={"trainer.compilation_cache_dir": "", "trainer.test_freq": "2"},  # each run compiles for itself
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="Python interpreter that has torch and trl")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare_trl", help="folder of the workdirs")
    parser.add_argument("--output", type=Path, help="folder of table and figures; none are written unless given")
    given, options = parser.parse_known_args(arguments)
    if given.output:
        empty_figure()  # fails now, not after hours, if it is missing
    configured = {arm: command_options(COMPARISON, arm, options) for arm in COMPARISON.arms}
    folders = {arm: folder_of(given.runs, options_of_arm) for arm, options_of_arm in configured.items()}
    config = read_config(["compare_trl", *configured["dapo_jax"]])
    theirs = folders["dapo_jax"].with_name(f"{folders['dapo_jax'].name}_trl")
    arms = {**folders, "TRL": theirs}
    reports = []
    if given.output:
        reports = [given.output / "compare_trl.json"]
        check_nothing_is_lost(reports[0], arms, given.seeds)
    reported = reported_runs(reports)
    for seed in given.seeds:
        for arm, folder in folders.items():
            if (folder.name, seed) not in reported:
                train(arm, configured[arm], folder, seed)
        if (theirs.name, seed) not in reported:
            train_with_trl(given.trl, config, theirs / f"seed{seed}", seed)
    told = settings_of(config, 0)
    told = {name: value for name, value in told.items() if name not in ("seed", "host")}  # each run has its own
    told["model"] = Path(told["model"]).name
    about = {
        "command": command_of("compare_trl.py", "--trl", "TORCH_ENV/bin/python", seeds=given.seeds, options=options),
        "config": COMPARISON.config,
        "shared": dict(COMPARISON.shared),
        "arms": {**{arm: dict(changed) for arm, changed in COMPARISON.arms.items()}, "TRL": told},
    }
    report("compare_trl", finished_runs(arms, given.seeds, reported), given.output, about)


def train_with_trl(python: Path, config: Any, workdir: Path, seed: int) -> None:
    """Runs TRL's side in its environment to the end, unless it has finished."""
    if is_finished(workdir):
        return
    print(f"TRL, seed {seed}", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "settings.json").write_text(json.dumps(settings_of(config, seed)))
    with open(workdir / "output.txt", "w") as output:
        command = [str(python), str(ROOT / "scripts" / "comparisons" / "train_with_trl.py"), str(workdir)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        code = subprocess.run(command, stdout=output, stderr=output, cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(f"TRL's run failed with exit code {code}, see {workdir / 'output.txt'}")
    mark_finished(workdir)


def settings_of(config: Any, seed: int) -> dict[str, Any]:
    """The settings of TRL's side: numbers and strings of our config."""
    actor, optim, steps = config.actor, config.actor.optim, config.trainer.total_training_steps
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size
    return {
        "seed": seed,
        "host": host(),
        "model": config.model.path,
        "train_files": list(config.data.train_files),
        "val_files": list(config.data.val_files),
        "steps": steps,
        "updates_per_step": updates,
        "rows_per_update": actor.ppo_mini_batch_size * config.rollout.n,
        "samples": config.rollout.n,
        "max_tokens": config.data.max_response_length,
        "overlong_buffer": config.reward.overlong_buffer.len if config.reward.overlong_buffer.enable else 0,
        "mask_truncated": config.algorithm.overlong_filtering,
        "clip_low": actor.clip_ratio_low,
        "clip_high": actor.clip_ratio_high,
        "learning_rates": [learning_rates(trained(config), config.trainer, 1 + done)["actor"] for done in range(steps)],
        "betas": list(optim.betas),
        "weight_decay": optim.weight_decay,
        "grad_clip": actor.grad_clip,
        "test_freq": config.trainer.test_freq,
        "evaluation_samples": config.evaluate.n,
    }


if __name__ == "__main__":
    with refusals(sys.argv):
        main()
