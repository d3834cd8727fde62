"""verl's training scripts become commands that this package accepts, with the same values."""

import re
import shlex
import subprocess

import pytest
from translations import cases, options_of, record
from verl_keys import TRAINER

from dapo_jax import cli
from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat, resolve_aliases
from dapo_jax.tools.from_verl.from_verl import main
from dapo_jax.tools.from_verl.translate import BASE, EXACT, command, config_file, remarks, translate
from dapo_jax.verl.options import converted, find
from dapo_jax.verl.table import HERE

CASES = cases()


def read(values) -> Config:
    words = shlex.split(command(values).replace("\\\n", " "))
    return read_config([words[2], *words[3:]])


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


@pytest.mark.parametrize("name", CASES)
def test_what_a_script_becomes_is_in_the_file(name):
    options, _ = options_of(CASES[name])
    assert record(CASES[name]) == CASES[name]["becomes"], "if that is meant: python tests/translations.py"
    assert all(find(key) or key.startswith("worker.") or key in DEFAULTS for key in options)
    result = translate(options)
    assert translate(dict(reversed(options.items()))).config() == result.config(), "the order changes nothing"
    said = "\n".join(remarks(result, []))
    assert all((entry := find(key)) is None or entry.ours or key in said for key in options)
    if not result.problems:
        assert read(result.values) == resolve_aliases(result.config())
        exact = re.findall(r"(?<=[ ,])([\w.]+)=(\w+)", "".join(one for one in result.by_hand if "exactly as" in one))
        validate(read(result.values | {key: EXACT[key] for key, _ in exact}))
        assert not {key for key, _ in exact} & result.values.keys()


def test_the_config_file_is_the_command(tmp_path):
    result = translate(options_of(CASES["a published script: run_dapo_qwen2.5_32b"])[0])
    assert result.problems == [] == result.lost
    file = tmp_path / "run.py"
    file.write_text(config_file(result.values, list(remarks(result, []))))
    assert read_config(["train", "--config", str(file)]) == read(result.values)


def test_the_command_prints_a_shell_script_or_writes_a_file(tmp_path, capsys):
    script, file = tmp_path / "run.sh", tmp_path / "run.py"
    script.write_text(CASES["a script in the shell's words"]["script"])
    cli.main(["from-verl", str(script), "trainer.total_epochs=3"])
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
