import contextlib
import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dapo_jax.command import command_line
from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.command.help import MOST_USED
from dapo_jax.command.validation import validate
from dapo_jax.errors import InputError
from dapo_jax.parallel import endings
from dapo_jax.parallel.memory import FRACTION

TINY = str(Path(__file__).parents[2] / "configs" / "tiny.py")


def test_overrides_reach_the_config():
    config = read_config(["train", "--config", TINY, "--config.actor.optim.lr=2e-6", "--config.data.gen_batch_size=4"])
    assert config.actor.optim.lr == 2e-6 and config.data.gen_batch_size == 4


def test_an_option_is_taken_back_by_null(tmp_path):
    for null in ("null", "None"):
        config = read_config(["train", "--config", TINY, f"--config.data.gen_batch_size={null}"])
        assert config.data.gen_batch_size is None
    given = "--config.data.gen_batch_size="
    for values, last in ((("8", "null"), None), (("null", "8"), 8)):
        config = read_config(["train", "--config", TINY, *(given + value for value in values)])
        assert config.data.gen_batch_size == last
    with pytest.raises(ValueError, match="rollout.n=null"):
        read_config(["train", "--config", TINY, "--config.rollout.n=null"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.unknown=1"], "unknown"),
        (["--config.actor.clip_ratio_lo=0.1"], "clip_ratio_low"),
        (["--config.actor.optim.lr=fast"], "lr"),
        (["--confg.seed=1"], "confg"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_config(["train", "--config", TINY, *arguments])


@pytest.mark.parametrize(
    ("given", "value"), [("yes", True), ("On", True), ("1", True), ("true", True), ("no", False), ("off", False)]
)
def test_a_switch_may_be_written_in_words(given, value):
    config = read_config(["train", "--config", TINY, f"--config.data.shuffle={given}"])
    assert config.data.shuffle is value


def test_what_is_no_switch_is_refused_with_what_to_write():
    given = ["--config.data.shuffle=maybe", "--config.algorithm.filter_groups.enable="]
    with pytest.raises(ValueError) as refused:
        read_config(["train", "--config", TINY, *given])
    for option in given:
        name = option.partition("=")[0]
        assert f"{option} must be true or false: write {name}=true or {name}=false" in str(refused.value)
    assert read_config(["train", "--config", TINY, "--config.data.prompt_key=yes"]).data.prompt_key == "yes"


def test_a_config_file_may_be_given_alone():
    alone = read_config(["train", "--config.seed=3", TINY])
    assert alone == read_config(["train", "--config", TINY, "--config.seed=3"])
    value = read_config(["train", "--config.data.prompt_key", "prompts.json", TINY])
    assert value.data.prompt_key == "prompts.json" and value.workdir == alone.workdir
    with pytest.raises(ValueError, match="--config=nowhere.py is not a file"):
        read_config(["train", "nowhere.py"])
    for two in ([TINY, TINY.replace("tiny", "gsm8k")], ["--config", TINY, "other.py"]):
        with pytest.raises(ValueError, match="--config is missing|unexpected arguments"):
            read_config(["train", *two])


@pytest.mark.parametrize("help_option", ["-h", "--help"])
@pytest.mark.parametrize("command", MOST_USED)
def test_help_has_the_options_most_used_with_their_comments(command, help_option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [command, help_option])
    with contextlib.suppress(SystemExit):
        module = {"preflight": "preflight.__main__", "train": "training"}.get(command, command)
        importlib.import_module(f"dapo_jax.{module}").main()
    said = capsys.readouterr().out
    assert f"python -m dapo_jax.{command} --config" in said and "--debug" in said and "docs/configuration.md" in said
    for option in MOST_USED[command]:
        assert f"  --config.{option}=..." in said
    assert all(len(line) <= 120 for line in said.splitlines())


def write_recipe(folder, *lines: str) -> str:
    """A config file like tiny.py with further lines."""
    end = "    return config"
    changes = "".join(f"    {line}\n" for line in lines)
    (folder / "recipe.py").write_text(Path(TINY).read_text().replace(end, changes + end))
    return str(folder / "recipe.py")


def test_one_option_varies_a_recipe_whatever_it_switches_off(tmp_path, capsys):
    groups = "config.algorithm.filter_groups"
    recipe = write_recipe(tmp_path, f"{groups}.leftover = 'carry'", f"{groups}.leftover_max_staleness = 3")
    off = ["train", "--config", recipe, f"--{groups}.enable=False"]
    config = read_config(off)
    validate(config)
    assert config.algorithm.filter_groups.leftover == "requeue"
    told = capsys.readouterr().err
    assert "dapo_jax: algorithm.filter_groups.leftover is not read without algorithm.filter_groups.enable=True" in told
    alias = read_config(["train", "--config", recipe, "--config.algorithm.use_dynamic_sample=False"])
    assert alias == config
    assert read_config(["train", "--config", recipe]).algorithm.filter_groups.leftover_max_staleness == 3
    for given in (
        [f"--{groups}.leftover=carry"],
        ["--noconfig.model.enable_gradient_checkpointing", "--config.model.remat_policy=dots"],
    ):
        with pytest.raises(ValueError, match="is not read without"):
            validate(read_config([*off, *given]))


def test_what_a_file_sets_in_vain_is_refused(tmp_path):
    recipe = write_recipe(tmp_path, "config.algorithm.lam = 0.9")
    for options in ([], ["--config.seed=2"]):
        with pytest.raises(ValueError, match="algorithm.lam=0.9 is not read without algorithm.adv_estimator=gae"):
            validate(read_config(["train", "--config", recipe, *options]))


@pytest.mark.parametrize(
    ("alias", "option", "sets"),
    [
        ("algorithm.use_dynamic_sample=True", "algorithm.filter_groups.enable=False", "enable=True, but False"),
        ("algorithm.use_dynamic_sample=False", "algorithm.filter_groups.enable=True", "enable=False, but True"),
        ("algorithm.online_filtering=False", "algorithm.filter_groups.enable=True", "enable=False, but True"),
        ("algorithm.use_dynamic_sample=True", "algorithm.filter_groups.leftover=requeue", "leftover=discard, but requ"),
        ("algorithm.use_dynamic_sample=True", "algorithm.filter_groups.max_num_gen_batches=10", "batches=3, but 10"),
        ("data.rollout_batch_size=8", "data.train_batch_size=512", "data.train_batch_size=8, but 512"),
    ],
)
def test_an_option_that_contradicts_an_alias_is_refused_even_at_its_default(alias, option, sets, tmp_path):
    (tmp_path / "defaults.py").write_text("from dapo_jax.config import default_config as get_config\n")
    command = ["train", "--config", str(tmp_path / "defaults.py"), f"--config.{alias}"]
    read_config(command)
    with pytest.raises(ValueError, match=sets):
        read_config([*command, f"--config.{option}"])


@pytest.mark.parametrize(
    ("alias", "dependants"),
    [
        ("use_dynamic_sample", ("algorithm.dynamic_sample_max_gen_batches = 3",)),
        ("online_filtering", ("algorithm.filter_low = 0.2", "trainer.max_try_make_batch = 3")),
    ],
)
def test_an_alias_that_is_switched_off_takes_along_what_belongs_to_it(alias, dependants, tmp_path):
    lines = [f"algorithm.{alias} = True", *dependants]
    recipe = write_recipe(tmp_path, *(f"config.{line}" for line in lines))
    off = ["train", "--config", recipe, f"--config.algorithm.{alias}=False"]
    config = read_config(off)
    validate(config)
    assert not config.algorithm.filter_groups.enable
    with pytest.raises(ValueError, match=f"need.* algorithm.{alias}=True"):
        read_config([*off, f"--config.{dependants[0].replace(' ', '')}"])


def test_an_alias_of_a_file_may_need_the_command_line(tmp_path):
    recipe = write_recipe(tmp_path, "config.algorithm.filter_low = 0.2")
    config = read_config(["train", "--config", recipe, "--config.algorithm.online_filtering=True"])
    assert config.algorithm.filter_groups.filter_low == 0.2
    validate(config)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "0.8"), ({FRACTION: "0.5"}, "0.5"), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, None)],
    ids=["option", "variable", "its newer name"],
)
def test_a_command_says_how_much_of_a_gpu_jax_may_take_before_it_is_used(monkeypatch, environment, expected):
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = []

    def joined(config):
        seen.append(os.environ.get(FRACTION))
        return contextlib.nullcontext()

    monkeypatch.setattr(command_line, "processes_of", joined)
    with command_line.command(["train", "--config", TINY, "--config.trainer.gpu_memory_fraction=0.8"]):
        pass
    os.environ.pop(FRACTION, None)
    assert seen == [expected]


def test_a_missing_config_is_refused():
    with pytest.raises(ValueError, match="--config is missing"):
        read_config(["train"])
    with pytest.raises(ValueError, match="nowhere.py"):
        read_config(["train", "--config", "nowhere.py"])


ENDINGS = [
    (InputError("rollout.n=0: raise it"), 2, "rollout.n=0: raise it"),
    (RuntimeError("no group was kept"), 1, "no group was kept"),
    (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), 1, "'metrics.jsonl': free some space"),
    (PermissionError(errno.EACCES, "Permission denied", "train.log"), 1, "'train.log': let this user"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\n" + "x\n" * 99), 1, "memory .*9 GiB.*: lower actor"),
    (jax.errors.JaxRuntimeError("INTERNAL: broken\n" + "x\n" * 99), 1, "JAX cannot continue: INTERNAL: broken"),
    (ValueError("UNKNOWN: Gloo AllGather failed: closed by peer"), 1, "JAX cannot continue: UNKNOWN: Gloo"),
    (MemoryError("10 GiB"), 1, "this machine ran out of memory"),
    (ImportError("x needs gguf: pip install it"), 1, "pip install"),
    (KeyboardInterrupt(), 130, "interrupted"),
]

HttpError = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})
ENDINGS.append((HttpError("Invalid bucket"), 1, r"a gs:// address cannot be reached .* Invalid bucket.*credentials"))


@pytest.mark.parametrize(("error", "code", "message"), ENDINGS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("debug", [False, True])
def test_a_failure_ends_with_its_code_and_message_and_with_debug_its_traceback(capsys, error, code, message, debug):
    with pytest.raises(SystemExit) as ended, refusals(["train", "--debug"] if debug else ["train"]):
        raise error
    told = capsys.readouterr().err
    assert ended.value.code == code and ended.value.__cause__ is error
    assert ("Traceback" in told) == debug
    *_, last = [line for line in told.splitlines() if line.startswith("dapo_jax: ")]
    assert re.search(message, last) and ("\nx\n" in told) == (debug and "\nx" in str(error))


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError, NotImplementedError, RecursionError])
def test_any_other_error_is_called_a_bug_with_its_traceback(capsys, kind):
    with pytest.raises(SystemExit) as ended, refusals(["train"]):
        raise kind("x")
    told = capsys.readouterr().err
    assert ended.value.code == 1 and "Traceback" in told and "a bug in dapo_jax" in told.splitlines()[-1]


def test_debug_may_stand_before_or_after_the_options():
    for arguments in (["--debug", "--config", TINY], ["--config", TINY, "--config.seed=3", "--debug"]):
        assert read_config(["train", *arguments]).model.path == "random"


@pytest.mark.parametrize(
    ("error", "code"), [(SystemExit(2), 2), (SystemExit("told"), 1), (SystemExit(), 0), (RuntimeError("x"), 1)]
)
def test_one_of_several_processes_ends_with_the_same_code(monkeypatch, capsys, error, code):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(endings.logging, "shutdown", lambda: None)
    try:
        raise error
    except BaseException:
        endings.end_process(error, 1)
    assert codes == [code] and ("Traceback" in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_one_that_lost_the_others_waits_for_the_word_of_jax(monkeypatch, capsys):
    codes, waits = [], []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(endings.logging, "shutdown", lambda: None)
    monkeypatch.setattr(endings.time, "sleep", waits.append)
    error = SystemExit(1)
    error.__cause__ = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")
    endings.end_process(error, 10)
    told = capsys.readouterr().err
    assert codes == [1] and waits == [15] and "another process has ended" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in ("export", "preflight"))]
)
def test_every_command_refuses_an_unknown_option_with_code_two(command):
    options = ["--output", "out"] if command == "export" else []
    done = subprocess.run(
        [sys.executable, "-m", f"dapo_jax.{command}", *options, "--config", TINY, "--config.nonsense=1", "--debug"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(TINY).parents[1])},
    )
    assert done.returncode == 2 and "nonsense" in done.stderr.splitlines()[-1] and "Traceback" in done.stderr
