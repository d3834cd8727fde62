"""Host: tries the reward functions on their problems before a run starts."""

import logging
import time
from collections.abc import Mapping, Sequence

from dapo_jax.data.experience import OWN_SCORES, check_score_names
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.ground_truths import check_ground_truths
from dapo_jax.rewards.judge import JudgedVerifiers
from dapo_jax.rewards.messages import NO_VERDICT, WRONG_RESULT
from dapo_jax.rewards.own_function import RULE
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.weighted import JUDGE, described, functions_of, is_weighted, parse_parts, without_judge

_RESPONSES = (  # the ground truth in forms that reward functions often look for
    *("{}", "Answer: {}", "#### {}", "\\boxed{{{}}}", "<think>So it is.</think>\n<answer>{}</answer>"),
    *('{{"answer": "{}"}}', "```python\nprint({})\n```", ""),
)

TRIAL_S = 10.0  # seconds for all of them

_log = logging.getLogger(__name__)


def check_rewards(
    sets: Sequence[tuple[Sequence[PromptRow], str]], verifiers: Mapping[str, Verifiers], metric: str | None
) -> None:
    """Tries each function on its rows: a built-in verifier on all ground truths, the user's own and the judge on one.

    Args:
        sets: rows with the name of their reward function; the training set first.
        verifiers: by function name.
        metric: the group filter's, which the first set's function must return; None = no filter.

    Raises:
        InputError: ground truths that no response can match, or a function that cannot work.
        RuntimeError: the judge cannot be reached.
    """
    tried = set()  # functions with the data sources they were tried on, in any set
    for index, (rows, name) in enumerate(sets):
        verifier, others = verifiers[name], without_judge(name)
        if isinstance(verifier, JudgedVerifiers):
            if rows and JUDGE not in tried:
                tried.add(JUDGE)
                verifier.judge.try_on(rows[0])
            if verifier.rest is None:
                continue
            verifier = verifier.rest
        if functions_of(name)[0] != JUDGE:
            check_ground_truths(rows, others, verifier)
        if VERIFIERS.keys() >= {*functions_of(others)} or not rows or (others, rows[0].data_source) in tried:
            continue
        tried.add((others, rows[0].data_source))
        of_judge = [part.name for part in parse_parts(name) if part.function == JUDGE] if is_weighted(name) else []
        for verdict in try_function(rows[0], others, verifier):
            check_score_names(verdict.numbers)
            if index == 0 and metric is not None and metric not in of_judge:
                _check_metric(metric, name, rows[0], verdict)


def _check_metric(metric: str, name: str, row: PromptRow, verdict: Verdict) -> None:
    if metric not in (*OWN_SCORES, *verdict.numbers):
        raise InputError(
            f"algorithm.filter_groups.metric={metric!r} is not among the numbers that {described(name)} returns for "
            f"{row.origin}, {', '.join(verdict.numbers)}: choose one of these, or return it for every response"
        )


def try_function(row: PromptRow, name: str, verifiers: Verifiers) -> list[Verdict]:
    """Verdicts on trial responses to a row, without those on which the function failed.

    A function may fail on a response that it cannot read: it counts as wrong, with a warning, or is left out if the
    function returns None. Responses that are not scored within TRIAL_S are left out.

    Raises:
        InputError: a result is not a verdict, or the function failed on all responses.
    """
    texts = [form.format(row.truth_text) for form in _RESPONSES]
    verdicts = _judged(row, texts, name, verifiers)
    verifiers.warn_of_graded(verdicts)
    failed = [(text, verdict.error) for text, verdict in zip(texts, verdicts, strict=False) if verdict.error]
    for text, error in failed:
        if WRONG_RESULT in error:
            raise InputError(
                f"{described(name)} returns no verdict on the trial response {text[:60]!r} for {row.origin} "
                f"({error.removeprefix('ValueError: ')}): it must be {RULE}: a finite number for every response"
            )
    if len(failed) == len(texts):
        raise InputError(
            f"{described(name)} failed on all {len(texts)} trial responses for {row.origin}, on "
            f"{texts[0][:60]!r} with {failed[0][1]}: correct it, and make it return its lowest score for a response "
            "that it cannot read"
        )
    if failed:
        _log.warning(
            "%s failed on %d of %d trial responses for %s, on %r with %s: such a response %s",
            described(name),
            len(failed),
            len(verdicts),
            row.origin,
            failed[0][0],
            failed[0][1],
            "is left out of its group"
            if failed[0][1] == NO_VERDICT
            else "counts as wrong, with the lowest score that the function has given",
        )
    return [verdict for verdict in verdicts if not verdict.error]


def _judged(row: PromptRow, texts: list[str], name: str, verifiers: Verifiers) -> list[Verdict]:
    """The verdicts on `texts`, in order, that arrive within TRIAL_S: a slow function does not delay the start."""
    end, verdicts = time.monotonic() + TRIAL_S, []
    for text in texts:
        verdict = verifiers.submit(ScoreRequest(row.data_source, text, row.ground_truth, row.columns))
        try:
            verdicts.append(verdict.result(timeout=max(end - time.monotonic(), 0.0)))
        except TimeoutError:
            _log.info("%s scored %d of %d trial responses in %g s", described(name), len(verdicts), len(texts), TRIAL_S)
            break
    return verdicts
