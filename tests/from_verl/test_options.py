"""Every verl option has an entry in the table, entries name existing options, and the command line gives advice."""

import re
from pathlib import Path

import pytest
from verl_keys import TRAINER, lines_of

from dapo_jax.command.command_line import read_config
from dapo_jax.config.values import DEFAULTS
from dapo_jax.verl.options import BY_KEY, STARS, TABLE, expanded, find, hint, is_off, ours_of
from dapo_jax.verl.table import EASYR1, HERE

TINY = str(Path(__file__).parents[2] / "configs" / "tiny.py")
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
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.veomni",
    "data.apply_chat_template_kwargs.",
    "{custom_reward_function,reward.custom_reward_function}.reward_kwargs",
    "{reward,reward_model}.reward_kwargs.*",
    "actor_rollout_ref.ref.{model.path,model}",
    "actor_rollout_ref.rollout.limit_images",
    "actor_rollout_ref.model.override_config.*",
    "actor_rollout_ref.actor.policy_loss.*",
    "async_training.",
    "rollout.",
    "model_engine",
    "{actor_rollout_ref.actor,critic}.optim.override_optimizer_config.*",
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
        assert not entry.lost or interpolated or is_off(entry, value), (key, value)


def test_the_name_comes_before_the_pattern_and_the_longer_pattern_first():
    assert ours_of("actor_rollout_ref.actor.fsdp_config.fsdp_size") == ["mesh.fsdp"]
    assert ours_of("actor_rollout_ref.actor.fsdp_config.offload_policy") == []
    assert find("reward_model.reward_kwargs.max_resp_len") is not find("reward_model.reward_kwargs.penalty")
    assert len(STARS) == len([key for key in BY_KEY if "*" in key])


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (
            "--config.actor_rollout_ref.rollout.n=16",
            "verl's actor_rollout_ref.rollout.n is rollout.n here: write",
        ),
        ("--config.rollout.val_kwargs.n=4", "is evaluate.n here (4 samples unless set): write --config.evaluate.n=4"),
        ("--config.actor.clip_ratio=0.3", "--config.actor.clip_ratio_low=0.3 --config.actor.clip_ratio_high=0.3"),
        ("--config.trainer.n_gpus_per_node=8", "not needed here: mesh.data=-1 takes every device that JAX finds"),
        ("--config.reward_model.reward_manager=dapo", "is reward.function here (auto chooses the verifier"),
        ("--config.reward_manager=dapo", "is reward.function here (auto chooses the verifier"),
        ("--config.reward_model.overlong_buffer.len=9", "write --config.reward.overlong_buffer.len=9"),
        ("--config.actor_rollout_ref.rollout.multi_turn.enable=True", "is not here: a response is a single turn"),
        ("--config.actor_rollout_ref.actor.share_prompts=True", "write --config.actor.share_prompts=True"),
        ("--config.actor_rollout_ref.rollout.temprature=1", "did you mean rollout.temperature"),
        ("--config.worker.rollout.n=8", "worker.rollout.n is rollout.n here: write --config.rollout.n=8"),
        ("--config.worker.actor.global_batch_size=8", "write --config.actor.ppo_mini_batch_size=8"),
        ("actor_rollout_ref.rollout.n=16", "write --config.rollout.n=16"),
        ("+data.seed=3", "verl's data.seed is seed here (for every random draw): write --config.seed=3"),
        ("++rollout.n=3", "options are written --config.KEY=VALUE: write --config.rollout.n=3"),
        ("nonsense=16", "options are written --config.KEY=VALUE, and there is no key nonsense"),
        ("--config.actor_rollout_ref.rollout.n=many", "write --config.rollout.n=many"),
    ],
)
def test_an_option_in_verl_s_words_is_answered_with_ours(option, advice):
    with pytest.raises(ValueError) as refused:
        read_config(["train", "--config", TINY, option])
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"{option}: ") and advice in line
    for harmful in ("rollout.top_k", "clip_ratio_c", "num_processes", "reward.model.weight"):
        assert harmful not in line


@pytest.mark.parametrize("option", ["stray", "--config.rollout.n=4", "--config.unknown=1", "configs/tiny.py"])
def test_any_other_argument_has_no_advice(option):
    assert answer(option) is None


def test_the_advice_is_taken():
    for option in ("trainer.logger=[console,wandb]", "data.train_files=a.parquet", "actor_rollout_ref.rollout.top_k=0"):
        advice = answer(option) or ""
        written = [part.strip('"') for part in advice.partition("write ")[2].split(" ") if part]
        read_config(["train", "--config", TINY, *written])
    assert "write \"--config.trainer.logger=('console','wandb')\"" in (answer("trainer.logger=[console,wandb]") or "")


def test_every_option_of_easyr1_s_is_one_of_its_keys():
    assert {key for entry in EASYR1 for key in expanded(entry.verl) if "*" not in key} <= set(lines_of("easyr1"))
