"""Host: the messages between the pool and a worker: length-prefixed JSON, never a pickle; and results in them.

The worker has read hostile text, so the pool trusts nothing it sends. Size and time of an answer are bounded, and a
malformed answer counts as the worker's death. Decoding a message cannot run code.
"""

import json
import math
import numbers
import reprlib
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dapo_jax.data.row_schema import plain

MAX_ANSWER = 1 << 20  # bytes of one message from a worker
MAX_TEXT = 1000  # characters of pred, of an error and of a number's name
MAX_NUMBERS = 100  # that a verifier may return per sample
MAX_NUMBER = (2 - 2**-23) * 2.0**127  # the largest float32, the type of rewards and filters
EPISODE_NUMBERS = ("num_turns", "observation_tokens")  # that a run counts, whatever a verifier says
WRONG_RESULT = "verifier must return"  # start of the error for an invalid result
NO_VERDICT = "the function returned None: no verdict"  # the error for a function that says that it has none


class MalformedAnswer(ConnectionError):
    """The message is not a worker's answer."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer to one request."""

    numbers: dict[str, float]  # finite in float32, with "score" and "acc"; empty after an error
    pred: str | None
    error: str | None
    exhausted: bool = False  # the worker is out of memory, threads or files: replace it


def encode_request(arguments: tuple[str, str, Any, dict[str, Any]]) -> bytes:
    """(data_source, solution, ground_truth, extra_info) as JSON.

    Types that JSON lacks are converted: Decimal, UUID and timedelta to `str`; dates and times to ISO 8601; bytes to
    base64; tuples and NumPy arrays to lists; NumPy scalars to numbers; keys to text. NaN, infinities and lone
    surrogates are kept. Anything else raises TypeError, ValueError or RecursionError.
    """
    return json.dumps(arguments, default=plain).encode()


def decode_request(message: bytes) -> tuple[str, str, Any, dict[str, Any]]:
    return tuple(json.loads(message))


def encode_answer(answer: Answer) -> bytes:
    return json.dumps([answer.numbers, answer.pred, answer.error, answer.exhausted]).encode()


def decode_answer(message: bytes) -> Answer:
    """The answer in an untrusted message. MalformedAnswer if it is not one."""
    try:
        numbers, pred, error, exhausted = json.loads(message)
        answer = Answer(numbers, pred, error, exhausted)
        valid = (
            all(text is None or (isinstance(text, str) and len(text) <= MAX_TEXT) for text in (pred, error))
            and isinstance(exhausted, bool)
            and isinstance(numbers, dict)
            and len(numbers) <= MAX_NUMBERS
            and all(isinstance(value, float) and abs(value) <= MAX_NUMBER for value in numbers.values())
            and (error is not None or numbers.keys() >= {"score", "acc"})
        )
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise MalformedAnswer("sent an invalid answer")
    return answer


def decode_start(message: bytes) -> str | None:
    """A worker's first message: None if it loaded its verifier, else the error. MalformedAnswer if it is neither."""
    try:
        error = json.loads(message)
    except (ValueError, RecursionError):
        error = 0
    if error is not None and not isinstance(error, str):
        raise MalformedAnswer("sent an invalid message")
    return error


def send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Sends a message by the deadline (time.monotonic).

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the other end is closed.
    """
    _limit(connection, deadline)
    connection.sendall(len(message).to_bytes(8, "big") + message)


def receive(connection: socket.socket, deadline: float | None = None, *, limit: int | None = None) -> bytes:
    """The next message, of at most `limit` bytes.

    Raises:
        TimeoutError: the deadline (time.monotonic) has passed.
        EOFError, OSError: the connection was closed.
        MalformedAnswer: the message would be longer than `limit`; nothing is allocated for it.
    """
    size = int.from_bytes(_read(connection, 8, deadline), "big")
    if limit is not None and size > limit:
        raise MalformedAnswer(f"announced {size} bytes, more than {limit}")
    return _read(connection, size, deadline)


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


def normalize_result(result: Any) -> tuple[dict[str, float], str | None]:
    """A verifier's result as named floats (with "score" and "acc", finite in float32) and pred.

    A bare number is both score and acc. In a dict acc defaults to the score; text other than pred is dropped.
    ValueError for any other result.
    """
    bare = not isinstance(result, Mapping)
    if bare:
        result = {"score": result}
    if len(result) > MAX_NUMBERS:
        raise ValueError(f"{WRONG_RESULT} at most {MAX_NUMBERS} numbers, not {len(result)}")
    values = {
        short(_text(name)): _finite("" if bare else f"{_described(name)}: ", value)
        for name, value in result.items()
        if name != "pred" and (name in ("score", "acc") or not isinstance(value, str))
    }
    if "score" not in values:
        raise ValueError(f"{WRONG_RESULT} a number or a dict with 'score', not {_described(result)}")
    values.setdefault("acc", values["score"])
    pred = result.get("pred")
    return values, None if pred is None else short(_text(pred))


def _finite(name: str, value: Any) -> float:
    kind = "a finite number"
    with suppress(TypeError, ValueError, OverflowError):
        number = value.item() if hasattr(value, "item") else value  # a NumPy scalar
        if isinstance(number, numbers.Real) and math.isfinite(number):
            if abs(float(number)) <= MAX_NUMBER:
                return float(number)
            kind = "a number that is finite in float32"
    raise ValueError(f"{WRONG_RESULT} {kind}, not {name}{_described(value)}")


def _described(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # an integer with too many digits, or a broken __repr__
        return f"a {type(value).__name__}"


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return _described(value)


def short(text: str) -> str:
    """The beginning of a text that fits into a worker's answer."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
