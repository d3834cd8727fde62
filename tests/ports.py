"""Ports for the processes that a test starts: each is given once in a session, and to one worker."""

import contextlib
import os
import random
import socket

RANGE = range(20_000, 32_000)  # below those that a system gives to whoever asks for any, until a process takes it
WORKERS = 8  # at most, for which ports are apart
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_left = iter(random.SystemRandom().sample(RANGE[_WORKER::WORKERS], len(RANGE) // WORKERS))


def free_port() -> int:
    for port in _left:
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {RANGE} is left")
