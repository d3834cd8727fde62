"""How the group filter is doing, from a log or from metrics; and how a run is named to the commands that read one."""

import importlib.util
import json

import pytest

from dapo_jax import cli
from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.monitor.filter_log import log_round, rule_words
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.tools import monitor


@pytest.fixture
def run(capsys):
    """Runs a command; returns its exit code, stdout and stderr."""

    def called(*arguments):
        code = 0
        try:
            cli.main(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return called


@pytest.mark.parametrize("name", ["plot", "monitor"])
def test_a_run_is_named_by_its_workdir_or_a_file_and_a_wrong_path_is_one_line(name, tmp_path, run):
    run_folder, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    run_folder.mkdir()
    row = {"step": 1, "dynamic_sampling/num_gen_batches": 1, "dynamic_sampling/num_evaluated_prompts": 4}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "cut')
    (tmp_path / "other.jsonl").write_text("no JSON\n")
    options = ["--output", tmp_path / "picture.png"] if name == "plot" else []
    if name == "monitor":
        of_file, of_folder = (run(name, run_folder / part) for part in ("metrics.jsonl", ""))
        assert of_file == of_folder and "training steps                 1" in of_file[1]
        (run_folder / "metrics.jsonl").unlink()
        (run_folder / "train.log").write_text("Generated batch 1, 8 prompts\nFiltered (std=0): 6 (75.0%)\n")
        assert "generation rounds              1" in run(name, run_folder)[1]
    elif importlib.util.find_spec("matplotlib") is None:
        return
    else:
        for given in (run_folder, run_folder / "metrics.jsonl"):
            assert run(name, given, *options)[0] == 0
            (tmp_path / "picture.png").unlink()
    for wrong in (tmp_path / "nowhere", empty, tmp_path / "other.jsonl", empty / "metrics.jsonl"):
        code, _, error = run(name, wrong, *options)
        assert code == 2 and error.count("\n") == 1, error
        assert error.startswith(f"dapo_jax: {wrong}") and "give" in error


def test_log_and_metrics_are_summed_up_alike(tmp_path):
    (tmp_path / "train.log").write_text(
        "Generated batch 1, 8 prompts, 64 trajectories\nFiltered (std=0): 6 (75.0%)\nKept (std>0): 2 prompts (25.0%)\n"
        "Generated batch 2, 8 prompts, 64 trajectories\nFiltered (std=0): 2 (25.0%)\nKept (std>0): 6 prompts (75.0%)\n"
    )
    row = {
        "step": 1,
        "train/filter_rate": 0.5,
        "dynamic_sampling/num_evaluated_prompts": 16,
        "dynamic_sampling/num_gen_batches": 2,
        "dynamic_sampling/filtered_all_correct": 3,
        "dynamic_sampling/filtered_all_wrong": 5,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps(row) + "\n")
    from_log = monitor.log_summary(monitor.read_log(tmp_path / "train.log"))
    from_metrics = monitor.steps_summary(monitor.read_steps(tmp_path / "metrics.jsonl"))
    assert from_log[1:3] == from_metrics[1:3]
    assert "(2.00 per step)" in from_log[1] and "50.0%" in from_log[2] and "8 (4.0 per round)" in from_log[3]
    assert monitor.log_summary({"batches": []}) == ["no generation round in the log: is the filter on?"]


@pytest.mark.parametrize("rule", ["std", "mean_range", "mixed"])
def test_the_log_of_every_rule_is_read(tmp_path, rule):
    words = rule_words(FilterGroupsConfig(rule=rule))
    with open_workdir(tmp_path, detailed=False):
        for number, kept in enumerate((2, 6), start=1):
            log_round(
                step=1,
                round_number=number,
                num_prompts=8,
                num_samples=4,
                metric="acc",
                words=words,
                num_kept=kept,
                mean_std=0.1,
                num_accumulated=8,
                target=8,
            )
    found = monitor.read_log(tmp_path / "train.log")
    assert found == {"batches": [1, 2], "filter_rates": [0.75, 0.25], "kept_prompts": [2, 6]}
