"""Host: compares a step that was computed again with what the run has recorded of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.data.experience import OWN_SCORES, Collected, Experience
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.monitor.records import CLOCK
from dapo_jax.training.sample_texts import HELD_OUT_KIND

# Besides the clock: what depends on the machine, or on how often something was asked before.
NOT_COMPARED = (*CLOCK, "reward/judge/", "reward/workers_replaced", "alarm/slow_process", "alarm/reward_workers")
PARTS = {  # what a step computes, in its order: the metrics of each begin so, the longest beginning counts
    "prompts": (),
    "tokens": ("dynamic_sampling/generated_tokens",),
    "verdicts": ("rollout/", "reward/", "environment/"),
    "rewards": ("critic/score", "critic/rewards", "actor/reward_kl", *(f"rollout/{name}/" for name in OWN_SCORES)),
    "kept groups": ("train/", "dynamic_sampling/", "experience_pipeline/", "data/", "mixture/", "sample/", "global_"),
    "log-probabilities": ("rollout_corr/", "training/", "actor/entropy", "actor/ppo_kl"),
    "advantages": ("critic/advantages", "critic/returns", "critic/values"),
    "loss": ("actor/loss", "actor/pg_", "actor/kl_loss", "actor/entropy_loss", "critic/vf_"),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "other metrics": ("",),
    "held-out problems": ("eval/",),
    "weights": (),
    "state": (),
}
ABSENT = "absent"
_TEXTS = ("kind", "task", "prompt", "response", "turns", "ground_truth", "length")  # of a sample, besides its scores


class Difference(NamedTuple):
    """A number or a text that was computed again, and is not what the run has recorded."""

    step: int
    part: str  # a key of PARTS
    name: str  # of the metric, the score or the array, with its place
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.name} is {short(self.found)}, the run has {short(self.recorded)}"


@dataclass
class Comparison:
    """What was compared of a step: of each part how much, and what differs; numbers up to `tolerance`."""

    step: int
    tolerance: float
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def same(self, part: str, name: str, recorded: Any, found: Any) -> bool:
        """Counts a number or a text of `part`, and keeps it if it differs."""
        self.counts[part] = self.counts.get(part, 0) + 1
        if not (equal := _equal(recorded, found, self.tolerance)):
            self.differences.append(Difference(self.step, part, name, recorded, found))
        return equal

    def lines(self) -> list[str]:
        """A line for each part that was compared."""
        lines = []
        for part in filter(self.counts.get, PARTS):
            differing, count = [one for one in self.differences if one.part == part], self.counts[part]
            result = f"{len(differing)} of {count} differ: {differing[0]}" if differing else f"{count} equal"
            lines.append(f"  {part:<18} {result}")
        return lines

    def rows(self, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Compares the metrics of the step."""
        for name in recorded | found:
            if name != "step" and not name.startswith(NOT_COMPARED):
                begins = [(len(one), part) for part, names in PARTS.items() for one in names if name.startswith(one)]
                self.same(max(begins)[1], name, recorded.get(name, ABSENT), found.get(name, ABSENT))

    def samples(self, recorded: Sequence[Mapping[str, Any]], groups: Sequence["Group"], tokenizer: Tokenizer) -> None:
        """Looks for each recorded response among those of `groups`, and compares its verdict and rewards."""
        places: dict[str, list[tuple[int, int]]] = {}
        for number, group in enumerate(groups):
            samples = range(len(group.experience.texts[group.index]))
            places.setdefault(group.prompt(tokenizer), []).extend((number, sample) for sample in samples)
        for one in recorded:
            prompt, wanted = one["prompt"], (one["response"], one["length"])
            if not self.same("prompts", "a prompt", prompt, prompt if prompt in places else "not sampled"):
                continue
            texts = {place: groups[place[0]].response(place[1]) for place in places[prompt]}
            matching = [place for place, text in texts.items() if text == wanted]
            found = wanted if matching else next(iter(texts.values()))
            if not self.same("tokens", f"a response to {short(prompt)}, with its length,", wanted, found):
                continue
            scores = {name: value for name, value in one.items() if name not in _TEXTS}
            all_scores = {place: groups[place[0]].scores(place[1]) for place in matching}
            # Of several equal responses, the one whose scores are closest.
            place = min(matching, key=lambda at: sum(all_scores[at].get(name) != scores[name] for name in scores))
            for name in scores | all_scores[place]:
                where = f"group {place[0] + 1}, response {place[1] + 1}, {short(wanted[0])} to {short(prompt)}: {name}"
                part = "rewards" if name in OWN_SCORES else "verdicts"
                self.same(part, where, scores.get(name, ABSENT), all_scores[place].get(name, ABSENT))

    def held_out(self, recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
        """Compares the responses to held-out problems, which every evaluation records in the same order."""
        for number, (before, now) in enumerate(zip(recorded, found, strict=False), start=1):
            for name in before | now:
                where = f"response {number}: {name}"
                self.same("held-out problems", where, before.get(name, ABSENT), now.get(name, ABSENT))

    def arrays(self, part: str, recorded: Any, found: Any) -> None:
        """Compares arrays, nested by name; of one that differs, the first number that does is kept."""
        trees = [jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (recorded, found)]
        before, now = ({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in tree} for tree in trees)
        for name in before | now:
            old, new = before.get(name, np.array(ABSENT)), now.get(name, np.array(ABSENT))
            if old.shape != new.shape or old.dtype.kind != new.dtype.kind:
                self.same(part, f"the shape of {name}", f"{old.shape} {old.dtype}", f"{new.shape} {new.dtype}")
                continue
            equal = new == old
            if old.dtype.kind == "f":
                near = np.abs(new - old) <= self.tolerance * np.maximum(1.0, np.abs(old))
                equal = equal | near | np.isnan(new) & np.isnan(old)
            place = tuple(np.argwhere(~equal)[0].tolist()) if not np.all(equal) else None
            of_place = (0, 0) if place is None else (old[place].item(), new[place].item())
            self.same(part, name if place is None else f"{name}{list(place)}", *of_place)


class Group(NamedTuple):
    """A group that a step has judged, or trained on."""

    experience: Experience
    index: int  # in the experience
    kept: bool
    trained: int | None  # its place in the batch

    def prompt(self, tokenizer: Tokenizer) -> str:
        """Its text, as samples have it."""
        return tokenizer.decode(self.experience.prompts[self.index], skip_special_tokens=False)

    def response(self, sample: int) -> tuple[str, int]:
        """Text and length."""
        return self.experience.texts[self.index][sample], int(self.experience.lengths[self.index, sample])

    def scores(self, sample: int) -> dict[str, float]:
        """Each score that a response has."""
        found = {name: float(values[self.index, sample]) for name, values in self.experience.scores.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def groups_of(rounds: Sequence[Round], sampled: Collected) -> list[Group]:
    """All groups of a step by prompt number: those judged in it, and those it trains on from earlier steps."""
    trained = sampled.experience
    places = {} if trained is None else {number: place for place, number in enumerate(trained.numbers.tolist())}
    found = {number: Group(trained, place, True, place) for number, place in places.items()} if trained else {}
    for one in rounds:
        for index, number in enumerate(one.experience.numbers.tolist()):
            found[number] = Group(one.experience, index, bool(one.keep[index]), places.get(number))
    return [found[number] for number in sorted(found)]


def of_kind(samples: Sequence[Mapping[str, Any]], *, held_out: bool) -> list[Mapping[str, Any]]:
    """The recorded responses to held-out problems, or those to training problems."""
    return [one for one in samples if (one["kind"] == HELD_OUT_KIND) == held_out]


def short(value: Any) -> str:
    """A value on one line, a long text shortened."""
    text = value if value in (ABSENT, "not sampled") else repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"


def _equal(recorded: Any, found: Any, tolerance: float) -> bool:
    """Whether two values are the same; JSON has null for a number that is not finite."""
    values = [None if isinstance(one, float) and not math.isfinite(one) else one for one in (recorded, found)]
    if all(isinstance(one, int | float) for one in values):
        return abs(values[0] - values[1]) <= tolerance * max(1.0, abs(values[0]))
    return values[0] == values[1]
