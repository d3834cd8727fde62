import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.derived import gen_batch_size, micro_batch_size, mini_batch_size, uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze
from dapo_jax.learner.choices import uses_critic

PACKAGE = Path(dapo_jax.__file__).parent


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
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config" / "sections.py"]
    helper = (PACKAGE / "config" / "derived.py").read_text()
    functions = [*ESTIMATORS.values(), *LOSSES.values(), *SELECTIONS.values()]
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    for key in leaves(Config):
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


@pytest.mark.parametrize(
    ("size", "key"), [(mini_batch_size, "ppo_mini_batch_size"), (micro_batch_size, "ppo_micro_batch_size_per_device")]
)
def test_the_critic_has_the_actors_batch_sizes_unless_it_has_its_own(size, key):
    values = default_config()
    values.actor[key] = 24
    assert [size(freeze(values), name) for name in ("actor", "critic")] == [24, 24]
    values.critic[key] = 12
    assert [size(freeze(values), name) for name in ("actor", "critic")] == [24, 12]


def test_a_generation_round_has_the_training_batchs_size_unless_it_has_its_own():
    values = default_config()
    assert gen_batch_size(freeze(values)) == 512
    values.data.gen_batch_size = 1536
    assert gen_batch_size(freeze(values)) == 1536


def test_only_gae_uses_a_critic():
    values = default_config()
    found = []
    for values.algorithm.adv_estimator in ESTIMATORS:
        found += [values.algorithm.adv_estimator] * uses_critic(freeze(values))
    assert found == ["gae"]


def test_each_kl_divergence_alone_uses_the_reference():
    values = default_config()
    assert not uses_reference(freeze(values))
    values.actor.use_kl_loss = True
    assert uses_reference(freeze(values))
    values.actor.use_kl_loss, values.algorithm.use_kl_in_reward = False, True
    assert uses_reference(freeze(values))
