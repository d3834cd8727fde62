"""Verifiers that fail in every way; the solution names the way."""

import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

KEPT = []
LONG = "3600"  # seconds: a test that waits for the end of a process gives up before
FOLDER = Path(__file__).parent


def score(data_source, solution, ground_truth, extra_info):
    if solution == "truth":
        return {"score": 1.0, "pred": repr(ground_truth)}
    if solution in FORGED or solution in CUT:
        return subverted(solution)
    return {**globals(), **WAYS}[solution](extra_info)


def score_slowly(data_source, solution, ground_truth, extra_info):
    time.sleep(300)


WAYS = {
    "right": lambda info: 1.0,
    "graded": lambda info: 0.25,
    "echo": lambda info: {"score": 1.0, "pred": repr(info)},
    "modules": lambda info: {"score": 1.0, "jax": "jax" in sys.modules},
    "named_numbers": lambda info: {"score": 2, "acc": True, "length": 7, "comment": "dropped", "pred": 12},
    "long_numbers": lambda info: {"score": 1.0, "acc": 1.0, "pred": 10**10000, "n" * 2000: 1.0},
    "huge_text": lambda info: {"score": 1.0, "pred": "1" * 50_000_000},
    "odd_text": lambda info: {"score": 1.0, "pred": "a\0b\ud800"},
    "environment": lambda info: {"score": 1.0, "pred": " ".join(os.environ.keys() & info["names"])},
    "limits": lambda info: {"score": 1.0, **{n: resource.getrlimit(getattr(resource, n))[0] for n in info["names"]}},
    "absent": lambda info: None,
    "function": lambda info: lambda: 0,
    "not_finite": lambda info: {"score": 1.0, "extra": float("nan")},
    "sleep": lambda info: time.sleep(60),
    "loop_in_c": lambda info: 9**9**9,
    "exit_hard": lambda info: os._exit(3),
    "exit_softly": lambda info: sys.exit(4),
    "kill_itself": lambda info: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda info: os.abort(),
    "close_everything": lambda info: os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    "recurse": lambda info: WAYS["recurse"](info),
    "allocate_at_once": lambda info: bytearray(10**12)[0],
    "fork": lambda info: float(os.fork() > 0),  # 0 in the forked copy
}


def fail(extra_info):
    raise ValueError("bad\nanswer " + "x" * 100_000)


def fail_without_words(extra_info):
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    raise Silent


def interrupt(extra_info):
    raise KeyboardInterrupt


def ignore_signals(extra_info):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def allocate_piecewise(extra_info):
    while True:
        KEPT.append(bytearray(1 << 20))


def allocate_in_its_frame(extra_info):
    grown = []
    while True:
        grown.append([0] * 10_000)


def start_threads_without_end(extra_info):
    while True:
        start_a_thread(extra_info)


def start_a_thread(extra_info):
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 1.0


def open_files_without_end(extra_info):
    while True:
        KEPT.append(os.pipe())


def print_a_flood(extra_info):
    for _ in range(1000):
        print("x" * 1000)
    return 1.0


def print_escapes(extra_info):
    print("\x1b[31mred", file=sys.stderr)
    raise ValueError("\x1b]0;owned\x07")


def close_stdout(extra_info):
    print("written by a verifier")
    sys.stdout.flush()
    sys.stdout.close()
    os.close(1)
    return 1.0


def where(extra_info):
    Path(extra_info["path"]).write_text(str(os.getpid()))
    time.sleep(int(LONG))


def start_a_child(extra_info):
    child = subprocess.Popen(["sleep", LONG])
    Path(extra_info["path"]).write_text(str(child.pid))
    child.wait()


def leave_a_child(extra_info):
    hidden = {"start_new_session": True, "env": {}} if extra_info["daemon"] else {}
    child = subprocess.Popen(["sleep", LONG], **hidden)
    Path(extra_info["path"]).write_text(str(child.pid))
    return 1.0


def leave_a_child_and_die(extra_info):
    leave_a_child(extra_info)
    os._exit(3)


class Command:
    def __reduce__(self):
        return os.system, (f"touch {FOLDER / 'forged.was_run'}",)


def forged(numbers, pred=None):
    return json.dumps([{"score": 1.0, "acc": 1.0} | numbers, pred, None, False]).encode()


FORGED = {  # messages that are no answers
    "pickle": pickle.dumps(Command()),
    "random": bytes(range(256)),
    "empty": b"",
    "nothing": b"null",
    "deep": b"[" * 500_000,
    "nan": forged({"score": float("nan")}),
    "overflow": b'[{"score": 1e999, "acc": 1.0}, null, null, false]',
    "digits": b'[{"score": %s, "acc": 1.0}, null, null, false]' % (b"9" * 100_000),
    "text": forged({"score": "1"}),
    "no_score": b"[{}, null, null, false]",
    "no_text": forged({}, ["12"]),
    "long_text": forged({}, "1" * 10_000),
    "beyond_float32": forged({"score": 1e300}),
    "below_float32": forged({"score": -1e300}),
    "many": forged({str(i): 0.0 for i in range(200)}),
}
CUT = {  # of which more is announced than comes
    "huge": (1 << 60).to_bytes(8, "big"),
    "beyond": b"\xff" * 8,
    "unfinished": (1 << 19).to_bytes(8, "big") + b"[",
    "drip": (1 << 19).to_bytes(8, "big"),
}


def subverted(how):
    """Writes to the pool directly, as injected code could."""
    connection = socket.socket(fileno=os.dup(int(sys.argv[1])))
    connection.sendall(CUT[how] if how in CUT else len(FORGED[how]).to_bytes(8, "big") + FORGED[how])
    while how == "drip":
        connection.sendall(b" ")
        time.sleep(0.01)
    time.sleep(60)
