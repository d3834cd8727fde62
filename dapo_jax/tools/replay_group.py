"""Host: a group that a step has judged, its way through the step as a table, and what the updates made of it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.algorithms.arguments import chosen
from dapo_jax.algorithms.named import named_loss
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Experience
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import loss_options
from dapo_jax.learner.batch import policy_statistics
from dapo_jax.learner.update import mini_batches
from dapo_jax.monitor.console import aligned
from dapo_jax.run.parts import Run

ABSENT = "absent"


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


def check_group(number: int, count: int) -> None:
    """InputError if none of so many groups has this number."""
    if not 1 <= number <= count:
        raise InputError(f"--group={number} must be a group of the step: 1 to {count}")


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
    check_group(number, len(groups))
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
