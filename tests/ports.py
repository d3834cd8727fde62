"""A port for the processes that a test starts."""

import contextlib
import random
import socket

RANGE = range(20_000, 32_000)  # below those that a system gives to whoever asks for any, until a process takes it


def free_port() -> int:
    for port in random.SystemRandom().sample(RANGE, 100):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {RANGE} is free")
