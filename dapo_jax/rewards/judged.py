"""Host: a verifier that is a judge, or the weighted sum of a judge's score and those of other functions."""

import itertools
from concurrent.futures import Future

from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers
from dapo_jax.rewards.weighted import JUDGE, Part, is_weighted, parse_parts


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
        for verdict in (judged, rest):
            if verdict is not None and not verdict.numbers:
                return verdict
        if rest is not None and rest.error is not None:
            return self.wrong(request, rest.error)
        return summed(self._parts, judged, rest) if self._parts else judged


def summed(parts: tuple[Part, ...], judged: Verdict, rest: Verdict | None) -> Verdict:
    """The verdict of several functions, as `weighted.weighted` computes it.

    Args:
        rest: the verdict of the parts that are no judge; None if there are none.
    """
    numbers = dict(rest.numbers) if rest else {"score": 0.0}
    for part in parts:
        if part.function == JUDGE:
            numbers["score"] += part.weight * judged.numbers["score"]
            numbers[part.name] = judged.numbers["score"]
    first = judged if rest is None or parts[0].function == JUDGE else rest
    return Verdict(numbers | {"acc": first.numbers["acc"]}, first.pred, None)
