"""Verifiers that fail in every way; the solution names the way."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

KEPT = []


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


def function(extra_info):
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


def interrupt(extra_info):
    raise KeyboardInterrupt


def abort(extra_info):
    os.abort()


def allocate_at_once(extra_info):
    return bytearray(10**12)[0]


def allocate_piecewise(extra_info):
    while True:
        KEPT.append(bytearray(1 << 20))


def allocate_in_its_frame(extra_info):
    grown = []
    while True:
        grown.append([0] * 10_000)


def start_threads_without_end(extra_info):
    while True:
        threading.Thread(target=time.sleep, args=(60,)).start()


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


def fork(extra_info):
    return float(os.fork() > 0)  # 0 in the forked copy


def leave_a_child(extra_info):
    child = subprocess.Popen(["sleep", "60"], start_new_session=extra_info["daemon"])
    Path(extra_info["path"]).write_text(str(child.pid))
    return 1.0


def leave_a_child_and_die(extra_info):
    leave_a_child(extra_info)
    os._exit(3)


RESULTS = {
    "none": None,
    "text": "1.0",
    "wrong_keys": {"reward": 1.0},
    "infinity": {"score": float("inf")},
    "nan": float("nan"),
    "huge_integer": {"score": 10**400},
    "unprintable_integer": 10**10000,
    "complex": 1 + 1j,
    "nested": {"score": 1.0, "more": {"score": 1.0}},
    "list": [1.0],
    "numbers_without_end": {"score": 1.0, **{str(i): 1.0 for i in range(101)}},
    "long_numbers": {"score": 1.0, "acc": 1.0, "pred": 10**10000, "n" * 2000: 1.0},
}


def give(extra_info):
    return RESULTS[extra_info["result"]]


class Command:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[0]}.was_run",)


def subverted(extra_info):
    """Writes to the pool directly, as injected code could."""
    connection = socket.socket(fileno=os.dup(int(sys.argv[1])))
    numbers = {"score": 1.0, "acc": 1.0}
    body = {
        "pickle": lambda: pickle.dumps(Command()),
        "random": lambda: bytes(range(256)),
        "empty": lambda: b"",
        "nothing": lambda: json.dumps(None),
        "deep": lambda: "[" * 500_000,
        "nan": lambda: json.dumps([numbers | {"score": float("nan")}, None, None, False]),
        "overflow": lambda: '[{"score": 1e999, "acc": 1.0}, null, null, false]',
        "digits": lambda: '[{"score": %s, "acc": 1.0}, null, null, false]' % ("9" * 100_000),
        "text": lambda: json.dumps([numbers | {"score": "1"}, None, None, False]),
        "no_score": lambda: json.dumps([{}, None, None, False]),
        "no_text": lambda: json.dumps([numbers, ["12"], None, False]),
        "long_text": lambda: json.dumps([numbers, "1" * 10_000, None, False]),
        "beyond_float32": lambda: json.dumps([numbers | {"score": 1e300}, None, None, False]),
        "many": lambda: json.dumps([numbers | {str(i): 0.0 for i in range(200)}, None, None, False]),
    }
    if extra_info["how"] == "huge":
        connection.sendall((1 << 60).to_bytes(8, "big"))
    elif extra_info["how"] == "beyond":
        connection.sendall(b"\xff" * 8)
    elif extra_info["how"] == "unfinished":
        connection.sendall((1 << 19).to_bytes(8, "big") + b"[")
    elif extra_info["how"] == "drip":
        connection.sendall((1 << 19).to_bytes(8, "big"))
        while True:
            connection.sendall(b" ")
            time.sleep(0.01)
    else:
        message = body[extra_info["how"]]()
        message = message.encode() if isinstance(message, str) else message
        connection.sendall(len(message).to_bytes(8, "big") + message)
    time.sleep(60)


def graded(extra_info):
    return 0.25


def echo(extra_info):
    return {"score": 1.0, "pred": repr(extra_info)}


def score_slowly(data_source, solution, ground_truth, extra_info):
    time.sleep(300)
