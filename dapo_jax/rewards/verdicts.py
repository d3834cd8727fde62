"""Host: requests for verdicts, and what all that answers them has in common."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from dapo_jax.rewards.messages import encode_request
from dapo_jax.rewards.verifiers import wrong_score
from dapo_jax.rewards.weighted import described, is_weighted, parse_parts

JUDGE_ERROR = "judge: "  # precedes the error of a verification in which a judge failed
ENVIRONMENT_ERROR = "environment: "  # of an episode in whose group the environment failed
_NUM_LOGGED = 3  # failures per call that are logged in full

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The arguments of one call to the verifier, and the question, which only a judge reads."""

    data_source: str
    solution: str
    ground_truth: Any  # text or plain JSON
    extra_info: dict[str, Any]
    question: str = ""  # the prompt as text


@dataclass(frozen=True)
class Verdict:
    """The verifier's result for one sample."""

    numbers: dict[str, float]  # "score", "acc" and any others that the verifier returns; {} = no verdict
    pred: str | None  # the answer it extracted, at most 1000 characters
    error: str | None  # why there is no verdict, or why the response made the verifier fail: then it is wrong


def no_verdict(error: str) -> Verdict:
    """Of a sample that could not be verified, for a reason that is not the response's."""
    return Verdict({}, None, error)


def encoded(request: ScoreRequest) -> bytes | str:
    """The request as a worker reads it, or why it cannot be written."""
    try:
        return encode_request((request.data_source, request.solution, request.ground_truth, request.extra_info))
    except (TypeError, ValueError, RecursionError) as error:
        return f"extra_info must be convertible to JSON: {error}"


class Verifiers(ABC):
    """Scores samples by a verifier. A response that makes it fail is wrong; the run continues."""

    def __init__(self, name: str, error_score: float | None) -> None:
        """
        Args:
            name: of `verifiers.load_verifier`.
            error_score: of a response that makes the verifier fail; None = `verifiers.wrong_score`.
        """
        self.name = name
        self._error_score = error_score
        self._warned_of_graded = False

    @abstractmethod
    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""

    @abstractmethod
    def take_replaced(self) -> int:
        """Workers replaced since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Samples still being scored count as failures."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """The verdicts, in the order of the requests. RuntimeError if a replacement worker does not start."""
        return self.collect(requests, [self.submit(request) for request in requests])

    def collect(self, requests: Sequence[ScoreRequest], futures: Sequence[Future[Verdict]]) -> list[Verdict]:
        """Waits for the verdicts on submitted requests and logs the failures."""
        verdicts = [future.result() for future in futures]
        self.warn_of_graded(verdicts)
        failures = [(request, v.error) for request, v in zip(requests, verdicts, strict=True) if v.error]
        for request, error in failures[:_NUM_LOGGED]:
            _log.warning(
                "verifier %s failed: data_source=%r, %s, solution %r...",
                self.name,
                request.data_source,
                error,
                request.solution[:80],
            )
        if len(failures) > _NUM_LOGGED:
            _log.warning("verifier %s failed: %d of %d samples", self.name, len(failures), len(requests))
        return verdicts

    def warn_of_graded(self, verdicts: Sequence[Verdict]) -> None:
        """Warns once if an `acc` is neither 0 nor 1."""
        graded = [acc for verdict in verdicts if (acc := verdict.numbers.get("acc", 0.0)) not in (0.0, 1.0)]
        if graded and not self._warned_of_graded:
            self._warned_of_graded = True
            _log.warning(
                "%s returns acc=%g, neither 0 nor 1: the reported accuracy (acc/mean@k) is then the "
                "mean of a graded score, and the group filter keeps groups that differ only slightly; return a dict "
                "with score and acc (1 if the answer is right, else 0)",
                described(self.name),
                graded[0],
            )

    def wrong(self, request: ScoreRequest, error: str) -> Verdict:
        """The verdict on a response that made the verifier fail, before `lowest.lowered`."""
        score = self._error_score
        if score is None:
            score = wrong_score(self.name, request.data_source)
        parts = parse_parts(self.name) if is_weighted(self.name) else ()
        of_parts = {part.name: wrong_score(part.function, request.data_source) for part in parts}
        return Verdict({"score": score, "acc": 0.0, **of_parts}, None, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Unverified(Verifiers):
    """reward.function=none: scores 0 without `acc`, as nothing says which responses are right."""

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        found: Future[Verdict] = Future()
        found.set_result(Verdict({"score": 0.0}, None, None))
        return found

    def take_replaced(self) -> int:
        return 0

    def close(self) -> None:
        pass
