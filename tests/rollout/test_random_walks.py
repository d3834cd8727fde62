"""Random episodes through queues with few pages: what each chunk sees of a row's pages is what was written there.

Where layers have states, those that a row reads have seen all tokens before.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from rollout.known_episodes import KnownEpisodes
from rollout.large_models import SEVEN, layout_of, settings_of
from rollout.small_rollouts import assert_all_pages_are_free
from shapes import ARCH

from dapo_jax.models.architecture import Delta
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.rows import ENDED, WAITS

DELTA = Delta(key_heads=1, value_heads=1, key_dim=8, value_dim=8, filter_width=4)
DELAYS = 0, 0, 1, 3, 10  # chunks until an answer
SEEDS = 80


class Written(Counting):
    """Devices that remember which token of which row, or of which prompt, lies in each place of the pages."""

    def __init__(self, layout, queue, window):
        super().__init__(ARCH, layout)
        self.queue, self.window, self.places, self.of_windows = queue, window, {}, {}
        self.states = {(shard, 0): "nothing" for shard in range(layout.shards)}  # what the states have seen
        self.inside = 0  # chunks that begin inside of a page, where the one before has not ended

    def prefill(self, size, opened):
        for prompt, shard, pages, window_pages, state in opened:
            self.states[shard, state] = "prompt", prompt
            for places, held in ((self.places, pages), (self.of_windows, window_pages)):
                for number, page in enumerate(held, len(pages) - len(held)):
                    for token in range(self.layout.page_length):
                        name = ("prompt", prompt), number * self.layout.page_length + token
                        places[shard, page, token] = name
        return super().prefill(size, opened)

    def write(self, places, shard, pages, row, first, tokens):
        """Puts tokens of a row where they belong; to page 0 only what is not read later. Returns the pages."""
        length, written = self.layout.page_length, set()
        for token in range(first, first + tokens):
            page = int(pages[(first % length + token - first) // length])
            assert page or token >= self.queue.limits[row], "what this chunk adds is read later"
            if page:
                places[shard, page, token % length] = (("row", row), token)
                written.add(page)
        return written

    def read(self, size, known):
        super().read(size, known)
        chunks = [(shard, one) for shard, of_shard in enumerate(known) for one in of_shard]
        assert max(map(len, known)) <= size.rows
        for shard, one in chunks:  # all are written before one is read
            if self.layout.states:
                places = (shard, one.states[0]), (shard, one.states[1])
                assert self.states[places[0]] == ("row", one.row, one.sampled), "no answer follows a prompt at once"
                self.states[places[1]] = "row", one.row, one.sampled + size.tokens
            for places, pages in zip((self.places, self.of_windows), one.destinations, strict=True):
                if places is self.places or self.window:
                    self.write(places, shard, pages, one.row, one.sampled, size.tokens)
        for shard, one in chunks:
            given = one.table, one.seen, one.held - len(one.seen)
            self.assert_sees(shard, one.row, one.sampled, *given, more=size.tokens)

    def see(self, turn):
        """The states that rows read have seen all tokens before; those that they write, more, until their turns end."""
        slots, read, written = turn.shape.slots, turn.states.reads, {}
        for slot in np.flatnonzero(turn.rows >= 0).tolist():
            shard, row, sampled = slot // slots, int(turn.rows[slot]), int(turn.sampled[slot])
            prompt = row // self.layout.num_samples
            fresh = ("prompt", prompt) if self.queue.prompt_lengths[prompt] > 1 else "nothing"
            assert self.states[shard, int(read[slot])] == (("row", row, sampled) if sampled else fresh)
            seen = min(sampled + int(turn.counts[slot]), self.ends[row])
            written[shard, int(turn.states.writes[slot])] = "row", row, seen
        assert len(written) == (turn.rows >= 0).sum() and all(place >= self.layout.states for _, place in written)
        self.states |= written

    def decode(self, turn):
        slots, windows, written = turn.shape.slots, turn.windows, Counter()
        if self.layout.states:
            self.see(turn)
        for slot in np.flatnonzero(turn.rows >= 0).tolist():
            seen, first = (windows.table[slot], int(windows.first[slot])) if self.window else ([], 0)
            given = slot // slots, int(turn.rows[slot]), int(turn.sampled[slot])
            self.assert_sees(*given, turn.table[slot], seen, first)
        for slot in np.flatnonzero(turn.rows >= 0).tolist():
            shard, row, sampled = slot // slots, int(turn.rows[slot]), int(turn.sampled[slot])
            self.inside += sampled % self.layout.chunk > 0
            for page in self.write(self.places, shard, turn.destinations[slot], row, sampled, self.layout.chunk):
                written[shard, page] += 1
            if self.window:
                self.write(self.of_windows, shard, windows.destinations[slot], row, sampled, self.layout.chunk)
        assert max(written.values(), default=1) == 1
        return super().decode(turn)

    def assert_sees(self, shard, row, sampled, table, seen, first, more=0):
        prompt = row // self.layout.num_samples
        length = self.layout.page_length
        of_prompt = self.layout.prompt_pages(self.queue.prompt_lengths[prompt]) * length
        end = of_prompt + sampled

        def name(token):
            return (("prompt", prompt), token) if token < of_prompt else (("row", row), token - of_prompt)

        for token in range(end + more):
            assert self.places[shard, int(table[token // length]), token % length] == name(token)
        for token in range(max(0, end - self.window + 1) if self.window else end + more, end + more):
            assert token // length >= first
            assert self.of_windows[shard, int(seen[token // length - first]), token % length] == name(token)


def episode(rng, limit, chunk):
    """Turns until the limit or an end, some as long as whole chunks."""
    turns, left = [], limit
    while True:
        own = min(chunk if rng.random() < 0.3 else int(rng.integers(1, 13)), left)
        left -= own
        said = int(rng.integers(1, 40)) if rng.random() < 0.7 else int(chunk * rng.integers(1, 4))
        if said >= left or rng.random() < 0.05:
            return [*turns, (own, None if left and rng.random() < 0.5 else 0)]
        turns.append((own, said))
        left -= said


@pytest.mark.parametrize("kind", ["alike", "windows", "states"])
def test_rows_see_their_own_tokens_and_all_end(kind):
    given_up, inside, windows = 0, 0, kind == "windows"
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        chunk, window = int(rng.choice([2, 4, 8])), int(rng.integers(2, 40)) if windows else None
        limit, samples, shards = int(rng.integers(20, 120)), int(rng.choice([1, 2, 4])), int(rng.choice([1, 1, 2]))
        slots, lengths = int(rng.choice([2, 4, 8, 16])), rng.integers(1, 40, int(rng.integers(2, 6)))
        layer = ARCH.pattern[0]
        pattern = (dataclasses.replace(layer, window=window, delta=kind == "states"), layer)[kind == "alike" :]
        arch = dataclasses.replace(ARCH, pattern=pattern, delta=DELTA if kind == "states" else None)
        sizes = {
            "chunk_length": chunk,
            "least_page": int(chunk * rng.choice([1, 2, 4])),
            "max_num_seqs": slots * shards,
        }
        sizes |= {"max_prompt_length": 64, "max_response_length": limit}
        settings = settings_of(SEVEN, (shards, 1), arch=arch, **sizes)
        layout = layout_of(settings, lengths, samples, dtype=np.float32, returns=True)
        least = 1 + layout.prompt_pages(int(lengths.max())) + layout.own_pages(limit)
        pages = min(layout.pages, least + int(rng.integers(0, 12)))
        layout = dataclasses.replace(layout, pages=pages, window_pages=min(pages, layout.window_pages))
        limits = np.where(rng.random(len(lengths) * samples) < 0.6, limit, rng.integers(5, limit + 1))
        episodes = [episode(rng, int(most), chunk) for most in limits]
        queue, outcome, delay = Queue(layout), KnownEpisodes(layout, episodes), int(rng.choice(DELAYS))
        devices = Written(layout, queue, window)
        devices.ends = outcome.ends
        queue.add(lengths, limits)
        for _ in range(2000):
            if not queue.step(devices, outcome) and WAITS not in outcome.state:
                break
            outcome.answer(queue, delay)
        assert (outcome.state == ENDED).all(), f"seed {seed}: rows take their pages from each other forever"
        assert outcome.known.tolist() == [sum(own + (said or 0) for own, said in turns) for turns in episodes]
        assert_all_pages_are_free(queue)
        given_up, inside = given_up + sum(shard.given_up for shard in queue.shards), inside + devices.inside
    assert given_up > SEEDS and inside > SEEDS
