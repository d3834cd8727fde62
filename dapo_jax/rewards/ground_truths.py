"""Host: asks the verifiers, before a run begins, whether any answer to a problem could be right."""

import math
from collections.abc import Iterable

from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.verifiers import verifier_for
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

MAX_ASKED = 1000  # different ground truths of math_verify, which takes milliseconds for one; of the others all
MAX_REPORTED = 10

# How a response says the ground truth so that the verifier reads it; one of the forms must be right. Your own function
# has forms that we do not know, `none` has no wrong answers, and `reasoning_gym` makes its ground truths itself.
_FORMS = {
    "arithmetic": ("{}",),
    "gsm8k": ("#### {}",),
    "gsm8k_flexible": ("{}",),
    "math_dapo": ("Answer: {}", r"\boxed{{{}}}"),
    "math_dapo_lenient": ("Answer: {}", r"\boxed{{{}}}"),
    "math_verify": (r"\boxed{{{}}}",),
}


def check_ground_truths(rows: Iterable[PromptRow], function: str, verifiers: VerifierPool) -> None:
    """Raises ValueError with the first rows whose ground truth the built-in verifier does not accept as an answer.

    Args:
        function: the name of the verifier in `verifiers`, or the path of your own, which is not asked.
    """
    same: dict[tuple[str, str], list[PromptRow]] = {}  # by verifier and ground truth
    no_text: dict[str, list[PromptRow]] = {}  # by verifier
    problems, failed = [], False
    for row in rows:
        name = verifier_for(row.data_source) if function == "auto" else function
        if name in _FORMS and not isinstance(row.ground_truth, str):
            no_text.setdefault(name, []).append(row)
        elif name in _FORMS:
            same.setdefault((name, row.ground_truth), []).append(row)
    for name, found in no_text.items():
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        problems.append(
            f"{found[0].origin}{others}: ground_truth={found[0].truth_text[:60]} is no text, and {name} compares text "
            "(a function of your own is given what it is)"
        )
    slow = [key for key in same if key[0] == "math_verify"]
    stride = math.ceil(len(slow) / MAX_ASKED) or 1
    asked = [key for key in same if key[0] != "math_verify"] + slow[::stride]
    requests = [
        ScoreRequest(row.data_source, form.format(truth), truth, row.extra_info)
        for name, truth in asked
        for row in same[name, truth][:1]
        for form in _FORMS[name]
    ]
    verdicts = iter(verifiers.score(requests))
    for name, truth in asked:
        found = [next(verdicts) for _ in _FORMS[name]]
        if not any(verdict.numbers["acc"] for verdict in found):
            reason = next((verdict.error for verdict in found if verdict.error), "")
            failed |= bool(reason)
            reason = reason or f"which reads {found[0].pred!r} in {_FORMS[name][0].format(truth)[:60]!r}"
            problems += [
                f"{row.origin}: ground_truth={truth[:60]!r} is no answer that {name} accepts, {reason}"
                for row in same[name, truth]
            ]
    if problems:
        count = len(problems) + sum(len(found) - 1 for found in no_text.values())
        listed = "\n  ".join(problems[:MAX_REPORTED])
        cure = "; for a time-out or a worker that died raise reward.timeout_s or reward.memory_limit_mb" * failed
        raise InputError(
            f"ground truths with which every response is wrong ({count} rows): write them as the verifier "
            f"reads answers, leave their rows out, or choose another reward.function{cure}:\n  {listed}"
        )
