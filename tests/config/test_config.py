import functools
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, default_config, freeze
from dapo_jax.rewards.numerals import gsm8k as score

PACKAGE = Path(dapo_jax.__file__).parent


def test_defaults_are_dapo():
    config = freeze(default_config())
    assert config == Config()
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.filter_groups.enable
    assert config.algorithm.filter_groups.metric == "acc"
    actor = config.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert actor.loss_agg_mode == "token-mean"


def test_every_key_is_read_by_some_code():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config" / "sections.py"]
    helper = (PACKAGE / "config" / "derived.py").read_text()
    functions = [*ESTIMATORS.values(), *LOSSES.values(), *SELECTIONS.values()]
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    for key in DEFAULTS:
        name = key.rpartition(".")[2]
        pattern = re.compile(rf"\.{name}\b")
        read = any(pattern.search(source) for source in sources) or f"config.{key} or" in helper
        assert read or name in parameters, f"no code reads {key}"


def test_every_key_has_a_comment_or_says_all_in_its_name():
    source = (PACKAGE / "config" / "sections.py").read_text()
    obvious = {"hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "enable"}
    obvious |= {"lr", "min_lr_ratio", "weight_decay", "betas", "eps", "clip_ratio_low", "temperature"}
    obvious |= {"max_ckpt_to_keep", "function_weight", "pos_alpha", "neg_alpha", "mi_alpha", "kl_alpha"}
    obvious |= {"kl_loss_coef", "loss_agg_mode"}
    for key in DEFAULTS:
        name = key.rpartition(".")[2]
        if name not in obvious:
            assert re.search(rf"^    {name}: .*#", source, re.MULTILINE), f"{key} has no comment"


def test_a_misspelt_key_is_refused_with_a_suggestion():
    values = default_config()
    with pytest.raises(AttributeError, match='Did you mean "clip_ratio_low"'):
        values.actor.clip_ratio_lo = 0.1


def assigned(function, key="function"):
    config = default_config()
    config.reward[key] = function
    return getattr(freeze(config).reward, key)


NAME = "dapo_jax.rewards.numerals.gsm8k"


def test_a_function_becomes_a_name_by_which_another_process_finds_it(tmp_path, monkeypatch):
    assert assigned(score) == NAME and assigned("gsm8k") == "gsm8k"
    functions = {"correct": score, "other": {"function": score, "weight": 0.5}}
    named = {"correct": NAME, "other": {"function": NAME, "weight": 0.5}}
    assert json.loads(assigned(functions, "functions")) == named
    (tmp_path / "own_reward.py").write_text("def score(*arguments): return 1.0")
    function = runpy.run_path(str(tmp_path / "own_reward.py"))["score"]
    assert assigned(function) == f"{tmp_path}/own_reward.py:score"
    (tmp_path / "cached_reward.py").write_text("import functools\n@functools.cache\ndef score(*_): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert assigned(importlib.import_module("cached_reward").score) == "cached_reward.score"


@pytest.mark.parametrize(
    "function", [lambda *arguments: 1.0, functools.partial(score, ""), {}.get, type("Judge", (), {"__call__": score})()]
)
def test_a_function_without_a_name_is_refused_with_the_form(function):
    with pytest.raises(ValueError, match="define it with `def` at the top level.*FILE.py:function"):
        assigned(function)
