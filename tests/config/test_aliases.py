import dataclasses

import pytest

from dapo_jax.config.aliases import resolve_aliases
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze


def resolved(**changes) -> Config:
    values = default_config()
    with values.unlocked():
        values.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return freeze(values)


def test_without_aliases_nothing_changes():
    assert resolved() == Config()


def test_dynamic_sample_is_the_spread_of_the_reward_and_what_there_is():
    groups = resolved(algorithm__use_dynamic_sample=True, data__rollout_batch_size=128).algorithm.filter_groups
    expected = dataclasses.replace(
        Config().algorithm.filter_groups,
        metric="seq_reward",
        max_num_gen_batches=3,
        on_limit="partial",
        on_exhausted="partial",
        on_empty="train_unfiltered",
        leftover="discard",
    )
    assert groups == expected
    unlimited = {"algorithm__use_dynamic_sample": True, "algorithm__dynamic_sample_max_gen_batches": 0}
    groups = resolved(**unlimited).algorithm.filter_groups
    assert (groups.max_num_gen_batches, groups.on_limit) == (0, "error")  # without a limit nothing happens at it
    assert not resolved(algorithm__use_dynamic_sample=False).algorithm.filter_groups.enable


def test_online_filtering_is_the_range_of_the_mean():
    config = resolved(
        algorithm__online_filtering=True,
        algorithm__filter_low=0.1,
        trainer__max_try_make_batch=7,
        data__rollout_batch_size=64,
        data__mini_rollout_batch_size=32,
    )
    groups = config.algorithm.filter_groups
    assert (groups.rule, groups.metric, groups.filter_low, groups.filter_high) == ("mean_range", "score", 0.1, 0.99)
    assert (groups.max_num_gen_batches, groups.on_limit, groups.leftover) == (7, "error", "discard")
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (64, 32)
    assert resolved(algorithm__online_filtering=True).algorithm.filter_groups.max_num_gen_batches == 20
    keyed = resolved(algorithm__online_filtering=True, algorithm__filter_key="format").algorithm.filter_groups
    assert keyed.metric == "format"


@pytest.mark.parametrize(("on", "metric"), [("use_dynamic_sample", "seq_reward"), ("online_filtering", "score")])
def test_the_filter_that_is_on_counts_more_than_the_one_that_is_off(on, metric):
    aliases = {f"algorithm__{name}": name == on for name in ("use_dynamic_sample", "online_filtering")}
    groups = resolved(**aliases).algorithm.filter_groups
    assert groups.enable and groups.metric == metric
    assert not resolved(**dict.fromkeys(aliases, False)).algorithm.filter_groups.enable


def test_a_size_of_zero_is_not_taken_for_none():
    data = resolved(data__rollout_batch_size=0, data__mini_rollout_batch_size=0).data
    assert data.train_batch_size == data.gen_batch_size == 0  # which validation refuses


def test_freeze_leaves_no_alias_over():
    values = default_config()
    values.algorithm.use_dynamic_sample = True
    values.data.rollout_batch_size = 64
    config = freeze(values)  # what train, bench and preflight are given in Python
    assert config.algorithm.filter_groups.metric == "seq_reward" and config.data.train_batch_size == 64
    assert resolve_aliases(config) == config and config.algorithm.use_dynamic_sample is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__dynamic_sample_max_gen_batches": 3}, "needs algorithm.use_dynamic_sample=True"),
        (
            {"algorithm__use_dynamic_sample": False, "algorithm__dynamic_sample_max_gen_batches": 3},
            "needs algorithm.use_dynamic_sample=True",
        ),
        ({"algorithm__filter_low": 0.1}, "algorithm.filter_low need algorithm.online_filtering=True"),
        (
            {"algorithm__online_filtering": False, "algorithm__filter_key": "overall"},
            "algorithm.filter_key need algorithm.online_filtering=True",
        ),
        ({"trainer__max_try_make_batch": 3}, "trainer.max_try_make_batch need algorithm.online_filtering=True"),
        ({"algorithm__use_dynamic_sample": True, "algorithm__online_filtering": True}, "exclude each other"),
        (
            {"algorithm__use_dynamic_sample": True, "algorithm__filter_groups__max_num_gen_batches": 25},
            "sets algorithm.filter_groups.max_num_gen_batches=3, but 25 was given",
        ),
        (
            {"algorithm__online_filtering": True, "algorithm__filter_groups__leftover": "carry"},
            "sets algorithm.filter_groups.leftover=discard, but carry was given",
        ),
        (
            {"algorithm__use_dynamic_sample": True, "algorithm__filter_groups__enable": False},
            "use_dynamic_sample=True sets algorithm.filter_groups.enable=True, but False was given",
        ),
        (
            {"data__rollout_batch_size": 8, "data__train_batch_size": 4},
            "data.rollout_batch_size=8 sets data.train_batch_size=8, but 4 was given: leave out one",
        ),
        (
            {"data__mini_rollout_batch_size": 8, "data__gen_batch_size": 4},
            "data.mini_rollout_batch_size=8 sets data.gen_batch_size=8, but 4 was given",
        ),
    ],
)
def test_aliases_that_do_not_belong_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


@pytest.mark.parametrize(
    ("given", "function"),
    [
        ({"path": "my/rewards.py"}, "my/rewards.py:compute_score"),
        ({"path": "my/rewards.py", "name": "graded"}, "my/rewards.py:graded"),
        ({"path": "file:///opt/rewards.py", "name": "graded"}, "/opt/rewards.py:graded"),
        ({"path": "pkg://my/rewards", "name": "graded"}, "my.rewards.graded"),
        ({}, "auto"),
    ],
)
def test_a_reward_function_of_verl_is_a_file_and_a_name(given, function):
    config = resolved(**{f"custom_reward_function__{name}": value for name, value in given.items()})
    assert config.reward.function == function
    assert config.custom_reward_function == Config().custom_reward_function and resolve_aliases(config) == config


def test_a_reward_function_of_verl_needs_a_file_and_contradicts_another_function():
    with pytest.raises(ValueError, match="custom_reward_function.name=graded needs custom_reward_function.path"):
        resolved(custom_reward_function__name="graded")
    for changes in ({"reward__function": "gsm8k"}, {}):
        values = default_config()
        values.custom_reward_function.path = "r.py"
        values.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
        with pytest.raises(ValueError, match="sets reward.function=r.py:compute_score, but (gsm8k|auto) was given"):
            freeze(values, () if changes else ("reward.function",))
