"""Host: a language model as the judge of responses, asked over HTTP, alone or along with other functions.

One thread of the trainer's process asks, by coroutines: a step has thousands of responses, and asking is waiting. What
the judge answered is kept (`judge_store`), and a resumed run or an equal response asks nothing twice.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_jax.config.sections import JudgeConfig
from dapo_jax.data.rows import PromptRow, truth_text
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_client import Breaker, Endpoint, Reply, RequestFailed, set_within
from dapo_jax.rewards.judge_prompt import NoVerdict, fill_in, new_tag, read_score, read_template
from dapo_jax.rewards.judge_store import JudgeStore
from dapo_jax.rewards.messages import short
from dapo_jax.rewards.verdicts import JUDGE_ERROR, ScoreRequest, Verdict, Verifiers, no_verdict
from dapo_jax.rewards.weighted import JUDGE, is_weighted, parse_parts

MAX_BACKOFF_S = 60.0
COUNTS = ("requests", "retries", "cached", "failures", "input_tokens", "output_tokens", "seconds")
_CLOSE_S = 1.0  # that the end of a run waits for answers on their way

_log = logging.getLogger(__name__)


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
        self._settings = settings
        self._template = read_template(settings.template)
        if "{tag}" not in self._template:
            _log.warning(
                "reward.judge.template has no {tag}: a response can forge the delimiter; wrap it in {tag}, which "
                "changes with every request (docs/rewards.md)"
            )
        self._endpoint = Endpoint(settings)
        self._name = f"the judge {settings.model!r} at reward.judge.base_url={settings.base_url}"
        self._breaker = Breaker(self._name, patience_s=settings.patience_s, wait_s=settings.backoff_s)
        self._store = JudgeStore(folder, settings, process, num_processes)
        self._disk = ThreadPoolExecutor(1, "judge answers")  # which may be slow
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
        self._asking: dict[str, asyncio.Task[Reply]] = {}  # by key
        self._slots, self._stopped = asyncio.Semaphore(settings.max_concurrency), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to judge a response in the background.

        A response that is not judged is a verdict with an error. If the judge has not answered for patience_s, at a
        limit of requests or costs, and if answers cannot be kept, the future raises RuntimeError.
        """
        future: Future[Verdict] = Future()
        asyncio.run_coroutine_threadsafe(self._work(request, future), self._loop)
        return future

    def try_on(self, row: PromptRow) -> None:
        """Judges the ground truth of a row as a response, to see that there is a judge.

        Raises:
            InputError: the endpoint refuses the request.
            RuntimeError: it cannot be reached, or a limit is reached.
        """
        request = ScoreRequest(row.data_source, row.truth_text, row.ground_truth, row.extra_info, row.question)
        try:
            self._wait_for(self._score(request))
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
        return self._wait_for(self._take_counts())

    def close(self) -> None:
        """Ends it. Responses that wait for a verdict get none."""
        if self._wait_for(self._close()):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _stored(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a method of the store returns."""
        return await self._loop.run_in_executor(self._disk, call, *arguments)

    async def _take_counts(self) -> dict[str, float]:
        new, cost = self._counts.copy(), self._store.cost
        self._counts.update(dict.fromkeys(COUNTS, 0.0))
        total = await self._stored(self._store.total_cost)
        return new | {"cost": cost(new["input_tokens"], new["output_tokens"]), "total_cost": total}

    async def _close(self) -> bool:
        """Whether everything has ended: else an answer is still to be kept."""
        self._stopped.set()
        self._breaker.stop()
        late = asyncio.all_tasks() - {asyncio.current_task()}
        if late:
            _, late = await asyncio.wait(late, timeout=_CLOSE_S)
        spent = await self._stored(self._store.spent)
        cost = f", cost {paid:.4g}" if (paid := self._store.cost(*spent[1:])) else ""
        _log.info("the judge was asked %d times, %d + %d tokens%s; answers are in %s", *spent, cost, self._store.path)
        if not late:
            await self._endpoint.close()
            await self._stored(self._store.close)
            self._disk.shutdown(wait=False)
        return not late

    async def _work(self, request: ScoreRequest, future: Future[Verdict]) -> None:
        async with self._slots:
            if self._stopped.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(await self._judge(request))
            except BaseException as error:
                future.set_exception(error)

    async def _judge(self, request: ScoreRequest) -> Verdict:
        try:
            score = await self._score(request)
        except (RequestFailed, NoVerdict) as failure:
            self._counts["failures"] += 1
            return no_verdict(short(f"{JUDGE_ERROR}{failure}"))
        return Verdict({"score": score, "acc": float(score >= self._settings.threshold)}, None, None)

    async def _score(self, request: ScoreRequest) -> float:
        values = {
            "question": request.question,
            "response": request.solution,
            "ground_truth": truth_text(request.ground_truth),
            "max_score": f"{self._settings.max_score:g}",
        }
        return self._read(await self._reply(values))

    def _read(self, reply: Reply) -> float:
        """The score, 0 to 1, of a reply. NoVerdict if it has none."""
        if not reply.complete:
            raise NoVerdict("the judge's answer was cut off: raise reward.judge.max_tokens")
        return read_score(reply.text, self._settings.max_score)

    async def _reply(self, values: Mapping[str, str]) -> Reply:
        """The judge's reply: of a request on its way, kept, or new."""
        settings = self._settings
        of_judge = settings.base_url, settings.model, settings.max_tokens, settings.extra_body, self._template
        key = hashlib.sha256(json.dumps([*of_judge, values], sort_keys=True).encode()).hexdigest()  # all but the tag
        if is_new := key not in self._asking:
            self._asking[key] = asyncio.create_task(self._kept_or_new(key, values))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key))
        reply = await self._asking[key]
        self._counts["cached"] += not is_new
        return reply

    async def _kept_or_new(self, key: str, values: Mapping[str, str]) -> Reply:
        kept = await self._stored(self._store.find, key)
        if kept is not None:
            with suppress(NoVerdict):  # the judge may have been broken when it gave none
                self._read(kept)
                self._counts["cached"] += 1
                return kept
        reply = await self._ask(fill_in(self._template, {**values, "tag": new_tag()}))
        await self._stored(self._store.keep, key, reply)
        self._counts["input_tokens"] += reply.input_tokens
        self._counts["output_tokens"] += reply.output_tokens
        return reply

    async def _ask(self, prompt: str) -> Reply:
        """Asks, and again after failures that may pass, each time after a longer wait. RequestFailed in the end."""

        async def request() -> Reply:
            await self._stored(self._store.begin_request)
            return await self._endpoint.ask(prompt)

        settings, start = self._settings, time.monotonic()
        self._counts["requests"] += 1
        try:
            for attempt in itertools.count():
                try:
                    return await self._breaker.attempt(request)
                except RequestFailed as failure:
                    if not failure.again or attempt == settings.retries:
                        raise
                    longest = min(settings.backoff_s * 2**attempt, MAX_BACKOFF_S)
                    wait = max(random.uniform(0.5, 1.0) * longest, failure.wait_s)
                if await set_within(self._stopped, wait):
                    raise RequestFailed("the run ended")
                self._counts["retries"] += 1
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._counts["seconds"] += time.monotonic() - start


class JudgedVerifiers(Verifiers):
    """Scores each sample by the judge and by the other functions at the same time."""

    def __init__(self, name: str, judge: Judge, rest: Verifiers | None, *, error_score: float | None = None) -> None:
        """
        Args:
            rest: of `weighted.without_judge(name)`; this closes it.
        """
        super().__init__(name, error_score)
        self.judge, self.rest = judge, rest
        self._parts = parse_parts(name) if is_weighted(name) else ()

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""
        found: Future[Verdict] = Future()
        asked = [self.judge.submit(request), *([self.rest.submit(request)] if self.rest else [])]
        ended = itertools.count(1)

        def end(one: Future[Verdict]) -> None:
            if next(ended) < len(asked) or not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(self._verdict(request, *(part.result() for part in asked)))
            except BaseException as error:
                found.set_exception(error)

        found.add_done_callback(lambda _: [part.cancel() for part in asked])
        for part in asked:
            part.add_done_callback(end)
        return found

    def take_replaced(self) -> int:
        """Workers of the other functions replaced since the last call."""
        return self.rest.take_replaced() if self.rest else 0

    def close(self) -> None:
        """Ends the other functions; whoever opened the judge closes it."""
        if self.rest:
            self.rest.close()

    def _verdict(self, request: ScoreRequest, judged: Verdict, rest: Verdict | None = None) -> Verdict:
        """That of all functions, as `weighted.weighted` computes it."""
        for verdict in (judged, rest):
            if verdict is not None and not verdict.numbers:
                return verdict
        if rest is not None and rest.error is not None:
            return self.wrong(request, rest.error)
        if not self._parts:
            return judged
        numbers, score = dict(rest.numbers) if rest else {"score": 0.0}, judged.numbers["score"]
        for part in self._parts:
            if part.function == JUDGE:
                numbers["score"] += part.weight * score
                numbers[part.name] = score
        first = judged if rest is None or self._parts[0].function == JUDGE else rest
        return Verdict(numbers | {"acc": first.numbers["acc"]}, first.pred, None)
