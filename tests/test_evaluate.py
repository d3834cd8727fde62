"""Evaluations of a small run: what training reports is what the command finds in the checkpoints."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from event_files import values_of
from small_run import small_config
from test_other_runs import save
from test_problems import write_rows

from dapo_jax.command import command_line
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import EnvironmentConfig
from dapo_jax.config.values import flat, with_values
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.evaluate import evaluate as evaluate_module
from dapo_jax.evaluate.evaluate import as_in_the_run, bench, main, open_policy, table
from dapo_jax.export import export as export_module
from dapo_jax.monitor.recipe import Recipe, write_config
from dapo_jax.monitor.records import read_metrics
from dapo_jax.run.held_out import mean_accuracy
from dapo_jax.run.problems import read_problems
from dapo_jax.training.loop import train


def test_the_mean_accuracy_is_that_of_plain_means():
    metrics = {"eval/a/acc/mean@4": 0.5, "eval/b/acc/mean@2": 0.25, "eval/a/acc/mean@4/max": 1.0}
    metrics |= {"eval/a/acc/best@4": 1.0, "bench/a/acc/mean@4": 1.0}
    assert mean_accuracy(metrics) == 0.375 and mean_accuracy({"rollout/acc/mean": 1.0}) is None


def test_what_only_training_offloads_is_left_out():
    offloaded = {"model.remat_policy": "offload", "actor.optim.offload": True}
    config = small_config("unused", **offloaded, **{"model.enable_gradient_checkpointing": True})
    with open_policy(config) as policy:
        assert policy.held_out.task_sets


def test_the_table_has_a_line_a_model_and_task_set():
    metrics = {
        "bench/b/acc/mean@2": 0.5,
        "bench/b/score/mean@2": 0.1,
        "bench/b/acc/mean@2/std": 0.2,
        "bench/c/score/mean@1": -1.0,
        "time/bench": 3.0,
    } | {f"bench/{task}/response_length/{name}": 7.0 for task in "bc" for name in ("mean", "clip_ratio")}
    head, b, c = table([{"model": "m", "step": 20, "metrics": metrics}]).splitlines()
    assert head.split() == ["step", "task", "set", "tokens", "cut", "off", "mean@2", "mean@1"]
    assert b.split() == ["20", "b", "7.000", "7.000", "0.500", "-"]
    assert c.split() == ["20", "c", "7.000", "7.000", "-", "-1.000"]


def test_the_command_refuses_with_one_line(capsys):
    tiny = ("--config", "configs/tiny.py")
    for arguments, message in (
        ((*tiny, "--config.evaluate.n=0"), "evaluate.n=0 must be greater"),
        ((*tiny, "--step=3", "--config.workdir=absent"), "is the workdir of one"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2 and re.search(f"dapo_jax: (?s:.)*({message})", capsys.readouterr().err)


def recorded_run(folder, *steps, **values):
    """A workdir with the config of a run and (empty) checkpoints."""
    config = with_values(small_config(folder), values)
    write_config(folder, dataclasses.asdict(config))
    save(folder / "checkpoints", *steps)
    return config


def test_a_run_is_measured_with_its_own_lengths_and_sampling(tmp_path):
    """It was measured with those of the recipe at hand."""
    theirs = {"data.max_response_length": 7, "data.system_prompt": "Add.", "evaluate.temperature": 0.5, "seed": 3}
    recorded_run(tmp_path / "run", 1, **theirs)
    given = small_config(tmp_path / "mine", **{"model.path": str(tmp_path / "run"), "evaluate.n": 2})
    config, [line] = as_in_the_run(given, (), checkpoints=False)
    assert flat(config) == flat(given) | theirs | {"evaluate.n": 4}
    for part in ("as in the run", "data.max_response_length=7 (not 4)", "evaluate.n=4 (not 2)", "evaluate.temperature"):
        assert part in line
    chosen = {"evaluate.n", "data.max_response_length", "data.system_prompt"}
    config, [line] = as_in_the_run(given, chosen, checkpoints=False)
    assert flat(config) == flat(given) | {"evaluate.temperature": 0.5, "seed": 3} and "evaluate.n=" not in line
    same = with_values(given, theirs | {"evaluate.n": 4})
    assert as_in_the_run(same, (), checkpoints=False) == (same, ())
    of_training = {"rollout.min_response_length": 4, "reward.overlong_buffer.enable": True}
    longer = with_values(given, of_training | {"data.max_response_length": 300})
    validate(as_in_the_run(longer, (), checkpoints=False)[0], training=False)
    recorded_run(tmp_path / "run", 1, **theirs, **{"environment.path": "lake.py:Lake", "environment.max_turns": 3})
    config, [line] = as_in_the_run(given, {"environment.path"}, checkpoints=False)  # "": as one turn
    assert config.environment == EnvironmentConfig() and "environment" not in line
    assert as_in_the_run(same, {"environment.path"}, checkpoints=False) == (same, ())


def test_a_run_is_asked_what_it_has_held_out_whatever_the_seed_of_the_draws(tmp_path, caplog):
    run = recorded_run(tmp_path / "run", 1)
    model = {"model.path": run.workdir}

    def asked(changes, *, training=False):
        problems = read_problems(with_values(run, changes), character_tokenizer(), training=training)
        return [row.question for row in problems.task_sets[0].prompts.rows]

    own = asked({}, training=True)
    assert asked(model) == asked(model | {"seed": 1}) == own != asked({"seed": 1})
    assert "also trained on" not in caplog.text
    more = asked(model | {"data.arithmetic.num_heldout": 8})
    sums = f"{len(set(more) - set(own))} of 8 prompts of data.arithmetic are also trained on"
    assert sums in caplog.text and "give its options as the run had them" in caplog.text


def test_the_run_in_the_workdir_is_measured_where_its_checkpoints_are_asked_for(tmp_path):
    given = with_values(recorded_run(tmp_path / "run", 1, **{"evaluate.n": 3}), {"evaluate.n": 2})
    config, lines = as_in_the_run(given, (), checkpoints=True)
    assert config.evaluate.n == 3 and len(lines) == 1
    config, [line] = as_in_the_run(given, (), checkpoints=False)
    assert config == given and "model.path=random is measured" in line and "--all-steps" in line
    assert as_in_the_run(small_config(tmp_path / "new"), (), checkpoints=False)[1] == ()


def test_a_step_that_is_not_there_is_named_before_the_output(tmp_path):
    config = recorded_run(tmp_path / "run", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match=r"--step=7 must be a checkpoint of .*: choose one of \[1\]"):
        bench(config, tmp_path / "out", step=7)
    with pytest.raises(ValueError, match="must be a new or an empty directory"):
        bench(config, tmp_path / "out", step=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, each saved and evaluated, on the held-out problems and on two more sets."""
    folder = tmp_path_factory.mktemp("trained")
    file = write_rows(folder / "two.jsonl", prompts=("1 + 1 =", "2 + 0 =", "1 + 1 ="))
    tasks = {
        "own": {"files": file, "n": 2, "batch_size": 2, "max_prompts": 3},
        "greedy": {"files": file, "n": 1, "temperature": 0, "reward_function": "gsm8k_flexible"},
    }
    each = {"trainer.total_training_steps": 2, "trainer.test_freq": 1, "trainer.save_freq": 1}
    measured = {"evaluate.tasks": json.dumps(tasks), "monitor.detailed_stats": True}
    config = small_config(folder / "run", **each, **measured)
    train(config)
    return config


def as_bench(row):
    return {"bench" + name[4:]: value for name, value in row.items() if name.startswith("eval/")}


def without_time(result):
    return {name: value for name, value in result["metrics"].items() if name != "time/bench"}


def test_a_checkpoint_measures_as_its_run_did(whole, tmp_path):
    [result] = bench(small_config(whole[0]), tmp_path / "out", step=4)
    assert without_time(result) == as_bench(whole[2][4]) and result["step"] == 4


@pytest.mark.slow
def test_adapters_in_bfloat16_measure_as_their_run_did(tmp_path):
    """They were added to the base in float32, and then rounded."""
    lora = {"model.dtype": "bfloat16", "model.lora.rank": 2, "actor.optim.lr": 0.05}
    config = small_config(tmp_path / "run", **lora, **{"trainer.total_training_steps": 2, "evaluate.n": 64})
    train(config)
    measured = with_values(config, {"model.path": config.workdir, "model.lora.rank": 0})
    [result] = bench(without_switched_off(config, measured, ()), tmp_path / "out")
    assert without_time(result) == as_bench(read_metrics(config.workdir)[-1])


@pytest.mark.slow
def test_the_checkpoints_measure_as_the_run_did(trained, tmp_path):
    results = bench(trained, tmp_path / "out", all_steps=True)
    rows = read_metrics(trained.workdir)[1:]
    assert [result["step"] for result in results] == [1, 2]
    for result, row in zip(results, rows, strict=True):
        assert without_time(result) == as_bench(row)
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == results
    shown = {(step, value.tag): value.simple_value for step, value in values_of(tmp_path / "out")}
    for result in results:
        for name, value in result["metrics"].items():
            assert shown[result["step"], name.replace("@", "_")] == pytest.approx(value), name
    assert {step for step, tag in shown if tag.startswith("bench/")} == {1, 2}
    lines = [json.loads(line) for line in (tmp_path / "out/generations.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (4 * 4 + 3 * 2 + 3)
    for result in results:
        for task, k in (("own", 2), ("greedy", 1)):  # of the row that occurs once
            found = [line for line in lines if line["task"] == task and line["step"] == result["step"]]
            by_prompt = {line["prompt"]: [] for line in found}
            for line in found:
                by_prompt[line["prompt"]].append(line["scores"]["acc"])
            assert result["metrics"][f"bench/{task}/finished_task_count"] == len(by_prompt) == 2
            mean = np.mean([np.mean(values) for values in by_prompt.values()])
            assert result["metrics"][f"bench/{task}/acc/mean@{k}"] == pytest.approx(mean)
            assert {(line["ground_truth"], line["finished"] or line["length"] == 4) for line in found} == {("2", True)}
            assert all(line["origin"].endswith(f"two.jsonl row {line['row']}") for line in found)
    assert table(results).count("\n") == 6


@pytest.mark.slow
def test_a_model_is_measured_without_training_data_and_in_pieces(trained, tmp_path):
    whole = bench(trained, tmp_path / "step", step=2)[0]["metrics"]
    changes = {"model.path": trained.workdir, "data.task": "files", "evaluate.batch_size": 1}
    config = with_values(trained, changes | {"workdir": str(tmp_path / "another")})
    config = without_switched_off(trained, config, ())
    [result] = bench(config, tmp_path / "out")
    assert result["step"] == 2 and result["model"] == trained.workdir
    own = {name for name in whole if name.startswith(("bench/own/", "bench/greedy/"))}
    assert own == set(result["metrics"]) - {"time/bench", "bench/num_errors", "bench/num_missing"}
    for name in own:
        assert result["metrics"][name] == pytest.approx(whole[name], abs=1e-12), name
    nothing = without_switched_off(config, with_values(config, {"evaluate.tasks": "{}"}), ())
    with pytest.raises(ValueError, match="nothing to evaluate"):
        bench(nothing, tmp_path / "nothing")


@pytest.mark.slow
def test_the_command_prints_a_table(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "read_options", lambda _: (trained, Recipe("", (), None)))
    monkeypatch.setattr(sys, "argv", ["evaluate", "--step", "1"])
    main()
    assert "task set" in capsys.readouterr().out
    assert (Path(trained.workdir) / "evaluation_step_1" / "metrics.json").exists()
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "evaluation_step_1 holds an evaluation already: give" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_measure_and_export_the_checkpoints_that_the_first_one_sees(whole, monkeypatch):
    """Another may look while the run goes on, and saves or removes some."""
    for module in (evaluate_module, export_module):
        monkeypatch.setattr(module, "gather", lambda value: [[1, 2] if isinstance(value, list) else 1, value])
    run = str(whole[0])
    assert [one.step for one in evaluate_module._checkpoints(run, "", None)] == [1, 2]
    newest = evaluate_module._newest(run)
    assert newest is not None and newest.step == 1
    assert export_module._chosen_step(run, f"{run}/checkpoints", None) == 2
