"""Host: responses from the beginning and from the end of a run, in pairs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dapo_jax.monitor.readable import shortened, visible
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.tools.report.numbers import is_number, number
from dapo_jax.tools.report.read import RunFiles, read_samples
from dapo_jax.training.sample_texts import HELD_OUT_KIND

Sample = dict[str, Any]
HELD_OUT_PAIRS = 4
PAIRS = 6
FILES = 20  # at each end of the run, in which the same prompt is looked for
KINDS = {  # of sample_texts.trained_texts, the fairest first
    "any": "not chosen by its score",
    "best": "among the best of its step",
    "worst": "among the worst of its step",
    "truncated": "cut off at the length limit",
}


class Shown(NamedTuple):
    step: int
    prompt: str
    response: str
    verdict: str  # right, wrong or other
    score: str
    length: str  # tokens
    truth: str


class Pair(NamedTuple):
    kind: str  # in words; of a held-out problem, its task
    same: bool  # whether both answer the same prompt
    before: Shown
    after: Shown
    held_out: bool = False

    @property
    def caption(self) -> str:
        """What the two have in common."""
        if self.held_out:
            return self.kind
        return f"{'Same prompt' if self.same else 'Different prompts'}; {self.kind}."


def held_out_pairs(run: RunFiles) -> list[Pair]:
    """Responses to the same held-out problems at the first and the last evaluation, as many of each task."""
    steps = [row["step"] for row in run.rows if any(map(HELD_OUT.fullmatch, row)) and row["step"] in run.samples]
    first, last = _first_held_out(run, steps), _first_held_out(run, steps[::-1])
    tasks: dict[str, list[Pair]] = {}
    for (task, prompt), (step, sample) in first.items():
        if (after := last.get((task, prompt))) and after[0] > step:
            tasks.setdefault(task, []).append(Pair(task, True, shown(step, sample), shown(*after), held_out=True))
    of_each = max(HELD_OUT_PAIRS // max(len(tasks), 1), 1)
    return [pair for pairs in tasks.values() for pair in pairs[:of_each]]


def _first_held_out(run: RunFiles, steps: Sequence[int]) -> dict[tuple[str, str], tuple[int, Sample]]:
    """By task and prompt, the held-out responses of the first of the steps that has any."""
    for step in steps:
        samples = [sample for sample in read_samples(run.samples[step]) if sample.get("kind") == HELD_OUT_KIND]
        if samples:
            return {(str(sample.get("task")), str(sample.get("prompt"))): (step, sample) for sample in samples}
    return {}


def trained_pairs(run: RunFiles) -> list[Pair]:
    """Pairs of an early and a late trained response of one kind: to the same prompt where there is one, then to others.

    Kinds are not mixed: an early "worst" next to a late "best" would show progress in any run.
    """
    steps = [step for step in run.samples if step > 0]
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
