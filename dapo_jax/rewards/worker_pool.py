"""Host: a verifier in worker processes, with a time limit for each sample.

Not multiprocessing: a fork of a process in which JAX runs threads can deadlock, and spawn imports the main
module again. A worker has no JAX loaded, and its own session, so that it can be killed with what it started.
"""

import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dapo_jax.rewards.verifiers import wrong_score
from dapo_jax.rewards.worker import receive, send

_START_LIMIT_S = 120.0  # for a worker to load its verifier
_REAP_LIMIT_S = 10.0  # for the system to end a killed process
_NUM_LOGGED = 3  # failures of one call that are logged in full

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The arguments of one call of the verifier."""

    data_source: str
    solution: str
    ground_truth: str
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one sample."""

    numbers: dict[str, float]  # "score", "acc" and what else the verifier returns
    pred: str | None  # the answer that it read, at most 1000 characters
    error: str | None  # None, or why there is no verdict; then the score is the lowest and acc is 0


class VerifierPool:
    """Scores samples in worker processes. A verifier that fails makes a wrong sample and does not end a run.

    Raises:
        ValueError: the verifier cannot be loaded, or an argument is out of range.
    """

    def __init__(self, verifier: str, *, num_workers: int, timeout_s: float) -> None:
        """Starts the workers and waits for the first.

        Args:
            verifier: a name in `verifiers.VERIFIERS`, or the dotted path of a function.
            timeout_s: seconds for one sample, after which its worker is killed and replaced.
        """
        if num_workers < 1:
            raise ValueError(f"reward.num_workers={num_workers} must be at least 1: raise it")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be positive: raise it")
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._workers: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # On Linux a worker ends with the thread that started it: so threads that live as long as the pool do.
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

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """The verdicts, in the order of the requests. RuntimeError if a new worker does not start."""
        return self.collect(requests, [self.submit(request) for request in requests])

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Begins to score in the background."""
        return self._threads.submit(self._judge, request)

    def collect(self, requests: Sequence[ScoreRequest], futures: Sequence[Future[Verdict]]) -> list[Verdict]:
        """Waits for the verdicts on submitted requests, and logs the failures among them."""
        verdicts = [future.result() for future in futures]
        failures = [(request, v.error) for request, v in zip(requests, verdicts, strict=True) if v.error]
        for request, error in failures[:_NUM_LOGGED]:
            _log.warning(
                "verifier %s failed: data_source=%r, %s, solution %r...",
                self._verifier, request.data_source, error, request.solution[:80],
            )  # fmt: skip
        if len(failures) > _NUM_LOGGED:
            _log.warning("verifier %s failed: %d of %d samples", self._verifier, len(failures), len(requests))
        return verdicts

    def close(self) -> None:
        """Kills the workers. Samples that are being scored end as failures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()
        for worker in list(self._workers):  # also those that were started meanwhile
            self._stop_worker(worker)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _judge(self, request: ScoreRequest) -> Verdict:
        worker = self._idle.get()
        try:
            try:
                worker.wait_until_ready()
            except ValueError as error:
                raise RuntimeError(f"a verifier process did not start: {error}") from error
            values, pred, error = worker.ask(request, self._timeout_s)
            if error is None:
                return Verdict(values, pred, None)
        except TimeoutError:
            self._stop_worker(worker)
            worker, error = self._start_worker(), f"timeout after {self._timeout_s:g} s"
        except (EOFError, OSError):
            exit_code = self._stop_worker(worker)
            worker, error = self._start_worker(), f"worker died (exit code {exit_code})"
        finally:
            self._idle.put(worker)
        lowest = wrong_score(self._verifier, request.data_source)
        return Verdict({"score": lowest, "acc": 0.0}, None, error)

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self._verifier)
        self._workers.add(worker)
        return worker

    def _stop_worker(self, worker: "_Worker") -> int | None:
        self._workers.discard(worker)
        return worker.stop()


class _Worker:
    """One worker process and this side of its connection. One thread at a time uses it."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._ready = False
        self._connection, inherited = socket.socketpair()
        # It finds the modules that this process finds; a verifier that uses JAX keeps off the accelerator.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "dapo_jax.rewards.worker", str(inherited.fileno()), verifier],
                stdin=subprocess.DEVNULL,
                pass_fds=[inherited.fileno()],
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Returns once the verifier is loaded. ValueError if it cannot be."""
        if self._ready:
            return
        try:
            error = pickle.loads(receive(self._connection, time.monotonic() + _START_LIMIT_S))
        except TimeoutError:
            error = self._not_loaded(f"did not load within {_START_LIMIT_S:g} s")
        except (EOFError, OSError):
            error = self._not_loaded(f"ended its process (exit code {self.stop()}) while it was loaded")
        if error is not None:
            raise ValueError(error)
        self._ready = True

    def ask(self, request: ScoreRequest, timeout_s: float) -> Any:
        """The worker's (numbers, pred, error). TimeoutError, or EOFError or OSError if the worker died."""
        deadline = time.monotonic() + timeout_s
        arguments = (request.data_source, request.solution, request.ground_truth, request.extra_info)
        send(self._connection, pickle.dumps(arguments), deadline)
        return pickle.loads(receive(self._connection, deadline))

    def kill(self) -> None:
        """Kills the process and those that it started. A process that is ending keeps its own exit code."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # both mean that it has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Kills, frees and returns the exit code; None if the system cannot end the process."""
        self.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_LIMIT_S)
        return self._process.returncode

    def _not_loaded(self, what: str) -> str:
        return f"reward.function={self._verifier!r} {what}: run `import` of its module alone to see why"
