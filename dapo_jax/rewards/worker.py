"""Host: one verifier process: `python -m dapo_jax.rewards.worker FD VERIFIER MEMORY_LIMIT_MB PATTERN`.

The pool starts it. FD is an inherited socket, PATTERN that of the verifier `format`. The worker first receives the
functions of the pool's session that the verifier needs (`session`), and reports whether the verifier loaded (null, or
the error). It then answers requests until the pool closes the socket (`messages`).
"""

import errno
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dapo_jax.rewards.messages import (
    NO_VERDICT,
    Answer,
    decode_request,
    encode_answer,
    normalize_result,
    receive,
    send,
    short,
)
from dapo_jax.rewards.session import of_session, received
from dapo_jax.rewards.verifiers import Verifier, load_verifier
from dapo_jax.rewards.weighted import described
from dapo_jax.rewards.worker_supervisor import fork_worker

MAX_FILE = 256 << 20  # bytes of a file that a verifier writes
MORE_TASKS = 2048  # processes and threads of its user, more than when it starts
_EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


def main() -> None:
    descriptor, name, memory_limit_mb, pattern = sys.argv[1:]
    connection, reply = connected(int(descriptor), int(memory_limit_mb))
    try:
        verifier, error = _load(name, pattern, [receive(connection) for _ in of_session(name)])
        reply(json.dumps(error).encode())
        while verifier is not None:
            reply(encode_answer(answer(verifier, receive(connection))))
    except (EOFError, ConnectionError):
        return


def connected(descriptor: int, memory_limit_mb: int) -> tuple[socket.socket, Callable[[bytes], None]]:
    """Returns in a new process, with limits: its end of the pool's connection, and what sends a message there."""
    fork_worker(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # processes that the verifier starts must not keep the pool waiting
    _limit(memory_limit_mb)
    worker = os.getpid()

    def reply(message: bytes) -> None:
        if os.getpid() != worker:  # the verifier forked: the copy of this process must not answer
            os._exit(0)
        send(connection, message)

    return connection, reply


def answer(verifier: Verifier, request: bytes) -> Answer:
    """The verifier's normalised result for an encoded request, or the error that it raised; NO_VERDICT for None."""
    try:
        result = verifier(*decode_request(request))
        if result is None:
            return Answer({}, None, NO_VERDICT)
        values, pred = normalize_result(result)
        return Answer(values, pred, None)
    except BaseException as error:  # including SystemExit and KeyboardInterrupt: the next sample may be fine
        raised = error.with_traceback(None)  # frees its frames and what they hold
        raised.__cause__ = raised.__context__ = None
    return Answer({}, None, error_text(raised), exhausted=is_exhaustion(raised))


def _load(name: str, pattern: str, pickles: Sequence[bytes]) -> tuple[Verifier | None, str | None]:
    """The verifier, or the reason why it cannot be loaded."""
    try:
        return load_verifier(name, received(name, pickles), pattern=pattern), None
    except ValueError as error:
        return None, str(error)
    except MemoryError:
        return None, f"{described(name)} does not load: {_out_of_memory()}"
    except BaseException as error:
        return None, f"{described(name)} must load, but raised {error_text(error)}: correct its module"


def _limit(memory_mb: int) -> None:
    """Limits the writable memory, the size of files and the processes, also for what the verifier starts.

    RLIMIT_DATA, not RLIMIT_AS, because threaded libraries reserve gigabytes of address space that they never use.
    RLIMIT_NPROC counts the processes and threads of the user, those of other programs included, and root has none.
    """
    limits = {resource.RLIMIT_FSIZE: MAX_FILE, resource.RLIMIT_NPROC: _tasks_of_user() + MORE_TASKS}
    if memory_mb:
        limits[resource.RLIMIT_DATA] = memory_mb << 20
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _tasks_of_user() -> int:
    """Processes and threads of this user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has exited
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def is_exhaustion(error: BaseException) -> bool:
    """Whether the process has run out of a resource that it may not get back."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "start new thread" in str(error))


def error_text(error: BaseException, what: str = "the verifier", section: str = "reward") -> str:
    """What was raised, in one line; of a lack of memory, the limit of `what`, which a section of the config sets."""
    if isinstance(error, MemoryError):
        return _out_of_memory(what, section)
    return short(" ".join("".join(traceback.format_exception_only(error)).split()))


def _out_of_memory(what: str = "the verifier", section: str = "reward") -> str:
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    allowed = "the machine has" if limit == resource.RLIM_INFINITY else f"{section}.memory_limit_mb={limit >> 20}"
    return f"MemoryError: {what} needs more than {allowed}"


if __name__ == "__main__":
    main()
