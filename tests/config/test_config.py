import inspect
import re
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.derived import gen_batch_size, keeps_some, uses_reference
from dapo_jax.config.sections import AlgorithmConfig, Config
from dapo_jax.config.values import DEFAULTS, default_config, freeze, with_values
from dapo_jax.learner.trained_networks import trained, uses_critic

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


@pytest.mark.parametrize(
    ("size", "key"),
    [("mini_batch_size", "ppo_mini_batch_size"), ("micro_batch_size", "ppo_micro_batch_size_per_device")],
)
def test_the_critic_has_the_actors_batch_sizes_unless_it_has_its_own(size, key):
    config = with_values(Config(), {f"actor.{key}": 24, "algorithm.adv_estimator": "gae"})
    assert [(name, getattr(one, size)) for name, one in trained(config).items()] == [("actor", 24), ("critic", 24)]
    config = with_values(config, {f"critic.{key}": 12})
    assert [(name, getattr(one, size)) for name, one in trained(config).items()] == [("actor", 24), ("critic", 12)]


def test_a_generation_round_has_the_training_batchs_size_unless_it_has_its_own():
    assert gen_batch_size(Config().data) == 512
    assert gen_batch_size(with_values(Config(), {"data.gen_batch_size": 1536}).data) == 1536


def test_only_gae_uses_a_critic():
    configs = {name: with_values(Config(), {"algorithm.adv_estimator": name}) for name in ESTIMATORS}
    assert [name for name, config in configs.items() if uses_critic(config.algorithm)] == ["gae"]


def test_each_ratio_below_one_keeps_some_samples():
    assert not keeps_some(AlgorithmConfig())
    assert keeps_some(AlgorithmConfig(keep_pos_ratio=0.5)) and keeps_some(AlgorithmConfig(keep_neg_ratio=0.5))


def test_each_kl_divergence_alone_uses_the_reference():
    assert not uses_reference(Config().algorithm, Config().actor)
    for key in ("actor.use_kl_loss", "algorithm.use_kl_in_reward"):
        config = with_values(Config(), {key: True})
        assert uses_reference(config.algorithm, config.actor)
