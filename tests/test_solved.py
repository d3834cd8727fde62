"""A run whose data is solved has ended: it measures its policy, says so now and later, and can go on."""

import json
import re

import jax
import pytest
from small_run import assert_same_policy, at_call, own_function, rows_without_clock, saved, small_config

from dapo_jax.monitor.records import read_metrics, sample_files
from dapo_jax.run import meshes
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

EASY = {
    "algorithm.filter_groups.max_num_gen_batches": 2,
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 3,
    "trainer.save_freq": 1,
}
SOLVED = r"the data is solved: (\d+) of \1 dropped groups were all right"


def ends_solved(monkeypatch, capsys, folder, call, changes):
    """Trains until the call of that number of the sampler, from which on every answer is right. Returns the config."""
    body = "import os\n    if os.path.exists(__file__ + '.solved'): return 1.0\n    return float('1' in solution)"
    config = {**EASY, "reward.function": own_function(folder, body), **changes}
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", call, (folder / "own.py.solved").touch)
        train(small_config(folder / "run", **config))
    out = capsys.readouterr().out
    assert re.search(SOLVED, out) and out.endswith(f"done: dapo-jax report {folder}/run\n")
    return config


def test_a_solved_run_measures_its_policy_and_the_same_command_says_so_again(tmp_path, monkeypatch, capsys):
    config, run = ends_solved(monkeypatch, capsys, tmp_path, 2, {}), tmp_path / "run"
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["eval/arithmetic/acc/mean@4"] == 1.0
    assert saved(run) == [1], "which says it, although it is the only one"
    kinds = [json.loads(line)["kind"] for line in sample_files(run)[1].read_text().splitlines()]
    assert "held_out" in kinds and "best" in kinds
    log = (run / "train.log").read_text()
    assert re.search(SOLVED, log.splitlines()[-1]) and "ERROR" not in log
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", 1, lambda: pytest.fail("it samples again"))
        train(small_config(run, **config))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("model: random (llama, ") and last == f"done: dapo-jax report {run}"
    assert rows == read_metrics(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.filter_groups.backfill": "stream"},
        {"algorithm.filter_groups.skip_uniform.enable": True, "trainer.val_before_train": False},
        {"algorithm.filter_groups.leftover": "carry", "monitor.console": "detailed", "trainer.save_freq": 3},
    ],
)
def test_a_solved_run_goes_on_with_other_options_as_if_it_had_not_ended(tmp_path, monkeypatch, capsys, changes):
    config = ends_solved(monkeypatch, capsys, tmp_path, 2, changes)
    (tmp_path / "own.py.solved").unlink()
    longer = {**config, "trainer.total_training_steps": 4}
    models = train(small_config(tmp_path / "run", **longer))
    assert "the data is" not in capsys.readouterr().out
    whole = train(small_config(tmp_path / "whole", **longer))
    assert_same_policy(models, jax.device_get(whole.actor.params))
    for found, wanted in zip(*(rows_without_clock(tmp_path / name) for name in ("run", "whole")), strict=True):
        only = {name for name in found if found[name] != wanted.get(name)}
        assert found.keys() >= wanted.keys(), "the row of the evaluation at the end has more"
        assert all(name.startswith(("eval/", "alarm/heldout_drop")) for name in only), only


@pytest.mark.slow
def test_a_batch_ahead_without_groups_is_sampled_once_more_by_the_newer_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(meshes, "split_devices", lambda *_: (jax.devices()[:1], jax.devices()[1:2]))
    ahead = {"trainer.rollout_ahead": 1, "actor.ppo_micro_batch_size_per_device": 16}
    config = ends_solved(monkeypatch, capsys, tmp_path, 3, ahead)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2] and saved(tmp_path / "run") == [1, 2]
    (tmp_path / "own.py.solved").unlink()
    train(small_config(tmp_path / "run", **{**config, "trainer.total_training_steps": 4}))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and all("actor/grad_norm" in row for row in rows[1:])
