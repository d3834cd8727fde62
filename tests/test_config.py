import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax import config as config_module
from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.policy_loss import LOSSES, SELECTIONS
from dapo_jax.config import Config, default_config, freeze
from dapo_jax.validation import validate, warnings

PACKAGE = Path(dapo_jax.__file__).parent


def valid() -> typing.Any:
    values = default_config()
    values.model.path = "random"
    values.data.task = "arithmetic"
    return values


def leaves(section: typing.Any, prefix: str = "") -> typing.Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_defaults_are_dapo():
    config = freeze(default_config())
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.filter_groups.enable
    assert config.algorithm.filter_groups.metric == "acc"
    actor = config.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert actor.loss_agg_mode == "token-mean"


def test_freeze_gives_back_the_defaults():
    assert freeze(default_config()) == Config()


def test_every_key_is_read_by_some_code():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "config.py"]
    helper = Path(config_module.__file__).read_text()
    functions = [*ESTIMATORS.values(), *LOSSES.values(), *SELECTIONS.values()]
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    for key in leaves(Config):
        name = key.rpartition(".")[2]
        pattern = re.compile(rf"\.{name}\b")
        read = any(pattern.search(source) for source in sources) or f"config.{key} or" in helper
        assert read or name in parameters, f"no code reads {key}"


def test_every_key_has_a_comment_or_says_all_in_its_name():
    source = Path(config_module.__file__).read_text()
    obvious = {"hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "enable"}
    obvious |= {"lr", "min_lr_ratio", "weight_decay", "betas", "eps", "clip_ratio_low", "temperature"}
    obvious |= {"max_ckpt_to_keep", "function_weight", "pos_alpha", "neg_alpha", "mi_alpha", "kl_alpha"}
    obvious |= {"kl_loss_coef", "loss_agg_mode"}
    for key in leaves(Config):
        name = key.rpartition(".")[2]
        if name not in obvious:
            assert re.search(rf"^    {name}: .*#", source, re.MULTILINE), f"{key} has no comment"


def test_a_misspelt_key_is_refused_with_a_suggestion():
    values = default_config()
    with pytest.raises(AttributeError, match='Did you mean "clip_ratio_low"'):
        values.actor.clip_ratio_lo = 0.1


def test_a_foreign_config_is_refused():
    values = default_config().unlock()
    values.actor.surprise = 1
    with pytest.raises(ValueError, match="surprise"):
        freeze(values)


def test_a_valid_config_passes():
    validate(freeze(valid()))


def test_validate_reports_all_problems_together():
    values = valid()
    values.data.truncation = "up"
    values.rollout.n = 0
    values.actor.clip_ratio_c = 1.0
    values.rollout.top_p = 0.0
    values.data.chat_template_kwargs = "[1]"
    with pytest.raises(ValueError) as caught:
        validate(freeze(values))
    for key in ("data.truncation", "rollout.n", "actor.clip_ratio_c", "rollout.top_p", "chat_template_kwargs"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train_batch_size", 500, "must be a multiple of actor.ppo_mini_batch_size"),
        ("actor.ppo_micro_batch_size_per_device", 7, "must be a multiple of"),
        ("rollout.max_num_seqs", 8, "must be at least rollout.n"),
        ("rollout.temperature", 0.0, "no gradient"),
        ("model.path", "", "model.path is empty"),
        ("data.task", "files", "data.train_files is empty"),
        ("data.gen_batch_size", 0, "gen_batch_size=0"),
        ("evaluate.top_k", 0, "evaluate.top_k"),
    ],
)
def test_each_rule_names_key_and_cure(key, value, message):
    values = valid()
    with values.unlocked():
        values.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(freeze(values))


def test_no_filter_means_one_round_of_the_batch_size():
    values = valid()
    values.algorithm.filter_groups.enable = False
    values.data.gen_batch_size = 1024
    with pytest.raises(ValueError, match="only makes sense with"):
        validate(freeze(values))
    values.data.gen_batch_size = 512
    validate(freeze(values))


def test_overlong_buffer_must_fit_in_the_response():
    values = valid()
    values.reward.overlong_buffer.enable = True
    values.reward.overlong_buffer.len = 2000
    with pytest.raises(ValueError, match="overlong_buffer.len"):
        validate(freeze(values))


def test_truncated_sampling_and_single_samples_are_warned_of():
    values = valid()
    assert not warnings(freeze(values))
    values.rollout.top_p = 0.9
    values.rollout.n = 1
    values.evaluate.n = 1
    assert len(warnings(freeze(values))) == 3
