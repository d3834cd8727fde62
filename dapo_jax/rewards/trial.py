"""Host: tries the reward functions on their problems before a run starts.

A built-in verifier must accept each problem's ground truth as an answer; a function of the user must return verdicts.
"""

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from dapo_jax.data.experience import OWN_SCORES, check_score_names
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge import JudgedVerifiers
from dapo_jax.rewards.messages import NO_VERDICT, WRONG_RESULT
from dapo_jax.rewards.own_function import RULE
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for
from dapo_jax.rewards.weighted import JUDGE, described, functions_of, is_weighted, parse_parts, without_judge

_RESPONSES = (  # the ground truth in forms that reward functions often look for
    *("{}", "Answer: {}", "#### {}", "\\boxed{{{}}}", "<think>So it is.</think>\n<answer>{}</answer>"),
    *('{{"answer": "{}"}}', "```python\nprint({})\n```", ""),
)

TRIAL_S = 15.0  # seconds for all of them: more than the default of reward.timeout_s, so that what hangs has failed
MAX_ASKED = 1000  # ground truths for math_verify, which takes milliseconds each; other verifiers check all of them
MAX_REPORTED = 10
MISSING = {"None", "nan", "NaN", "<NA>", "N/A", "n/a", "null"}  # as Python, pandas and people write no value
BY_SPELLING = {"gsm8k": "gsm8k_flexible", "math_dapo": "math_dapo_lenient"}  # verifiers; the same by value

_log = logging.getLogger(__name__)


def check_rewards(
    sets: Sequence[tuple[Sequence[PromptRow], str]], verifiers: Mapping[str, Verifiers], metric: str | None
) -> None:
    """Tries each function on its rows: a built-in verifier on all ground truths, the judge on one, the user's own on
    one of each data source, of further ones while TRIAL_S lasts.

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
        if VERIFIERS.keys() >= {*functions_of(others)}:
            continue
        of_judge = [part.name for part in parse_parts(name) if part.function == JUDGE] if is_weighted(name) else []
        firsts: dict[str, PromptRow] = {}
        for row in rows:
            firsts.setdefault(row.data_source, row)
        end = time.monotonic() + TRIAL_S
        for row in firsts.values():
            if (others, row.data_source) in tried or (row is not rows[0] and time.monotonic() > end):
                continue
            tried.add((others, row.data_source))
            for verdict in try_function(row, others, verifier):
                check_score_names(verdict.numbers)
                if index == 0 and metric is not None and metric not in of_judge:
                    _check_metric(metric, name, row, verdict)


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
    verdicts = _verdicts(row, texts, name, verifiers)
    verifiers.warn_of_graded(verdicts)
    failed = [(text, verdict.error) for text, verdict in zip(texts, verdicts, strict=False) if verdict.error]
    for text, error in failed:
        if WRONG_RESULT in error:
            raise InputError(
                f"{described(name)} returns no verdict on the trial response {text[:60]!r} for {row.origin} "
                f"({error.removeprefix('ValueError: ')}): it must be {RULE}: a finite number for every response"
            )
    if failed and len(failed) == len(verdicts):
        raise InputError(
            f"{described(name)} failed on all {len(failed)} trial responses for {row.origin}, on "
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
    scored = [verdict for verdict in verdicts if not verdict.error]
    if len({verdict.numbers["score"] for verdict in scored}) == 1 < len(scored):
        _log.warning(
            "%s gives %g to all %d trial responses for %s, though most of them have its ground truth %r and one is "
            "empty: see whether it compares text with a number, or takes its arguments in another order",
            described(name),
            scored[0].numbers["score"],
            len(scored),
            row.origin,
            row.ground_truth,
        )
    return scored


def _verdicts(row: PromptRow, texts: list[str], name: str, verifiers: Verifiers) -> list[Verdict]:
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


def check_ground_truths(rows: Iterable[PromptRow], function: str, verifiers: Verifiers) -> None:
    """Raises InputError with the first rows whose ground truth the built-in verifier rejects as an answer.

    Warns of ground truths with leading zeros, such as AIME's 033, where the spelling is compared.

    Args:
        function: the verifier's name in `verifiers`, or the path of your own function, which is not checked; of several
            functions, the first is checked, which says what is right.
    """
    first = functions_of(function)[0]
    same: dict[tuple[str, str], list[PromptRow]] = {}  # by verifier and ground truth
    unusable: dict[str, list[PromptRow]] = {}  # by what they must be
    problems, failed = [], False
    for row in rows:
        name = verifier_for(row.data_source) if first == "auto" else first
        if name not in VERIFIERS or not VERIFIERS[name].forms:  # your own function's form is not known
            continue
        if not isinstance(row.ground_truth, str):
            rule = f"must be text, because {name} compares text (your own function would get the value as it is)"
            unusable.setdefault(rule, []).append(row)
        elif row.ground_truth.strip() in MISSING:
            rule = "must be an answer, not the text of a missing value (if it is the answer, write \\text{None})"
            unusable.setdefault(rule, []).append(row)
        else:
            same.setdefault((name, row.ground_truth), []).append(row)
    for rule, found in unusable.items():
        problems.append(f"{found[0].origin}{_others(found)}: ground_truth={found[0].truth_text[:60] or None} {rule}")
    for name, lenient in BY_SPELLING.items():
        keys = [key for key in same if key[0] == name and re.match(r"-?0[0-9]", key[1])]
        if found := [row for key in keys for row in same[key]]:
            text = "%s%s: ground_truth=%s begins with 0 and %s compares the spelling, so the number without it is wrong"
            text += ": remove the zeros, or choose %s"
            _log.warning(text, found[0].origin, _others(found), found[0].ground_truth, name, lenient)
    slow = [key for key in same if key[0] == "math_verify"]
    stride = math.ceil(len(slow) / MAX_ASKED) or 1
    asked = [key for key in same if key[0] != "math_verify"] + slow[::stride]
    requests = [
        ScoreRequest(row.data_source, form.format(truth), truth, row.extra_info)
        for name, truth in asked
        for row in same[name, truth][:1]
        for form in VERIFIERS[name].forms
    ]
    verdicts = iter(verifiers.score(requests))
    for name, truth in asked:
        found = [next(verdicts) for _ in VERIFIERS[name].forms]
        if not any(verdict.numbers.get("acc") for verdict in found):
            reason = next((verdict.error for verdict in found if verdict.error), "")
            failed |= bool(reason)
            reason = reason or f"which reads {found[0].pred!r} in {VERIFIERS[name].forms[0].format(truth)[:60]!r}"
            problems += [
                f"{row.origin}: ground_truth={truth[:60]!r} is not an answer that {name} accepts, {reason}"
                for row in same[name, truth]
            ]
    if problems:
        count = len(problems) + sum(len(found) - 1 for found in unusable.values())
        listed = "\n  ".join(problems[:MAX_REPORTED])
        cure = "; after a timeout or a dead worker, raise reward.timeout_s or reward.memory_limit_mb" * failed
        raise InputError(
            f"no response can match these ground truths ({count} rows): write them as the verifier reads answers, "
            f"remove the rows, or choose another reward.function{cure}:\n  {listed}"
        )


def _others(rows: Sequence[PromptRow]) -> str:
    return f" and {len(rows) - 1} more" if len(rows) > 1 else ""
