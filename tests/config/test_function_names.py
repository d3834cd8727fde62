import functools
import importlib
import json
import runpy

import pytest

from dapo_jax.config.function_names import name_of
from dapo_jax.config.values import default_config, freeze
from dapo_jax.rewards.gsm8k import score


def assigned(function):
    config = default_config()
    config.reward.function = function
    return freeze(config).reward.function


def test_a_function_of_a_module_becomes_its_path():
    assert assigned(score) == "dapo_jax.rewards.gsm8k.score"


def test_functions_in_an_object_become_their_paths():
    config = default_config()
    config.reward.functions = {"correct": score, "other": {"function": score, "weight": 0.5}}
    name = "dapo_jax.rewards.gsm8k.score"
    expected = {"correct": name, "other": {"function": name, "weight": 0.5}}
    assert json.loads(freeze(config).reward.functions) == expected


def test_a_function_of_a_file_that_was_run_becomes_file_and_function(tmp_path):
    (tmp_path / "config.py").write_text("def score(*arguments): return 1.0")
    function = runpy.run_path(str(tmp_path / "config.py"))["score"]
    assert assigned(function) == f"{tmp_path}/config.py:score"


def test_a_decorated_function_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "decorated_reward.py").write_text(
        "import functools\n@functools.cache\ndef score(*arguments): return 1.0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("decorated_reward")
    assert name_of(module.score) == "decorated_reward.score"


@pytest.mark.parametrize(
    "function", [lambda *arguments: 1.0, functools.partial(score, ""), {}.get, type("Judge", (), {"__call__": score})()]
)
def test_a_function_without_a_name_is_refused_with_the_form(function):
    with pytest.raises(ValueError, match="define it with `def` at the top level.*FILE.py:function"):
        assigned(function)


def test_text_and_null_stay():
    assert assigned("gsm8k") == "gsm8k"
    config = default_config()
    config.trainer.total_training_steps = None
    assert freeze(config).trainer.total_training_steps is None
