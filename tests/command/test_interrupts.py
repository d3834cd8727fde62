"""Ctrl-C at chosen points of small programs and of the commands: one line, exit code 130, nothing left behind."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from waiting import LIMIT_S, wait_until

from dapo_jax.command.interrupts import SENTENCES, sentence

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "small_recipe.py")
EXPORT = "dapo_jax: interrupted: the model is incomplete and was not written; rerun the same command to export it\n"
PROGRAM = """
import signal, sys, time
from dapo_jax.command import interrupts

def interrupt():
    signal.raise_signal(signal.SIGINT)

interrupts.REPEATED_S = 0.0
interrupts.end_at_once("export")
try:
    with interrupts.undone():
{body}
except KeyboardInterrupt:
    print("dapo_jax: " + interrupts.sentence("export"), file=sys.stderr)
    interrupts.finish()
"""
# Interrupts itself, once, when the module NAME is imported or the function MODULE:NAME is called.
AT_POINT = """
import importlib, runpy, signal, sys

point, module, *arguments = sys.argv[1:]
name, _, function = point.partition(":")

class Finder:
    def find_spec(self, found, path=None, target=None):
        if found == name:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

def interrupted(*_, **__):
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("it goes on")

if function:
    setattr(importlib.import_module(name), function, interrupted)
else:
    sys.meta_path.insert(0, Finder())
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # however the tests are started
    return subprocess.run(
        [sys.executable, "-c", heard + code, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def run_body(*lines: str) -> subprocess.CompletedProcess[str]:
    return run(PROGRAM.format(body="\n".join(f"        {line}" for line in lines)))


def test_what_has_begun_is_undone_and_the_same_request_may_arrive_twice():
    for lines in (
        ("try: interrupt()", "finally: print('undone')"),
        ("interrupts.REPEATED_S = 1e9", "try: interrupt()", "finally:", "    interrupt(); print('undone')"),
    ):
        done = run_body(*lines)
        assert (done.returncode, done.stdout, done.stderr) == (130, "undone\n", EXPORT)


@pytest.mark.parametrize(
    "lines",
    [
        ("class Thing:", "    def __del__(self): interrupt()", "thing = Thing()", "del thing", "time.sleep(600)"),
        (
            *("import gc", "gc.callbacks.append(lambda *_: gc.callbacks.clear() or interrupt())"),
            *("gc.collect()", "time.sleep(600)"),
        ),
        ("try: interrupt()", "except: pass"),
        ("try: interrupt()", "except BaseException as error: raise ImportError('initialization failed') from error"),
        ("try: interrupt()", "finally:", "    interrupt()", "    while True: pass"),
        ("interrupts.GRACE_S = 0.1", "try: interrupt()", "finally:", "    while True: pass"),
    ],
    ids=["in __del__", "in the garbage collector", "swallowed", "renamed", "a second Ctrl-C", "time"],
)
def test_what_a_library_does_with_the_exception_or_cannot_undo_changes_nothing(lines):
    done = run_body(*lines)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", EXPORT)


def test_after_the_end_the_results_are_there():
    done = run(PROGRAM.format(body="        print('results')") + "interrupt()")
    assert (done.returncode, done.stdout) == (130, "results\n")
    assert done.stderr == "dapo_jax: interrupted while it was ending\n"


def test_another_handler_hears_alone():
    done = run_body("signal.signal(signal.SIGINT, lambda *_: print('mine'))", "interrupt()", "time.sleep(0.1)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")


def test_a_library_and_a_process_in_the_background_keep_their_handlers():
    importlib.import_module("dapo_jax.training.loop")
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)  # as the tests are started
    code = """
import signal; before = signal.getsignal(signal.SIGINT)
from dapo_jax.command import interrupts
with interrupts.undone(): pass
assert signal.getsignal(signal.SIGINT) is before
interrupts.finish()
signal.signal(signal.SIGINT, signal.SIG_IGN); interrupts.end_at_once('train')
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; print('ends')
"""
    assert run(code).stdout == "ends\n"


# Early, each command; late, in code that they share, one of them in the long lane.
BEGUN = {command: "dapo_jax.command.validation:validate" for command in SENTENCES}
BEGUN["export"] = "dapo_jax.export.export:as_trained"  # reads the config of the run


@pytest.mark.short("train-numpy", "-jax")
@pytest.mark.long("evaluate-dapo_jax.command")
@pytest.mark.parametrize(
    ("command", "point"),
    [("train", "numpy"), ("train", "dapo_jax.config"), *((command, "jax") for command in SENTENCES), *BEGUN.items()],
)
def test_a_command_is_interrupted_before_it_has_begun(command, point, tmp_path):
    options = ["--output", str(tmp_path / "out")] if command in ("evaluate", "export") else []
    done = run(AT_POINT, point, f"dapo_jax.{command}", "--config", TINY, f"--config.workdir={tmp_path}/run", *options)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"dapo_jax: {sentence(command)}\n" and not os.listdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.slow
@pytest.mark.long("train")
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_no_verifier_outlives_an_interrupted_command(command, tmp_path):
    name, value = "TEST_MARK", str(uuid.uuid4())
    point = "dapo_jax.rollout.engine:Engine"  # which is made once the verifiers have been started
    options = ["--output", str(tmp_path / "out")] if command == "evaluate" else []
    given = f"dapo_jax.{command}", "--config", TINY, f"--config.workdir={tmp_path}/run", *options
    done = run(AT_POINT, point, *given, **{name: value})
    assert (done.returncode, done.stderr) == (130, f"dapo_jax: {sentence(command)}\n")

    def marked() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [path.parent.name] if value.encode() in path.read_bytes() else []
        return found

    wait_until(lambda: not marked(), "the end of the verifiers")
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_begun_saves_instead(tmp_path):
    """StopRequest hears SIGINT from its first safe point on, and not before."""
    code = (
        "import signal\nfrom dapo_jax.command import interrupts\n"
        "from dapo_jax.parallel.stopping import Stopped, StopRequest\n"
        "interrupts.end_at_once('train')\nours = signal.getsignal(signal.SIGINT)\n"
        "with interrupts.undone(), StopRequest() as stop:\n"
        "    assert signal.getsignal(signal.SIGINT) == ours\n"
        "    try:\n"
        "        with stop.safe():\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "            stop.check()\n"
        "    except Stopped as reason: print(reason)\n"
        "assert signal.getsignal(signal.SIGINT) == ours\n"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped by SIGINT\n", "")
