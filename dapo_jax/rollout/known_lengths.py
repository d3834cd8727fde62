"""Host: responses whose lengths are known, for walks without devices."""

import numpy as np


class KnownLengths:
    """Responses that end after a known number of tokens; a chunk is its number of tokens.

    Args:
        lengths: [B] tokens.
        limit: tokens after which any response ends.
    """

    def __init__(self, lengths: np.ndarray, limit: int) -> None:
        self.lengths, self.limit, self.seen = lengths, limit, np.zeros(len(lengths), np.int64)

    def add(self, chunk: int, rows: np.ndarray, starts: np.ndarray | int) -> None:
        """As `Responses.add`."""
        real = rows >= 0
        seen = np.broadcast_to(starts, rows.shape)[real] + chunk
        self.seen[rows[real]] = np.maximum(self.seen[rows[real]], seen)

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """As `Responses.alive`."""
        return (rows >= 0) & (self.seen < self.lengths)[rows]

    def longest(self, rows: np.ndarray) -> int:
        """As `Responses.longest`."""
        return self.limit
