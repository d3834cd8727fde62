"""Host: a language model as the judge of responses, asked over HTTP by threads of the trainer's process.

Asking is waiting, so threads do: a step has thousands of responses. What the judge answered is kept (`judge_store`),
and a resumed run or an equal response asks nothing twice.
"""

import hashlib
import json
import logging
import queue
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from dapo_jax.config.sections import JudgeConfig
from dapo_jax.data.experience import JUDGE_ERROR
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_breaker import Breaker
from dapo_jax.rewards.judge_client import Reply, RequestFailed, open_endpoint
from dapo_jax.rewards.judge_prompt import NoVerdict, fill_in, new_tag, read_score, read_template
from dapo_jax.rewards.judge_store import JudgeStore, Spent
from dapo_jax.rewards.results import short
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, no_verdict

MAX_BACKOFF_S = 60.0
COUNTS = ("requests", "retries", "cached", "failures", "input_tokens", "output_tokens", "seconds")
_CLOSE_S = 1.0  # that the end of a run waits for answers on their way

_log = logging.getLogger(__name__)
_Job = tuple[ScoreRequest, Future[Verdict]]


class Judge:
    """Asks for verdicts in the background, at most max_concurrency at a time."""

    def __init__(self, settings: JudgeConfig, folder: Path, *, process: int = 0, num_processes: int = 1) -> None:
        """
        Args:
            folder: of the answers that are kept, a file for each process.
            process: the index of this process among those of the run. Each may use an equal share of the limits.

        Raises:
            InputError: httpx, the key or the template is missing, or the file cannot be opened.
        """
        self._settings, self._num_processes = settings, num_processes
        self._template = read_template(settings.template)
        if "{tag}" not in self._template:
            _log.warning(
                "reward.judge.template has no {tag}: a response can imitate the end of its part of the prompt; name "
                "the parts by a tag, which changes with every request (docs/rewards.md)"
            )
        self._endpoint = open_endpoint(settings)
        self._name = f"the judge {settings.model!r} at reward.judge.base_url={settings.base_url}"
        self._breaker = Breaker(self._name, patience_s=settings.patience_s, wait_s=settings.backoff_s)
        self._store = JudgeStore(folder / f"answers_{process}.sqlite")
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
        self._taken = self._counts.copy()
        self._asking: dict[str, Future[Reply]] = {}  # by key
        self._lock, self._beginning = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        names = [f"judge {index}" for index in range(settings.max_concurrency)]
        # Not an executor: Python would wait for its threads, and so for the endpoint, before it ends.
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to judge a response in the background.

        A response that is not judged is a verdict with an error. If the judge has not answered for patience_s, at a
        limit of requests or costs, and if answers cannot be kept, the future raises RuntimeError.
        """
        future: Future[Verdict] = Future()
        self._jobs.put((request, future))
        return future

    def try_on(self, row: PromptRow) -> None:
        """Judges the ground truth of a row as a response, to see that there is a judge.

        Raises:
            InputError: the endpoint refuses the request.
            RuntimeError: it cannot be reached, or a limit is reached.
        """
        request = ScoreRequest(row.data_source, row.truth_text, row.ground_truth, row.extra_info, row.question)
        try:
            self._score(request)
        except NoVerdict as problem:
            _log.warning("%s: %s: such a response is left out (docs/rewards.md)", self._name, problem)
        except RequestFailed as failure:
            if failure.again:
                raise RuntimeError(
                    f"{self._name} cannot be reached ({failure}): start it, then rerun the command"
                ) from failure
            raise InputError(f"{self._name} refuses a request ({failure}): correct reward.judge") from failure

    def take_counts(self) -> dict[str, float]:
        """COUNTS since the last call, their cost, and the cost of all answers so far, of this process."""
        with self._lock:
            new = {name: self._counts[name] - self._taken[name] for name in COUNTS}
            self._taken = self._counts.copy()
        cost = self._cost(new["input_tokens"], new["output_tokens"])
        return new | {"cost": cost, "total_cost": self._spent_cost(self._store.spent())}

    def close(self) -> None:
        """Ends it. Responses that wait for a verdict get none."""
        self._stopped.set()
        self._breaker.stop()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        spent = self._store.spent()
        cost = f", cost {self._spent_cost(spent):.4g}" if self._spent_cost(spent) else ""
        _log.info("the judge was asked %d times, %d + %d tokens%s; answers are in %s", *spent, cost, self._store.path)
        if not any(thread.is_alive() for thread in self._threads):  # else an answer is still to be kept
            self._endpoint.close()
            self._store.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, future = job
            if self._stopped.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._judge(request))
            except BaseException as error:
                future.set_exception(error)

    def _judge(self, request: ScoreRequest) -> Verdict:
        try:
            score = self._score(request)
        except (RequestFailed, NoVerdict) as failure:
            self._count(failures=1)
            return no_verdict(short(f"{JUDGE_ERROR}{failure}"))
        return Verdict({"score": score, "acc": float(score >= self._settings.threshold)}, None, None)

    def _score(self, request: ScoreRequest) -> float:
        truth = request.ground_truth
        values = {
            "question": request.question,
            "response": request.solution,
            "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, default=str),
            "max_score": f"{self._settings.max_score:g}",
        }
        return self._read(self._reply(values))

    def _read(self, reply: Reply) -> float:
        """The score, 0 to 1, of a reply. NoVerdict if it has none."""
        if not reply.complete:
            raise NoVerdict("the judge's answer was cut off: raise reward.judge.max_tokens")
        return read_score(reply.text, self._settings.max_score)

    def _kept(self, key: str) -> Reply | None:
        """The kept reply, if it has a verdict: the judge may have been broken when it gave none."""
        reply = self._store.find(key)
        if reply is not None:
            with suppress(NoVerdict):
                self._read(reply)
                return reply
        return None

    def _reply(self, values: Mapping[str, str]) -> Reply:
        """The judge's reply: kept, asked for by another thread, or new."""
        settings = self._settings
        key = _key(settings.base_url, settings.model, settings.max_tokens, settings.extra_body, self._template, values)
        with self._lock:
            asking = self._asking.get(key)
            own = asking is None
            asking = asking or self._asking.setdefault(key, Future())
        if not own:
            reply = asking.result()
            self._count(cached=1)
            return reply
        try:
            reply = self._kept(key)
            if reply is None:
                reply = self._ask(fill_in(self._template, {**values, "tag": new_tag()}))
                self._store.keep(key, reply)
                self._count(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            else:
                self._count(cached=1)
            asking.set_result(reply)
            return reply
        except BaseException as error:
            asking.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._asking[key]

    def _ask(self, prompt: str) -> Reply:
        """Asks, and again after failures that may pass, each time after a longer wait. RequestFailed in the end."""
        settings, start = self._settings, time.monotonic()
        self._count(requests=1)
        try:
            for attempt in range(settings.retries + 1):
                try:
                    with self._breaker.turn():
                        self._begin_request()
                        return self._endpoint.ask(prompt)
                except RequestFailed as failure:
                    if not failure.again or attempt == settings.retries:
                        raise
                    longest = min(settings.backoff_s * 2**attempt, MAX_BACKOFF_S)
                    wait = max(random.uniform(0.5, 1.0) * longest, failure.wait_s)
                if self._stopped.wait(wait):
                    raise RequestFailed("the run ended")
                self._count(retries=1)
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._count(seconds=time.monotonic() - start)

    def _begin_request(self) -> None:
        """Counts a request. RuntimeError if this process has used its share of a limit."""
        with self._beginning:
            self._check_limits(self._store.spent())
            self._store.begin_request()

    def _check_limits(self, spent: Spent) -> None:
        settings, share = self._settings, 1 / self._num_processes
        used = (
            ("max_requests", settings.max_requests, spent.requests),
            ("max_cost", settings.max_cost, self._spent_cost(spent)),
        )
        for name, limit, value in used:
            if limit and value >= limit * share:
                of = f", a share of 1/{self._num_processes} of" if self._num_processes > 1 else ","
                raise RuntimeError(
                    f"the judge has used {value:g}{of} reward.judge.{name}={limit:g}: raise it, then rerun the same "
                    f"command to resume (answers are kept in {self._store.path})"
                )

    def _spent_cost(self, spent: Spent) -> float:
        return self._cost(spent.input_tokens, spent.output_tokens)

    def _cost(self, input_tokens: float, output_tokens: float) -> float:
        settings = self._settings
        per_input, per_output = settings.price_per_million_input_tokens, settings.price_per_million_output_tokens
        return (input_tokens * per_input + output_tokens * per_output) / 1e6

    def _count(self, **numbers: float) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._counts[name] += number


def _key(*parts: object) -> str:
    """A hash of all that the judge's answer depends on, but for the tag."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
