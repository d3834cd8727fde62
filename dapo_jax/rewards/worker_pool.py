"""Host: a verifier in worker processes, with a limit of time for each sample and of memory for each process.

What a model writes is hostile text, and what reads it may hang, crash, or be turned against us. So it never runs in
the trainer's process, and nothing that a worker sends is trusted (`messages`).

Not multiprocessing: a fork of a process in which JAX runs threads can deadlock, and spawn imports the main
module again. A worker has no JAX loaded, and its own session, so that it can be killed with what it started.
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
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import (
    MAX_ANSWER,
    Answer,
    MalformedAnswer,
    decode_answer,
    decode_start,
    encode_request,
    receive,
    send,
)
from dapo_jax.rewards.verifiers import wrong_score

_START_LIMIT_S = 120.0  # for a worker to load its verifier
_REAP_LIMIT_S = 10.0  # for the system to end a killed process
_MARK = "DAPO_JAX_WORKER"  # environment variable by which what a worker started is found
_NUM_LOGGED = 3  # failures of one call that are logged in full

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The arguments of one call of the verifier."""

    data_source: str
    solution: str
    ground_truth: Any  # text or plain JSON
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one sample."""

    numbers: dict[str, float]  # "score", "acc" and what else the verifier returns
    pred: str | None  # the answer that it read, at most 1000 characters
    error: str | None  # None, or why there is no verdict; then acc is 0, and score and acc are all there is


class VerifierPool:
    """Scores samples in worker processes. A verifier that fails makes a wrong sample and does not end a run.

    Raises:
        ValueError: the verifier cannot be loaded, or an argument is out of range.
    """

    def __init__(
        self,
        verifier: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_limit_mb: int = 0,
        error_score: float | None = None,
    ) -> None:
        """Starts the workers and waits for the first.

        Args:
            verifier: a name in `verifiers.VERIFIERS`, or the path of a function (`own_function`).
            timeout_s: seconds for one sample, after which its worker is killed and replaced.
            memory_limit_mb: MiB that a worker may write to (enforced on Linux); a sample that needs more is wrong,
                and its worker is replaced. 0 = none.
            error_score: of a sample without a verdict; None = `verifiers.wrong_score`.
        """
        if num_workers < 1:
            raise InputError(f"reward.num_workers={num_workers} must be at least 1: raise it")
        if not timeout_s > 0:
            raise InputError(f"reward.timeout_s={timeout_s} must be positive: raise it")
        if memory_limit_mb < 0:
            raise InputError(f"reward.memory_limit_mb={memory_limit_mb} must be 0 (none) or more: raise it")
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._error_score = error_score
        self._num_replaced = self._taken = 0
        self._warned_of_graded = False
        self._counting = threading.Lock()
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

    @property
    def num_replaced(self) -> int:
        """Workers that have been replaced since the start. One that grows with every step says: look at the log."""
        return self._num_replaced

    def take_replaced(self) -> int:
        """Workers that have been replaced since the last call."""
        with self._counting:
            new, self._taken = self._num_replaced - self._taken, self._num_replaced
        return new

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """The verdicts, in the order of the requests. RuntimeError if a new worker does not start."""
        return self.collect(requests, [self.submit(request) for request in requests])

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Begins to score in the background."""
        return self._threads.submit(self._judge, request)

    def collect(self, requests: Sequence[ScoreRequest], futures: Sequence[Future[Verdict]]) -> list[Verdict]:
        """Waits for the verdicts on submitted requests, and logs the failures among them."""
        verdicts = [future.result() for future in futures]
        self.warn_of_graded(verdicts)
        failures = [(request, v.error) for request, v in zip(requests, verdicts, strict=True) if v.error]
        for request, error in failures[:_NUM_LOGGED]:
            _log.warning(
                "verifier %s failed: data_source=%r, %s, solution %r...",
                self._verifier,
                request.data_source,
                error,
                request.solution[:80],
            )
        if len(failures) > _NUM_LOGGED:
            _log.warning("verifier %s failed: %d of %d samples", self._verifier, len(failures), len(requests))
        return verdicts

    def warn_of_graded(self, verdicts: Sequence[Verdict]) -> None:
        """Warns, once, if an `acc` is neither 0 nor 1."""
        graded = [verdict.numbers["acc"] for verdict in verdicts if verdict.numbers["acc"] not in (0.0, 1.0)]
        if graded and not self._warned_of_graded:
            self._warned_of_graded = True
            _log.warning(
                "reward.function=%r gives acc=%g, neither 0 nor 1: what is reported as accuracy (acc/mean@k) is the "
                "mean of a graded score, and the group filter keeps a group for the smallest difference; return a dict "
                "with acc, 1 for a right answer and 0 for a wrong one, besides score",
                self._verifier,
                graded[0],
            )

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
        try:
            message = encode_request((request.data_source, request.solution, request.ground_truth, request.extra_info))
        except (TypeError, ValueError, RecursionError) as error:
            return self._wrong(request, f"extra_info must have a form in JSON: {error}")
        worker = self._idle.get()
        try:
            try:
                worker.wait_until_ready()
            except ValueError as error:
                raise RuntimeError(f"a verifier process did not start: {error}") from error
            answer = worker.ask(message, self._timeout_s)
            if answer.exhausted:
                worker = self._replace(worker)[0]
            error = answer.error
            if error is None:
                return Verdict(answer.numbers, answer.pred, None)
        except TimeoutError:
            worker = self._replace(worker)[0]
            error = f"timeout after {self._timeout_s:g} s"
        except MalformedAnswer as malformed:
            worker = self._replace(worker)[0]
            error = f"worker died ({malformed})"
        except (EOFError, OSError):
            worker, exit_code = self._replace(worker)
            error = f"worker died (exit code {exit_code})"
        finally:
            self._idle.put(worker)
        return self._wrong(request, error)

    def _wrong(self, request: ScoreRequest, error: str) -> Verdict:
        score = self._error_score
        if score is None:
            score = wrong_score(self._verifier, request.data_source)
        return Verdict({"score": score, "acc": 0.0}, None, error)

    def _replace(self, worker: "_Worker") -> tuple["_Worker", int | None]:
        """A new worker, and the exit code of the old one."""
        exit_code = self._stop_worker(worker)
        with self._counting:
            self._num_replaced += 1
        return self._start_worker(), exit_code

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self._verifier, self._memory_limit_mb)
        self._workers.add(worker)
        return worker

    def _stop_worker(self, worker: "_Worker") -> int | None:
        self._workers.discard(worker)
        return worker.stop()


class _Worker:
    """One worker process and this side of its connection. One thread at a time uses it."""

    def __init__(self, verifier: str, memory_limit_mb: int) -> None:
        self._verifier = verifier
        self._ready = False
        self._mark = str(uuid.uuid4())
        self._connection, inherited = socket.socketpair()
        # It finds the modules that this process finds; a verifier that uses JAX keeps off the accelerator.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        environment[_MARK] = self._mark
        arguments = [str(inherited.fileno()), verifier, str(memory_limit_mb)]
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "dapo_jax.rewards.worker", *arguments],
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
            error = decode_start(receive(self._connection, time.monotonic() + _START_LIMIT_S, limit=MAX_ANSWER))
        except TimeoutError:
            error = self._not_loaded(f"did not load within {_START_LIMIT_S:g} s")
        except MalformedAnswer as malformed:
            error = self._not_loaded(f"{malformed} while it was loaded")
        except (EOFError, OSError):
            error = self._not_loaded(f"ended its process (exit code {self.stop()}) while it was loaded")
        if error is not None:
            raise InputError(error)
        self._ready = True

    def ask(self, request: bytes, timeout_s: float) -> Answer:
        """The answer. TimeoutError, MalformedAnswer, or EOFError or OSError if the worker died."""
        deadline = time.monotonic() + timeout_s
        send(self._connection, request, deadline)
        return decode_answer(receive(self._connection, deadline, limit=MAX_ANSWER))

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
        self._kill_marked()
        return self._process.returncode

    def _kill_marked(self) -> None:
        """Kills what the worker started and what has left its session. Linux; elsewhere it is left to itself."""
        entry = f"{_MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if entry in process.read_bytes().split(b"\0"):
                    os.kill(int(process.parent.name), signal.SIGKILL)

    def _not_loaded(self, what: str) -> str:
        return f"reward.function={self._verifier!r} {what}: run `import` of its module alone to see why"
