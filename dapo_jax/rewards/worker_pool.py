"""Host: a verifier in worker processes, with a time limit per sample and a memory limit per process.

A model's responses are hostile text: the code that reads them may hang, crash or be exploited. It never runs in the
trainer's process, and the pool trusts nothing that a worker sends (`messages`).
"""

import logging
import os
import queue
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from dapo_jax.errors import InputError
from dapo_jax.monitor.environment import without_secrets
from dapo_jax.rewards.messages import NO_VERDICT, MalformedAnswer
from dapo_jax.rewards.session import pickles
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers, encoded, no_verdict
from dapo_jax.rewards.worker_process import Worker

_log = logging.getLogger(__name__)


class VerifierPool(Verifiers):
    """Scores samples in worker processes. A response that makes the verifier fail is wrong; the run continues.

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
        if num_workers < 1:
            raise InputError(f"reward.num_workers={num_workers} must be at least 1: raise it")
        if not timeout_s > 0:
            raise InputError(f"reward.timeout_s={timeout_s} must be positive: raise it")
        if memory_limit_mb < 0:
            raise InputError(f"reward.memory_limit_mb={memory_limit_mb} must be 0 (no limit) or more: raise it")
        super().__init__(verifier, error_score)
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._pattern = pattern
        self._functions = pickles(verifier)
        self._environment = without_secrets(os.environ, env, hidden_env)
        if left_out := sorted(os.environ.keys() - self._environment.keys()):
            names = ", ".join(left_out)
            _log.info("verifier processes do not get %s: name what they need in reward.env", names)
        self._num_replaced = self._taken = 0
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

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""
        return self._threads.submit(self._judge, request)

    def close(self) -> None:
        """Kills the workers. Samples still being scored count as failures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()
        for worker in list(self._workers):  # including those started in the meantime
            self._stop_worker(worker)

    def _judge(self, request: ScoreRequest) -> Verdict:
        message = encoded(request)
        if isinstance(message, str):
            return no_verdict(message)
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
            if error == NO_VERDICT:
                return no_verdict(error)
        except BrokenPipeError:  # it was dead before it could read the request
            worker, exit_code = self._replace(worker)
            return no_verdict(f"the worker had died (exit code {exit_code})")
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
        return self.wrong(request, error)

    def _replace(self, worker: Worker) -> tuple[Worker, int | None]:
        """A new worker, and the exit code of the old one."""
        exit_code = self._stop_worker(worker)
        with self._counting:
            self._num_replaced += 1
        return self._start_worker(), exit_code

    def _start_worker(self) -> Worker:
        worker = Worker(self.name, self._memory_limit_mb, self._pattern, self._environment, self._functions)
        self._workers.add(worker)
        return worker

    def _stop_worker(self, worker: Worker) -> int | None:
        self._workers.discard(worker)
        return worker.stop()
