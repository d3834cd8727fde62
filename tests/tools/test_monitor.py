"""How the group filter is doing, from a log or from metrics; and how a run is named to the commands that read one."""

import json

import pytest

from dapo_jax import cli
from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.monitor.filter_log import log_round, rule_words
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.tools import monitor

LOG = (
    "Generated batch 1, 8 prompts, 64 trajectories\nFiltered (std=0): 6 (75.0%)\nKept (std>0): 2 prompts (25.0%)\n"
    "[Dynamic Sampling] Step 1, Gen batch 1: Kept 2/8 prompts (filtered 48 trajectories), Accumulated: 2/8\n"
    "Generated batch 2, 8 prompts, 64 trajectories\nFiltered (std=0): 2 (25.0%)\nKept (std>0): 6 prompts (75.0%)\n"
    "[Dynamic Sampling] Step 1, Gen batch 2: Kept 6/8 prompts (filtered 16 trajectories), Accumulated: 8/8\n"
)
ROW = {
    "step": 1,
    "train/filter_rate": 0.5,
    "dynamic_sampling/num_evaluated_prompts": 16,
    "dynamic_sampling/num_gen_batches": 2,
    "dynamic_sampling/filtered_all_correct": 3,
    "dynamic_sampling/filtered_all_wrong": 5,
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.log").write_text(LOG)
    (tmp_path / "run/metrics.jsonl").write_text(f'{{"step": 0}}\n{json.dumps(ROW)}\n{{"step": 2, "cut')
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["plot", "monitor"])
def test_a_wrong_path_is_one_line(name, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text("no JSON\n")
    options = ["--output", str(tmp_path / "picture.png")] if name == "plot" else []
    for wrong in ("nowhere", "empty", "other.jsonl", "empty/metrics.jsonl"):
        with pytest.raises(SystemExit) as end:
            cli.main([name, str(tmp_path / wrong), *options])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1, error
        assert error.startswith(f"dapo_jax: {tmp_path / wrong}") and "give" in error


def test_a_run_is_named_by_its_workdir_or_a_file(run, capsys):
    def printed(path):
        cli.main(["monitor", str(path)])
        return capsys.readouterr().out

    assert printed(run) == printed(run / "metrics.jsonl") and "training steps                 1" in printed(run)
    (run / "metrics.jsonl").unlink()
    assert "generation rounds              2" in printed(run)


def test_log_and_metrics_are_summed_up_alike(run):
    from_log = monitor.log_summary(monitor.read_log(run / "train.log"))
    from_metrics = monitor.steps_summary(monitor.read_steps(run / "metrics.jsonl"))
    assert from_log[1:3] == from_metrics[1:3]
    assert "(2.00 per step)" in from_log[1] and "50.0%" in from_log[2] and "8 (4.0 per round)" in from_log[3]
    assert monitor.log_summary({"batches": []}) == ["no generation round in the log: is the filter on?"]


@pytest.mark.parametrize("rule", ["std", "mean_range", "mixed"])
def test_the_log_of_every_rule_is_read(tmp_path, rule):
    about = {"step": 1, "num_prompts": 8, "num_samples": 4, "metric": "acc", "mean_std": 0.1, "target": 8}
    about |= {"words": rule_words(FilterGroupsConfig(rule=rule)), "num_accumulated": 8}
    with open_workdir(tmp_path, detailed=False):
        for number, kept in enumerate((2, 6), start=1):
            log_round(round_number=number, num_kept=kept, **about)
    found = monitor.read_log(tmp_path / "train.log")
    assert found == {"batches": [1, 2], "filter_rates": [0.75, 0.25], "kept_prompts": [2, 6], "steps": [1, 1]}


def test_steps_whose_groups_are_judged_together_are_counted(tmp_path):
    """As those of responses in segments are: each step has one block, of three rounds."""
    about = {"num_prompts": 20, "num_samples": 4, "metric": "acc", "mean_std": 0.1, "target": 8, "num_accumulated": 8}
    with open_workdir(tmp_path, detailed=False):
        for step in (1, 2):
            log_round(step=step, round_number=3, num_kept=9, **about)
    lines = monitor.log_summary(monitor.read_log(tmp_path / "train.log"))
    assert [line.split()[2] for line in lines[:2]] == ["2", "6"] and "55.0%" in lines[2] and "18 (3.0" in lines[3]
