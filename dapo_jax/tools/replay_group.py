"""Host: one group's way through a step as a table: texts, verdicts, rewards, advantage, clipped tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms.arguments import chosen
from dapo_jax.algorithms.named import named_loss
from dapo_jax.data.containers import Batch
from dapo_jax.learner.actor import loss_options
from dapo_jax.learner.batch import policy_statistics
from dapo_jax.learner.update import mini_batches
from dapo_jax.monitor.console import aligned
from dapo_jax.run.parts import Run
from dapo_jax.tools.replay_comparison import Group, short


class UpdateWatch:
    """Computes the log-probabilities of a step's batch before each of its optimizer steps, by one more forward pass."""

    def __init__(self, run: Run) -> None:
        self.batch: Batch | None = None  # whose updates are watched
        self._run, self._logprobs = run, list[np.ndarray]()

    def watched(self) -> Run:
        """The run, with a policy whose updates are watched."""
        learner = self._run.learner
        actor = learner.networks.actor
        operands = actor.trainable.operands

        def of_step(params: Any) -> Any:
            if self.batch is not None:
                self._logprobs.append(policy_statistics(learner, params, self.batch).logprobs)
            return operands(params)

        trainable = dataclasses.replace(actor.trainable, operands=of_step)  # pyright: ignore[reportArgumentType]
        networks = dataclasses.replace(learner.networks, actor=dataclasses.replace(actor, trainable=trainable))
        return dataclasses.replace(self._run, learner=dataclasses.replace(learner, networks=networks))

    def clipped(self, row: int) -> str:
        """Tokens of a row that the loss clipped, over all epochs; "-" if it says of no token whether it clips it."""
        batching, batch, count = self._run.learner.batching, self.batch, 0.0
        options = batching.actor
        if batch is None or self._run.learner.networks.actor.select is not None:
            return "-"
        function = named_loss(options.policy_loss.loss_mode)
        numbered = dataclasses.replace(batch, group_ids=np.arange(len(batch.mask)))
        parts = [
            one for one in mini_batches(numbered, batching.trained["actor"].mini_batch_rows) if one.loss_mask.any()
        ]
        for logprobs, part in zip(self._logprobs, parts * options.ppo_epochs, strict=False):
            if row in part.group_ids:
                weights = np.ones_like(logprobs) if batch.importance_weights is None else batch.importance_weights
                further = {**loss_options(options), "importance_weights": weights[row : row + 1]}
                arrays = (logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)
                _, metrics = function(*(one[row : row + 1] for one in arrays), **chosen(function, further))
                if "pg_clipfrac" not in metrics:
                    return "-"
                count += float(metrics["pg_clipfrac"].total)
        return f"{count:g}" if self._logprobs else "-"


def group_table(groups: Sequence[Group], number: int, watch: UpdateWatch, run: Run) -> str:
    """The table of `groups[number - 1]`."""
    group, tokenizer, batch = groups[number - 1], run.sampler.tokenizer, watch.batch
    experience, index, rows = group.experience, group.index, []
    for sample, text in enumerate(experience.texts[index]):
        cells = {"response": str(sample + 1)} | {name: f"{value:g}" for name, value in group.scores(sample).items()}
        cells["tokens"] = str(int(experience.lengths[index, sample]))
        if group.trained is not None and batch is not None:
            row = group.trained * len(experience.texts[index]) + sample
            values = batch.advantages[row][batch.policy_mask[row]]
            ends = dict.fromkeys(f"{one:.4g}" for one in (values.min(initial=np.inf), values.max(initial=-np.inf)))
            cells |= {"advantage": " to ".join(ends), "trained": str(int(batch.loss_mask[row].sum()))}
            cells["clipped"] = watch.clipped(row)
        rows.append(cells | {"text": short(text)})
    metric = run.config.algorithm.filter_groups.metric
    metric = metric if metric in experience.scores else "seq_reward"
    values = experience.scores[metric][index]
    way = f"kept, in the batch as group {group.trained + 1}" if group.trained is not None else "kept, not trained on"
    truth = run.problems.train_set.rows[experience.rows[index]].truth_text
    return "\n".join(
        [
            f"group {number} of {len(groups)}, sampled after step {experience.versions[index]}: "
            f"{short(group.prompt(tokenizer))}, ground truth {short(truth)}",
            f"{metric}: mean {np.nanmean(values):.4g}, standard deviation {np.nanstd(values):.4g}; "
            f"{way if group.kept else 'dropped by the filter'}",
            aligned(rows),
        ]
    )
