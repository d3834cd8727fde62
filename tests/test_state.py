"""Runs that end early, for whatever reason, and runs that begin with another run."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from ends_within import ends_within
from safetensors.numpy import load_file
from small_run import CONFIGS, assert_same_policy, at_call, rows_without_clock, small_config

from dapo_jax import step as step_module
from dapo_jax import training as train_module
from dapo_jax.export import export
from dapo_jax.held_out import mean_accuracy
from dapo_jax.learner import update as update_module
from dapo_jax.models.lora import TARGETS
from dapo_jax.monitor.records import read_metrics
from dapo_jax.parallel.stopping import Stopped
from dapo_jax.rewards import verification
from dapo_jax.training import main, train


def saved(folder) -> list[int]:
    return sorted(int(path.name) for path in (Path(folder) / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("module", "name", "number", "step"),
    [
        (train_module, "evaluate", 2, 2),  # while it evaluates step 2, which has no row yet
        # while it samples for step 4
        pytest.param(step_module, "sample_groups", 4, 3, marks=pytest.mark.slow),
        # in step 3, before the first weights change: that step is thrown away
        pytest.param(step_module, "update", 3, 2, marks=pytest.mark.slow),
        # between its two optimizer steps: it ends within the patience
        pytest.param(update_module, "_loss_weights", 6, 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_resumes(whole, tmp_path, monkeypatch, module, name, number, step):
    config = small_config(tmp_path, **{"trainer.save_freq": -1, "trainer.stop_patience_s": 600.0})
    with monkeypatch.context() as patch:
        at_call(patch, module, name, number, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="SIGTERM"):
            train(config)
    assert saved(tmp_path) == [step]
    models = train(config)
    assert_same_policy(models, whole[1])
    assert rows_without_clock(tmp_path) == whole[2]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == sorted(
        path.name for path in (whole[0] / "samples").iterdir()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_freq", "kept", "words"),
    [
        (2, [2], "in the update of step 3: step 3 is lost; rerun the same command to resume after step 2"),
        (-1, [], "in the update of step 3: steps 1 to 3 are lost; rerun the same command to resume from the beginning"),
    ],
)
def test_an_update_that_outlasts_the_patience_is_thrown_away(whole, tmp_path, monkeypatch, save_freq, kept, words):
    config = small_config(tmp_path, **{"trainer.save_freq": save_freq, "trainer.stop_patience_s": 0.0})
    with monkeypatch.context() as patch:
        at_call(patch, update_module, "_loss_weights", 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="SIGTERM"):
            train(config)
    assert saved(tmp_path) == kept and words in (tmp_path / "train.log").read_text()
    assert_same_policy(train(config), whole[1])
    assert rows_without_clock(tmp_path) == whole[2]
    rounds = sum(row["train/num_gen_batches"] for row in whole[2][1:])
    assert (tmp_path / "train.log").read_text().count("Generated batch") == rounds, "each round stands once"
    assert words in (tmp_path / "train.log").read_text()
    assert "Generated batch" in (tmp_path / "train.discarded.log").read_text()


@pytest.mark.slow
def test_checkpoints_are_at_most_so_many_minutes_apart(tmp_path, monkeypatch):
    often = {"trainer.save_freq": -1, "trainer.save_minutes": 1e-9, "trainer.max_ckpt_to_keep": 9}
    train(small_config(tmp_path / "often", **often))
    assert saved(tmp_path / "often") == [1, 2, 3, 4]
    train(small_config(tmp_path / "seldom", **{**often, "trainer.save_minutes": 1e9}))
    assert saved(tmp_path / "seldom") == [4]


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 75])
def test_the_command_ends_with_the_chosen_code(tmp_path, monkeypatch, capsys, code):
    at_call(monkeypatch, step_module, "sample_groups", 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    changes = {
        "workdir": tmp_path,
        "trainer.stopped_exit_code": code,
        "data.arithmetic.high": 4,
        "trainer.val_before_train": False,
        "algorithm.filter_groups.enable": False,
    }
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    last = "    return config"
    recipe = (CONFIGS / "tiny.py").read_text().replace(last, f"    config.data.gen_batch_size = 32\n{last}")
    (tmp_path / "recipe.py").write_text(recipe)
    monkeypatch.setattr("sys.argv", ["train", f"--config={tmp_path / 'recipe.py'}", *flags])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code and "stopped by SIGINT after step 0" in (tmp_path / "train.log").read_text()
    switched_off = "data.gen_batch_size is not read without algorithm.filter_groups.enable=True: it is back"
    assert switched_off in (tmp_path / "train.log").read_text()
    assert capsys.readouterr().err.count(switched_off) == 1
    assert "devices" in (tmp_path / "train.log").read_text() or "device(s)" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_a_run_that_fails_while_it_samples_keeps_its_steps(whole, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("too few groups")

    config = small_config(tmp_path, **{"trainer.save_freq": -1})
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", 4, fail)
        with pytest.raises(RuntimeError, match="too few groups"):
            train(config)
    assert saved(tmp_path) == [3]
    assert_same_policy(train(config), whole[1])
    assert rows_without_clock(tmp_path) == whole[2]


@pytest.mark.slow
def test_a_run_begins_as_another_run_was(whole, tmp_path):
    folder, params, rows = whole
    before = {"trainer.resume_from_path": f"{folder}/checkpoints/2"}
    models = train(small_config(tmp_path / "branch", **before))
    assert_same_policy(models, params)
    assert rows_without_clock(tmp_path / "branch") == rows[3:]
    longer = {"trainer.resume_from_path": str(folder), "trainer.total_training_steps": 5}
    train(small_config(tmp_path / "longer", **longer))
    again = train(small_config(tmp_path / "longer", **longer))  # resumes from its own checkpoint
    assert [row["step"] for row in read_metrics(tmp_path / "longer")] == [5] and saved(tmp_path / "longer") == [5]
    assert saved(folder) == [2, 4] and int(again.actor.updates) == 10


@pytest.mark.slow
def test_other_prompts_are_noticed(whole, tmp_path, caplog):
    other = {"data.arithmetic.high": 5}
    with pytest.raises(ValueError, match="the training prompts are not those that workdir=.* has trained on"):
        train(small_config(whole[0], **other, **{"trainer.total_training_steps": 5}))
    branch = {"trainer.resume_from_path": str(whole[0]), "trainer.total_training_steps": 5}
    train(small_config(tmp_path, **other, **branch))
    assert "they begin with the first" in (tmp_path / "train.log").read_text()
    assert read_metrics(tmp_path)[0]["data/prompts_consumed"] < whole[2][4]["data/prompts_consumed"]


@pytest.mark.slow
def test_a_run_begins_with_the_policy_of_another(whole, tmp_path):
    folder, params, _ = whole
    adapters = {"model.lora.rank": 2, "actor.optim.lr": 1e-2, "trainer.total_training_steps": 2}
    for path in (folder, folder / "checkpoints" / "4"):
        models = train(
            small_config(
                tmp_path / path.name,
                **{"model.path": str(path), "actor.optim.lr": 0.0, "trainer.total_training_steps": 1},
            )
        )
        assert_same_policy(models, params)
        assert int(models.actor.updates) == 2  # moments and counters are its own
    train(small_config(tmp_path / "adapters", **adapters, **{"model.path": str(folder)}))
    last = small_config(
        tmp_path / "last",
        **{"model.path": str(tmp_path / "adapters"), "actor.optim.lr": 0.0, "trainer.total_training_steps": 1},
    )
    merged = jax.device_get(train(last).actor.params)
    moved = {name: np.abs(merged["layers"][name] - params["layers"][name]).max() for name in params["layers"]}
    assert {name for name, change in moved.items() if change} == set(TARGETS.values())
    with pytest.raises(ValueError, match="must be the workdir of a run that has saved a checkpoint"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
        train(dataclasses.replace(last, model=dataclasses.replace(last.model, path=str(tmp_path / "empty"))))


def spoil(monkeypatch, steps):
    """Makes the advantages of these steps infinite."""
    original, step = step_module.make_batch, [0]

    def make_batch(*arguments, **keywords):
        batch, metrics = original(*arguments, **keywords)
        step[0] += 1
        if step[0] in steps:
            batch = dataclasses.replace(batch, advantages=np.where(batch.mask, np.inf, 0).astype(np.float32))
        return batch, metrics

    monkeypatch.setattr(step_module, "make_batch", make_batch)


def test_a_batch_that_is_not_finite_changes_nothing_and_is_kept(tmp_path, monkeypatch):
    spoil(monkeypatch, {2})
    limit = {"algorithm.filter_groups.max_num_gen_batches": 50}  # a policy of NaNs would sample forever
    models = train(small_config(tmp_path, **limit))
    rows = read_metrics(tmp_path)
    assert [row.get("actor/skipped_updates") for row in rows] == [None, 0, 2, 0, 0]
    assert int(models.actor.updates) == 6 and all(np.isfinite(x).all() for x in jax.tree.leaves(models.actor.params))
    assert [path.name for path in (tmp_path / "nonfinite").iterdir()] == ["step_000002.npz"]
    with np.load(tmp_path / "nonfinite" / "step_000002.npz") as batch:
        assert np.isinf(batch["advantages"]).any() and batch["responses"].shape == batch["mask"].shape


@pytest.mark.slow
def test_too_many_of_them_in_a_row_end_the_run(tmp_path, monkeypatch):
    config = small_config(tmp_path, **{"trainer.max_nonfinite_steps": 2, "trainer.save_freq": -1})
    with monkeypatch.context() as patch:
        spoil(patch, {2, 3})
        with pytest.raises(RuntimeError, match=r"not finite in 2 steps in a row, up to step 3 .*nonfinite: lower"):
            train(config)
    assert saved(tmp_path) == [3] and read_metrics(tmp_path)[-1]["step"] == 3
    train(config)  # without the fault it resumes
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_restart_sees_the_alarms_that_are_on(whole, tmp_path):
    rows = read_metrics(whole[0])
    assert all(row["alarm/truncation"] in (0.0, 1.0) for row in rows[1:])
    progress = json.loads((whole[0] / "checkpoints" / "4" / "progress" / "metadata").read_text())
    assert progress["alarms"]["truncation"] == rows[-1]["alarm/truncation"] and "first entropy" in progress["alarms"]
    assert progress["best"] is not None and progress["unrecorded"] is None


@pytest.mark.slow
def test_a_checkpoint_from_the_middle_of_a_step_is_completed(whole, tmp_path, monkeypatch):
    config = small_config(tmp_path, **{"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 9})
    with monkeypatch.context() as patch:
        at_call(patch, train_module, "evaluate", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped):
            train(config)

    def second(item):
        return json.loads((tmp_path / "checkpoints" / "2" / item).read_text())

    assert second("progress/metadata")["unrecorded"] is not None and second("metrics/metrics")["value"] is None
    train(config)
    assert second("progress/metadata")["unrecorded"] is None and second("metrics/metrics")["value"] is not None
    assert rows_without_clock(tmp_path) == whole[2]


@pytest.mark.slow
def test_a_stop_does_not_wait_for_verdicts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rewards" / "data"))
    slow = {"reward.function": "hostile_verifier.score_slowly", "reward.timeout_s": 600.0}
    at_call(monkeypatch, verification, "wait", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with ends_within(), pytest.raises(Stopped):
        train(small_config(tmp_path, **slow, **{"trainer.val_before_train": False}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.total_training_steps": 3}, "total_training_steps=3 is less than the 4 steps"),
        ({"trainer.checkpoint_dir": "{other}"}, "has its checkpoints in .*checkpoints, and trainer.checkpoint_dir now"),
        ({"model.path": "{workdir}"}, "model.path=.* is in this run's own workdir: choose"),
        ({"trainer.resume_from_path": "{workdir}/checkpoints/2"}, "is in workdir=.* itself: choose a new workdir"),
    ],
)
def test_a_restart_that_would_lose_something_is_refused(whole, tmp_path, changes, message):
    named = {
        key: value.format(other=tmp_path, workdir=whole[0]) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        train(small_config(whole[0], **named))
    assert rows_without_clock(whole[0]) == whole[2] and saved(whole[0]) == [2, 4]


@pytest.mark.slow
def test_carried_groups_of_another_shape_are_refused(tmp_path):
    carry = {"algorithm.filter_groups.leftover": "carry", "data.gen_batch_size": 16, "trainer.save_freq": 1}
    train(small_config(tmp_path, **carry, **{"trainer.total_training_steps": 1}))
    with pytest.raises(ValueError, match=r"rollout.n=16, data.max_response_length=4, and the run has 16, 5"):
        train(small_config(tmp_path, **carry, **{"data.max_response_length": 5}))
    with pytest.raises(ValueError, match=r"sampled with algorithm.use_kl_in_reward=False, and the run has True"):
        train(small_config(tmp_path, **carry, **{"algorithm.use_kl_in_reward": True}))


@pytest.mark.slow
def test_the_best_accuracy_on_other_problems_is_forgotten(whole, tmp_path):
    def progress_in(folder: Path):
        return json.loads((folder / f"checkpoints/{saved(folder)[-1]}/progress/metadata").read_text())

    assert progress_in(whole[0])["best"] > 0
    hard = {"data.arithmetic.low": 300, "data.arithmetic.high": 320, "algorithm.filter_groups.enable": False}
    branch = {
        "trainer.resume_from_path": str(whole[0]),
        "trainer.total_training_steps": 5,
        "data.gen_batch_size": 4,
    }
    train(small_config(tmp_path, **hard, **branch))
    progress, [row] = progress_in(tmp_path), read_metrics(tmp_path)
    assert progress["best"] == progress["alarms"]["best heldout"] == mean_accuracy(row) == 0
    assert row["alarm/heldout_drop"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_run_begins_with_is_pinned(tmp_path, elsewhere):
    """With checkpoints elsewhere a restart, and any export, took the frozen weights of the other run's newest."""
    source, run, place = tmp_path / "source", tmp_path / "run", {}
    if elsewhere:
        place = {"trainer.checkpoint_dir": str(tmp_path / "elsewhere")}
    begun = train(small_config(source, **place, **{"trainer.total_training_steps": 1}))
    frozen = np.asarray(begun.actor.params["embedding"])
    changes = {"model.path": str(source), "trainer.total_training_steps": 1, "model.lora.rank": 2}
    train(small_config(run, **changes))
    gone_on = train(small_config(source, **place, **{"trainer.total_training_steps": 2}))
    assert np.abs(gone_on.actor.params["embedding"] - frozen).max() > 0
    changes["trainer.total_training_steps"] = 2
    train(small_config(run, **changes))
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["model"]["path"] == f"{source}/checkpoints/1"
    export(small_config(run, **changes), tmp_path / "exported", dtype="float32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(exported, frozen)
