"""Host: what passes between the pool and a worker: JSON behind its length, never a pickle.

The worker has read hostile text, so the pool trusts nothing that comes from it: an answer is bounded in size and
time, and one that is not exactly as below counts as the worker's death. Nothing that is read can run code.
"""

import json
import socket
import time
from dataclasses import dataclass
from typing import Any

from dapo_jax.data.json_values import plain

MAX_ANSWER = 1 << 20  # bytes of one message from a worker
MAX_TEXT = 1000  # characters of pred, of an error and of a number's name
MAX_NUMBERS = 100  # that a verifier may return for one sample
MAX_NUMBER = (2 - 2**-23) * 2.0**127  # the largest float32: rewards and filters compute in it
WRONG_RESULT = "verifier must return"  # how the error for a result that is no verdict begins


class MalformedAnswer(ConnectionError):
    """What came is no answer of a worker."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer to one request."""

    numbers: dict[str, float]  # finite in float32, with "score" and "acc"; empty where there is an error
    pred: str | None
    error: str | None
    exhausted: bool = False  # the worker is out of memory, threads or files: replace it


def encode_request(arguments: tuple[str, str, Any, dict[str, Any]]) -> bytes:
    """(data_source, solution, ground_truth, extra_info) as JSON.

    What JSON lacks in extra_info becomes: Decimal, UUID and timedelta their `str`; dates and times ISO 8601; bytes
    base64; a tuple or NumPy array a list; a NumPy scalar its number; a key text. NaN, infinities and lone surrogates
    stay. TypeError, ValueError or RecursionError for anything else.
    """
    return json.dumps(arguments, default=plain).encode()


def decode_request(message: bytes) -> tuple[str, str, Any, dict[str, Any]]:
    return tuple(json.loads(message))


def encode_answer(answer: Answer) -> bytes:
    return json.dumps([answer.numbers, answer.pred, answer.error, answer.exhausted]).encode()


def decode_answer(message: bytes) -> Answer:
    """The answer in a message that anybody may have written. MalformedAnswer if it is none."""
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
        raise MalformedAnswer("sent no valid answer")
    return answer


def decode_start(message: bytes) -> str | None:
    """A worker's first message: None if its verifier is loaded, else why not. MalformedAnswer if it is neither."""
    try:
        error = json.loads(message)
    except (ValueError, RecursionError):
        error = 0
    if error is not None and not isinstance(error, str):
        raise MalformedAnswer("sent no valid message")
    return error


def send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Sends a message by the deadline (time.monotonic). TimeoutError after it, OSError if nobody listens."""
    _limit(connection, deadline)
    connection.sendall(len(message).to_bytes(8, "big") + message)


def receive(connection: socket.socket, deadline: float | None = None, *, limit: int | None = None) -> bytes:
    """The next message, of at most `limit` bytes.

    TimeoutError after the deadline (time.monotonic), EOFError or OSError without a message, MalformedAnswer where
    it would be longer: nothing is allocated for it.
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
