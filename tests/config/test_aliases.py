"""Names of other trainers. Which of them do not belong together is in command/messages.yaml."""

import dataclasses
import re

import pytest

from dapo_jax.command.command_line import read_config
from dapo_jax.config.aliases import resolve_aliases
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze
from dapo_jax.interface.configs import as_config, load_config

FILTER = "algorithm.filter_groups"


def resolved(changes, chosen=()) -> Config:
    values = default_config()
    with values.unlocked():
        values.update_from_flattened_dict(changes)
    return freeze(values, chosen)


def test_without_aliases_nothing_changes():
    assert resolved({}) == Config()


PYTHON = """
from dapo_jax.config.values import default_config

def get_config():
    config = default_config()
    config.rollout.engine = "waves"
    return config
"""


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("own.json", '{"rollout": {"engine": "waves"}}', {}),
        ("own.yaml", "rollout: {engine: waves}", {}),
        ("own.py", PYTHON, {}),
        ("own.json", "{}", {"rollout.engine": "waves"}),
    ],
)
def test_an_option_of_an_earlier_version_is_named_once_and_has_no_effect(name, text, options, tmp_path, capsys):
    file = tmp_path / name
    file.write_text(text)
    line = "dapo_jax: rollout.engine=waves has no effect: there is one engine now, which decodes in slots; leave"
    assert read_config(["train", str(file), *(f"{key}={value}" for key, value in options.items())]) == Config()
    assert re.findall(line, capsys.readouterr().err) == [line]
    assert as_config(load_config(file, options)) == Config()
    assert re.findall(line, capsys.readouterr().err) == [line]


def test_dynamic_sample_is_the_spread_of_the_reward_and_what_there_is():
    on = {"algorithm.use_dynamic_sample": True}
    config = resolved(on | {"data.rollout_batch_size": 128})  # freeze: what train, bench and preflight take in Python
    expected = dataclasses.replace(
        Config().algorithm.filter_groups,
        metric="seq_reward",
        max_num_gen_batches=3,
        on_limit="partial",
        on_exhausted="partial",
        on_empty="train_unfiltered",
        leftover="discard",
    )
    assert config.algorithm.filter_groups == expected and config.data.train_batch_size == 128
    assert resolve_aliases(config) == config and config.algorithm.use_dynamic_sample is None
    groups = resolved(on | {"algorithm.dynamic_sample_max_gen_batches": 0}).algorithm.filter_groups
    assert (groups.max_num_gen_batches, groups.on_limit) == (0, "error")  # without a limit nothing happens at it
    assert not resolved({"algorithm.use_dynamic_sample": False}).algorithm.filter_groups.enable


def test_online_filtering_is_the_range_of_the_mean():
    on = {"algorithm.online_filtering": True}
    limits = {"algorithm.filter_low": 0.1, "trainer.max_try_make_batch": 7}
    config = resolved({**on, **limits, "data.rollout_batch_size": 64, "data.mini_rollout_batch_size": 32})
    groups = config.algorithm.filter_groups
    assert (groups.rule, groups.metric, groups.filter_low, groups.filter_high) == ("mean_range", "score", 0.1, 0.99)
    assert (groups.max_num_gen_batches, groups.on_limit, groups.leftover) == (7, "error", "discard")
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (64, 32)
    groups = resolved(on | {"algorithm.filter_key": "format"}).algorithm.filter_groups
    assert (groups.max_num_gen_batches, groups.metric) == (20, "format")


@pytest.mark.parametrize(("on", "metric"), [("use_dynamic_sample", "seq_reward"), ("online_filtering", "score")])
def test_the_filter_that_is_on_counts_more_than_the_one_that_is_off(on, metric):
    aliases = {f"algorithm.{name}": name == on for name in ("use_dynamic_sample", "online_filtering")}
    groups = resolved(aliases).algorithm.filter_groups
    assert groups.enable and groups.metric == metric
    assert not resolved(dict.fromkeys(aliases, False)).algorithm.filter_groups.enable


@pytest.mark.parametrize(
    ("alias", "value", "option", "sets"),
    [
        ("algorithm.use_dynamic_sample", True, f"{FILTER}.leftover", "leftover=discard, but requeue"),
        ("algorithm.use_dynamic_sample", True, f"{FILTER}.max_num_gen_batches", "batches=3, but 10"),
        ("algorithm.use_dynamic_sample", False, f"{FILTER}.enable", "enable=False, but True"),
        ("algorithm.online_filtering", False, f"{FILTER}.enable", "enable=False, but True"),
        ("data.rollout_batch_size", 8, "data.train_batch_size", "data.train_batch_size=8, but 512"),
        ("custom_reward_function.path", "r.py", "reward.function", "function=r.py:compute_score, but auto"),
    ],
)
def test_an_option_that_the_command_line_sets_contradicts_an_alias_even_at_its_default(alias, value, option, sets):
    resolved({alias: value})
    with pytest.raises(ValueError, match=sets):
        resolved({alias: value}, [option])


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
    config = resolved({f"custom_reward_function.{name}": value for name, value in given.items()})
    assert config.reward.function == function
    assert config.custom_reward_function == Config().custom_reward_function and resolve_aliases(config) == config
