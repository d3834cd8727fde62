"""Runs that end early, for whatever reason, and runs that begin with another run."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ends_within import ends_within
from safetensors.numpy import load_file
from small_run import (
    RECIPE,
    assert_as_undisturbed,
    assert_same_policy,
    at_call,
    copied,
    rows_without_clock,
    saved,
    small_config,
)

from dapo_jax.config.values import with_values
from dapo_jax.export.export import export
from dapo_jax.learner import update as update_module
from dapo_jax.models.lora import TARGETS
from dapo_jax.monitor.records import read_metrics
from dapo_jax.parallel.stopping import Stopped
from dapo_jax.rewards import verification
from dapo_jax.run import checkpoint
from dapo_jax.run.held_out import mean_accuracy
from dapo_jax.run.progress import is_finite
from dapo_jax.training import loop as train_module
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import main, train

SELDOM = {"trainer.save_freq": -1, "trainer.max_ckpt_to_keep": 9}
BRANCH = {"trainer.total_training_steps": 5}  # of a run of four steps


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise RuntimeError("too few groups")


def ends(monkeypatch, config, module, name, number=1, *, action=stop, error=Stopped, match="SIGTERM"):
    """Runs until the call of that number of a function, at which `action` ends the run."""
    with monkeypatch.context() as patch:
        at_call(patch, module, name, number, action)
        with pytest.raises(error, match=match):
            train(config)


def item(folder, step, name):
    return json.loads((folder / "checkpoints" / str(step) / name).read_text())


def test_a_run_that_is_asked_to_stop_in_an_evaluation_saves_and_resumes(whole, tmp_path, monkeypatch):
    """The checkpoint is of the middle of a step, which has no row yet; then it is completed."""
    config = small_config(copied(whole[0], tmp_path, step=1), **SELDOM, **{"trainer.stop_patience_s": 600.0})
    ends(monkeypatch, config, train_module, "evaluate")
    assert saved(tmp_path) == [1, 2]
    assert item(tmp_path, 2, "progress/metadata")["unrecorded"] is not None
    assert item(tmp_path, 2, "metrics/metrics")["value"] is None
    models = train(config)
    assert item(tmp_path, 2, "progress/metadata")["unrecorded"] is None
    assert item(tmp_path, 2, "metrics/metrics")["value"] is not None
    assert_as_undisturbed(models, tmp_path, whole)


@pytest.mark.slow
def test_a_run_that_ends_in_other_phases_saves_and_resumes(whole, tmp_path, monkeypatch):
    config = small_config(tmp_path, **SELDOM, **{"trainer.stop_patience_s": 600.0})
    ends(monkeypatch, config, step_module, "sample_groups", 2)
    assert saved(tmp_path) == [1]
    ends(monkeypatch, config, step_module, "update", 2)  # before the first weights change: step 3 is thrown away
    assert saved(tmp_path) == [1, 2]
    assert item(tmp_path, 2, "metrics/metrics")["value"] == mean_accuracy(whole[2][2])  # keep-best forgot it
    ends(monkeypatch, config, step_module, "sample_groups", 2, action=fail, error=RuntimeError, match="too few groups")
    assert saved(tmp_path) == [1, 2, 3]
    ends(monkeypatch, config, update_module, "_optimizer_step", 2)  # it ends within the patience
    assert saved(tmp_path) == [1, 2, 3, 4]
    assert_as_undisturbed(train(config), tmp_path, whole)


@pytest.mark.slow
def test_an_update_that_outlasts_the_patience_is_thrown_away(whole, tmp_path, monkeypatch):
    impatient = {"trainer.stop_patience_s": 0.0}
    attempts = (
        (-1, [], "in the update of step 3: steps 1 to 3 are lost; rerun the same command to resume from the beginning"),
        (2, [2], "in the update of step 3: step 3 is lost; rerun the same command to resume after step 2"),
    )
    for save_freq, kept, words in attempts:
        config = small_config(tmp_path, **impatient, **{"trainer.save_freq": save_freq})
        ends(monkeypatch, config, update_module, "_optimizer_step", 6)
        assert saved(tmp_path) == kept and words in (tmp_path / "train.log").read_text()
    assert_as_undisturbed(train(config), tmp_path, whole)
    rounds = sum(row["train/num_gen_batches"] for row in whole[2][1:])
    log = (tmp_path / "train.log").read_text()
    assert log.count("Generated batch") == rounds, "each round is logged once"
    assert all(words in log for _, _, words in attempts)
    assert "Generated batch" in (tmp_path / "train.discarded.log").read_text()


@pytest.mark.slow
def test_checkpoints_are_at_most_so_many_minutes_apart(whole, tmp_path, monkeypatch):
    for minutes, steps in ((1e-9, [1, 2, 3, 4]), (1e9, [1, 4])):
        folder = copied(whole[0], tmp_path / str(minutes), step=1)
        train(small_config(folder, **SELDOM, **{"trainer.save_minutes": minutes}))
        assert saved(folder) == steps
    folder = copied(whole[0], tmp_path / "late", step=1)
    with monkeypatch.context() as patch:  # the checkpoint is an hour old when the run resumes
        patch.setattr(checkpoint, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 3600))
        train(small_config(folder, **SELDOM, **{"trainer.save_minutes": 59.0}))
    assert saved(folder) == [1, 2, 4]


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
    last = "    return config"
    recipe = RECIPE.read_text().replace(last, f"    config.data.gen_batch_size = 32\n{last}")
    (tmp_path / "recipe.py").write_text(recipe)
    with pytest.raises(SystemExit) as end:
        main([f"--config={tmp_path / 'recipe.py'}", *(f"--config.{name}={value}" for name, value in changes.items())])
    log = (tmp_path / "train.log").read_text()
    assert end.value.code == code and "stopped by SIGINT after step 0" in log
    switched_off = "data.gen_batch_size is not read without algorithm.filter_groups.enable=True: it is back"
    assert switched_off in log and capsys.readouterr().err.count(switched_off) == 1
    assert "devices" in log or "device(s)" in log


@pytest.mark.slow
def test_a_run_begins_as_another_run_was(whole, tmp_path):
    folder, _, rows = whole
    models = train(small_config(tmp_path / "branch", **{"trainer.resume_from_path": f"{folder}/checkpoints/2"}))
    assert_same_policy(models, whole[1])
    assert rows_without_clock(tmp_path / "branch") == rows[3:]
    longer = small_config(tmp_path / "longer", **BRANCH, **{"trainer.resume_from_path": str(folder)})
    train(longer)
    again = train(longer)  # resumes from its own checkpoint
    assert [row["step"] for row in read_metrics(tmp_path / "longer")] == [5] and saved(tmp_path / "longer") == [5]
    assert saved(folder) == [1, 2, 3, 4] and int(again.actor.updates) == 10


@pytest.mark.slow
def test_other_prompts_are_noticed_and_the_best_accuracy_on_others_is_forgotten(whole, tmp_path):
    copy, branch = copied(whole[0], tmp_path / "copy", step=4), tmp_path / "branch"
    with pytest.raises(ValueError, match="the training prompts are not those that workdir=.* has trained on"):
        train(small_config(copy, **BRANCH, **{"data.arithmetic.high": 5}))
    hard = {"data.arithmetic.low": 300, "data.arithmetic.high": 320, "algorithm.filter_groups.enable": False}
    begun = {"trainer.resume_from_path": str(whole[0]), "data.gen_batch_size": 4}
    train(small_config(branch, **BRANCH, **hard, **begun))
    assert "they begin with the first" in (branch / "train.log").read_text()
    progress, [row] = item(branch, 5, "progress/metadata"), read_metrics(branch)
    assert row["data/prompts_consumed"] < whole[2][4]["data/prompts_consumed"]
    assert progress["best"] == progress["alarms"]["best heldout"] == mean_accuracy(row) == 0
    assert row["alarm/heldout_drop"] == 0 and item(copy, 4, "progress/metadata")["best"] > 0


@pytest.mark.slow
def test_a_run_begins_with_the_policy_of_another(whole, tmp_path):
    folder, params, _ = whole
    unmoved = {"actor.optim.lr": 0.0, "trainer.total_training_steps": 1}
    for path in (folder, folder / "checkpoints" / "4"):
        models = train(small_config(tmp_path / path.name, **unmoved, **{"model.path": str(path)}))
        assert_same_policy(models, params)
        assert int(models.actor.updates) == 2  # moments and counters are its own
    adapters = {"model.lora.rank": 2, "actor.optim.lr": 1e-2, "trainer.total_training_steps": 2}
    train(small_config(tmp_path / "adapters", **adapters, **{"model.path": str(folder)}))
    last = small_config(tmp_path / "last", **unmoved, **{"model.path": str(tmp_path / "adapters")})
    merged = jax.device_get(train(last).actor.params)
    moved = {name for name, value in params["layers"].items() if (merged["layers"][name] != value).any()}
    assert moved == set(TARGETS.values()) & set(params["layers"])
    with pytest.raises(ValueError, match="must be the workdir of a run with a saved checkpoint"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
        train(with_values(last, {"model.path": str(tmp_path / "empty")}))


@pytest.mark.long("elsewhere")
@pytest.mark.parametrize("place", ["workdir", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_what_a_run_begins_with_is_pinned(whole, tmp_path, place):
    """With checkpoints elsewhere a restart, and any export, took the frozen weights of the other run's newest."""
    source, run, changes = tmp_path / "source", tmp_path / "run", {}
    if place == "elsewhere":
        changes = {"trainer.checkpoint_dir": str(tmp_path / "elsewhere")}
    begun = train(small_config(source, **changes, **{"trainer.total_training_steps": 1}))
    frozen = np.asarray(begun.actor.params["embedding"])
    config = small_config(run, **{"model.path": str(source), "trainer.total_training_steps": 1, "model.lora.rank": 2})
    train(config)
    gone_on = train(small_config(source, **changes, **{"trainer.total_training_steps": 2}))
    assert np.abs(gone_on.actor.params["embedding"] - frozen).max() > 0
    config = with_values(config, {"trainer.total_training_steps": 2})
    train(config)
    assert json.loads((run / "config.json").read_text())["model"]["path"] == f"{source}/checkpoints/1"
    export(config, tmp_path / "exported", dtype="float32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(exported, frozen)


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


def test_a_batch_that_is_not_finite_changes_nothing_and_is_kept_and_too_many_in_a_row_end_the_run(
    tmp_path, monkeypatch
):
    limit = {"algorithm.filter_groups.max_num_gen_batches": 50}  # a policy of NaNs would sample forever
    most = {"trainer.max_nonfinite_steps": 2, "trainer.save_freq": -1, "trainer.total_training_steps": 5}
    config = small_config(tmp_path, **limit, **most)
    with monkeypatch.context() as patch:
        spoil(patch, {1, 3, 4})
        with pytest.raises(
            RuntimeError, match=r"not finite in 2 steps in a row, up to step 4 .*nonfinite: .*then rerun: lower"
        ):
            train(config)
    assert saved(tmp_path) == [4]
    measured = mean_accuracy(read_metrics(tmp_path)[-1])
    assert measured is not None and item(tmp_path, 4, "metrics/metrics")["value"] == measured
    models = train(config)  # without the fault it resumes
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.get("actor/skipped_updates") for row in rows] == [None, 2, 0, 2, 2, 0]
    assert int(models.actor.updates) == 4 and all(np.isfinite(x).all() for x in jax.tree.leaves(models.actor.params))
    kept = sorted((tmp_path / "nonfinite").iterdir())
    assert [path.name for path in kept] == [f"step_{step:06d}.npz" for step in (1, 3, 4)]
    with np.load(kept[0]) as batch:
        assert np.isinf(batch["advantages"]).any() and batch["responses"].shape == batch["mask"].shape


def test_a_step_is_finite_if_policy_and_critic_are():
    finite = dict.fromkeys(("actor/loss", "critic/vf_loss", "actor/skipped_updates", "critic/skipped_updates"), 0.0)
    assert is_finite(finite) and is_finite({})
    wrong = {"loss": np.nan, "vf_loss": np.inf, "skipped_updates": 1.0}
    assert not any(is_finite({**finite, name: wrong[name.partition("/")[2]]}) for name in finite)


@pytest.mark.slow
def test_a_stop_does_not_wait_for_verdicts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rewards" / "data"))
    slow = {"reward.function": "hostile_verifier.score_slowly", "reward.timeout_s": 600.0}
    at_call(monkeypatch, verification, "wait", 1, stop)
    with ends_within(), pytest.raises(Stopped):
        train(small_config(tmp_path, **slow, **{"trainer.val_before_train": False}))


def test_a_restart_that_would_lose_something_is_refused(whole, tmp_path):
    run = copied(whole[0], tmp_path / "run", step=4)
    for name, value, message in (
        ("trainer.resume_mode", "disable", "resume_mode=disable"),
        ("trainer.total_training_steps", 3, "total_training_steps=3 is less than the 4 steps"),
        ("trainer.checkpoint_dir", str(tmp_path), "has its checkpoints in .*checkpoints, and trainer.checkpoint_dir n"),
        ("model.path", str(run), "model.path=.* is in this run's own workdir: choose"),
        ("trainer.resume_from_path", f"{run}/checkpoints/2", "is in workdir=.* itself: choose a new workdir to resume"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small_config(run, **{name: value}))
        assert rows_without_clock(run) == whole[2] and saved(run) == [1, 2, 3, 4]
    new = small_config(tmp_path / "new", **{"trainer.checkpoint_dir": f"{whole[0]}/checkpoints"})
    with pytest.raises(ValueError, match=f"holds checkpoints of the run in {whole[0]}, not of workdir={tmp_path}/new"):
        train(new)
    assert not (tmp_path / "new" / "config.json").exists(), "options that were never used are not recorded"


@pytest.mark.slow
def test_carried_groups_of_another_shape_are_refused(tmp_path):
    carry = {"algorithm.filter_groups.leftover": "carry", "data.gen_batch_size": 16, "trainer.save_freq": 1}
    train(small_config(tmp_path, **carry, **{"trainer.total_training_steps": 1}))
    with pytest.raises(ValueError, match=r"data.max_response_length=4, and the run has 5: restore"):
        train(small_config(tmp_path, **carry, **{"data.max_response_length": 5}))
    with pytest.raises(ValueError, match=r"sampled with algorithm.use_kl_in_reward=False, and the run has True"):
        train(small_config(tmp_path, **carry, **{"algorithm.use_kl_in_reward": True}))
    with pytest.raises(ValueError, match=r"sampled with rollout.temperature=1.0, and the run has 0.5: restore"):
        train(small_config(tmp_path, **carry, **{"rollout.temperature": 0.5}))
    train(small_config(tmp_path, **carry, **{"data.train_batch_size": 2, "trainer.total_training_steps": 2}))
    assert (
        read_metrics(tmp_path)[-1]["experience_pipeline/experience_count"] == 2 * 16
    )  # more are carried than it takes
