"""Host: responses from the beginning and from the end of a run, in pairs."""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from dapo_jax.report.numbers import is_number, number
from dapo_jax.report.read import RunFiles, read_samples

Sample = dict[str, Any]
PAIRS = 6
FILES = 20  # at each end of the run, in which the same prompt is looked for
KINDS = {  # of step_metrics.sample_texts, the fairest first
    "any": "not chosen by its score",
    "best": "among the best of its step",
    "worst": "among the worst of its step",
    "truncated": "cut off at the length limit",
}
PLAIN = "\n\t\u200c\u200d"  # the last two join letters and emoji
BEGIN, END = 900, 500  # characters of a long text that are shown


class Shown(NamedTuple):
    step: int
    prompt: str
    response: str
    verdict: str  # right, wrong or other
    score: str
    length: str  # tokens
    truth: str


class Pair(NamedTuple):
    kind: str
    same: bool  # whether both answer the same prompt
    before: Shown
    after: Shown


def before_and_after(run: RunFiles) -> list[Pair]:
    """Pairs of an early and a late response of the same kind: to the same prompt where there is one, then to others.

    Kinds are not mixed: an early "worst" next to a late "best" would show progress in any run.
    """
    steps = list(run.samples)
    if len(steps) < 2:
        return []
    count = min(FILES, len(steps) // 2)
    early = [(step, sample) for step in steps[:count] for sample in read_samples(run.samples[step])]
    late = [(step, sample) for step in reversed(steps[-count:]) for sample in read_samples(run.samples[step])]
    pairs = _same_prompt(early, late)
    for kind in KINDS:
        known = [pair for pair in pairs if pair.kind == KINDS[kind]]
        if len(known) < 1 and len(pairs) < PAIRS:
            pairs += _same_kind(early, late, kind)
    return pairs[:PAIRS]


def _same_prompt(early: Sequence[tuple[int, Sample]], late: Sequence[tuple[int, Sample]]) -> list[Pair]:
    """One pair per prompt and kind, the first early and the last late one; at most two of each kind."""
    pairs = []
    for kind, words in KINDS.items():
        first: dict[str, tuple[int, Sample]] = {}
        for step, sample in early:
            if sample.get("kind") == kind:
                first.setdefault(str(sample.get("prompt")), (step, sample))
        found = []
        for step, sample in late:
            if sample.get("kind") == kind and (before := first.pop(str(sample.get("prompt")), None)):
                found.append(Pair(words, True, shown(*before), shown(step, sample)))
        pairs += found[: 2 if kind in ("any", "best") else 1]
    return pairs


def _same_kind(early: Sequence[tuple[int, Sample]], late: Sequence[tuple[int, Sample]], kind: str) -> list[Pair]:
    before, after = (
        next(((step, sample) for step, sample in part if sample.get("kind") == kind), None) for part in (early, late)
    )
    return [Pair(KINDS[kind], False, shown(*before), shown(*after))] if before and after else []


def shown(step: int, sample: Sample) -> Shown:
    """A sample as text."""
    acc = sample.get("acc")
    verdict = "right" if acc == 1 else "wrong" if acc == 0 else "other"
    names = {"score": "score", "seq_reward": "reward"}
    scores = {names.get(name, name): value for name, value in sample.items() if name in ("acc", *names)}
    if scores.get("reward") == scores.get("score"):
        scores.pop("reward", None)
    return Shown(
        step=step,
        prompt=visible(shortened(str(sample.get("prompt", "")))),
        response=visible(shortened(str(sample.get("response", "")))),
        verdict=verdict,
        score=", ".join(f"{name} {number(value)}" for name, value in scores.items() if is_number(value)),
        length=f"{number(sample['length'])} tokens" if is_number(sample.get("length")) else "",
        truth=visible(shortened(str(sample.get("ground_truth", "")))),
    )


def shortened(text: str) -> str:
    """The beginning and the end of a long text, where the question and the answer are."""
    left_out = len(text) - BEGIN - END
    return text if left_out <= 0 else f"{text[:BEGIN]}\n[... {left_out:,} characters left out ...]\n{text[-END:]}"


def visible(text: str) -> str:
    """The text with control characters, and those that turn the direction of text, as what they are: <U+202E>."""
    return "".join(
        character
        if character in PLAIN or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else f"<U+{ord(character):04X}>"
        for character in text
    )
