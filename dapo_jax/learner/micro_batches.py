"""Host: splits a mini-batch into micro-batches, each the arrays of one forward and backward pass.

Packed, sequences follow each other in bins without padding between them (packing.py). By rows, each bin holds one
sequence, and all bins of a batch are equally wide.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_jax.data.containers import Batch, Bins, MicroBatch, Tokens
from dapo_jax.learner.packing import EIGHTHS, Pass, plan_passes
from dapo_jax.models.architecture import Choices
from dapo_jax.models.attention import XLA, BinAttention
from dapo_jax.models.flops import TokenFlops

LARGE = 4096  # slots of a share, from which padding costs more than compiling another shape
SLOTS = "tokens", "positions", "trees", "branches"
PER_TOKEN = {field.name for field in dataclasses.fields(Tokens)} - {"noise"}  # a pass draws nothing


@dataclass(frozen=True)
class Piece:
    """A micro-batch, and where its tokens are in the batch."""

    micro_batch: MicroBatch
    rows: np.ndarray  # [S, U] row of each response token, -1 on padding
    columns: np.ndarray  # [S, U] its place in the response

    def write(self, values: np.ndarray, whole: np.ndarray) -> None:
        """Writes values [S, U] of the response tokens to their places in `whole` [B, R]."""
        real = self.rows >= 0
        whole[self.rows[real], self.columns[real]] = values[real]


@dataclass(frozen=True)
class MicroBatches:
    """How rows are split into forward and backward passes."""

    num_shards: int  # devices that bins are sharded over
    max_tokens_per_device: int = 0  # slots of a pass; at least one longest sequence
    rows_per_device: int = 0  # not 0: by rows
    attention: BinAttention = XLA
    flops: TokenFlops = TokenFlops(layers=1.0, head=0.0, pair=0.0)
    choices: Choices | None = None  # not None: tokens go to the experts that the sampler used, where they are known

    def split(self, batch: Batch) -> Iterator[Piece]:
        """The micro-batches, which hold every row that has a response."""
        passes, packer = self.passes(batch), _Packer(batch, self)
        most: dict[tuple[int, int], int] = {}  # response tokens of a share, by the shape of a pass
        for one in passes:
            most[one.shape] = max(most.get(one.shape, 0), packer.num_tokens(one))
        for one in passes:
            slots = one.width * len(one.bins) // self.num_shards
            part = -(-slots // (EIGHTHS if slots >= LARGE else EIGHTHS // 2))  # few shapes are compiled
            yield packer.piece(one, -(-most[one.shape] // part) * part)

    def passes(self, batch: Batch) -> Sequence[Pass]:
        """Which rows each micro-batch has in which bins."""
        prompts, responses = batch.prompt_mask.sum(axis=1), batch.mask.sum(axis=1)
        if not responses.any():
            return []
        if self.rows_per_device:
            return list(self._by_rows(responses, batch.prompts.shape[1] + batch.mask.shape[1]))
        return plan_passes(
            prompts,
            responses,
            num_shards=self.num_shards,
            max_tokens=self.max_tokens_per_device,
            attention=self.attention,
            pair_cost=self.flops.pair / (self.flops.layers + self.flops.head),
        )

    def computed(self, piece: Piece) -> float:
        """Operations of a forward pass over a micro-batch."""
        return self.operations(piece.micro_batch, self.slowest_pairs(piece))

    def operations(self, micro_batch: MicroBatch, pairs: float) -> float:
        """Operations of a forward pass whose slowest share of the devices computes so many scores; all wait for it."""
        slots, tokens = micro_batch.bins.trees.size, micro_batch.sources.size
        return self.flops.layers * slots + self.flops.head * tokens + self.flops.pair * self.num_shards * pairs

    def slowest_pairs(self, piece: Piece) -> float:
        """Pairs of a query and a key whose score the share of the devices with the most computes, in the mean layer."""
        bins, windows = piece.micro_batch.bins, self.flops.windows
        pairs = np.array([share * self.attention.pairs(bins, window) for window, share in windows]).sum(axis=0)
        return float(pairs.reshape(self.num_shards, -1).sum(axis=1).max())

    def needed(self, batch: Batch) -> float:
        """Operations of a forward pass over the batch without padding, each prompt once."""
        prompts, responses = batch.prompt_mask.sum(axis=1), batch.mask.sum(axis=1)
        first_tokens = self.flops.head * np.count_nonzero(responses)  # the prompts predict them
        later = self.flops.of_responses(prompts, responses.reshape(len(prompts), -1))
        return self.flops.of_prompts(prompts) + first_tokens + later

    def _by_rows(self, responses: np.ndarray, width: int) -> Iterator[Pass]:
        rows, size = len(responses), self.rows_per_device * self.num_shards
        for start in range(0, rows, size):
            bins = [[row] if row < rows and responses[row] else [] for row in range(start, start + size)]
            if any(bins):
                yield Pass(self.attention.rounded(width), bins, shares=False)


class _Packer:
    """Makes the arrays of passes from the rows of a batch."""

    def __init__(self, batch: Batch, split: MicroBatches) -> None:
        self.batch, self.attention = batch, split.attention
        self.num_shards, self.choices = split.num_shards, split.choices
        self.prompts = [prompt[mask] for prompt, mask in zip(batch.prompts, batch.prompt_mask, strict=True)]
        self.lengths = batch.mask.sum(axis=1).tolist()
        self.samples = len(batch.mask) // len(batch.prompts)

    def num_tokens(self, one: Pass) -> int:
        """Response tokens of the share with the most."""
        of_bins = [sum(self.lengths[row] for row in rows) for rows in one.bins]
        return int(np.reshape(of_bins, (self.num_shards, -1)).sum(axis=1).max())

    def piece(self, one: Pass, size: int) -> Piece:
        """The micro-batch of a pass, with `size` response tokens for each share of the devices."""
        each = len(one.bins) // self.num_shards
        filled = [self._share(one.bins[at : at + each], one, size) for at in range(0, len(one.bins), each)]
        slots = {name: np.concatenate([of_share[0][name] for of_share in filled]) for name in filled[0][0]}
        targets = {name: np.stack([of_share[1][name] for of_share in filled]) for name in filled[0][1]}
        rows, columns = targets.pop("rows"), targets.pop("columns")

        def packed(array: np.ndarray) -> np.ndarray:
            real = (rows >= 0).reshape(rows.shape + (1,) * (array.ndim - 2))
            return np.where(real, array[rows, columns], np.zeros((), array.dtype))

        fields = {name: getattr(self.batch, name) for name in PER_TOKEN}
        tokens = {name: packed(array) for name, array in fields.items() if array is not None}
        return Piece(MicroBatch(bins=self.attention.prepare(Bins(**slots)), **targets, **tokens), rows, columns)

    def _share(
        self, bins: list[list[int]], one: Pass, size: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays of a share: [n, T] of the slots of its bins, [size] of its response tokens."""
        slots: dict[str, Any] = {name: np.zeros(len(bins) * one.width, np.int32) for name in SLOTS}
        if self.choices is not None:
            layers, per_token, dtype = self.choices
            slots["experts"] = np.full((len(bins) * one.width, layers, per_token), -1, dtype)
        targets = {name: np.zeros(size, np.int32) for name in ("sources", "sequences", "columns")}
        targets["rows"] = np.full(size, -1, np.int32)
        target = sequence = 0

        def put(slot: int, tokens: np.ndarray, position: int, tree: int, branch: int, experts: Any) -> int:
            """Fills slots, and returns the one after them."""
            end = slot + len(tokens)
            for name, values in zip(SLOTS, (tokens, position + np.arange(len(tokens)), tree, branch), strict=True):
                slots[name][slot:end] = values
            if experts is not None:
                known = experts[: len(tokens)]
                slots["experts"][slot : slot + len(known)] = known
            return end

        for number, rows in enumerate(bins):
            slot, tree, root = number * one.width, 0, 0  # the last slot of a tree's prompt is its root
            planted = -1  # the prompt of the tree
            for branch, row in enumerate(rows, start=1):
                prompt, length = row // self.samples, self.lengths[row]
                if prompt != planted or not one.shares:
                    planted, tree = prompt, tree + 1
                    slot = put(slot, self.prompts[prompt], 0, tree, 0, self._record(self.batch.prompt_experts, prompt))
                    root = slot - 1
                of_row, sequence = slice(target, target + length), sequence + 1
                targets["sources"][of_row] = [root, *range(slot, slot + length - 1)]
                targets["sequences"][of_row], targets["rows"][of_row] = sequence, row
                targets["columns"][of_row] = np.arange(length)
                fed, record = self.batch.responses[row, : length - 1], self._record(self.batch.experts, row)
                slot = put(slot, fed, len(self.prompts[prompt]), tree, branch, record)
                target += length
        return {name: array.reshape(len(bins), one.width, *array.shape[1:]) for name, array in slots.items()}, targets

    def _record(self, records: Any, index: int) -> Any:
        """The experts of the tokens of a prompt or a response; None if they choose for themselves."""
        if self.choices is None or records is None or not len(records[index]):
            return None
        return records[index]
