"""Host: one worker process as the pool sees it: started, asked, killed with all that it started.

Not multiprocessing: forking a process in which JAX runs threads can deadlock, and spawn imports the main module
again. A worker does not load JAX. What it starts ends with it (worker_supervisor.py).
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import MAX_ANSWER, Answer, MalformedAnswer, decode_answer, decode_start, receive, send
from dapo_jax.rewards.weighted import described

_START_LIMIT_S = 120.0  # for a worker to load its verifier
_REAP_LIMIT_S = 10.0  # for the system to end a killed process


class Worker:
    """One worker process and the pool's end of its connection. Only one thread may use it at a time."""

    def __init__(
        self,
        verifier: str,
        memory_limit_mb: int,
        pattern: str,
        environment: Mapping[str, str],
        functions: Sequence[bytes],
    ) -> None:
        """
        Args:
            functions: `session.pickles` of the verifier.
        """
        self._verifier = verifier
        self._ready = False
        self._connection, inherited = socket.socketpair()
        # A worker finds the same modules as this process; a verifier that uses JAX leaves the accelerator alone.
        environment = {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        arguments = [str(inherited.fileno()), verifier, str(memory_limit_mb), pattern]
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "dapo_jax.rewards.worker", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[inherited.fileno()],
                env=environment,
                start_new_session=True,
            )
        with suppress(OSError, TimeoutError):  # it has ended: `wait_until_ready` says so
            for function in functions:
                send(self._connection, function, time.monotonic() + _START_LIMIT_S)

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
        """Begins to end the process and all that it started. One that is already exiting keeps its exit code."""
        self._process.terminate()

    def stop(self) -> int | None:
        """Ends the process, frees its resources and returns its exit code; None if the system cannot end it."""
        self.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_LIMIT_S)
        with suppress(ProcessLookupError, PermissionError):  # both mean that nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.returncode

    def _not_loaded(self, what: str) -> str:
        return f"{described(self._verifier)} {what}: import its module in a fresh Python to see why"
