"""Host: what a queue knows of its rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

ENDED, WAITS, ALIVE = range(3)  # states of a response: WAITS for tokens that the policy does not write
# Of layers without a window, and with one: the page in which what a chunk adds begins, and the next one; 0 = none.
Destinations = tuple[tuple[int, int], tuple[int, int]]


class Outcome(Protocol):
    """What the queue asks of the responses; rows are [B], -1 = none."""

    def add(self, chunk: Any, rows: np.ndarray, starts: np.ndarray) -> int:
        """Takes a chunk whose first token is number `starts` [B] of these rows; returns its tokens of each row."""
        ...

    def states(self, rows: np.ndarray) -> np.ndarray:
        """[B] ENDED, WAITS for tokens that the policy does not write, or ALIVE, as far as it is known."""
        ...

    def are_given(self, rows: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """[B, length] bool, which tokens from `starts` [B] on are known and were not written by the policy."""
        ...


class Granted(NamedTuple):
    """The pages that take what the next chunk of a row adds."""

    page: int = 0  # page 0 is a scratch page
    window_page: int = 0


class Known(NamedTuple):
    """Known tokens that a row reads."""

    row: int
    sampled: int  # tokens of the response before it
    table: np.ndarray  # [M] pages of the row, with those that take it
    held: int  # of these that the row has
    seen: list[int]  # of layers with a window, the last pages of the row, with those that take it
    destinations: Destinations
    states: tuple[int, int]  # where they are, before and after


class OpenPrompt(NamedTuple):
    """What a prompt has while rows of it may begin."""

    pages: list[int]
    window_pages: list[int]  # in layers with a window, for its last tokens
    state: int  # the place of its states; 0 = it has none, or no tokens are prefilled


@dataclass(eq=False)
class Row:
    """A row that has begun."""

    number: int
    table: np.ndarray  # [M] pages of its prompt, then its own
    prompt_pages: int
    sampled: int  # tokens that are drawn or being drawn
    state: int = 0  # the place of its states: its prompt's until it has had a chunk, then ...
    own_state: int = 0  # ... its own
    slot: int = -1  # in the last chunk; it stays there while the ladder has it
    returns: bool = False  # its next chunk follows a token that the host knows, not what is in its slot
    pages: list[int] = field(default_factory=list)  # its own
    seen: list[int] = field(default_factory=list)  # pages that a window sees, the newest last: its prompt's, its own
    window_pages: list[int] = field(default_factory=list)  # of those its own, with that of the chunk being decoded


def in_answers(rows: Sequence[Row], outcome: Outcome, tokens: int) -> list[Row]:
    """Those whose next so many tokens are parts of an answer."""
    given = np.all(are_given(rows, outcome, tokens), axis=1).tolist()
    return [row for row, one in zip(rows, given, strict=True) if one]


def are_given(rows: Sequence[Row], outcome: Outcome, tokens: int) -> np.ndarray:
    """[b, tokens] bool, which of the next tokens of these rows are parts of an answer."""
    return outcome.are_given(numbers_of(row.number for row in rows), numbers_of(row.sampled for row in rows), tokens)


def numbers_of(rows: Iterable[int]) -> np.ndarray:
    return np.fromiter(rows, np.int64)
