"""Names of other trainers. What they set, and which do not belong together, is in command/messages.yaml."""

import json
import re

import pytest

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze
from dapo_jax.interface.configs import as_config, load_config

FILTER = "algorithm.filter_groups"


def resolved(changes, chosen=()) -> Config:
    values = default_config()
    with values.unlocked():
        values.update_from_flattened_dict(changes)
    return freeze(values, chosen)


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


@pytest.mark.parametrize(
    ("alias", "value", "option", "sets"),
    [
        ("algorithm.use_dynamic_sample", True, f"{FILTER}.leftover", "leftover=discard, but requeue"),
        ("algorithm.use_dynamic_sample", True, f"{FILTER}.max_num_gen_batches", "batches=3, but 10"),
        ("algorithm.use_dynamic_sample", False, f"{FILTER}.enable", "enable=False, but True"),
        ("algorithm.online_filtering", True, f"{FILTER}.max_num_gen_batches", "batches=20, but 10"),
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
    ("alias", "dependant"),
    [
        ("algorithm.use_dynamic_sample", "algorithm.dynamic_sample_max_gen_batches"),
        ("algorithm.online_filtering", "trainer.max_try_make_batch"),
    ],
)
def test_the_command_line_may_give_a_files_alias_what_it_needs_or_switch_it_off(alias, dependant, tmp_path):
    file = tmp_path / "own.json"
    section, _, name = dependant.partition(".")
    file.write_text(json.dumps({section: {name: 3}}))
    needed = ["train", str(file), "data.task=arithmetic", "model.path=random"]
    config = read_config([*needed, f"{alias}=True"])
    validate(config)
    assert config.algorithm.filter_groups.max_num_gen_batches == 3
    off = read_config([*needed, f"{alias}=False"])
    assert not off.algorithm.filter_groups.enable and off.algorithm.filter_groups.max_num_gen_batches == 10
    with pytest.raises(ValueError, match=f"need.* {alias}=True"):
        read_config([*needed, f"{alias}=False", f"{dependant}=3"])
