"""verl's training scripts become commands that this package accepts, with the same values."""

import json
import runpy
import shlex
import subprocess

import pytest
from verl_keys import DATA, TRAINER, lines_of

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat
from dapo_jax.tools.from_verl.__main__ import main
from dapo_jax.tools.from_verl.shell import UNKNOWN, Script
from dapo_jax.tools.from_verl.translate import BASE, command, config_file, overrides, remarks, translate
from dapo_jax.verl.options import converted, find
from dapo_jax.verl.table import HERE

PUBLISHED = ("run_dapo_qwen2.5_32b", "test_dapo_7b_math")
SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
# it's a comment
NNODES=${NNODES:-2}
HOMES=${DATA_HOME:-"${HOME}/verl"}
prompt=$((1024 * 2))
offload=True
DATA=(
    data.train_files="['${HOMES}/a.parquet', '${HOMES}/b.parquet']"  # don't stop here
    data.max_prompt_length=${prompt}
)
ray job submit --runtime-env="${HOMES}/env.yaml" \\
    -- python3 -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.model.path="${HOMES}/my model" \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    +actor_rollout_ref.rollout.multi_turn.enable=True \\
    custom_reward_function.path=rewards/mine.py \\
    trainer.nnodes="${NNODES}" trainer.experiment_name=a_$(date +%F) $@ 2>&1 | tee log.txt
"""


def given(name: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines_of(name))


def read(values) -> Config:
    words = shlex.split(command(values).replace("\\\n", " "))
    return read_config([words[2], *words[3:]])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_script_is_accepted_and_keeps_its_values(name):
    options = given(name)
    result = translate(options)
    assert result.problems == [] and result.lost == []
    config = read(result.values)
    validate(config)
    actor, prefix = config.actor, "actor_rollout_ref."
    assert config.rollout.n == int(options[f"{prefix}rollout.n"]) == 16
    assert config.data.train_batch_size == 512 and actor.ppo_mini_batch_size == 32
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10)
    assert config.data.max_response_length == int(options["data.max_response_length"])
    assert (config.evaluate.n, config.evaluate.temperature, config.evaluate.top_p) == (1, 1.0, 0.7)
    assert config.data.train_files == ("/home/me/verl/data/dapo-math-17k.parquet",)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.lr_warmup_steps) == (1e-6, 0.1, 10)
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    filters = "algorithm.filter_groups.enable" in options
    assert config.algorithm.filter_groups.enable == filters
    assert any("dynamic sampling is off" in line for line in result.by_hand) != filters
    said = "\n".join(remarks(result, []))
    values = "\n".join(command(result.values).split())
    for key in options:
        entry = find(key)
        assert entry is not None and (entry.ours or key in said), key
        assert entry in HERE or f"{key}=" in said and values


def test_a_script_that_sets_nothing_trains_as_verl_does():
    """Options that change a run have verl's default unless a script sets them."""
    ours_kept = set(  # places, records and speed
        """
        model.path critic.model.path data.train_files data.val_files workdir
        trainer.logger trainer.project_name trainer.experiment_name trainer.save_freq trainer.test_freq
        mesh.tensor mesh.fsdp reward.num_workers reward.overlong_buffer.log critic.ppo_mini_batch_size
        actor.share_prompts actor.use_dynamic_bsz actor.ppo_max_token_len_per_device model.lora.alpha
        algorithm.filter_groups.max_num_gen_batches custom_reward_function.name evaluate.n evaluate.temperature
        """.split()
    )
    base, seen = flat(BASE), set()
    for key, default in TRAINER["0.9.0"].items():
        entry = find(key)
        if entry not in HERE or default is None or (isinstance(default, str) and "${" in default):
            continue
        for ours, value in converted(key, default, TRAINER["0.9.0"]).items():
            if ours not in ours_kept and "clip_ratio" not in key:
                assert base[ours] == value, (key, ours)
                seen.add(ours)
    changed = {key for key, value in base.items() if value != DEFAULTS[key]}
    assert changed - seen <= {  # null or missing in verl: its scripts use other names
        "actor.clip_ratio_high",
        "actor.clip_ratio_c",
        "actor.optim.lr_warmup_steps",
        "trainer.total_training_steps",
    }
    assert (BASE.actor.clip_ratio_low, BASE.actor.clip_ratio_high, BASE.actor.clip_ratio_c) == (0.2, 0.2, 3.0)


def test_a_script_in_the_shell_s_words_is_read():
    script = Script(SCRIPT, environment={"HOME": "/home/me", "NNODES": "4"}, arguments=["trainer.total_epochs=2"])
    result = translate(overrides(script))
    config = read(result.values)
    assert config.data.train_files == ("/home/me/verl/a.parquet", "/home/me/verl/b.parquet")
    assert config.model.path == "/home/me/verl/my model" and config.rollout.n == 8
    assert config.reward.function == "rewards/mine.py:compute_score"
    assert config.data.max_prompt_length == 2048 and config.trainer.total_epochs == 2
    assert config.mesh.fsdp == 32  # 4 nodes of 8, by verl's default
    assert result.lost == [
        "actor_rollout_ref.rollout.multi_turn.enable=True: a response is a single turn, without tools"
    ]
    assert any("trainer.experiment_name" in line for line in result.by_hand)
    assert any("param_offload" in line for line in result.dropped)


def test_the_config_file_is_the_command(tmp_path):
    result = translate(given(PUBLISHED[0]))
    file = tmp_path / "run.py"
    file.write_text(config_file(result.values, list(remarks(result, []))))
    assert read_config(["train", "--config", str(file)]) == read(result.values)


def test_options_that_nothing_would_read_are_left_out_and_named():
    result = translate({**given(PUBLISHED[1]), "critic.optim.lr": "1e-5", "algorithm.lam": "0.9"})
    assert result.problems == [] and "algorithm.lam" not in result.values
    assert any("algorithm.lam=0.9: not read without algorithm.adv_estimator=gae" in line for line in result.dropped)
    without_files = {key: value for key, value in given(PUBLISHED[1]).items() if key != "data.val_files"}
    assert translate(without_files).problems == []
    greedy = translate({"data.val_files": "a.parquet"}).config().evaluate
    assert (greedy.n, greedy.temperature) == (1, 0)


FILTER, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
OF_GSPO = {"actor.clip_ratio_c": 10.0, "actor.loss_agg_mode": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", {}),
        ("data.gen_batch_size=null", {}),
        ("trainer.logger=[console,swanlab]", {"trainer.logger": ("console",)}),
        ("trainer.logger=swanlab", {}),
        ("trainer.save_freq=0", {"trainer.save_freq": -1}),
        ("actor_rollout_ref.rollout.top_k=0", {}),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True", {"reward.overlong_buffer.enable": True}),
        (f"{FILTER}.enable=True", {f"{FILTER}.enable": True, f"{FILTER}.max_num_gen_batches": 0}),
        ("data.apply_chat_template_kwargs.think=False", {"data.chat_template_kwargs": '{"think": false}'}),
        ("algorithm.adv_estimator=grpo_vectorized", {"algorithm.adv_estimator": "grpo"}),
        ("custom_reward_function.name=compute_score", {}),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            {"actor.policy_loss.loss_mode": "gspo", **OF_GSPO},
        ),
        (f"{CORRECTION}.rollout_is=token", {f"{CORRECTION}.rollout_is": "token", "actor.old_logprob": "recompute"}),
    ],
)
def test_a_value_is_converted(option, values):
    key, _, text = option.partition("=")
    nothing = translate({}).values
    assert {name: value for name, value in translate({key: text}).values.items() if name not in nothing} == values


def test_clip_ratio_is_read_as_verl_reads_it():
    clip = "actor_rollout_ref.actor.clip_ratio"
    alone = translate({clip: "0.3"})
    assert not any("clip_ratio" in key for key in alone.values)
    assert any(line.startswith(f"{clip}=0.3: verl reads clip_ratio_low") for line in alone.by_hand)
    with_nulls = translate({clip: "0.3", f"{clip}_low": "null", f"{clip}_high": "null"}).config().actor
    assert (with_nulls.clip_ratio_low, with_nulls.clip_ratio_high) == (0.3, 0.3)


@pytest.mark.parametrize(("loss", "low"), [("cispo", 1.0), ("vanilla", 1.0), ("dppo_kl", 10), ("geo_mean", 10)])
def test_a_lower_clip_ratio_that_never_clips_is_accepted(loss, low):
    actor = "actor_rollout_ref.actor"
    result = translate({f"{actor}.policy_loss.loss_mode": loss, f"{actor}.clip_ratio_low": "10"})
    assert result.values["actor.clip_ratio_low"] == low
    assert any("clip_ratio_low=10 must be in (0, 1]" in line for line in result.problems) == (low == 10)


def test_a_script_of_easyr1_is_translated():
    script = Script(
        "python3 -m verl.trainer.main config=examples/config.yaml data.rollout_batch_size=512 worker.rollout.n=8 "
        "worker.actor.clip_ratio_low=0.1 worker.actor.model.model_path=m data.train_files=a.parquet "
        "algorithm.adv_estimator=grpo algorithm.online_filtering=True trainer.max_steps=9 data.answer_key=answer",
        environment={},
    )
    result = translate(overrides(script))
    assert [line.partition(":")[0] for line in script.skipped] == ["config=examples/config.yaml"]
    config = read(result.values)
    assert result.problems == [] == result.lost and config.algorithm.filter_groups.rule == "mean_range"
    assert (config.data.train_batch_size, config.rollout.n, config.actor.clip_ratio_low) == (512, 8, 0.1)
    assert config.data.answer_key == "answer" and any("prompt_template={COLUMN}" in line for line in result.by_hand)


def test_the_order_of_the_options_changes_nothing():
    loss, validation = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.val_kwargs"
    options = {
        f"{loss}.policy_loss.loss_mode": "gspo",
        f"{loss}.loss_agg_mode": "token-mean",
        f"{validation}.do_sample": "False",
        f"{validation}.temperature": "0.6",
        "data.val_files": "a.parquet",
    }
    one, other = translate(options).config(), translate(dict(reversed(options.items()))).config()
    assert one == other
    assert one.actor.loss_agg_mode == "seq-mean-token-mean" and one.evaluate.temperature == 0


def test_a_reference_to_another_option_has_its_value():
    result = translate({"data.max_prompt_length": "64", "data.max_response_length": "${data.max_prompt_length}"})
    assert result.config().data.max_response_length == 64
    unknown = translate({"data.max_response_length": "${data.max_prompt_length}", "data.custom_cls.path": UNKNOWN})
    assert any("is ${data.max_prompt_length}: set" in line for line in unknown.by_hand)
    assert unknown.lost == ["data.custom_cls.path needs a command to run: write the rows to a file: docs/data.md"]


def test_a_config_file_of_the_script_is_named():
    script = Script("python3 -m verl.trainer.main_ppo --config-name=mine data.seed=1", environment={})
    assert overrides(script) == {"data.seed": "1"}
    assert [line.partition(":")[0] for line in script.skipped] == ["--config-name=mine"]


def test_a_share_of_the_steps_becomes_steps():
    share = {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.1"}
    assert translate({**share, "trainer.total_training_steps": "50"}).values["actor.optim.lr_warmup_steps"] == 5
    assert "needs trainer.total_training_steps" in translate(share).lost[0]


def test_refused_options_are_listed(tmp_path):
    result = translate({**given(PUBLISHED[0]), "actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode"})
    assert any("actor.policy_loss.loss_mode='bypass_mode' must be one of" in line for line in result.problems)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command_prints_a_shell_script_or_writes_a_file(tmp_path, capsys, monkeypatch):
    script, file = tmp_path / "run.sh", tmp_path / "run.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", ["from_verl", str(script), "trainer.total_epochs=3"])
    runpy.run_module("dapo_jax.tools.from_verl", run_name="__main__")
    printed = capsys.readouterr().out
    assert "--config.trainer.total_epochs=3" in printed
    subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
    main([str(script), "--output", str(file), "trainer.total_epochs=3"])  # before or after the file
    assert "config.trainer.total_epochs = 3" in file.read_text()
    validate(read_config(["train", "--config", str(file)]))
    with pytest.raises(SystemExit) as end:
        main([str(script), "--output", str(tmp_path / "none" / "run.py")])
    assert end.value.code == 2 and "run.py cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("python3 -m verl.trainer.sft_trainer data.train_files=a", "no command of the script starts"),
        ("echo hello", "no command of the script starts"),
        ("a='b", "line 1: the ' is not closed"),
    ],
)
def test_other_scripts_are_refused(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "run.sh")])
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and "Traceback" not in error


def test_variables_of_the_environment_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MINE", "from_here")
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a "
        "actor_rollout_ref.rollout.n=2 actor_rollout_ref.model.path=m "
        "data.prompt_key=$MINE data.train_batch_size=$OTHER"
    )
    main([str(script), "--env", "OTHER=2048", "data.seed=7"])
    printed = capsys.readouterr().out
    assert "from_here" not in printed and "--config.data.train_batch_size=2048" in printed
    assert "read as empty (give them by --env NAME=VALUE): MINE" in printed
    main([str(script), "--env=MINE"])
    assert "--config.data.prompt_key=from_here" in capsys.readouterr().out.replace('"', "'")
    with pytest.raises(SystemExit) as end:
        main([str(script), "--env=1A=2"])
    assert end.value.code == 2 and "--env=1A=2 must be NAME=VALUE" in capsys.readouterr().err


# As in verl's GSPO examples: batch sizes of a function, and a place that $(pwd) names.
LOST_ONCE = """
batch() { local factor=${1%x}; size=$((64 * factor)); }
for name in none mine; do [[ $name == mine ]] && loss=${name/mine/gspo}; done
batch 4x
python3 -m verl.trainer.main_ppo data.train_batch_size=${size} actor_rollout_ref.actor.policy_loss.loss_mode=$loss \\
    custom_reward_function.path="$(pwd)/rewards.py" 2>&1 | tee "logs/$(date +%F).log"
"""


def test_values_that_only_a_shell_knows_are_kept():
    options = overrides(Script(LOST_ONCE, environment={"PWD": "/here"}))
    assert options == {
        "data.train_batch_size": "256",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "custom_reward_function.path": "/here/rewards.py",
    }


def test_the_lists_are_of_versions():
    assert all(path.read_text().startswith("# ") for path in DATA.iterdir()) and json.dumps(TRAINER)
