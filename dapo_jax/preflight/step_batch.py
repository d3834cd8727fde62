"""Host: the micro-batches of a training step as shapes, from the lengths of its prompts and responses."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.derived import mini_batch_size
from dapo_jax.config.sections import Config
from dapo_jax.data.containers import Batch
from dapo_jax.data.padding import bucket
from dapo_jax.data.work import Work
from dapo_jax.learner.choices import uses_critic
from dapo_jax.models.architecture import Architecture
from dapo_jax.parallel.sharding import batch_sharding
from dapo_jax.preflight.lengths import Lengths
from dapo_jax.settings import micro_batches, rows_of_a_prompt
from dapo_jax.step_metrics import forward_flops


class StepBatch:
    """What a step trains on.

    Args:
        draws: the policy's loss selects tokens by random draws.
    """

    def __init__(self, config: Config, arch: Architecture, mesh: Mesh, lengths: Lengths, *, draws: bool) -> None:
        self.config, self.arch, self.mesh, self.draws = config, arch, mesh, draws
        self.responses, self.prompts = lengths.sample(config.data.train_batch_size, config.rollout.n)
        self.samples_per_prompt = rows_of_a_prompt(config, arch, mesh)

    def micro_batches(self, name: str, *, trained: bool = False) -> list[tuple[Batch, float]]:
        """The micro-batches of the "actor" or the "critic" as shapes, each with how many there are in an epoch.

        Args:
            trained: they have what an update needs besides the sampled rows.
        """
        sharding, shares = batch_sharding(self.mesh), micro_batches(self.config, self.mesh, name)
        found: Counter[tuple[Any, ...]] = Counter()
        shapes: dict[tuple[Any, ...], Batch] = {}
        for mini, times in self._mini_batches(mini_batch_size(self.config, name)):
            for _, piece in shares.split(self._trained(mini, name) if trained else mini):
                key = tuple(x.shape for x in jax.tree.leaves(piece))
                found[key] += times
                shapes.setdefault(
                    key, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), piece)
                )
        return [(shapes[key], float(count)) for key, count in found.items()]

    def work(self) -> Work:
        """Of a forward pass of the policy over an epoch: rows with their padding, of which real tokens are needed."""
        samples = self.responses.shape[1]
        needed = self._flops(self.responses + self.prompts[:, None], np.repeat(self.prompts, self._saved(samples)))
        computed = 0.0
        for piece, count in self.micro_batches("actor"):
            rows, width = len(piece.responses), piece.prompts.shape[1]
            lengths = np.full(rows, width + piece.responses.shape[1])
            computed += count * self._flops(lengths, np.full(self._saved(rows), width))
        return Work(computed, needed)

    def _flops(self, sequences: np.ndarray, saved: np.ndarray) -> float:
        """Of a forward pass over these lengths, without those of prompts that are run once for several responses."""
        return forward_flops(self.arch, sequences) - forward_flops(self.arch, saved)

    def _saved(self, rows: int) -> int:
        """How many copies of a prompt fewer than `rows` are run."""
        return rows - rows // self.samples_per_prompt

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
        copies = responses.shape[1] // self.samples_per_prompt
        prompt_mask = np.arange(width) >= width - np.repeat(prompts, copies)[:, None]
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

    def _trained(self, batch: Batch, name: str) -> Batch:
        """`batch` with what `make_batch` and the update add to it."""
        config = self.config
        corrected = config.actor.old_logprob == "recompute" and config.algorithm.rollout_correction.rollout_is != "none"
        names = ["loss_weights"]
        names += ["ref_logprobs"] * config.actor.use_kl_loss + ["importance_weights"] * corrected
        names += ["noise"] * self.draws + ["values", "returns"] * uses_critic(config)
        added = {extra: _zeros(batch.mask.shape, np.float32) for extra in names}
        if self.draws and name == "actor":
            added["selected"] = _zeros(batch.mask.shape, np.bool_)
        return batch.replace(**added)  # pyright: ignore[reportAttributeAccessIssue]


def size_of(micro_batch: Batch) -> str:
    """For the name of a program."""
    rows, length = micro_batch.responses.shape
    return f"{rows} x {micro_batch.prompts.shape[1]} + {length} tokens"


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)
