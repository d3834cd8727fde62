"""Host: whether the reward functions can judge their problems, asked before a run begins."""

import logging
import time
from collections.abc import Mapping, Sequence

from dapo_jax.data.experience import OWN_SCORES, check_score_names
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.ground_truths import check_ground_truths
from dapo_jax.rewards.messages import WRONG_RESULT
from dapo_jax.rewards.own_function import RULE
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.worker_pool import ScoreRequest, Verdict, VerifierPool

_RESPONSES = (  # with the ground truth in them: forms in which reward functions often look for an answer
    *("{}", "Answer: {}", "#### {}", "\\boxed{{{}}}", "<think>So it is.</think>\n<answer>{}</answer>"),
    *('{{"answer": "{}"}}', "```python\nprint({})\n```", ""),
)

TRIAL_S = 10.0  # seconds for all of them

_log = logging.getLogger(__name__)


def check_rewards(
    sets: Sequence[tuple[Sequence[PromptRow], str]], verifiers: Mapping[str, VerifierPool], metric: str | None
) -> None:
    """Asks each function about its rows: a built-in verifier about all ground truths, one of the user's about one row.

    Args:
        sets: rows, and the name of the function that judges the responses to them; first those to train on.
        verifiers: by the name of their function.
        metric: of the group filter, which the function of the first set must return; None = no filter.

    Raises:
        ValueError: ground truths that no response can match, or a function that cannot work.
    """
    tried = set()  # what a function says of one data source is the same in every set
    for index, (rows, name) in enumerate(sets):
        check_ground_truths(rows, name, verifiers[name])
        if name in VERIFIERS or not rows or (name, rows[0].data_source) in tried:
            continue
        tried.add((name, rows[0].data_source))
        for verdict in try_function(rows[0], name, verifiers[name]):
            check_score_names(verdict.numbers)
            if index == 0 and metric is not None:
                _check_metric(metric, name, rows[0], verdict)


def _check_metric(metric: str, name: str, row: PromptRow, verdict: Verdict) -> None:
    if metric not in (*OWN_SCORES, *verdict.numbers):
        raise InputError(
            f"algorithm.filter_groups.metric={metric!r} is not among the numbers that reward.function={name!r} returns "
            f"for {row.origin}, {', '.join(verdict.numbers)}: choose one of these, or return it for every response"
        )


def try_function(row: PromptRow, name: str, verifiers: VerifierPool) -> list[Verdict]:
    """The verdicts on made-up responses to a row for which the function did not raise.

    A function may raise for a response that it cannot read, which then counts as wrong: that is warned of. Responses
    that are not judged within TRIAL_S are left out.

    Raises:
        ValueError: a result that is no verdict, or the function raised for all responses.
    """
    texts = [form.format(row.truth_text) for form in _RESPONSES]
    verdicts = _judged(row, texts, name, verifiers)
    verifiers.warn_of_graded(verdicts)
    failed = [(text, verdict.error) for text, verdict in zip(texts, verdicts, strict=False) if verdict.error]
    for text, error in failed:
        if WRONG_RESULT in error:
            raise InputError(
                f"reward.function={name!r} gives no verdict on the made-up response {text[:60]!r} to {row.origin} "
                f"({error.removeprefix('ValueError: ')}): it must be {RULE}, with a finite number or a dict that has "
                "one as 'score' for every response"
            )
    if len(failed) == len(texts):
        raise InputError(
            f"reward.function={name!r} failed on all {len(texts)} made-up responses to {row.origin}, on "
            f"{texts[0][:60]!r} with {failed[0][1]}: correct it, and let it return its lowest score for a response "
            "that it cannot read"
        )
    if failed:
        _log.warning(
            "reward.function=%r failed on %d of %d made-up responses to %s, on %r with %s: such a response counts as "
            "wrong, with reward.error_score",
            name,
            len(failed),
            len(verdicts),
            row.origin,
            failed[0][0],
            failed[0][1],
        )
    return [verdict for verdict in verdicts if not verdict.error]


def _judged(row: PromptRow, texts: list[str], name: str, verifiers: VerifierPool) -> list[Verdict]:
    """The verdicts on the first of `texts`, one after the other, that come within TRIAL_S: a slow judge is not waited
    for.
    """
    end, verdicts = time.monotonic() + TRIAL_S, []
    for text in texts:
        verdict = verifiers.submit(ScoreRequest(row.data_source, text, row.ground_truth, row.extra_info))
        try:
            verdicts.append(verdict.result(timeout=max(end - time.monotonic(), 0.0)))
        except TimeoutError:
            _log.info(
                "reward.function=%r judged %d of %d made-up responses in %g s", name, len(verdicts), len(texts), TRIAL_S
            )
            break
    return verdicts
