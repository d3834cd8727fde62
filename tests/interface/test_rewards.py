"""Functions as the reward of a run."""

import dataclasses
import json

import pytest
from small_run import RECIPE

import dapo_jax as dx
from dapo_jax.config.values import with_values
from dapo_jax.interface.configs import as_config
from dapo_jax.interface.rewards import reward_options


def short(text):
    return -float(len(text))


def with_reward(config, reward):
    return with_values(config, reward_options(reward))


@pytest.fixture
def config(tmp_path):
    return as_config(dx.load_config(str(RECIPE), {"workdir": str(tmp_path / "run")}))


def test_one_function_or_name_takes_the_place_of_reward_function(config):
    found = with_reward(config, short)
    assert found.reward.function == f"{__name__}.short"
    assert with_reward(config, "gsm8k").reward.function == "gsm8k"
    function = lambda text: 1.0  # noqa: E731
    assert with_reward(config, function).reward.function == "python:function"


def test_several_functions_have_names_and_weights(config):
    def truth(text, truth):
        return float(text == truth)

    found = with_reward(config, {"right": truth, "brief": (short, 0.5), "gsm": ("gsm8k", 0.1)})
    parts = json.loads(found.reward.functions)
    assert {name: part["weight"] for name, part in parts.items()} == {"right": 1.0, "brief": 0.5, "gsm": 0.1}
    assert parts["gsm"]["function"] == "gsm8k" and parts["brief"]["function"] == f"{__name__}.short"
    assert parts["right"]["function"] == "python:right"
    listed = with_reward(config, [("gsm8k", 1.0), (short, 0.5), lambda text: 0.0, (short, 0.2)])
    assert list(json.loads(listed.reward.functions)) == ["gsm8k", "short", "reward_1", "reward_2"]
    assert json.loads(listed.reward.functions)["reward_1"]["function"] == "python:reward_1"
    recipe = dataclasses.replace(config, reward=dataclasses.replace(config.reward, function="math_verify"))
    assert with_reward(recipe, [("gsm8k", 1.0)]).reward.function == "auto"

    def score(text):
        return 1.0

    def reward_1(text):
        return 0.0

    named = with_reward(config, [reward_1, score, lambda text: 0.0])
    assert list(json.loads(named.reward.functions)) == ["reward_1", "reward_2", "reward_3"]
    with pytest.raises(dx.InputError, match="'brief': the weight 'half' must be a number"):
        with_reward(config, {"brief": (short, "half")})
    with pytest.raises(dx.InputError, match="holds no function"):
        with_reward(config, [])
    with pytest.raises(dx.InputError, match="must be a function"):
        with_reward(config, {"right": (3, 1.0)})  # pyright: ignore[reportArgumentType]
