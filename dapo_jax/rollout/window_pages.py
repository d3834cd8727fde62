"""Host: which pages of layers with a window belong to which prompt and row of a shard.

Pages of a row are numbered from the first of its prompt. In a chunk that begins after n pages, a window reaches the
last `reach` of them. A prompt has such pages for its last tokens, which its rows share. A row takes one for each chunk
that it adds; once `reach` pages are its own, that is the oldest of them: this chunk reads it before it is written, and
no later one sees it. So a shard needs at most `reach` pages for each slot and each open prompt.
"""

from typing import Any, NamedTuple

NONE = 0  # the page that takes what nobody reads


class Seen(NamedTuple):
    """The pages of layers with a window in a chunk of b slots, in arrays of the host or of the devices."""

    table: Any  # [b, R] int32, the last pages of each row, in the order of their tokens
    first: Any  # [b] int32, the number of the first of them among all pages of the row
    destinations: Any  # [b] int32, the page that takes what this chunk adds; 0 = none


class _Row(NamedTuple):
    seen: list[int]  # pages in the order of their tokens, the newest last: its prompt's, then its own
    own: list[int]  # those that it has taken, with the page of the chunk being decoded


class WindowPages:
    """The pages of a shard.

    Args:
        pages: with page 0.
        reach: of a window behind a chunk, in pages; 0 = no layer has a window, and no page is given.
    """

    def __init__(self, pages: int, reach: int) -> None:
        self.reach = reach
        self.free = list(range(pages - 1, 0, -1))
        self._prompts: dict[int, list[int]] = {}
        self._rows: dict[int, _Row] = {}

    def open(self, prompt: int, num_pages: int) -> list[int]:
        """The pages for the last of a prompt's `num_pages` pages."""
        self._prompts[prompt] = [self.free.pop() for _ in range(min(num_pages, self.reach))]
        return self._prompts[prompt]

    def close(self, prompt: int) -> None:
        """Frees the pages of a prompt."""
        self.free.extend(self._prompts.pop(prompt))

    def begin(self, row: int, prompt: int) -> None:
        """A row begins with what its prompt has."""
        self._rows[row] = _Row(list(self._prompts[prompt]), [])

    def end(self, row: int) -> None:
        """Frees the pages of a row."""
        self.free.extend(self._rows.pop(row).own)

    def take(self, row: int) -> int:
        """The page for what the row's next chunk adds."""
        if not self.reach:
            return NONE
        own = self._rows[row].own
        own.append(self.free.pop() if len(own) < self.reach else own.pop(0))
        return own[-1]

    def seen(self, row: int) -> list[int]:
        """The pages that the row's next chunk sees, the newest last."""
        return self._rows[row].seen

    def add(self, row: int) -> None:
        """The chunk for which the row has taken a page is being decoded."""
        if self.reach:
            seen, own = self._rows[row]
            seen.append(own[-1])
            del seen[: -self.reach]
