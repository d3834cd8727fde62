"""Host: one worker process as the pool sees it: started, asked, killed with all that it started.

Not multiprocessing: forking a process in which JAX runs threads can deadlock, and spawn imports the main module
again. A worker does not load JAX. It has its own session, so that the processes it starts can be killed with it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import MAX_ANSWER, Answer, MalformedAnswer, decode_answer, decode_start, receive, send
from dapo_jax.rewards.weighted import described

_START_LIMIT_S = 120.0  # for a worker to load its verifier
_REAP_LIMIT_S = 10.0  # for the system to end a killed process
_MARK = "DAPO_JAX_WORKER"  # environment variable that marks every process a worker starts


class Worker:
    """One worker process and the pool's end of its connection. Only one thread may use it at a time."""

    def __init__(self, verifier: str, memory_limit_mb: int, pattern: str) -> None:
        self._verifier = verifier
        self._ready = False
        self._mark = str(uuid.uuid4())
        self._connection, inherited = socket.socketpair()
        # A worker finds the same modules as this process; a verifier that uses JAX leaves the accelerator alone.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        environment[_MARK] = self._mark
        arguments = [str(inherited.fileno()), verifier, str(memory_limit_mb), pattern]
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "dapo_jax.rewards.worker", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[inherited.fileno()],
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Returns once the verifier is loaded. InputError if it cannot be loaded."""
        if self._ready:
            return
        try:
            error = decode_start(receive(self._connection, time.monotonic() + _START_LIMIT_S, limit=MAX_ANSWER))
        except TimeoutError:
            error = self._not_loaded(f"did not load within {_START_LIMIT_S:g} s")
        except MalformedAnswer as malformed:
            error = self._not_loaded(f"{malformed} while loading")
        except (EOFError, OSError):
            error = self._not_loaded(f"ended its process (exit code {self.stop()}) while loading")
        if error is not None:
            raise InputError(error)
        self._ready = True

    def ask(self, request: bytes, timeout_s: float) -> Answer:
        """The answer to an encoded request.

        Raises:
            TimeoutError: the worker has not answered within timeout_s.
            MalformedAnswer: it has sent something else than an answer.
            EOFError, OSError: it died.
        """
        deadline = time.monotonic() + timeout_s
        send(self._connection, request, deadline)
        return decode_answer(receive(self._connection, deadline, limit=MAX_ANSWER))

    def kill(self) -> None:
        """Kills the process and its session. A process that is already exiting keeps its exit code."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # both mean that it has exited
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Kills the process, frees its resources and returns its exit code; None if the system cannot end it."""
        self.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_LIMIT_S)
        self._kill_marked()
        return self._process.returncode

    def _kill_marked(self) -> None:
        """Kills processes that the worker started and that left its session. Linux only: elsewhere they live on."""
        entry = f"{_MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has exited, or belongs to another user
                if entry in process.read_bytes().split(b"\0"):
                    os.kill(int(process.parent.name), signal.SIGKILL)

    def _not_loaded(self, what: str) -> str:
        return f"{described(self._verifier)} {what}: import its module in a fresh Python to see why"
