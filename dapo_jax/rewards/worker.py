"""Host: one verifier process: `python -m dapo_jax.rewards.worker FD VERIFIER`. The pool starts it.

FD is an inherited socket. On it the worker first reports whether the verifier loaded (None, or the error). It
then answers each request with (numbers, pred, error) until the other side closes. Messages are pickles behind
their length.
"""

import ctypes
import math
import numbers
import os
import pickle
import reprlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from dapo_jax.rewards.verifiers import Verifier, load_verifier

_MAX_TEXT = 1000  # characters of pred and of an error that are sent back
_PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent ends (Linux)

Answer = tuple[dict[str, float], str | None, str | None]  # numbers, pred, error


def main() -> None:
    descriptor, name = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)  # what the verifier starts must not keep the pool waiting
    os.dup2(2, 1)  # what the verifier prints goes to stderr
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        verifier = load_verifier(name)
    except Exception as error:
        send(connection, pickle.dumps(str(error)))
        return
    try:
        send(connection, pickle.dumps(None))
        while True:
            send(connection, pickle.dumps(answer(verifier, receive(connection))))
    except (EOFError, ConnectionError):
        return


def answer(verifier: Verifier, request: bytes) -> Answer:
    """The verifier's normalised result for a pickled (data_source, solution, ground_truth, extra_info)."""
    try:
        values, pred = normalize_result(verifier(*pickle.loads(request)))
        return values, pred, None
    except (Exception, SystemExit) as error:
        return {}, None, _short(" ".join("".join(traceback.format_exception_only(error)).split()))


def normalize_result(result: Any) -> tuple[dict[str, float], str | None]:
    """A verifier's result as named finite floats with "score" and "acc", and pred. ValueError for all else.

    A bare number is the score and acc. In a dict acc defaults to the score; text other than pred is dropped.
    """
    if not isinstance(result, Mapping):
        result = {"score": result}
    values = {
        str(name): _finite(name, value)
        for name, value in result.items()
        if name != "pred" and (name in ("score", "acc") or not isinstance(value, str))
    }
    if "score" not in values:
        raise ValueError(f"verifier must return a number or a dict with 'score', not {reprlib.repr(result)}")
    values.setdefault("acc", values["score"])
    pred = result.get("pred")
    return values, None if pred is None else _short(str(pred))


def send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Sends a message by the deadline (time.monotonic). TimeoutError after it, OSError if nobody listens."""
    _limit(connection, deadline)
    connection.sendall(len(message).to_bytes(8, "big") + message)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """The next message. TimeoutError after the deadline (time.monotonic), EOFError or OSError without one."""
    return _read(connection, int.from_bytes(_read(connection, 8, deadline), "big"), deadline)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        _limit(connection, deadline)
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError("the connection was closed")
        data += chunk
    return bytes(data)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _finite(name: Any, value: Any) -> float:
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(f"verifier must return a finite number, not {reprlib.repr(name)}: {reprlib.repr(value)}")


def _short(text: str) -> str:
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
