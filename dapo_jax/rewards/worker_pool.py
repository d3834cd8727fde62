"""Host: a verifier in worker processes, with a time limit per sample and a memory limit per process.

A model's responses are hostile text: the code that reads them may hang, crash or be exploited. It never runs in the
trainer's process, and the pool trusts nothing that a worker sends (`messages`).
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import MalformedAnswer, encode_request
from dapo_jax.rewards.verifiers import wrong_score
from dapo_jax.rewards.weighted import described
from dapo_jax.rewards.worker_process import Worker

_NUM_LOGGED = 3  # failures per call that are logged in full

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The arguments of one call to the verifier."""

    data_source: str
    solution: str
    ground_truth: Any  # text or plain JSON
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The verifier's result for one sample."""

    numbers: dict[str, float]  # "score", "acc" and any others that the verifier returns
    pred: str | None  # the answer it extracted, at most 1000 characters
    error: str | None  # why the verifier failed; then numbers holds only score and acc, and acc is 0


class VerifierPool:
    """Scores samples in worker processes. A sample on which the verifier fails counts as wrong; the run continues.

    Raises:
        InputError: the verifier cannot be loaded, or an argument is out of range.
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
        """Starts the workers and waits until the first is ready.

        Args:
            verifier: a name of `verifiers.load_verifier`.
            timeout_s: seconds per sample, after which its worker is killed and replaced.
            memory_limit_mb: MiB that a worker may write to (enforced on Linux); a sample that needs more counts as
                wrong, and its worker is replaced. 0 = no limit.
            error_score: the score of a sample on which the verifier fails; None = `verifiers.wrong_score`.
        """
        if num_workers < 1:
            raise InputError(f"reward.num_workers={num_workers} must be at least 1: raise it")
        if not timeout_s > 0:
            raise InputError(f"reward.timeout_s={timeout_s} must be positive: raise it")
        if memory_limit_mb < 0:
            raise InputError(f"reward.memory_limit_mb={memory_limit_mb} must be 0 (no limit) or more: raise it")
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._error_score = error_score
        self._num_replaced = self._taken = 0
        self._warned_of_graded = False
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

    @property
    def num_replaced(self) -> int:
        """Workers replaced since the start. If it grows with every step, look at the log."""
        return self._num_replaced

    def take_replaced(self) -> int:
        """Workers replaced since the last call."""
        with self._counting:
            new, self._taken = self._num_replaced - self._taken, self._num_replaced
        return new

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """The verdicts, in the order of the requests. RuntimeError if a replacement worker does not start."""
        return self.collect(requests, [self.submit(request) for request in requests])

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""
        return self._threads.submit(self._judge, request)

    def collect(self, requests: Sequence[ScoreRequest], futures: Sequence[Future[Verdict]]) -> list[Verdict]:
        """Waits for the verdicts on submitted requests and logs the failures."""
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
        """Warns once if an `acc` is neither 0 nor 1."""
        graded = [verdict.numbers["acc"] for verdict in verdicts if verdict.numbers["acc"] not in (0.0, 1.0)]
        if graded and not self._warned_of_graded:
            self._warned_of_graded = True
            _log.warning(
                "%s returns acc=%g, neither 0 nor 1: the reported accuracy (acc/mean@k) is then the "
                "mean of a graded score, and the group filter keeps groups that differ only slightly; return a dict "
                "with score and acc (1 if the answer is right, else 0)",
                described(self._verifier),
                graded[0],
            )

    def close(self) -> None:
        """Kills the workers. Samples still being scored count as failures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()
        for worker in list(self._workers):  # including those started in the meantime
            self._stop_worker(worker)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _judge(self, request: ScoreRequest) -> Verdict:
        try:
            message = encode_request((request.data_source, request.solution, request.ground_truth, request.extra_info))
        except (TypeError, ValueError, RecursionError) as error:
            return self._wrong(request, f"extra_info must be convertible to JSON: {error}")
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

    def _replace(self, worker: Worker) -> tuple[Worker, int | None]:
        """A new worker, and the exit code of the old one."""
        exit_code = self._stop_worker(worker)
        with self._counting:
            self._num_replaced += 1
        return self._start_worker(), exit_code

    def _start_worker(self) -> Worker:
        worker = Worker(self._verifier, self._memory_limit_mb)
        self._workers.add(worker)
        return worker

    def _stop_worker(self, worker: Worker) -> int | None:
        self._workers.discard(worker)
        return worker.stop()
