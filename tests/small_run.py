"""A run of a random two-layer model that takes seconds, for the tests of whole runs."""

import dataclasses
import importlib.util
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from crash_test import last_checkpoint
from shapes import SMALL

from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.sections import Config
from dapo_jax.config.values import freeze
from dapo_jax.monitor.records import CLOCK, read_metrics
from dapo_jax.run import networks
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPE = Path(__file__).with_name("small_recipe.py")


def load_config(name: str = "") -> Any:
    """The recipe of that name; without a name, that of the tests."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py" if name else RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def small_config(workdir: Any, **changes: Any) -> Config:
    """Four steps on sums up to 4. What `changes` switch off has its default, as on the command line."""
    values = load_config()
    recipe = freeze(values)
    with values.unlocked():
        values.update_from_flattened_dict({"workdir": str(workdir), **SMALL, **changes})
    return without_switched_off(recipe, freeze(values), changes)


def sums(*numbers: int) -> list[dict[str, Any]]:
    """Rows of a prompt file, each of a number plus one."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
            "data_source": "arithmetic",
            "reward_model": {"ground_truth": str(number + 1)},
        }
        for number in numbers
    ]


def own_function(folder: Path, body: str) -> str:
    """The name of a reward function with this body, whose later lines are indented by four."""
    arguments = "data_source, solution, ground_truth, extra_info"
    (folder / "own.py").write_text(f"calls = []\ndef score({arguments}):\n    {body}\n")
    return f"{folder}/own.py:score"


def unsure_function(folder: Path) -> str:
    """The name of a reward function of 1 and -1 that has no verdict on some responses, and fails on others."""
    body = "first = solution[:1]\n    if first in '34abcd': return None\n"
    body += "    if first in '56efgh': raise RuntimeError(first)\n"
    return own_function(folder, body + "    return 1.0 if '1' in solution else -1.0")


class Killed(BaseException):
    """What ends a run as SIGKILL does: nothing catches it."""


def kill() -> None:
    raise Killed


def at_call(monkeypatch: Any, module: Any, name: str, number: int, action: Callable[[], Any]) -> None:
    """Does `action` before the call of that number of a function of the module."""
    original, calls = getattr(module, name), itertools.count(1)

    def function(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            action()
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, function)


def rows_without_clock(workdir: Any) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in read_metrics(workdir)]


def sampling_work(workdir: Any) -> list[list[float]]:
    """The engine's counters in each row, which do not depend on the clock."""
    names = ("perf/prefill_efficiency", "perf/decode_efficiency")
    return [[row[name] for name in names if name in row] for row in read_metrics(workdir)]


def saved(folder: Path) -> list[int]:
    """Steps of which a run has a checkpoint."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def copied(folder: Path, to: Path, *, step: int) -> Path:
    """A copy of a run with every step saved, as if it had ended after `step`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for later in saved(to):
        if later > step:
            shutil.rmtree(to / "checkpoints" / str(later))
    return to


# Adam divides a gradient that is only rounding by itself: with a larger epsilon, what is equal up to rounding stays so.
DAMPED = {"actor.optim.eps": 1e-4}


def assert_same_policy(models: Any, expected: Any, tolerance: float = 0.0) -> None:
    params = jax.device_get(models.actor.params)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


ROUNDING = 1e-6  # of a weight, as its products differ between two meshes ...
NOISES = 16  # ... which may go to either side of a bound; each is also tried with the other sign


def rounding_decides(assert_alike: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run parts from itself if its first weights differ by rounding, as where two tokens tie.

    Args:
        assert_alike: trains with the folder as workdir, on the same mesh each time, and compares.
    """
    load = networks.load_policy
    for number in range(NOISES):

        def nearly(*arguments: Any, number: int = number, **keywords: Any) -> Any:
            loaded = load(*arguments, **keywords)
            key, size = jax.random.key(number // 2), ROUNDING * (-1) ** number
            near = jax.tree.map(lambda x: x * (1 + size * jax.random.normal(key, x.shape)), loaded.params)
            return dataclasses.replace(loaded, params=near)

        with monkeypatch.context() as patch:
            patch.setattr(networks, "load_policy", nearly)
            try:
                assert_alike(folder / f"near{number}")
            except AssertionError as difference:
                print(f"On one device, with weights that differ by rounding: {difference}")
                return True
    return False


def assert_as_undisturbed(models: Any, folder: Path, whole: Any, *, saved_in: Path | None = None) -> None:
    """The run in `folder` has the policy, rows, work, samples and last checkpoint of `whole`.

    Args:
        saved_in: the folder with its checkpoints, if that is another.
    """
    assert_same_policy(models, whole[1])
    assert rows_without_clock(folder) == whole[2] and sampling_work(folder) == sampling_work(whole[0])
    samples, expected = (
        {path.name: path.read_text() for path in (run / "samples").iterdir()} for run in (folder, whole[0])
    )
    assert samples == expected
    assert_same_checkpoint(saved_in or folder, whole[0])


def assert_same_checkpoint(folder: Path, other: Path) -> None:
    """The newest checkpoints of two runs hold the same: all state, without the free memory and the size of the log."""
    found, expected = last_checkpoint(folder), last_checkpoint(other)
    assert [name for name in found | expected if found.get(name) != expected.get(name)] == []


def resumed(tmp_path: Path, monkeypatch: Any, changes: dict[str, Any], *, killed_in: int = 3) -> Any:
    """The models of a run, killed in an update and resumed; they are those of one that is not killed."""
    expected = train(small_config(tmp_path / "a", **changes))
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "update", killed_in, kill)
        with pytest.raises(Killed):
            train(small_config(tmp_path / "b", **changes))
    models = train(small_config(tmp_path / "b", **changes))
    assert_same_policy(models, jax.device_get(expected.actor.params))
    assert rows_without_clock(tmp_path / "a") == rows_without_clock(tmp_path / "b")
    return models
