import contextlib
import errno
import importlib
import math
import os
import re
import runpy
import sys
from pathlib import Path

import jax
import pytest

from dapo_jax.cli import COMMANDS
from dapo_jax.command import command_line, interrupts
from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.command.help import MOST_USED
from dapo_jax.command.validation import validate
from dapo_jax.config.aliases import FROM_MEMORY
from dapo_jax.config.values import DEFAULTS, flat
from dapo_jax.errors import InputError
from dapo_jax.interface.configs import load_config
from dapo_jax.parallel import endings
from dapo_jax.parallel.memory import FRACTION

TINY = str(Path(__file__).parents[1] / "small_recipe.py")
FILTER = "algorithm.filter_groups"


def read(*arguments: str, file: str = TINY):
    return read_config(["train", "--config", file, *arguments])


def test_options_reach_the_config_in_words_and_are_taken_back_by_null():
    changed = {
        "actor.optim.lr": ("2e-6", 2e-6),
        "actor.grad_clip": ("inf", math.inf),
        "actor.optim.betas": ("(0.9,)", (0.9,)),  # wrong values are left to validation
        "data.train_files": ("3", (3,)),
        "seed": (str(2**70), 2**70),
        "workdir": ("", ""),
        "data.chat_template_kwargs": ('{"a":' * 10**5, '{"a":' * 10**5),
        "data.gen_batch_size": ("4", 4),
        "data.prompt_key": ("yes", "yes"),  # not a switch
        "data.shuffle": ("no", False),
        "data.filter_overlong_prompts": ("yes", True),
        "data.curriculum.enable": ("On", True),
        "actor.use_kl_loss": ("1", True),
        "actor.optim.offload": ("true", True),
        f"{FILTER}.keep_singletons": ("off", False),
    }
    given = [f"--config.{key}={text}" for key, (text, _) in changed.items()]
    config = flat(read("--debug", *given))
    assert {key: config[key] for key in changed} == {key: value for key, (_, value) in changed.items()}
    size = "--config.data.gen_batch_size="
    for texts, last in ((("8", "null"), None), (("None", "8"), 8)):
        assert read(*(size + text for text in texts), "--debug").data.gen_batch_size == last


SWITCH = "must be true or false: write --config"
FOR_EXAMPLE = "give a recipe (`dapo-jax configs` lists them), for example --config tiny"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--config.unknown=1"], ["--config.unknown=1: there is no key unknown: dapo_jax/config/sections.py lists"]),
        (["--config.actor.clip_ratio_lo=1"], ["no key actor.clip_ratio_lo: did you mean actor.clip_ratio_low"]),
        (["trainer.test_frq=1"], ["there is no key trainer.test_frq: did you mean trainer.test_freq"]),
        (["--config.rolout.n=4"], ["there is no key rolout.n: did you mean rollout.n"]),
        (["--config.rollout.nn=4", "--config.sead=1"], ["there is no key rollout.nn", "did you mean seed?"]),
        (["--config.rollout.n=many"], ["--config.rollout.n=many", "invalid literal", "correct the command"]),
        (["--config.actor.optim.lr=fast"], ["--config.actor.optim.lr=fast", "correct the command"]),
        (["--config.rollout.n=2.5"], ["--config.rollout.n=2.5", "correct the command"]),
        (["--config.seed=None"], ["--config.seed=None", "correct the command"]),
        (["--config.rollout.n=null"], ["--config.rollout.n=null", "correct the command"]),
        (["--confg.seed=1"], ["'confg.seed'", "correct the command"]),
        (["--config.seed"], ["Missing value for flag --config.seed", "correct the command"]),
        (["stray"], ["unexpected arguments ['stray']: options are written KEY=VALUE"]),
        (
            ["--config.data.shuffle=maybe", f"--config.{FILTER}.enable="],
            [
                f"--config.data.shuffle=maybe {SWITCH}.data.shuffle=true or --config.data.shuffle=false",
                f"--config.{FILTER}.enable= {SWITCH}.{FILTER}.enable=true or --config.{FILTER}.enable=false",
            ],
        ),
        (["--config=nowhere.py"], ["--config=nowhere.py is not a file", FOR_EXAMPLE]),
        ([f"--config={os.path.dirname(TINY)}"], ["tests is not a file", FOR_EXAMPLE]),
    ],
)
def test_a_wrong_argument_is_refused_and_named(arguments, messages):
    with pytest.raises(InputError) as refused:
        read(*arguments)
    assert all(message in str(refused.value) for message in messages)


@pytest.mark.parametrize("option", ["actor.optim.lr=0.5", "--actor.optim.lr=0.5", "-actor.optim.lr=0.5"])
def test_an_option_needs_no_prefix(option):
    assert read(option).actor.optim.lr == 0.5
    files = read("data.train_files=('a.json',)", "data.task=files").data.train_files
    assert files == ("a.json",), "and is no recipe"


@pytest.mark.parametrize("form", ["{}", "--{}", "--config.{}"])
def test_a_name_of_another_trainer_is_answered_with_ours(form):
    for name, ours in FROM_MEMORY.items():
        options = re.findall(r"([a-z_.]+)=", ours)
        assert options and not set(options) - DEFAULTS.keys() and name not in DEFAULTS
        with pytest.raises(InputError, match=re.escape(f"{form.format(name)}=3: write {ours.format(3)}")):
            read(f"{form.format(name)}=3")
        with pytest.raises(InputError, match=re.escape(f"there is no option {name}: write {ours.format(3)}")):
            load_config("tiny", {name: 3})


def test_a_config_file_may_be_given_alone():
    alone = read_config(["train", "--config.seed=3", TINY])
    assert alone == read("--config.seed=3")
    value = read_config(["train", "--config.data.prompt_key", "prompts.json", TINY])
    assert value.data.prompt_key == "prompts.json" and value.workdir == alone.workdir
    for arguments, message in (
        ([], "--config is missing: give a recipe"),
        (["nowhere.py"], "--config=nowhere.py is not a file"),
        ([TINY, TINY.replace("small_recipe", "gsm8k")], "--config is missing|unexpected arguments"),
        (["--config", TINY, "other.py"], "unexpected arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(["train", *arguments])


@pytest.mark.parametrize("help_option", ["-h", "--help"])
@pytest.mark.parametrize("command", MOST_USED)
def test_help_has_the_options_most_used_with_their_comments(command, help_option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [command, help_option])
    with contextlib.suppress(SystemExit):
        importlib.import_module(COMMANDS[command][0]).main()
    said = capsys.readouterr().out
    assert f"python -m dapo_jax.{command} --config" in said and "--debug" in said and "docs/configuration.md" in said
    assert all(f"  --config.{option}=..." in said for option in MOST_USED[command])
    assert all(len(line) <= 120 for line in said.splitlines())


def write_recipe(folder, **changes: object) -> str:
    """A config file like tiny.py with further options."""
    end = "    return config"
    lines = "".join(f"    config.{key} = {value!r}\n" for key, value in changes.items())
    (folder / "recipe.py").write_text(Path(TINY).read_text().replace(end, lines + end))
    return str(folder / "recipe.py")


def test_one_option_varies_a_recipe_whatever_it_switches_off(tmp_path, capsys):
    recipe = write_recipe(tmp_path, **{f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 3})
    off = f"--config.{FILTER}.enable=False"
    config = read(off, file=recipe)
    validate(config)
    assert config.algorithm.filter_groups.leftover == "requeue"
    told = capsys.readouterr().err
    line = f"{FILTER}.leftover is not read without {FILTER}.enable=True: it is back at its default, 'requeue'"
    assert f"dapo_jax: {line}\n" in told
    assert read("--config.algorithm.use_dynamic_sample=False", file=recipe) == config
    assert read(file=recipe).algorithm.filter_groups.leftover_max_staleness == 3
    for given in (
        [f"--config.{FILTER}.leftover=carry"],
        ["--noconfig.model.enable_gradient_checkpointing", "--config.model.remat_policy=dots"],
    ):
        with pytest.raises(ValueError, match="is not read without"):
            validate(read(off, *given, file=recipe))


def test_what_a_file_sets_in_vain_is_refused(tmp_path):
    recipe = write_recipe(tmp_path, **{"algorithm.lam": 0.9})
    for options in ([], ["--config.seed=2"]):
        with pytest.raises(ValueError, match="algorithm.lam=0.9 is not read without algorithm.adv_estimator=gae"):
            validate(read(*options, file=recipe))


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


HttpError = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})
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
    (HttpError("Invalid bucket"), 1, r"a gs:// address cannot be reached .* Invalid bucket.*credentials"),
]


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


LOST = SystemExit(1)
LOST.__cause__ = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(2), 2), (SystemExit("told"), 1), (SystemExit(), 0), (RuntimeError("x"), 1), (LOST, 1)],
)
def test_one_of_several_processes_ends_with_the_same_code_and_waits_for_jax_if_it_lost_them(
    monkeypatch, capsys, error, code
):
    codes, waits = [], []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(endings.logging, "shutdown", lambda: None)
    monkeypatch.setattr(endings.time, "sleep", waits.append)
    try:
        raise error
    except BaseException:
        endings.end_process(error, 10)
    told = capsys.readouterr().err
    assert codes == [code] and ("Traceback" in told) == isinstance(error, RuntimeError)
    assert waits == [15] * (error is LOST) and ("another process has ended" in told) == (error is LOST)


def wrong_command(command: str) -> list[str]:
    options = ["--output", "out"] if command in ("evaluate", "export") else []
    return [*options, "--config", TINY, "--config.nonsense=1", "--debug"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", interrupts.SENTENCES)
def test_every_command_refuses_an_unknown_option_with_code_two(command, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(interrupts, "end_at_once", started.append)
    monkeypatch.setattr(sys, "argv", [command, *wrong_command(command)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"dapo_jax.{command}", run_name="__main__")
    told = capsys.readouterr().err
    assert ended.value.code == 2 and started == [command]
    assert "nonsense" in told.splitlines()[-1] and "Traceback" in told
