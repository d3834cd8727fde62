"""Host: verifies each response as it ends, while others are still being decoded, and says what has failed."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Outcomes
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.parallel.processes import SharedFailure, gather
from dapo_jax.rewards.verdicts import ENVIRONMENT_ERROR, JUDGE_ERROR, ScoreRequest, Verdict, Verifiers

_WAIT_S = 0.5  # between two checks for a stop request


class Verification:
    """The verdicts on `num_samples` responses to each row. Every process verifies its share of the groups.

    Args:
        verifiers: None = there are no verdicts, only texts.
        check: called while waiting for verdicts; may raise.
        on_ended: called with the number of responses that have just ended.
    """

    def __init__(
        self,
        verifiers: Verifiers | None,
        tokenizer: Tokenizer,
        rows: Sequence[PromptRow],
        num_samples: int,
        *,
        check: Callable[[], None],
        on_ended: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._verifiers, self._tokenizer, self._check, self._on_ended = verifiers, tokenizer, check, on_ended
        self.rows, self.num_samples = rows, num_samples
        self.texts = [""] * (len(rows) * num_samples)
        self._asked: list[tuple[ScoreRequest, Future[Verdict]] | None] = [None] * len(self.texts)

    def begin(self, ended: np.ndarray, rollout: Rollout) -> None:
        """Submits this process's share of the responses at the indices `ended` to the verifiers."""
        for index in ended.tolist():
            text = self._tokenizer.decode(rollout.responses[index][rollout.mask[index]].tolist())
            self.texts[index] = text
            if self._verifiers is not None and self._process_of(index) == jax.process_index():
                row = self.rows[index // self.num_samples]
                request = ScoreRequest(row.data_source, text, row.ground_truth, row.columns, row.question)
                self._asked[index] = request, self._verifiers.submit(request)
        self._on_ended(len(ended))

    def wait(self) -> list[Verdict]:
        """The verdicts of all processes, in the order of the responses.

        Raises:
            SharedFailure: verification cannot continue, in any process.
        """
        if self._verifiers is None:
            return [Verdict({}, None, None)] * len(self.texts)
        asked = [pair for pair in self._asked if pair is not None]
        while any(gather(bool(wait([verdict for _, verdict in asked], timeout=_WAIT_S).not_done))):
            self._check()
        own, failure = list[Verdict](), ""
        try:
            own = self._verifiers.collect([request for request, _ in asked], [verdict for _, verdict in asked])
        except (RuntimeError, OSError) as error:  # such as of a worker that cannot start
            failure = str(error) or type(error).__name__
        found = gather([failure, [dataclasses.asdict(verdict) for verdict in own]])
        for failure in filter(None, (part[0] for part in found)):
            raise SharedFailure(failure)
        shared = [iter(part[1]) for part in found]
        return [Verdict(**next(shared[self._process_of(index)])) for index in range(len(self.texts))]

    def cancel(self) -> None:
        """Takes back what no verifier has begun with: nobody will wait for it."""
        for pair in self._asked:
            if pair is not None:
                pair[1].cancel()

    def _process_of(self, index: int) -> int:
        return index // self.num_samples % jax.process_count()


def describe_failures(parts: Sequence[Outcomes]) -> str:
    """How many verifications failed and their most frequent error; "" if none did."""
    failed = sum(int(part.failed.sum()) for part in parts)
    if not failed:
        return ""
    error = _main_error(parts)
    count = sum(part.failed.size for part in parts)
    share = f"all {count}" if failed == count else f"{failed} of {count}"
    failing = "the reward function failed"
    for begin, said in ((JUDGE_ERROR, "the judge gave no verdict"), (ENVIRONMENT_ERROR, "the environment failed")):
        if error.startswith(begin):
            error, failing = error.removeprefix(begin), said
    return f"{failing} on {share} responses, most often with {error}"


def _main_error(parts: Sequence[Outcomes]) -> str:
    """The most frequent error of the part in which most verifications failed."""
    return max(parts, key=lambda part: part.failed.sum()).error


def total_failure(parts: Sequence[Outcomes], what: str, max_share: float = 1.0) -> str | None:
    """What happened and what to do if no verification of `what` succeeded, or more than max_share failed; else None.

    Args:
        max_share: reward.max_error_share.
    """
    failed, count = sum(int(part.failed.sum()) for part in parts), sum(part.failed.size for part in parts)
    if not parts or not (failed == count or failed > max_share * count):
        return None
    limit = "" if failed == count else f" (reward.max_error_share={max_share:g})"
    cure = (
        "correct it, and let it return its lowest score for a response that it cannot read (for a time-out, raise "
        "reward.timeout_s)"
    )
    if _main_error(parts).startswith(JUDGE_ERROR):
        cure = "correct reward.judge, or see that its endpoint works"
    if _main_error(parts).startswith(ENVIRONMENT_ERROR):
        cure = "correct it (for a time-out, raise environment.timeout_s)"
    return f"{what}: {describe_failures(parts)}{limit}: {cure}; then rerun the same command"
