"""Host: compares steps that are computed again with what the run has recorded; one group's way through a step."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.algorithms.arguments import chosen
from dapo_jax.algorithms.named import named_loss
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import OWN_SCORES, SCORE, Experience
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import loss_options
from dapo_jax.learner.batch import policy_statistics
from dapo_jax.learner.update import mini_batches
from dapo_jax.monitor.console import aligned
from dapo_jax.monitor.kept_batches import GROUPS
from dapo_jax.monitor.records import CLOCK
from dapo_jax.run.parts import Run
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
ABSENT = "absent"
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


class Group(NamedTuple):
    """A group that a step has judged, or trained on."""

    experience: Experience
    index: int  # in the experience
    kept: bool
    prompt: str  # as samples have it

    def response(self, sample: int) -> tuple[str, int]:
        """Text and length."""
        return self.experience.texts[self.index][sample], int(self.experience.lengths[self.index, sample])

    def scores(self, sample: int) -> dict[str, float]:
        """Each score that a response has."""
        found = {name: float(values[self.index, sample]) for name, values in self.experience.scores.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def groups_by_number(parts: Iterable[tuple[Experience, Sequence[bool]]], decode: Callable[..., str]) -> list[Group]:
    """All groups by prompt number; of one that several parts have, the last.

    Args:
        parts: groups, each with whether it is kept.
    """
    found: dict[int, Group] = {}
    for experience, keep in parts:
        for index, number in enumerate(experience.numbers.tolist()):
            prompt = decode(experience.prompts[index], skip_special_tokens=False)
            found[number] = Group(experience, index, keep[index], prompt)
    return [found[number] for number in sorted(found)]


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

    def samples(self, recorded: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> None:
        """Looks for each recorded response among those of `groups`, and compares its verdict and rewards."""
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
                self.same(part_of_score(name), where, scores.get(name, ABSENT), now.get(name, ABSENT))

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


def part_of_score(name: str) -> str:
    return "rewards" if name in OWN_SCORES else "verdicts"


def _part_of_array(name: str) -> str:
    """What has computed an array of a kept batch."""
    if name.startswith(SCORE):
        return part_of_score(name.removeprefix(SCORE))
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


def short(value: Any) -> str:
    """A value on one line, a long text shortened."""
    text = value if value in (ABSENT, "not sampled") else repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"


class UpdateWatch:
    """Computes the log-probabilities of a step's batch before each of its optimizer steps, by one more forward pass."""

    def __init__(self, run: Run) -> None:
        self.batch: Batch | None = None  # whose updates are watched
        self._learner, self._logprobs = run.learner, list[np.ndarray]()
        operands = (actor := run.learner.networks.actor).trainable.operands

        def of_step(params: Any) -> Any:
            if self.batch is not None:
                self._logprobs.append(policy_statistics(self._learner, params, self.batch).logprobs)
            return operands(params)

        trainable = dataclasses.replace(actor.trainable, operands=of_step)  # pyright: ignore[reportArgumentType]
        networks = dataclasses.replace(run.learner.networks, actor=dataclasses.replace(actor, trainable=trainable))
        self.run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, networks=networks))  # is watched

    def of_row(self, row: int) -> dict[str, str]:
        """The loss of a row in its first update, the mean over its tokens; how many it clipped in all updates.

        "-" for what the loss does not say of single tokens.
        """
        batching, batch, count, loss = self._learner.batching, self.batch, 0.0, "-"
        if batch is None or not self._logprobs or self._learner.networks.actor.select is not None:
            return {"loss": loss, "clipped": "-"}
        function = named_loss(batching.actor.policy_loss.loss_mode)
        numbered = dataclasses.replace(batch, group_ids=np.arange(len(batch.mask)))
        parts = [
            one for one in mini_batches(numbered, batching.trained["actor"].mini_batch_rows) if one.loss_mask.any()
        ]
        for logprobs, part in zip(self._logprobs, parts * batching.actor.ppo_epochs, strict=False):
            if row in part.group_ids:
                weights = np.ones_like(logprobs) if batch.importance_weights is None else batch.importance_weights
                further = {**loss_options(batching.actor), "importance_weights": weights[row : row + 1]}
                arrays = (logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)
                losses, metrics = function(*(one[row : row + 1] for one in arrays), **chosen(function, further))
                if loss == "-" and (tokens := batch.loss_mask[row : row + 1]).any():
                    loss = f"{float(np.mean(np.asarray(losses)[tokens])):.4g}"
                if "pg_clipfrac" not in metrics:
                    return {"loss": loss, "clipped": "-"}
                count += float(metrics["pg_clipfrac"].total)
        return {"loss": loss, "clipped": f"{count:g}"}


def group_table(
    groups: Sequence[Group],
    number: int,
    in_batch: Sequence[int],
    batch: Batch | None,
    metric: str,
    prompt_rows: Sequence[PromptRow],
    of_row: Callable[[int], Mapping[str, str]] = lambda row: {},
) -> str:
    """The way of the `number`-th of `groups` through its step.

    Args:
        in_batch: prompt numbers of the groups of `batch`.
        metric: of the group filter.
        prompt_rows: that prompts come from.
        of_row: further cells of a row of the batch.

    Raises:
        InputError: there is no such group.
    """
    if not 1 <= number <= len(groups):
        raise InputError(f"--group={number} must be a group of the step: 1 to {len(groups)}")
    group, rows = groups[number - 1], []
    experience, index = group.experience, group.index
    own = int(experience.numbers[index])
    trained = in_batch.index(own) if own in in_batch else None
    for sample, text in enumerate(experience.texts[index]):
        cells = {"response": str(sample + 1)} | {name: f"{value:g}" for name, value in group.scores(sample).items()}
        cells["tokens"] = str(group.response(sample)[1])
        if trained is not None and batch is not None:
            row = trained * len(experience.texts[index]) + sample
            values = batch.advantages[row][batch.policy_mask[row]]
            ends = dict.fromkeys(f"{one:.4g}" for one in (values.min(initial=np.inf), values.max(initial=-np.inf)))
            cells |= {"advantage": " to ".join(ends), "trained": str(int(batch.loss_mask[row].sum()))}
            cells |= of_row(row)
        rows.append(cells | {"text": short(text)})
    values = experience.scores.get(metric, experience.scores["seq_reward"])[index]
    way = f"kept, group {trained + 1} of the batch" if trained is not None else "kept, but not trained on"
    way = way if group.kept else "dropped by the filter"
    truth = prompt_rows[experience.rows[index]].truth_text
    return "\n".join(
        [
            f"group {number} of {len(groups)}: {short(group.prompt)}, ground truth {short(truth)}",
            f"sampled after step {experience.versions[index]}; {metric}: mean {np.nanmean(values):.4g}, standard "
            f"deviation {np.nanstd(values):.4g}; {way}",
            aligned(rows),
        ]
    )
