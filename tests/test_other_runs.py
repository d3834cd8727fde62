"""Which run and which of its checkpoints a path names, and that a restart begins with the same."""

import dataclasses
import json
from operator import attrgetter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.sections import Config, OptimConfig, TrainerConfig
from dapo_jax.config.values import with_values
from dapo_jax.learner.optimizer import Models, init_state
from dapo_jax.monitor.recipe import write_config
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.other_runs import PINNED, Origin, find_checkpoint, find_trained, pinned
from dapo_jax.run.progress import Progress

SETTINGS = OptimConfig(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def save(directory, *steps) -> None:
    checkpoints = Checkpoints(str(directory), TrainerConfig(max_ckpt_to_keep=9))
    models = Models(actor=init_state({"w": jnp.ones(2)}, SETTINGS), critic=None)
    for step in steps:
        checkpoints.save(models, Progress(step=step), {"next_prompt": np.array(0)})
    checkpoints.close()


def run_in(workdir, *steps, elsewhere: Path | None = None) -> Path:
    """The workdir of a run with checkpoints of these steps, which lie `elsewhere` if that is given."""
    config = with_values(Config(workdir=str(workdir)), {"trainer.checkpoint_dir": str(elsewhere or "")})
    write_config(workdir, dataclasses.asdict(config))
    save(checkpoint_dir(config.workdir, config.trainer), *steps)
    return workdir


def test_a_workdir_may_be_named_by_a_number(tmp_path):
    """It was taken for the checkpoint of that step."""
    run_in(tmp_path / "lr" / "10", 1, 2)
    run_in(tmp_path / "lr" / "20", 5, elsewhere=tmp_path / "elsewhere" / "20")
    for path, directory, step in (
        (tmp_path / "lr/10", tmp_path / "lr/10/checkpoints", 2),
        (tmp_path / "lr/10/checkpoints/1", tmp_path / "lr/10/checkpoints", 1),
        (tmp_path / "lr/20", tmp_path / "elsewhere/20", 5),
        (tmp_path / "lr/20/checkpoints/5", tmp_path / "elsewhere/20", 5),
    ):
        assert find_checkpoint(str(path)) == Origin(str(directory), step)
        trained = find_trained(str(path))
        assert trained is not None and trained.step == step
        assert trained.directory == str(directory)
    with pytest.raises(ValueError, match="must be the workdir of a run with a saved checkpoint"):
        find_checkpoint(str(tmp_path / "lr"))  # whose directories are workdirs
    assert find_trained(str(tmp_path / "lr")) is None


def test_checkpoints_alone_are_found_and_pinned_but_belong_to_no_run(tmp_path):
    save(tmp_path / "run" / "checkpoints", 1)  # and no config.json
    directory = str(tmp_path / "run" / "checkpoints")
    config = with_values(Config(workdir=str(tmp_path / "next")), {"trainer.resume_from_path": directory})
    write_config(config.workdir, dataclasses.asdict(pinned(config)))
    save(directory, 2)
    assert pinned(config).trainer.resume_from_path == f"{directory}/1"
    assert find_checkpoint(str(tmp_path / "run")) == find_checkpoint(directory) == Origin(directory, 2)
    assert find_checkpoint(f"{directory}/1") == Origin(directory, 1)
    for path, held in ((f"{directory}/7", r"steps \[1, 2\]"), (str(tmp_path / "none"), "none holds none")):
        with pytest.raises(ValueError, match=held):
            find_checkpoint(path)
    for path in (directory, f"{directory}/1"):
        with pytest.raises(ValueError, match="without their run's config: give the run's workdir"):
            find_trained(path)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_restart_begins_with_the_same_checkpoint(tmp_path, monkeypatch, elsewhere):
    """It read the other run's newest one, if that had a trainer.checkpoint_dir or was named to resume from."""
    place = tmp_path / "elsewhere" if elsewhere else None
    other = run_in(tmp_path / "other", 1, elsewhere=place)
    configs = {key: with_values(Config(workdir=str(tmp_path / key)), {key: str(other)}) for key in PINNED}
    first = {key: pinned(config) for key, config in configs.items()}
    for key, config in configs.items():
        write_config(config.workdir, dataclasses.asdict(first[key]))
    save(place or other / "checkpoints", 2)
    monkeypatch.chdir(tmp_path)
    for key, config in configs.items():

        def chosen(config: Config, key: str = key) -> str:
            return attrgetter(key)(pinned(config))

        assert chosen(config) == f"{other}/checkpoints/1"
        assert find_checkpoint(chosen(config)).step == 1
        assert chosen(with_values(config, {key: "other"})) == f"{other}/checkpoints/1"  # the same, said otherwise
        assert chosen(with_values(config, {key: f"{other}/checkpoints/2"})) == f"{other}/checkpoints/2"
        assert chosen(dataclasses.replace(config, workdir=str(tmp_path / "new"))) == f"{other}/checkpoints/2"
        assert pinned(first[key]) == first[key]


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for path in ("random", str(tmp_path / "hf"), str(tmp_path / "none"), str(run_in(tmp_path / "empty"))):
        config = with_values(Config(workdir=str(tmp_path / "run")), {"model.path": path})
        assert pinned(config) == config
