"""Host: checks, before a run starts, that the verifiers accept each problem's ground truth as an answer."""

import math
from collections.abc import Iterable

from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.verdicts import ScoreRequest, Verifiers
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for
from dapo_jax.rewards.weighted import functions_of

MAX_ASKED = 1000  # ground truths for math_verify, which takes milliseconds each; other verifiers check all of them
MAX_REPORTED = 10


def check_ground_truths(rows: Iterable[PromptRow], function: str, verifiers: Verifiers) -> None:
    """Raises InputError with the first rows whose ground truth the built-in verifier rejects as an answer.

    Args:
        function: the verifier's name in `verifiers`, or the path of your own function, which is not checked; of several
            functions, the first is checked, which says what is right.
    """
    first = functions_of(function)[0]
    same: dict[tuple[str, str], list[PromptRow]] = {}  # by verifier and ground truth
    no_text: dict[str, list[PromptRow]] = {}  # by verifier
    problems, failed = [], False
    for row in rows:
        name = verifier_for(row.data_source) if first == "auto" else first
        if name not in VERIFIERS or not VERIFIERS[name].forms:  # your own function's form is not known
            continue
        if not isinstance(row.ground_truth, str):
            no_text.setdefault(name, []).append(row)
        else:
            same.setdefault((name, row.ground_truth), []).append(row)
    for name, found in no_text.items():
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        problems.append(
            f"{found[0].origin}{others}: ground_truth={found[0].truth_text[:60]} must be text, because {name} compares "
            "text (your own function would get the value as it is)"
        )
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
        if not any(verdict.numbers["acc"] for verdict in found):
            reason = next((verdict.error for verdict in found if verdict.error), "")
            failed |= bool(reason)
            reason = reason or f"which reads {found[0].pred!r} in {VERIFIERS[name].forms[0].format(truth)[:60]!r}"
            problems += [
                f"{row.origin}: ground_truth={truth[:60]!r} is not an answer that {name} accepts, {reason}"
                for row in same[name, truth]
            ]
    if problems:
        count = len(problems) + sum(len(found) - 1 for found in no_text.values())
        listed = "\n  ".join(problems[:MAX_REPORTED])
        cure = "; after a timeout or a dead worker, raise reward.timeout_s or reward.memory_limit_mb" * failed
        raise InputError(
            f"no response can match these ground truths ({count} rows): write them as the verifier reads answers, "
            f"remove the rows, or choose another reward.function{cure}:\n  {listed}"
        )
