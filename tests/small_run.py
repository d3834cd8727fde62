"""A run of a random two-layer model that takes seconds, for the tests of whole runs."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.sections import Config
from dapo_jax.config.values import freeze
from dapo_jax.monitor.records import read_metrics

CONFIGS = Path(__file__).parents[1] / "configs"
CLOCK = ("time/", "timing", "perf/", "dynamic_sampling/first_release_s")


def load_config(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def small_config(workdir: Any, **changes: Any) -> Config:
    """Four steps on sums up to 4, where a random model is right often enough for the filter to keep groups.

    What `changes` switch off has its default, as on the command line.
    """
    values = load_config("tiny")
    recipe = freeze(values)
    small = {
        "workdir": str(workdir),
        "data.arithmetic.high": 4,
        "data.arithmetic.num_heldout": 4,
        "data.train_batch_size": 4,
        "data.gen_batch_size": 8,
        "actor.ppo_mini_batch_size": 2,
        "actor.ppo_micro_batch_size_per_device": 4,
        "trainer.total_training_steps": 4,
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "algorithm.filter_groups.max_num_gen_batches": 0,
        "reward.num_workers": 1,
        "actor.optim.lr": 1e-3,
    }
    with values.unlocked():
        values.update_from_flattened_dict({**small, **changes})
    return without_switched_off(recipe, freeze(values), changes)


def rows_without_clock(workdir: Any) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in read_metrics(workdir)]


def assert_same_policy(models: Any, expected: Any, tolerance: float = 0.0) -> None:
    params = jax.device_get(models.actor.params)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
