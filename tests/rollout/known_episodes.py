"""Episodes whose turns have known lengths, and a walk through their queue with devices that count."""

from collections.abc import Sequence

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.rollout.counting import Counting, Turn
from dapo_jax.rollout.decoding import MEANWHILE, PART
from dapo_jax.rollout.layout import Layout
from dapo_jax.rollout.queue import Queue, needed_work
from dapo_jax.rollout.rows import ALIVE, ENDED, WAITS

Turns = Sequence[tuple[int, int | None]]  # tokens of the policy and of the answer; None = it ends the episode


class ThatEndEarly(Counting):
    """Chunks that end early because rows wait, as `decoding.decode` does."""

    def decode(self, turn: Turn) -> int:
        waits = self.layout.ends_early and np.any((turn.rows < 0) & (turn.sources >= 0))
        return min(super().decode(turn), MEANWHILE if waits else self.layout.chunk)


class KnownEpisodes:
    """`queue.Outcome`; the last answer in `episodes` is not waited for if it is 0."""

    def __init__(self, layout: Layout, episodes: Sequence[Turns]) -> None:
        self.layout, self.episodes = layout, episodes
        self.turn, self.known = np.zeros((2, len(episodes)), int)
        self.ends = np.array([turns[0][0] for turns in episodes])  # tokens of each row when its turn ends
        self.state, self.asked = np.full(len(episodes), ALIVE), {}
        self.given = [set[int]() for _ in episodes]  # places of tokens of the environment

    def add(self, chunk: int, rows: np.ndarray, starts: np.ndarray) -> int:
        """Takes a chunk, which ends early because rows have ended, as `decoding.decode` does."""
        alive = self.states(rows) == ALIVE
        if self.layout.ends_early:
            chunk = min([chunk, *np.sort((self.ends[rows] - starts)[alive])[max(len(rows) // PART, 1) - 1 :]])
        rows, starts = rows[alive], starts[alive]
        given = self.are_given(rows, starts, chunk)  # a row that is read again stops before an answer
        stops = np.pad(~given[:, :-1] & given[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        drawn = starts + np.argmax(stops, axis=1) + 1
        self.known[rows] = np.maximum(self.known[rows], np.minimum(drawn, self.ends[rows]))
        for row in rows[self.known[rows] == self.ends[rows]].tolist():
            self.state[row] = ENDED if self.episodes[row][self.turn[row]][1] == 0 else WAITS
            self.asked[row] = 0
        return int(chunk)

    def states(self, rows: np.ndarray) -> np.ndarray:
        """As `queue.Outcome`."""
        return np.where(rows >= 0, self.state[rows], ENDED)

    def are_given(self, rows: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """As `queue.Outcome`."""
        given = [[start + n in self.given[row] for n in range(length)] for row, start in zip(rows, starts, strict=True)]
        return np.array(given, bool).reshape(len(rows), length)

    def answer(self, queue: Queue, delay: int) -> None:
        """Answers rows that have waited for so many chunks."""
        for row in np.flatnonzero(self.state == WAITS).tolist():
            self.asked[row] += 1
            said = self.episodes[row][self.turn[row]][1]
            if self.asked[row] <= delay:
                continue
            self.state[row] = ENDED if said is None else ALIVE
            if said is not None:
                known, self.turn[row] = int(self.known[row]), self.turn[row] + 1
                self.known[row] += said
                self.given[row].update(range(known, known + said))
                self.ends[row] = self.known[row] + self.episodes[row][self.turn[row]][0]
                queue.resume(row, known)


def walk_episodes(
    arch: Architecture,
    layout: Layout,
    prompt_lengths: np.ndarray,
    episodes: Sequence[Turns],
    *,
    limit: int,
    delay: int = 1,
    gathers: bool = False,
) -> tuple[Counting, dict[str, Work]]:
    """As `walk_lengths`, of episodes; an environment answers after `delay` chunks, as in run/episodes.py."""
    queue, outcome = Queue(layout), KnownEpisodes(layout, episodes)
    devices = ThatEndEarly(arch, layout, gathers=gathers)
    queue.add(prompt_lengths, np.full(len(episodes), limit))
    while queue.step(devices, outcome) or WAITS in outcome.state:
        outcome.answer(queue, delay)
    given = sum(said or 0 for turns in episodes for _, said in turns)
    lengths = np.array([sum(own + (said or 0) for own, said in turns) for turns in episodes])
    needed = needed_work(arch, prompt_lengths, lengths.reshape(len(prompt_lengths), -1), given)
    return devices, devices.take_work(needed)
