"""Host: responses from the beginning and from the end of a run, in pairs."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from dapo_jax.environments.tool_formats import parts_of
from dapo_jax.monitor.readable import shortened, visible
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.tools.report.numbers import is_number, number
from dapo_jax.tools.report.read import RunFiles, read_samples
from dapo_jax.training.sample_texts import HELD_OUT_KIND

Sample = dict[str, Any]
HELD_OUT_PAIRS = 4
FILES = 20  # at each end of the run, in which the same prompt is looked for
KINDS = {  # of sample_texts.trained_texts, the fairest first: in words, and how many pairs at most
    "any": ("not chosen by its score", 2),
    "best": ("among the best of its step", 2),
    "worst": ("among the worst of its step", 1),
    "truncated": ("cut off at the length limit", 1),
}


class Shown(NamedTuple):
    step: int
    prompt: str
    response: str
    turns: list[tuple[str, str]]  # policy, call or environment, and the text of each part; [] for a single turn
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
    first, last = (
        next(filter(None, (_of_kind(run, [step], HELD_OUT_KIND) for step in order)), {})
        for order in (steps, steps[::-1])
    )
    tasks: dict[str, list[Pair]] = {}
    for (task, prompt), before in first.items():
        if (after := last.get((task, prompt))) and after[0] > before[0]:
            tasks.setdefault(task, []).append(Pair(task, True, shown(*before), shown(*after), held_out=True))
    of_each = max(HELD_OUT_PAIRS // max(len(tasks), 1), 1)
    return [pair for pairs in tasks.values() for pair in pairs[:of_each]]


def trained_pairs(run: RunFiles) -> list[Pair]:
    """Pairs of an early and a late trained response of one kind: to the same prompts, or to others if there are none.

    Kinds are not mixed: an early "worst" next to a late "best" would show progress in any run.
    """
    steps = [step for step in run.samples if step > 0]
    count = min(FILES, len(steps) // 2)
    pairs = []
    for kind, (words, most) in KINDS.items():
        early, late = _of_kind(run, steps[:count], kind), _of_kind(run, steps[: -count - 1 : -1], kind)
        same = [Pair(words, True, shown(*early[prompt]), shown(*late[prompt])) for prompt in late if prompt in early]
        if not same and early and late:
            same = [Pair(words, False, shown(*next(iter(early.values()))), shown(*next(iter(late.values()))))]
        pairs += same[:most]
    return pairs


def _of_kind(run: RunFiles, steps: Sequence[int], kind: str) -> dict[tuple[str, str], tuple[int, Sample]]:
    """By task and prompt, the first sample of a kind in the order of `steps`, with its step."""
    found: dict[tuple[str, str], tuple[int, Sample]] = {}
    for step in steps:
        for sample in read_samples(run.samples[step]):
            if sample.get("kind") == kind:
                found.setdefault((str(sample.get("task")), str(sample.get("prompt"))), (step, sample))
    return found


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
        turns=[(by, visible(text)) for by, text in _parts(sample.get("turns", []))],
        verdict=verdict,
        score=", ".join(f"{name} {number(value)}" for name, value in scores.items() if is_number(value)),
        length=f"{number(sample['length'])} tokens" if is_number(sample.get("length")) else "",
        truth=visible(shortened(str(sample.get("ground_truth", "")))),
    )


def _parts(turns: Sequence[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Who wrote what; calls of tools, which an environment has answered, apart from the rest of their turn."""
    for turn, following in zip_longest(turns, turns[1:]):
        text = shortened(turn["text"])  # parts_of takes long for long ones
        if turn["by"] == "policy" and following is not None:
            yield from (("call" if called else "policy", part) for called, part in parts_of(text))
        else:
            yield turn["by"], text
