"""Host: which sequences share a bin, and which bins share a forward and backward pass.

Nothing here changes a gradient: which rows a mini-batch holds is decided before, and its loss is a sum over tokens.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dapo_jax.data.padding import bucket
from dapo_jax.models.attention import BinAttention

EIGHTHS = 8  # widths are so many parts of the widest, so that few shapes are compiled
Rounded = Callable[[int], int]  # slots -> the next width that attention takes


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: equally many bins for each share of the devices, those of a share together."""

    width: int  # slots of a bin
    bins: list[list[int]]  # rows of each, ascending; a bin may be empty
    shares: bool  # the responses to a prompt in a bin share it

    @property
    def shape(self) -> tuple[int, int]:
        """Bins and slots of a bin."""
        return len(self.bins), self.width


@functools.lru_cache(maxsize=64)  # a step asks for the same rows several times: in each epoch, and for each model
def plan_passes(
    prompts: tuple[int, ...],
    responses: tuple[int, ...],
    *,
    num_shards: int,
    max_tokens: int,
    attention: BinAttention,
    pair_cost: float,
    walks: bool = False,
) -> tuple[Pass, ...]:
    """All rows with a response, in passes of at most `max_tokens` slots, or one longest sequence, on each device.

    Either is rounded up to a width that attention takes.

    Args:
        prompts: [Q] tokens.
        responses: [B] tokens; row b answers prompt b // (B // Q).
        pair_cost: the work of one pair of a query and a key, by that of a slot.
        walks: a recurrence walks along each bin, so that a pass takes the longer the wider its bins are.
    """
    lengths = np.array(prompts), np.array(responses)
    longest = int(np.max(np.repeat(lengths[0], len(responses) // len(prompts)) + lengths[1] - 1))
    most = attention.rounded(max(max_tokens, longest))
    rows = _Rows(*lengths, shares=most <= attention.shared_width)
    if not attention.packs:
        return tuple(_one_by_one(rows, num_shards, most, attention.rounded))
    if attention.skips and not (walks and most >= 2 * bucket(longest)):
        return tuple(_wide_bins(rows, num_shards, most, attention.rounded))
    return tuple(_narrow_bins(rows, num_shards, most, pair_cost, attention.rounded))


class _Rows:
    """The lengths of sequences, and how they fill bins.

    A prompt takes its tokens once per bin, or once per response if it is not shared. A response takes one slot less
    than it has tokens, as its last token predicts nothing.
    """

    def __init__(self, prompts: np.ndarray, responses: np.ndarray, *, shares: bool) -> None:
        self.prompts, self.responses, self.shares = prompts, responses, shares
        self.samples = len(responses) // len(prompts)
        self.slots = np.where(responses > 0, np.repeat(prompts, self.samples) + responses - 1, 0)
        self.longest = int(self.slots.max())
        self.rows = np.flatnonzero(responses)
        self.by_length = self.rows[np.argsort(-responses[self.rows], kind="stable")]
        totals = np.repeat(responses.reshape(-1, self.samples).sum(axis=1), self.samples)
        keys = self.rows, -responses[self.rows], self.rows // self.samples, -totals[self.rows]
        self.by_prompt = self.rows[np.lexsort(keys)]
        tails = int((responses[self.rows] - 1).sum())
        answered = responses.reshape(-1, self.samples).any(axis=1)
        self.least = int(prompts[answered].sum()) + tails if shares else int(self.slots.sum())

    def fill(self, widths: np.ndarray) -> list[list[int]] | None:
        """First-fit decreasing: the rows of each bin, or None if bins of `widths` [N], descending, cannot hold them.

        The longest responses come first. If prompts are shared, it also tries those of one prompt after the other, with
        fewer copies of prompts but gaps that are harder to fill, and takes what leaves more bins empty.
        """
        orders = [self.by_length, self.by_prompt] if self.shares else [self.by_length]
        filled = [bins for order in orders if (bins := self._fill(order, widths, balanced=False)) is not None]
        return max(filled, key=lambda bins: bins.count([]), default=None)

    def balance(self, widths: np.ndarray) -> list[list[int]] | None:
        """As `fill`, but each response goes to the bin where attention has the least work so far."""
        return self._fill(self.by_length, widths, balanced=True)

    def _fill(self, order: np.ndarray, widths: np.ndarray, *, balanced: bool) -> list[list[int]] | None:
        slots = widths.copy()  # free in each bin
        work = np.zeros(len(widths))
        bins: list[list[int]] = [[] for _ in widths]
        homes: list[list[int]] = [[] for _ in self.prompts]  # bins that hold a prompt
        for row in order.tolist():
            prompt, length = row // self.samples, int(self.responses[row])
            needed = np.full(len(widths), length - 1 + int(self.prompts[prompt]))
            if self.shares:
                needed[homes[prompt]] = length - 1
            fitting = slots >= needed
            there = [] if balanced else [one for one in homes[prompt] if self.shares and fitting[one]]
            place = there[0] if there else int(np.argmin(np.where(fitting, work, np.inf)))
            if not fitting[place]:
                return None
            if place not in homes[prompt]:
                homes[prompt].append(place)
            bins[place].append(row)
            slots[place] -= needed[place]
            work[place] += balanced * float(self.slots[row]) ** 2
        return [sorted(rows) for rows in bins]

    def work(self, bins: list[list[int]]) -> list[float]:
        """Of attention with each bin, about."""
        return [float(np.square(self.slots[rows], dtype=np.float64).sum()) for rows in bins]


def _wide_bins(rows: _Rows, num_shards: int, most: int, rounded: Rounded) -> list[Pass]:
    """One bin for each device in a pass, as wide as it may be; the last pass is narrower if that is enough."""
    for parts in itertools.count(max(EIGHTHS * rows.least // (num_shards * most), 1)):
        full, rest = divmod(parts, EIGHTHS)
        last = [min(rounded(-(-most * rest // EIGHTHS)), most)] if rest else []
        widths = [most] * full + last
        of_bins, wide = np.repeat(widths, num_shards), full * num_shards
        if widths[0] >= rows.longest and (filled := rows.fill(of_bins)) is not None:
            filled = rows.balance(of_bins) or filled
            passes = list(_passes(rows, filled[:wide], most, num_shards, 1))
            return passes + [one for width in last for one in _passes(rows, filled[wide:], width, num_shards, 1)]
    raise AssertionError("wider bins hold all rows")


def _narrow_bins(rows: _Rows, num_shards: int, most: int, pair_cost: float, rounded: Rounded) -> list[Pass]:
    """Bins that hold little more than the longest sequence, many in a pass.

    For attention that computes all pairs in a bin, or a recurrence, which walks along all bins of a pass at once.
    Of few widths, the one with the least work; but not a wider one for a tenth, so that few shapes are compiled.
    """
    best, least, width = [], float("inf"), min(rounded(bucket(rows.longest)), most)
    while rows.least * (1 + pair_cost * width) < 0.9 * least:
        filled = rows.fill(np.full(len(rows.rows), width))
        assert filled is not None
        passes = list(_passes(rows, [one for one in filled if one], width, num_shards, most // width))
        work = sum(width * len(one.bins) * (1 + pair_cost * width) for one in passes)
        if work < 0.9 * least:
            best, least = passes, work
        if width == most:
            break
        width = min(rounded(bucket(width + 1)), most)
    return best


def _passes(rows: _Rows, bins: list[list[int]], width: int, num_shards: int, most: int) -> Iterator[Pass]:
    """The bins with the longest sequences first, so that those of a pass take about equally long.

    Args:
        most: bins of a device in a pass.
    """
    order = np.argsort(-np.array(rows.work(bins)), kind="stable")
    bins = [bins[number] for number in order]
    while bins:
        size = _size(-(-len(bins) // num_shards), most)
        chosen, bins = bins[: size * num_shards], bins[size * num_shards :]
        chosen += [[] for _ in range(size * num_shards - len(chosen))]
        if any(chosen):
            yield Pass(width, [one for shard in range(num_shards) for one in chosen[shard::num_shards]], rows.shares)


def _one_by_one(rows: _Rows, num_shards: int, most: int, rounded: Rounded) -> Iterator[Pass]:
    """One sequence in a bin, the longest first; a pass is as wide as its longest."""
    left = [[row] for row in rows.rows[np.argsort(-rows.slots[rows.rows], kind="stable")].tolist()]
    while left:
        width = min(rounded(bucket(int(rows.slots[left[0][0]]))), most)
        first = next(_passes(rows, left, width, num_shards, most // width))
        left = left[sum(map(bool, first.bins)) :]
        yield first


def _size(left: int, most: int) -> int:
    """Bins of a device in the next pass if `left` are left: passes take evenly many, but of few different numbers."""
    even = -(-left // -(-left // most))
    return min(bucket(even) if even > 3 else even, most)
