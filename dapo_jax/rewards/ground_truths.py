"""Host: checks, before a run starts, that the verifiers accept each problem's ground truth as an answer."""

import logging
import math
import re
from collections.abc import Iterable, Sequence

from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.verdicts import ScoreRequest, Verifiers
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for
from dapo_jax.rewards.weighted import functions_of

MAX_ASKED = 1000  # ground truths for math_verify, which takes milliseconds each; other verifiers check all of them
MAX_REPORTED = 10
MISSING = {"None", "nan", "NaN", "<NA>", "N/A", "n/a", "null"}  # as Python, pandas and people write no value
BY_SPELLING = {"gsm8k": "gsm8k_flexible", "math_dapo": "math_dapo_lenient"}  # verifiers; the same by value

_log = logging.getLogger(__name__)


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
        problems.append(f"{found[0].origin}{_others(found)}: ground_truth={found[0].truth_text[:60]} {rule}")
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
