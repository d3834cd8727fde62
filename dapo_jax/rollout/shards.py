"""Host: the rows and pages of one shard of the batch.

Rows wait for a slot in the order of their prompts. Too few pages: rows without a slot give up theirs, then the youngest
rows; they restart later, with the same tokens.

Pages of a row are numbered from the first of its prompt. Layers with a window have a pool of their own: in a chunk that
begins after n pages, a window reaches the last `reach` of them. A prompt has such pages for its last tokens, which its
rows share. A row takes one for each page that it begins; once `reach` pages are its own, that is the oldest of them,
which nothing sees that is decoded after it is written, or read at once with it. So a shard needs at most `reach` pages
for each slot and each open prompt. Rows that wait for an environment have more while there are enough.

States of layers with linear attention lie at places of a pool: those of prompts, and of rows. A row's first chunk reads
its prompt's and writes its own.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from dapo_jax.rollout.layout import RESERVED_STATES, Layout, ReadSize
from dapo_jax.rollout.rows import (
    ALIVE,
    ENDED,
    WAITS,
    Destinations,
    Granted,
    Known,
    OpenPrompt,
    Outcome,
    Row,
    are_given,
    in_answers,
    numbers_of,
)

States = Callable[[np.ndarray], np.ndarray]  # rows [B] -> [B], as far as they are known


class Shard:
    """What the rows of a shard hold, by the lengths of what they have drawn.

    Args:
        limits: most tokens to draw for each row of the queue.
    """

    def __init__(self, layout: Layout, limits: list[int]) -> None:
        self.layout, self.limits = layout, limits
        self.copied = bool(layout.stretches)  # a row that has begun no longer needs its prompt
        self.live: list[Row] = []  # with a slot, the oldest first
        self.waiting: deque[int] = deque()  # for a slot
        self.returning: deque[Row] = deque()  # for a slot, with the pages of what they have drawn
        self.parked: dict[int, Row | None] = {}  # for tokens; None = without what they have drawn
        self.free = list(range(layout.pages - 1, 0, -1))
        self.free_windows = list(range(layout.window_pages - 1, 0, -1))
        self.free_states = list(range(layout.states - 1, RESERVED_STATES - 1, -1))  # of prompts
        self.free_row_states = list(range(layout.states + layout.row_states - 1, layout.states - 1, -1))
        self.prompts: dict[int, OpenPrompt] = {}
        self.left: dict[int, int] = {}  # rows of each prompt that still need it
        self.given_up = 0  # rows

    @property
    def holding(self) -> list[Row]:
        """Parked rows that keep their slot: with it they would lose their stretch."""
        return [row for row in self.parked.values() if row is not None and row.slot >= 0]

    @property
    def load(self) -> int:
        """Rows that have a slot or wait for one."""
        return len(self.live) + len(self.holding) + len(self.returning) + len(self.waiting)

    def has_room(self, pages: int, *, most: int, longest: int) -> bool:
        """Whether a prompt of so many pages may be opened, and the oldest row can still end then.

        Args:
            most: rows with a slot or waiting for one.
            longest: pages of a response, at most.
        """
        if (self.layout.reach or self.layout.states) and len(self.prompts) >= self.layout.open_prompts:
            return False
        if len(self.free_windows) < min(pages, self.layout.reach):
            return False
        held = sum(len(prompt.pages) for prompt in self.prompts.values())
        return self.load < most and pages <= len(self.free) and held + pages + longest < self.layout.pages

    def open(self, prompt: int, num_pages: int) -> OpenPrompt:
        """What a prompt has; its rows wait from now on."""
        windows = [self.free_windows.pop() for _ in range(min(num_pages, self.layout.reach))]
        state = self.free_states.pop() if self.layout.states and num_pages else 0
        self.prompts[prompt] = OpenPrompt([self.free.pop() for _ in range(num_pages)], windows, state)
        self.left[prompt] = self.layout.num_samples
        self.waiting.extend(self.layout.rows(prompt).tolist())
        return self.prompts[prompt]

    def release(self, states: States) -> None:
        """Takes their slots from rows that have ended, with their pages, and from those that wait for tokens."""
        live, self.live = self.live, []
        for row, state in zip(live, states(numbers_of(row.number for row in live)), strict=True):
            if state == ALIVE and row.sampled < self.limits[row.number]:
                self.live.append(row)
            elif self.layout.returns and state != ENDED:
                self._park(row)
            else:
                self._free(row)
                if not self.copied:
                    self._done(row.number)
        parked = numbers_of(self.parked)
        for number in parked[states(parked) == ENDED].tolist():
            if (row := self.parked.pop(number)) is not None:
                self._free(row)
            if row is None or not self.copied:
                self._done(number)
        queued, self.waiting = numbers_of(self.waiting), deque()
        for number, state in zip(queued.tolist(), states(queued), strict=True):
            if state == ALIVE:
                self.waiting.append(number)
            elif state == WAITS:  # after the token that prefill has drawn
                self.parked[number] = None
            else:
                self._done(number)

    def resume(self, number: int, known: int) -> None:
        """A parked row goes on after its first `known` tokens.

        With its stretch, or its pages and states, nothing is lost. Otherwise it begins again.
        """
        row = self.parked.pop(number)
        if row is None:
            self.waiting.appendleft(number)
            return
        self._go_on(row, known)
        (self.live if row.slot >= 0 else self.returning).append(row)

    def _go_on(self, row: Row, sampled: int) -> None:
        """The row's next chunk follows so many tokens, fewer than it may have; it keeps what has these."""
        row.sampled, row.returns = sampled, True
        if self.layout.stretches:
            return
        kept = -(-sampled // self.layout.page_length)
        for page in row.pages[kept:]:
            self.free.append(page)
            if self.layout.reach:
                self.free_windows.append(row.window_pages.pop())
                row.seen.pop()
        del row.pages[kept:]
        row.table[row.prompt_pages + kept :] = 0

    def grant(self) -> dict[int, Granted]:
        """Gives pages to each row whose next chunk may be read later, the oldest first, and starts waiting rows."""
        granted: dict[int, Granted] = {}
        young: list[int] = []
        live, self.live = deque(self.live), []
        while live:
            row = live.popleft()
            if self._needs_page(row, self.layout.chunk):
                while not self._has_page(row) and live:
                    young.append(self._give_up(live.pop()))
                if not self._has_page(row):
                    young.append(self._give_up(row))
                    break
                granted[row.number] = self._take(row)
            self.live.append(row)
        self.waiting.extendleft(young)
        room = self.layout.slots - len(self.holding)
        while not young and (self.returning or self.waiting) and len(self.live) < room:
            if self.live and len(self.free) <= len(self.live) and not self.layout.stretches:
                break  # for each row that lives, a page for its next chunk
            row = self.returning.popleft() if self.returning else self._begin(self.waiting.popleft())
            if self._needs_page(row, self.layout.chunk):
                has_page = self._has_page(row)
                assert has_page
                granted[row.number] = self._take(row)
            self.live.append(row)
        return granted

    def turn_ends(self, outcome: Outcome) -> dict[int, int]:
        """Tokens until the end of a turn, of rows in whose next chunk one ends whose answer is known."""
        if not self.layout.go_on_anywhere:
            return {}
        given = are_given(self.live, outcome, self.layout.chunk)
        ends = ~given[:, :-1] & given[:, 1:]
        return {self.live[at].number: int(np.argmax(ends[at])) + 1 for at in np.flatnonzero(ends.any(axis=1)).tolist()}

    def read_known(self, granted: dict[int, Granted], outcome: Outcome, size: ReadSize) -> list[Known]:
        """What rows read now of their answers, as much as a call of this size takes.

        A row reads as often as it can, but once where what it reads takes the place of what these tokens see. Each time
        it is granted a page for them, and one for what comes after, if it needs them. Too few: younger rows give up
        theirs, and without younger ones a row waits without a slot.
        """
        once = bool(self.layout.reach or self.layout.states)
        found, young, rows = list[Known](), list[int](), deque(in_answers(self.live, outcome, size.tokens))
        while rows and len(found) < size.rows:
            row = rows.popleft()
            if row not in self.live or not self._grant_more(row, size.tokens, granted, young):
                continue
            sampled, page = row.sampled, granted.pop(row.number, Granted())
            places = self.destinations(row, page), (row.state, row.own_state)
            self.advance(row, -1, page, size.tokens)
            found.append(Known(row.number, sampled, row.table, self.held(row), list(row.seen), *places))
            if self._grant_more(row, self.layout.chunk, granted, young) and not once:
                rows.extendleft(in_answers([row], outcome, size.tokens))
        self.waiting.extendleft(young)
        return found

    def _grant_more(self, row: Row, tokens: int, granted: dict[int, Granted], young: list[int]) -> bool:
        """Grants a row a page for its next `tokens`, if it needs one; else it waits without a slot: False."""
        if not self._needs_page(row, tokens):
            return True
        while not self._has_page(row) and self.live[-1] is not row:
            youngest = self.live.pop()
            granted.pop(youngest.number, None)
            young.append(self._give_up(youngest))
        if not self._has_page(row):
            self.returning.appendleft(self.live.pop())
            return False
        granted[row.number] = self._take(row)
        return True

    def held(self, row: Row) -> int:
        """Pages of a row before its next chunk; the last may have room for it."""
        return row.prompt_pages + -(-row.sampled // self.layout.page_length)

    def destinations(self, row: Row, granted: Granted) -> Destinations:
        """Of what the row's next chunk adds, which fills the page that has begun before it takes another."""
        if self.layout.stretches or not row.sampled % self.layout.page_length:
            return (granted.page, 0), (granted.window_page, 0)
        begun = row.pages[row.sampled // self.layout.page_length], row.seen[-1] if self.layout.reach else 0
        return (begun[0], granted.page), (begun[1], granted.window_page)

    def advance(self, row: Row, slot: int, granted: Granted, count: int) -> None:
        """The row's next chunk is decoded, of which it keeps `count` tokens."""
        if granted.page:
            row.table[self.held(row)] = granted.page
            if self.layout.reach:
                row.seen.append(granted.window_page)
                del row.seen[: -self.layout.reach]
        row.slot, row.sampled, row.returns, row.state = slot, row.sampled + count, False, row.own_state
        if count < self.layout.chunk:
            self._go_on(row, row.sampled)

    def take_back(self, tokens: int) -> None:
        """The last chunk has ended so many tokens early."""
        for row in self.live:
            row.sampled -= 0 if row.returns else tokens

    def _needs_page(self, row: Row, tokens: int) -> bool:
        """Whether a row's pages have no room for its next `tokens`, and these may be read later."""
        held, end = len(row.pages) * self.layout.page_length, row.sampled + tokens
        if self.layout.stretches or end <= held:
            return False
        return (held if self.layout.returns else end) < self.limits[row.number]

    def _has_page(self, row: Row) -> bool:
        """Whether a page is free for a row, once rows without a slot have given up theirs."""
        needs_window = len(row.window_pages) < self.layout.reach
        return self._is_free(lambda: bool(self.free) and (bool(self.free_windows) or not needs_window))

    def _is_free(self, has: Callable[[], bool]) -> bool:
        """Rows without a slot give up what they hold, the last to wait first, until there `has` been enough."""
        while not has() and self.returning:
            self.waiting.appendleft(self._give_up(self.returning.pop()))
        holders = (row for row in reversed(self.parked.values()) if row is not None)
        while not has() and (row := next(holders, None)) is not None:
            self.parked[self._give_up(row)] = None
        return has()

    def _begin(self, number: int) -> Row:
        prompt, table = number // self.layout.num_samples, np.zeros(self.layout.row_pages, np.int32)
        pages, windows, state = self.prompts[prompt]
        table[: len(pages)] = pages
        if self.copied:
            self._done(number)
        row = Row(number, table, len(pages), self.layout.prefilled, state, seen=list(windows))
        if self.layout.states:
            is_free = self._is_free(lambda: bool(self.free_row_states))
            assert is_free, "there is a place for each slot"
            row.own_state = self.free_row_states.pop()
        return row

    def _take(self, row: Row) -> Granted:
        row.pages.append(self.free.pop())
        if not self.layout.reach:
            return Granted(row.pages[-1])
        own = row.window_pages
        own.append(self.free_windows.pop() if len(own) < self.layout.reach else own.pop(0))
        return Granted(row.pages[-1], own[-1])

    def _park(self, row: Row) -> None:
        """A row keeps its stretch, and so its slot; or its pages and states without a slot; or it begins again."""
        self.parked[row.number] = row
        if self.layout.stretches:
            return
        row.slot = -1
        if self.layout.states and not self.layout.keeps_states:
            self._free(row)
            self.parked[row.number] = None

    def _give_up(self, row: Row) -> int:
        self._free(row)
        self.given_up += 1
        return row.number

    def _free(self, row: Row) -> None:
        self.free.extend(row.pages)
        self.free_windows.extend(row.window_pages)
        self.free_row_states += [row.own_state] if row.own_state else []

    def _done(self, number: int) -> None:
        """A row no longer needs its prompt."""
        prompt = number // self.layout.num_samples
        self.left[prompt] -= 1
        if not self.left[prompt]:
            pages, windows, state = self.prompts.pop(prompt)
            self.free.extend(pages)
            self.free_windows.extend(windows)
            self.free_states += [state] if state else []
            del self.left[prompt]
