"""Host: a verifier in worker processes, with a time limit per sample and a memory limit per process.

A model's responses are hostile text: the code that reads them may hang, crash or be exploited. It never runs in the
trainer's process, and the pool trusts nothing that a worker sends (`messages`).
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from dapo_jax.errors import InputError
from dapo_jax.monitor.environment import without_secrets
from dapo_jax.rewards.messages import (
    MAX_ANSWER,
    NO_VERDICT,
    MalformedAnswer,
    decode_answer,
    decode_start,
    receive,
    send,
)
from dapo_jax.rewards.session import pickles
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers, encoded, no_verdict
from dapo_jax.rewards.weighted import described

_START_LIMIT_S = 120.0  # for a worker to load its verifier
_REAP_LIMIT_S = 10.0  # for the system to end a killed process
WORKER = "dapo_jax.rewards.worker"

_log = logging.getLogger(__name__)


class Worker:
    """One worker process and the pool's end of its connection. Only one thread may use it at a time.

    Not multiprocessing: forking a process in which JAX runs threads can deadlock, and spawn imports the main module
    again. A worker does not load JAX. What it starts ends with it (worker_supervisor.py).
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        functions: Sequence[bytes],
        what: str,
    ) -> None:
        """
        Args:
            module: that the process runs, with the number of its socket and these arguments.
            functions: `session.pickles` of what it loads.
            what: it loads, for messages.
        """
        self._what = what
        self._ready = False
        self._connection, inherited = socket.socketpair()
        # A worker finds the same modules as this process; a verifier that uses JAX leaves the accelerator alone.
        environment = {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", module, str(inherited.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[inherited.fileno()],
                env=environment,
                start_new_session=True,
            )
        with suppress(OSError, TimeoutError):  # it has ended: `wait_until_ready` says so
            for function in functions:
                send(self._connection, function, time.monotonic() + _START_LIMIT_S)

    def wait_until_ready(self) -> None:
        """Returns once it has loaded. InputError if it cannot."""
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

    def ask(self, request: bytes, timeout_s: float, *, limit: int = MAX_ANSWER) -> bytes:
        """The answer, of at most `limit` bytes, to an encoded request.

        Raises:
            TimeoutError: the worker has not answered within timeout_s.
            MalformedAnswer: it has sent more.
            EOFError, OSError: it died.
        """
        deadline = time.monotonic() + timeout_s
        send(self._connection, request, deadline)
        return receive(self._connection, deadline, limit=limit)

    def kill(self) -> None:
        """Begins to end the process and all that it started. One that is already exiting keeps its exit code."""
        self._process.terminate()

    def stop(self) -> int | None:
        """Ends the process, frees its resources and returns its exit code; None if the system cannot end it."""
        if self._process.returncode is None:
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_LIMIT_S)
            with suppress(ProcessLookupError, PermissionError):  # both mean that nothing is left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._connection.close()
        return self._process.returncode

    def _not_loaded(self, what: str) -> str:
        return f"{self._what} {what}: import its module in a fresh Python to see why"


class VerifierPool(Verifiers):
    """Scores samples in worker processes. A response that makes the verifier fail is wrong; the run continues.

    Raises:
        InputError: the verifier cannot be loaded, or a variable of `env` is not set.
    """

    def __init__(
        self,
        verifier: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_limit_mb: int = 0,
        error_score: float | None = None,
        pattern: str = "",
        env: Collection[str] = (),
        hidden_env: Collection[str] = (),
    ) -> None:
        """Starts the workers and waits until the first is ready.

        Args:
            verifier: a name of `verifiers.load_verifier`.
            timeout_s: seconds per sample, after which its worker is killed and replaced.
            memory_limit_mb: MiB that a worker may write to (enforced on Linux); a sample that needs more counts as
                wrong, and its worker is replaced. 0 = no limit.
            error_score: of a response that makes the verifier fail; None = `verifiers.wrong_score`.
            pattern: of the verifier `format`.
            env: secret environment variables that workers get.
            hidden_env: variables that they do not get, besides those that are secret by name or value.
        """
        if missing := [name for name in env if name not in os.environ]:
            raise InputError(f"reward.env={tuple(env)} must be variables that are set: export {missing[0]}")
        super().__init__(verifier, error_score)
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._pattern = pattern
        self._functions = pickles(verifier)
        self._environment = without_secrets(os.environ, env, hidden_env)
        if left_out := sorted(os.environ.keys() - self._environment.keys()):
            names = ", ".join(left_out)
            _log.info("verifier processes do not get %s: name what they need in reward.env", names)
        self._num_replaced = 0  # since `take_replaced`
        self._counting = threading.Lock()
        self._workers: set[Worker] = set()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        # On Linux a worker dies with the thread that started it, so these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verifier")
        try:
            starts = [self._threads.submit(self._start_worker) for _ in range(num_workers)]
            workers = [start.result() for start in starts]
            workers[0].wait_until_ready()
        except BaseException:
            self.close()
            raise
        for worker in workers:
            self._idle.put(worker)

    def take_replaced(self) -> int:
        """Workers replaced since the last call. If there are some in every step, look at the log."""
        with self._counting:
            new, self._num_replaced = self._num_replaced, 0
        return new

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""
        return self._threads.submit(self._score, request)

    def close(self) -> None:
        """Kills the workers. Samples still being scored count as failures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:  # including those started in the meantime
            worker.stop()

    def _score(self, request: ScoreRequest) -> Verdict:
        message = encoded(request)
        if isinstance(message, str):
            return no_verdict(message)
        worker, replaces = self._idle.get(), False
        try:
            try:
                worker.wait_until_ready()
            except ValueError as error:
                raise RuntimeError(f"a verifier process did not start: {error}") from error
            replaces = True
            answer = decode_answer(worker.ask(message, self._timeout_s))
            replaces = answer.exhausted
            if answer.error is None:
                return Verdict(answer.numbers, answer.pred, None)
            return no_verdict(NO_VERDICT) if answer.error == NO_VERDICT else self.wrong(request, answer.error)
        except BrokenPipeError:  # it was dead before it could read the request
            return no_verdict(f"the worker had died (exit code {worker.stop()})")
        except TimeoutError:
            return self.wrong(request, f"timeout after {self._timeout_s:g} s")
        except MalformedAnswer as malformed:
            return self.wrong(request, f"worker died ({malformed})")
        except (EOFError, OSError):
            return self.wrong(request, f"worker died (exit code {worker.stop()})")
        finally:
            try:
                worker = self._replaced(worker) if replaces else worker
            finally:  # even if none can be started: others wait for it
                self._idle.put(worker)

    def _replaced(self, worker: Worker) -> Worker:
        """A new worker in the place of one, which is ended."""
        worker.stop()
        self._workers.discard(worker)
        with self._counting:
            self._num_replaced += 1
        return self._start_worker()

    def _start_worker(self) -> Worker:
        arguments = self.name, str(self._memory_limit_mb), self._pattern
        worker = Worker(WORKER, arguments, self._environment, self._functions, described(self.name))
        self._workers.add(worker)
        return worker
