"""Every verl option has an entry in the table, entries name existing options, and the command line gives advice."""

import re
from pathlib import Path

import pytest
import yaml
from verl_keys import TRAINER, lines_of

from dapo_jax.command.command_line import read_config
from dapo_jax.config.values import DEFAULTS
from dapo_jax.verl.options import BY_KEY, STARS, TABLE, expanded, find, hint, is_off, ours_of
from dapo_jax.verl.table import EASYR1, HERE

TINY = str(Path(__file__).parents[2] / "configs" / "tiny.py")
ADVICE = yaml.safe_load((Path(__file__).parent / "advice.yaml").read_text())
KEYS = {**{key: None for keys in TRAINER.values() for key in keys}, **dict.fromkeys(lines_of("dapo_scripts"))}


def test_every_option_of_verl_and_of_its_scripts_has_an_entry():
    assert len(KEYS) > 700 and [key for key in KEYS if find(key) is None] == []
    assert [key for key in lines_of("easyr1") if key not in DEFAULTS and answer(f"--config.{key}=1") is None] == []


def answer(option: str) -> str | None:
    return hint(option, set(DEFAULTS))


def test_every_entry_is_met_and_no_name_has_two():
    names = [key for entry in TABLE for key in expanded(entry.verl)]
    assert sorted(names) == sorted(BY_KEY)
    known = {*KEYS, *lines_of("easyr1"), "trainer.profile_steps"}
    met = {id(find(key)) for key in known} | {id(find("actor_rollout_ref.actor._target_"))}
    assert [entry.verl for entry in TABLE if id(entry) not in met and not entry.verl.startswith(WITH_A_PLUS)] == []


WITH_A_PLUS = (  # options that a script adds to the trainer's config with +, and those of other engines
    "{actor_rollout_ref.actor.megatron",
    "{actor_rollout_ref.actor,critic}.megatron",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.veomni",
    "data.apply_chat_template_kwargs.",
    "{custom_reward_function,reward.custom_reward_function}.reward_kwargs",
    "{reward,reward_model}.reward_kwargs.*",
    "actor_rollout_ref.ref.{model.path,model}",
    "actor_rollout_ref.rollout.limit_images",
    "{actor_rollout_ref,critic}.model.override_config.",
    "actor_rollout_ref.actor.policy_loss.*",
    "actor_rollout_ref.actor.policy_loss.{tau_pos",
    "async_training.",
    "rollout.",
    "model_engine",
    "{actor_rollout_ref.actor,critic}.optim.override_optimizer_config.",
)


def test_an_entry_names_existing_options_or_explains_why_there_are_none():
    for entry in TABLE:
        assert set(expanded(entry.ours) if entry.ours else ()) <= set(DEFAULTS), entry.verl
        assert entry.ours or entry.note, entry.verl
        assert not (entry.lost and entry.ours), entry.verl
        for word in re.findall(r"(?<!/)\b[a-z_]+(?:\.[a-z_]+)+", entry.note):
            if word.partition(".")[0] in {key.partition(".")[0] for key in DEFAULTS}:
                assert any(f"{key}.".startswith(f"{word}.") for key in DEFAULTS), (entry.verl, word)
    assert all(entry.ours for entry in HERE) and all(len(ours_of(key)) for key in KEYS if find(key) in HERE)


@pytest.mark.parametrize("version", TRAINER)
def test_a_default_of_verl_is_never_a_loss(version):
    for key, value in TRAINER[version].items():
        entry = find(key)
        assert entry is not None
        interpolated = isinstance(value, str) and "${" in value
        assert not entry.lost or interpolated or is_off(entry, value, TRAINER[version]), (key, value)


def test_the_name_comes_before_the_pattern_and_the_longer_pattern_first():
    assert ours_of("actor_rollout_ref.actor.fsdp_config.fsdp_size") == ["mesh.fsdp"]
    assert ours_of("actor_rollout_ref.actor.fsdp_config.offload_policy") == []
    assert find("reward_model.reward_kwargs.max_resp_len") is not find("reward_model.reward_kwargs.penalty")
    assert len(STARS) == len([key for key in BY_KEY if "*" in key])


@pytest.mark.parametrize("option", ADVICE)
def test_an_option_in_verl_s_words_is_answered_with_ours(option):
    assert answer(option) == ADVICE[option]
    if ADVICE[option] and option.partition("=")[0] not in DEFAULTS:  # which the command line takes as they are
        with pytest.raises(ValueError, match=f"^{re.escape(ADVICE[option])}$"):
            read_config(["train", "--config", TINY, option])


def test_the_advice_is_taken():
    for option in ("trainer.logger=[console,wandb]", "data.train_files=a.parquet", "actor_rollout_ref.rollout.top_k=0"):
        written = [part.strip('"') for part in ADVICE[option].partition("write ")[2].split(" ") if part]
        read_config(["train", "--config", TINY, *written])


def test_every_option_of_easyr1_s_is_one_of_its_keys():
    assert {key for entry in EASYR1 for key in expanded(entry.verl) if "*" not in key} <= set(lines_of("easyr1"))
