"""What a run records of the origin of its options, and of what it ran on."""

import dataclasses
import os
from pathlib import Path

import jax

from dapo_jax.command.command_line import command, read_config
from dapo_jax.config.values import flatten
from dapo_jax.monitor.environment import TOTAL_STEPS, environment, recorded_environment
from dapo_jax.monitor.recipe import recorded_options, recorded_recipe
from dapo_jax.training.summary import open_records

TINY = str(Path(__file__).parents[2] / "configs/tiny.py")


def started(workdir, *options):
    """What a start of the training command records of its options."""
    arguments = ["train", "--config", TINY, f"--config.workdir={workdir}", *options]
    with command(arguments) as (config, recipe), open_records(config, 8, None, lambda name: None, recipe):
        pass
    return recorded_recipe(workdir)


def test_the_last_start_records_its_config_file_and_what_the_command_line_set(tmp_path):
    started(tmp_path, "--config.rollout.n=4")
    recipe = started(tmp_path, "--config.seed=3", "--config.actor.optim.lr=0.1")
    assert recipe is not None and recipe.config is not None
    assert recipe.recipe == TINY and recipe.given == ["actor.optim.lr", "seed", "workdir"]
    of_recipe, of_run = flatten(dict(recipe.config)), recorded_options(tmp_path)
    assert of_recipe["seed"] == 0 and of_run["seed"] == 3
    assert [key for key in of_run if of_run[key] != of_recipe[key]] == ["actor.optim.lr", "seed", "workdir"]


def test_a_start_without_a_command_removes_the_record_of_an_earlier_one(tmp_path):
    assert started(tmp_path) is not None
    config = dataclasses.replace(read_config(["train", "--config", TINY]), workdir=str(tmp_path))
    with open_records(config, 8, None, lambda name: None):
        pass
    assert recorded_recipe(tmp_path) is None


def test_a_damaged_record_is_none(tmp_path):
    for text in ("", "{", "[1]", '{"recipe": "a.py"}', "3"):
        (tmp_path / "recipe.json").write_text(text)
        assert recorded_recipe(tmp_path) is None, text


def test_a_run_says_what_it_ran_on_and_with(tmp_path):
    started(tmp_path)
    found = recorded_environment(tmp_path)
    assert found == environment() | {TOTAL_STEPS: 8}
    assert found["versions"]["jax"] == jax.__version__ and {"python", "jaxlib", "optax"} <= found["versions"].keys()
    assert (found["devices"], found["processes"]) == ("8 x cpu", 1)
    assert found["host"].endswith(f", {os.cpu_count()} cores") and not found["host"].startswith(",")
