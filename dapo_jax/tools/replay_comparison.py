"""Host: compares steps that are computed again with what the run has recorded."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.data.experience import OWN_SCORES, SCORE
from dapo_jax.monitor.kept_batches import GROUPS
from dapo_jax.monitor.records import CLOCK, sample_files
from dapo_jax.tools.replay_group import ABSENT, Group, short
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
ARRAYS = {  # of a kept batch, by the part that has computed them; besides log-probabilities, experts and scores
    "prompts": ("prompts", "prompt_mask", "prompt_tokens", "numbers", "rows"),
    "tokens": ("responses", "mask", "by_policy", "finished"),
    "advantages": ("advantages", "returns", "values"),
}
_TEXTS = ("kind", "prompt", "response", "turns", "ground_truth", "length")  # of a sample, besides its scores


class Difference(NamedTuple):
    """A number or a text that was computed again, and is not what the run has recorded."""

    step: int
    part: str  # a key of PARTS
    name: str  # of the metric, the score or the array, with its place
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.name} is {short(self.found)}, the run has {short(self.recorded)}"


class Replay:
    """Steps that were computed again, each compared with what the run has recorded. `print` shows the last one.

    Args:
        tolerance: numbers may differ by so much, times the recorded number if that is above 1.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.step, self._differences = tolerance, 0, list[Difference]()
        self.counts: dict[str, int] = {}  # how much was compared of each part of the last step
        self.not_compared: list[str] = []
        self.table = ""  # of the group that was asked for

    def begin(self, step: int) -> None:
        """Compares a further step from now on."""
        self.step, self.counts = step, {}

    @property
    def equal(self) -> bool:
        """Whether everything that the run has recorded was found again."""
        return not self._differences

    @property
    def differences(self) -> list[Difference]:
        """By step, those of a step in the order in which it computes; the others may follow from the first."""
        return sorted(self._differences, key=lambda one: (one.step, [*PARTS].index(one.part)))

    def __str__(self) -> str:
        lines = [f"step {self.step}:"]
        for part in filter(self.counts.get, PARTS):
            differing = [str(one) for one in self._differences if (one.step, one.part) == (self.step, part)]
            several = f"{len(differing)} of {self.counts[part]} differ: {''.join(differing[:1])}"
            lines.append(f"  {part:<18} {several if differing else f'{self.counts[part]} equal'}")
        lines += [f"not compared: {one}" for one in self.not_compared] + [self.table] * bool(self.table)
        first = [f"first difference: step {one.step}, {one.part}: {one}" for one in self.differences[:1]]
        return "\n".join(lines + (first or ["equal"]))

    def same(self, part: str, name: str, recorded: Any, found: Any) -> bool:
        """Counts a number or a text of `part`, and keeps it if it differs."""
        self.counts[part] = self.counts.get(part, 0) + 1
        if not (equal := _equal(recorded, found, self.tolerance)):
            self._differences.append(Difference(self.step, part, name, recorded, found))
        return equal

    def rows(self, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Compares the metrics of the step."""
        for name in {**recorded, **found}:
            if name != "step" and not name.startswith(NOT_COMPARED):
                begins = [(len(one), part) for part, names in PARTS.items() for one in names if name.startswith(one)]
                self.same(max(begins)[1], name, recorded.get(name, ABSENT), found.get(name, ABSENT))

    def samples(self, run: Path, groups: Sequence[Group]) -> None:
        """Looks for each response that `run` recorded among those of `groups`, and compares its verdict and rewards."""
        if (path := sample_files(run).get(self.step)) is None:
            return
        recorded = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for one in (one for one in recorded if one["kind"] != HELD_OUT_KIND):
            prompt, wanted = one["prompt"], (one["response"], one["length"])
            asked = [(number, group) for number, group in enumerate(groups, start=1) if group.prompt == prompt]
            if not self.same("prompts", "a prompt", prompt, prompt if asked else "not sampled"):
                continue
            places = [
                (number, group, at) for number, group in asked for at in range(group.experience.finished.shape[1])
            ]
            matching = [place for place in places if place[1].response(place[2]) == wanted]
            found = wanted if matching else asked[0][1].response(0)
            if not self.same("tokens", f"a response to {short(prompt)}, with its length,", wanted, found):
                continue
            scores = {name: value for name, value in one.items() if name not in _TEXTS}

            def unlike(place: tuple[int, Group, int], scores: Mapping[str, Any] = scores) -> int:
                return sum(place[1].scores(place[2]).get(name) != value for name, value in scores.items())

            number, group, at = min(matching, key=unlike)  # of several equal responses
            for name in scores | (now := group.scores(at)):
                where = f"group {number}, response {at + 1}, {short(wanted[0])} to {short(prompt)}: {name}"
                self.same(_part_of_score(name), where, scores.get(name, ABSENT), now.get(name, ABSENT))

    def batch(self, recorded: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
        """Compares the arrays of a kept batch, each as the part that has computed it."""
        for name in {**recorded, **found}:
            parts = ({name: one[name]} if name in one else {} for one in (recorded, found))
            self.arrays(_part_of_array(name.removeprefix(GROUPS)), *parts)

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
            values = (0, 0) if place is None else (old[place].item(), new[place].item())
            self.same(part, name if place is None else f"{name}{list(place)}", *values)


def comparable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The `saved_arrays` of a state, without the engine's, and with the metrics of a batch that was sampled ahead."""
    ahead = arrays.get("ahead")
    if ahead is None:
        return {**arrays, "engine": {}}
    metrics, *counts = json.loads(np.asarray(ahead["numbers"]).tobytes())
    metrics = {name: np.array(value) for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}
    return {**arrays, "engine": {}, "ahead": {**ahead, "numbers": {**metrics, "counts": np.array(counts)}}}


def _part_of_score(name: str) -> str:
    return "rewards" if name in OWN_SCORES else "verdicts"


def _part_of_array(name: str) -> str:
    """What has computed an array of a kept batch."""
    if name.startswith(SCORE):
        return _part_of_score(name.removeprefix(SCORE))
    if "expert" in name:  # those that tokens went to
        return "tokens"
    if "logprobs" in name:
        return "log-probabilities"
    return next((part for part, names in ARRAYS.items() if name in names), "kept groups")


def _equal(recorded: Any, found: Any, tolerance: float) -> bool:
    """Whether two values are the same; JSON has null for a number that is not finite."""
    old, new = (None if isinstance(one, float) and not math.isfinite(one) else one for one in (recorded, found))
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(old - new) <= tolerance * max(1.0, abs(old))
    return old == new
