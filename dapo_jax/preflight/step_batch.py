"""Host: the micro-batches of a training step as shapes, from the lengths of its prompts and responses."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.derived import candidates
from dapo_jax.config.sections import Config
from dapo_jax.data.containers import Batch, MicroBatch
from dapo_jax.data.padding import bucket
from dapo_jax.data.work import Work
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.trained_networks import Network
from dapo_jax.parallel.sharding import batch_sharding
from dapo_jax.preflight.lengths import Lengths


@dataclass(frozen=True)
class Shape:
    """Micro-batches of one shape, in an epoch."""

    micro_batch: MicroBatch  # of jax.ShapeDtypeStruct with shardings
    count: float
    slowest: float  # scores that a head of the slowest share of the devices computes, on average
    shares: int

    @property
    def pairs(self) -> float:
        """As `slowest`, of a bin."""
        return self.slowest * self.shares / len(self.micro_batch.bins.tokens)

    def __str__(self) -> str:
        (bins, slots), (shares, predicted) = self.micro_batch.bins.tokens.shape, self.micro_batch.sources.shape
        shared = self.micro_batch.bins.prompt_slots
        keys = "" if shared is None else f" + {shared.shape[1]} keys"
        return f"{bins} x {slots} tokens{keys}, {shares} x {predicted} predicted"


class StepBatch:
    """What a step trains on.

    Args:
        networks: that are trained.
        splits: how rows are split for these, and for models that are not trained.
        draws: the policy's loss selects tokens by random draws.
    """

    def __init__(
        self,
        config: Config,
        networks: Mapping[str, Network],
        splits: Mapping[str, MicroBatches],
        mesh: Mesh,
        lengths: Lengths,
        *,
        draws: bool,
    ) -> None:
        self.config, self.networks, self.splits, self.draws = config, networks, splits, draws
        self.responses, self.prompts = lengths.sample(config.data.train_batch_size, config.rollout.n)
        self.sharding = batch_sharding(mesh)

    def passes(self, name: str) -> list[Shape]:
        """The micro-batches of forward passes of the "actor", the "critic" or the "teacher" over the whole batch."""
        change = self._with_candidates if name == "teacher" else lambda batch: batch
        return self._shapes(name, self.config.data.train_batch_size, change)

    @functools.cached_property
    def updates(self) -> dict[str, list[Shape]]:
        """The micro-batches of an update, by mini-batches, of each model that is trained."""
        return {
            name: self._shapes(name, network.mini_batch_size, functools.partial(self._updated, name=name))
            for name, network in self.networks.items()
        }

    def _shapes(self, name: str, size: int, change: Callable[[Batch], Batch]) -> list[Shape]:
        """The micro-batches of parts of `size` prompts, each changed first."""
        split = self.splits[name]
        found: dict[Any, list[tuple[int, float]]] = {}  # how many, and their pairs
        shapes: dict[Any, MicroBatch] = {}
        for rows, times in self._mini_batches(size):
            for piece in split.split(change(rows)):
                shape = jax.tree.map(self._shape, piece.micro_batch)
                key = tuple(jax.tree.leaves(shape))
                found.setdefault(key, []).append((times, split.slowest_pairs(piece)))
                shapes[key] = shape
        result = []
        for key, pieces in found.items():
            counts, pairs = np.array(pieces, float).T
            result.append(Shape(shapes[key], counts.sum(), float(np.average(pairs, weights=counts)), split.num_shards))
        return result

    def _shape(self, array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharding)

    def work(self) -> Work:
        """Of forward passes of the policy in an epoch."""
        split = self.splits["actor"]
        mini_batches = self._mini_batches(self.networks["actor"].mini_batch_size)
        return Work(
            sum(shape.count * split.operations(shape.micro_batch, shape.slowest) for shape in self.updates["actor"]),
            sum(times * split.needed(mini) for mini, times in mini_batches),
        )

    def _mini_batches(self, size: int) -> Iterator[tuple[Batch, int]]:
        """The mini-batches of `size` prompts that differ in their lengths, each with how many there are."""
        lengths = np.column_stack([self.prompts, self.responses])
        different, counts = np.unique(lengths.reshape(-1, size, lengths.shape[1]), axis=0, return_counts=True)
        for mini, times in zip(different, counts, strict=True):
            yield self._rows(mini[:, 1:], mini[:, 0]), int(times)

    def _rows(self, responses: np.ndarray, prompts: np.ndarray) -> Batch:
        """Groups as learner/batch.py's `rows_of` makes them: masks of these lengths, and zeros that take no memory.

        Args:
            responses, prompts: tokens, [Q, G] and [Q].
        """
        width = bucket(int(self.prompts.max()))
        length = min(bucket(int(self.responses.max())), self.config.data.max_response_length)
        prompt_mask = np.arange(width) >= width - prompts[:, None]
        mask = np.arange(length) < responses.reshape(-1, 1)
        return Batch(
            prompts=_zeros(prompt_mask.shape, np.int32),
            prompt_mask=prompt_mask,
            responses=_zeros(mask.shape, np.int32),
            mask=mask,
            loss_mask=mask,
            group_ids=_zeros(mask.shape[:1], np.int32),
            old_logprobs=_zeros(mask.shape, np.float32),
            advantages=_zeros(mask.shape, np.float32),
        )

    def _with_candidates(self, batch: Batch) -> Batch:
        """`batch` with the tokens that a teacher scores besides the sampled ones."""
        count = candidates(self.config.algorithm.distillation)
        return dataclasses.replace(batch, candidates=_zeros((*batch.mask.shape, count), np.int32)) if count else batch

    def _updated(self, batch: Batch, name: str) -> Batch:
        """`batch` with what `make_batch` and the update add to it."""
        config = self.config
        corrected = config.actor.old_logprob == "recompute" and config.algorithm.rollout_correction.rollout_is != "none"
        names = ["loss_weights"]
        names += ["ref_logprobs"] * config.actor.use_kl_loss + ["importance_weights"] * corrected
        masked = config.actor.off_policy_mask_threshold is not None and config.actor.old_logprob == "recompute"
        names += ["sampled_logprobs"] * masked
        names += ["noise"] * self.draws + ["values", "returns"] * ("critic" in self.networks)
        added = {extra: _zeros(batch.mask.shape, np.float32) for extra in names}
        if self.draws and name == "actor":
            added["selected"] = _zeros(batch.mask.shape, np.bool_)
        batch = self._with_candidates(dataclasses.replace(batch, **added))
        if batch.candidates is None:
            return batch
        return dataclasses.replace(batch, teacher_logprobs=_zeros(batch.candidates.shape, np.float32))


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)
