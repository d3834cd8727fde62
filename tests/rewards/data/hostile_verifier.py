"""Verifiers that go wrong in every way; which way, the solution says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def score(data_source, solution, ground_truth, extra_info):
    return globals()[solution](extra_info)


def right(extra_info):
    return 1.0


def sleep(extra_info):
    time.sleep(60)


def loop_in_c(extra_info):
    return 9**9**9


def ignore_signals(extra_info):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def start_a_child(extra_info):
    child = subprocess.Popen(["sleep", "60"])
    Path(extra_info["path"]).write_text(str(child.pid))
    child.wait()


def exit_hard(extra_info):
    os._exit(3)


def exit_softly(extra_info):
    sys.exit(4)


def kill_itself(extra_info):
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything(extra_info):
    os.closerange(0, 100)
    return 1.0


def close_stdout(extra_info):
    print("written by a verifier")
    sys.stdout.flush()
    sys.stdout.close()
    os.close(1)
    return 1.0


def fail(extra_info):
    raise ValueError("bad\nanswer " + "x" * 100_000)


def fail_without_words(extra_info):
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    raise Silent


def recurse(extra_info):
    return recurse(extra_info)


def unpicklable(extra_info):
    return lambda: 0


def huge_text(extra_info):
    return {"score": 1.0, "pred": "1" * 50_000_000}


def odd_text(extra_info):
    return {"score": 1.0, "pred": "a\0b\ud800"}


def named_numbers(extra_info):
    return {"score": 2, "acc": True, "length": 7, "comment": "dropped", "pred": 12}


def not_finite(extra_info):
    return {"score": 1.0, "extra": float("nan")}


def modules(extra_info):
    return {"score": 1.0, "jax": "jax" in sys.modules}


def where(extra_info):
    Path(extra_info["path"]).write_text(str(os.getpid()))
    time.sleep(60)
