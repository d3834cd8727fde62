"""Host: splits a mini-batch into micro-batches, each the arrays of one forward and backward pass.

Packed, sequences follow each other in bins without padding between them (packing.py). By rows, each bin holds one
sequence, and all bins of a batch are equally wide. Where several devices share a bin, each has as many of its slots,
and predicts the tokens that these predict.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dapo_jax.data.containers import Batch, Bins, MicroBatch, Tokens
from dapo_jax.learner.packing import EIGHTHS, Pass, plan_passes
from dapo_jax.models.architecture import Choices
from dapo_jax.models.attention import XLA, BinAttention
from dapo_jax.models.flops import TokenFlops

LARGE = 4096  # slots of a share, from which padding costs more than compiling another shape
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
    walks: bool = False  # a recurrence walks along each bin
    choices: Choices | None = None  # not None: tokens go to the experts that the sampler used, where they are known
    parts: int = 1  # devices of a share, which divide the slots of each bin

    def split(self, batch: Batch) -> Iterator[Piece]:
        """The micro-batches, which hold every row that has a response."""
        passes, packer = self.passes(batch), _Packer(batch, self)
        most: dict[tuple[int, int], int] = {}  # response tokens of a device, by the shape of a pass
        for one in passes:
            most[one.shape] = max(most.get(one.shape, 0), packer.num_tokens(one))
        for one in passes:
            slots = one.width * len(one.bins) // (self.num_shards * self.parts)
            part = -(-slots // (EIGHTHS if slots >= LARGE else EIGHTHS // 2))  # few shapes are compiled
            yield packer.piece(one, -(-most[one.shape] // part) * part)

    def passes(self, batch: Batch) -> Sequence[Pass]:
        """Which rows each micro-batch has in which bins."""
        return [dataclasses.replace(one, width=self._divided(one.width)) for one in self._passes(batch)]

    def _divided(self, width: int) -> int:
        """The next width that attention takes and the devices of a share divide."""
        while width % self.parts:
            width = self.attention.rounded(width + 1)
        return width

    def _passes(self, batch: Batch) -> Sequence[Pass]:
        prompts, responses = batch.prompt_mask.sum(axis=1), batch.mask.sum(axis=1)
        if not responses.any():
            return []
        if self.rows_per_device:
            return list(self._by_rows(responses, batch.prompts.shape[1] + batch.mask.shape[1]))
        return plan_passes(
            tuple(prompts.tolist()),
            tuple(responses.tolist()),
            num_shards=self.num_shards,
            max_tokens=self.max_tokens_per_device,
            attention=self.attention,
            pair_cost=self.flops.pair / (self.flops.layers + self.flops.head),
            walks=self.walks,
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


class _Table(NamedTuple):
    """Where the rows of a pass are: of each, [n] in the order of the bins.

    A row takes slots that follow each other: for its prompt, unless that is in the slots of an earlier row, and for its
    response without the last token.
    """

    rows: np.ndarray
    bins: np.ndarray
    starts: np.ndarray  # its first slot, of all slots of the pass
    slots: np.ndarray  # that it takes
    skipped: np.ndarray  # tokens of its prompt that an earlier row holds
    roots: np.ndarray  # the slot of its prompt's last token
    trees: np.ndarray  # numbered from 1 in each bin
    branches: np.ndarray  # numbered from 1 in each bin


class _Packer:
    """Makes the arrays of passes from the rows of a batch."""

    def __init__(self, batch: Batch, split: MicroBatches) -> None:
        self.batch, self.num_shards, self.parts, self.choices = batch, split.num_shards, split.parts, split.choices
        self.attention, self.samples = split.attention, len(batch.mask) // len(batch.prompts)
        self.prompts, self.lengths = np.repeat(batch.prompt_mask.sum(axis=1), self.samples), batch.mask.sum(axis=1)
        prompts = np.repeat(batch.prompts, self.samples, axis=0)
        self.tokens = np.concatenate([batch.responses, prompts], axis=1)  # of a prompt, the last has index -1

    def num_tokens(self, one: Pass) -> int:
        """Response tokens of the device with the most."""
        if self.parts > 1:
            return int(np.bincount(self._sources(self._table(one), one)[2]).max())
        of_bins = [self.lengths[np.array(rows, int)].sum() for rows in one.bins]
        return int(np.reshape(of_bins, (self.num_shards, -1)).sum(axis=1).max())

    def piece(self, one: Pass, size: int) -> Piece:
        """The micro-batch of a pass, with `size` response tokens for each device."""
        table = self._table(one)
        sources, sequences, rows, columns = self._targets(table, one, size)

        def packed(array: np.ndarray) -> np.ndarray:
            real = (rows >= 0).reshape(rows.shape + (1,) * (array.ndim - 2))
            return np.where(real, array[rows, columns], np.zeros((), array.dtype))

        fields = {name: getattr(self.batch, name) for name in PER_TOKEN}
        tokens = {name: packed(array) for name, array in fields.items() if array is not None}
        bins = self.attention.prepare(self._bins(table, one))
        return Piece(MicroBatch(bins=bins, sources=sources, sequences=sequences, **tokens), rows, columns)

    def _table(self, one: Pass) -> _Table:
        rows = np.array([row for rows in one.bins for row in rows], int)
        bins, numbers = np.repeat(np.arange(len(one.bins)), [len(rows) for rows in one.bins]), np.arange(len(rows))
        opens, prompts = np.diff(bins, prepend=-1) != 0, self.prompts[rows]
        plants = opens | (np.diff(rows // self.samples, prepend=-1) != 0) | (not one.shares)
        skipped, planted = np.where(plants, 0, prompts), np.cumsum(plants)
        slots = prompts - skipped + self.lengths[rows] - 1
        before = np.cumsum(slots) - slots
        starts = before - _latest(before, opens) + bins * one.width
        roots, trees = _latest(starts + prompts - 1, plants), planted - _latest(planted, opens) + 1
        return _Table(rows, bins, starts, slots, skipped, roots, trees, numbers - _latest(numbers, opens) + 1)

    def _bins(self, table: _Table, one: Pass) -> Bins:
        of_slots, positions = np.repeat(np.arange(len(table.rows)), table.slots), _counted(table.skipped, table.slots)
        rows, places = table.rows[of_slots], _counted(table.starts, table.slots)
        answers = positions - self.prompts[rows]  # place in the response, below 0 in prompts

        def filled(values: np.ndarray) -> np.ndarray:
            return _scattered(values, places, (len(one.bins), one.width))

        return Bins(
            tokens=filled(self.tokens[rows, answers]),
            positions=filled(positions),
            trees=filled(table.trees[of_slots]),
            branches=filled(np.where(answers < 0, 0, table.branches[of_slots])),
            experts=self._experts(table, one, self.choices) if self.choices is not None else None,
        )

    def _experts(self, table: _Table, one: Pass, choices: Choices) -> np.ndarray:
        """[N, T, l, k] experts that tokens went to when they were sampled, -1 where that is not known."""
        layers, per_token, dtype = choices
        whole = np.full((len(one.bins) * one.width, layers, per_token), -1, dtype)
        for row, start, slots, skipped in zip(table.rows, table.starts, table.slots, table.skipped, strict=True):
            held = self.prompts[row] - skipped
            runs = (self.batch.prompt_experts, row // self.samples, 0, held), (self.batch.experts, row, held, slots)
            for records, index, first, end in runs:
                if records is not None and len(records[index]):
                    known = records[index][: end - first]
                    whole[start + first : start + first + len(known)] = known
        return whole.reshape(len(one.bins), one.width, layers, per_token)

    def _targets(self, table: _Table, one: Pass, size: int) -> list[np.ndarray]:
        """Sources, sequences, rows and columns [S, U] of the response tokens, those of a device next to each other."""
        of_tokens, columns, devices, sources = self._sources(table, one)
        order, held = np.argsort(devices, kind="stable"), np.bincount(devices)
        places = np.empty_like(order)
        places[order] = _counted(np.arange(len(held)) * size, held)
        numbers, shares = np.arange(len(table.rows)), table.bins * self.num_shards // len(one.bins)
        sequences = (numbers - _latest(numbers, np.diff(shares, prepend=-1) != 0) + 1)[of_tokens]
        found = (sources, 0), (sequences, 0), (table.rows[of_tokens], -1), (columns, 0)
        return [_scattered(values, places, (self.num_shards, self.parts * size), empty) for values, empty in found]

    def _sources(self, table: _Table, one: Pass) -> tuple[np.ndarray, ...]:
        """Of each response token its row in `table`, its column, the device that predicts it, and from which slot."""
        lengths, bins, width = self.lengths[table.rows], len(one.bins) // self.num_shards, one.width // self.parts
        of_tokens = np.repeat(np.arange(len(table.rows)), lengths)
        columns = _counted(np.zeros_like(lengths), lengths)
        tails = table.starts + table.slots - lengths  # the slot before a response's first
        slots = np.where(columns, tails[of_tokens] + columns, table.roots[of_tokens])
        number, place = np.divmod(slots, one.width)
        devices = number // bins * self.parts + place // width
        return of_tokens, columns, devices, number % bins * width + place % width


def _counted(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each pair in turn: start, start + 1, ..., so many numbers."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _latest(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """For each place the value of the last place, up to it, at which `where` is True; it is at the first."""
    return values[np.maximum.accumulate(np.where(where, np.arange(len(values)), 0))]


def _scattered(values: np.ndarray, places: np.ndarray, shape: tuple[int, int], empty: int = 0) -> np.ndarray:
    """An int32 array with `values` at these places of its flat form."""
    whole = np.full(shape, empty, np.int32)
    whole.reshape(-1)[places] = values
    return whole
