"""Host: the few shapes that waves are decoded in: prompt widths, rows, and windows of the key-value cache."""

from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.data.padding import bucket

ROW_MULTIPLE = 8  # rows per device
FIRST_WINDOW = 64  # tokens
WIDEST_STEP = 512  # tokens between two windows


def prompt_width(longest: int, limit: int) -> int:
    """Width of a wave whose longest prompt is this long: a bucket, at least a quarter of that of `limit`."""
    return bucket(max(longest, bucket(limit) // 4))


def windows(max_response_length: int, chunk_length: int) -> list[int]:
    """Cache widths, ascending, in whole chunks: buckets from FIRST_WINDOW up, then every WIDEST_STEP tokens.

    The widest holds a whole response but its last token, which is not cached.
    """
    last = max(-(-(max_response_length - 1) // chunk_length), 1) * chunk_length
    found, size = [], FIRST_WINDOW
    while (width := -(-size // chunk_length) * chunk_length) < last:
        found.append(width)
        size = min(bucket(size + 1), size + WIDEST_STEP)
    return sorted({*found, last})


def window_of(ladder: Sequence[int], tokens: int) -> int:
    """The narrowest window for this many tokens."""
    return next(window for window in ladder if window >= tokens)


def rungs(rows: int, smallest: int) -> list[int]:
    """Rows per device that a wave of `rows` may shrink to, descending: each about 1/sqrt(2) of the previous one.

    Multiples of ROW_MULTIPLE, then halves down to `smallest`.
    """
    found = [rows]
    while (below := round(found[-1] / 2**0.5 / ROW_MULTIPLE) * ROW_MULTIPLE) >= max(ROW_MULTIPLE, smallest):
        if below >= found[-1]:
            break
        found.append(below)
    below = min(ROW_MULTIPLE, 1 << (found[-1] - 1).bit_length()) // 2
    while below >= smallest:
        found.append(below)
        below //= 2
    return found


def wave_size(num_prompts: int, num_samples: int, *, max_rows: int, shards: int) -> int:
    """Prompts per wave: as few equal waves as `max_rows` allows, rounded up to the batch shards of the mesh."""
    most = max(max_rows // num_samples // shards, 1) * shards
    num_waves = -(-num_prompts // most)
    return min(-(-num_prompts // num_waves // shards) * shards, most)


class LengthHistory:
    """How long responses have been: an exponential average over the waves decoded so far."""

    WEIGHT = 0.3  # of the newest wave

    def __init__(self, max_response_length: int) -> None:
        self._share = np.zeros(max_response_length + 1)  # of responses by length
        self._share[-1] = 1.0
        self.known = False  # until then nothing is assumed to end early

    def add(self, lengths: np.ndarray) -> None:
        """The lengths of a finished wave's responses."""
        share = np.bincount(lengths, minlength=len(self._share)) / max(len(lengths), 1)
        weight = self.WEIGHT if self.known else 1.0
        self._share = (1 - weight) * self._share + weight * share
        self.known = True

    def to_array(self) -> np.ndarray:
        """The history as one array, for a checkpoint."""
        return np.append(self._share, float(self.known))

    def restore(self, array: np.ndarray) -> None:
        """The inverse of `to_array`; a history with another max_response_length is ignored."""
        if len(array) != len(self._share) + 1:
            return
        self._share, self.known = np.array(array[:-1], np.float64), bool(array[-1])

    def alive(self, length: int) -> float:
        """Expected share of responses of more than `length` tokens."""
        return float(self._share[length + 1 :].sum())

    def mean_held(self) -> float:
        """Expected tokens of a row that is being decoded, over all its steps."""
        lengths = np.arange(len(self._share))
        return float(self._share @ (lengths * (lengths + 1) / 2) / max(self._share @ lengths, 1.0))

    def typical(self, count: int) -> np.ndarray:
        """[count] lengths that are spread as those so far, always in the same mixed order."""
        below = np.cumsum(self._share)
        lengths = np.searchsorted(below, (np.arange(count) + 0.5) / count * below[-1])
        return np.random.default_rng(0).permutation(lengths)


def rows_in_memory(
    free_bytes: float,
    *,
    cache_bytes: Callable[[int], float],
    bytes_per_row: float,
    width: int,
    chunk_length: int,
    ladder: Sequence[int],
    alive: Callable[[int], float],
    lookahead: int,
) -> int:
    """Rows per device that fit at every moment of a wave, with keys and values, and what else a row takes.

    Survivors are rounded up to a rung, which may be half as many again; a tenth more rows than the history says, and
    two in a hundred that never end, must also fit.

    Args:
        cache_bytes: of the keys and values of so many tokens of a prompt or a response.
    """
    worst, filled = cache_bytes(1), 0
    for window in ladder:
        share = min(1.1 * 1.5 * alive(max(filled - chunk_length * (1 + lookahead), 0)) + 0.02, 1.0)
        worst = max(worst, share * (cache_bytes(width) + cache_bytes(window)))
        filled = window
    rows = int(free_bytes / (worst + bytes_per_row))
    return max(rows // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)
