"""How much of the work of responses that return is needed; the calculator and FrozenLake are in docs/inside.md."""

import dataclasses

import numpy as np
import pytest
from rollout.known_episodes import walk_episodes
from rollout.large_models import SEVEN, layout_of, settings_of
from rollout.small_rollouts import assert_all_pages_are_free, dense, queues_of
from rollout.test_returns import TURNS, played
from shapes import ARCH, mesh_of

from dapo_jax.models.architecture import Delta
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.queue import needed_work

# Least and most turns, tokens that the policy writes in one, and tokens of an answer.
CALCULATOR, LAKE, SEARCH = ((2, 3), (14, 26), (7, 13)), ((6, 6), (4, 6), (27, 33)), ((3, 5), (60, 200), (150, 600))
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "head_dim": 64}
SMALL = dataclasses.replace(ARCH, **SMOLLM2, num_heads=9, num_kv_heads=3, tie_embeddings=True)


def walked(kind, *, slots, chunk, arch=SMALL, page=1, prompts=8, limit=320, reads=None, **layout):
    """8 episodes to each of some prompts of 60 tokens; the devices, which have counted, and the work by stage."""
    rng, (turns, own, said), episodes = np.random.default_rng(0), kind, []
    for _ in range(8 * prompts):
        count = int(rng.integers(turns[0], turns[1] + 1))
        written, answers = (rng.integers(low, high + 1, count).tolist() for low, high in (own, said))
        episodes.append([*zip(written, [*answers[:-1], 0], strict=True)])
    lengths = np.full(prompts, 60)
    sizes = {"max_num_seqs": slots, "max_prompt_length": 64, "max_response_length": limit}
    settings = settings_of(SEVEN, (1, 1), arch=arch, chunk_length=chunk, least_page=page, **sizes)
    chosen = layout_of(settings, lengths, 8, dtype=np.float32, returns=True, **layout)
    chosen = dataclasses.replace(chosen, reads=chosen.reads if reads is None else reads)
    return walk_episodes(arch, chosen, lengths, episodes, limit=limit)


def ratio(found):
    """Computed over needed operations of all stages."""
    work = found[1]
    return sum(one.computed for one in work.values()) / sum(one.needed for one in work.values())


@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize("slots", [1, 2, 8, 64])
def test_on_cpus_little_more_is_computed_than_is_needed(slots, chunk):
    """What is left: slots of rows that wait, scores of the vocabulary for what is given, keys, the last rows."""
    assert ratio(walked(CALCULATOR, slots=slots, chunk=chunk, attend=None)) < (1.1 if slots == 1 else 1.3)
    assert ratio(walked(LAKE, slots=slots, chunk=chunk, attend=None)) < (1.3 if slots == 1 else 1.55)


@pytest.mark.parametrize(("chunk", "calculator", "lake"), [(4, 1.22, 1.17), (8, 1.35, 1.3), (32, 2.0, 2.45)])
@pytest.mark.parametrize("page", [1, 32])
def test_with_pages_a_turn_takes_whole_chunks(page, chunk, calculator, lake):
    """A row reads nothing again when it returns, but idles after the end of a turn to that of its chunk."""
    for kind, most in ((CALCULATOR, calculator), (LAKE, lake)):
        assert walked(kind, slots=64, chunk=chunk, page=page, prompts=32)[1]["decode"].efficiency > 1 / most


@pytest.mark.parametrize(
    ("rows", "chunk", "sizes"),
    [
        (256, 4, {}),
        (264, 8, {}),
        (264, 4, {"max_num_seqs": 256}),
        (64, 8, {"least_chunk": 8}),
        (64, 16, {"chunk_length": 16}),
    ],
)
def test_chunks_of_episodes_are_short_where_few_rows_are_decoded(rows, chunk, sizes):
    lengths, limits = np.full(rows // 8, 60), {"max_prompt_length": 64, "max_response_length": 320, "max_num_seqs": 0}
    settings = settings_of(SEVEN, (1, 1), arch=SMALL, least_page=32, **limits | sizes)
    assert layout_of(settings, lengths, 8, dtype=np.float32, returns=True, free=8).chunk == chunk
    if rows == 256:
        assert ratio(walked(CALCULATOR, slots=64, chunk=0, page=32, prompts=32)) < 1.3


@pytest.mark.parametrize(("chunk", "most"), [(8, 1.12), (16, 1.12), (32, 1.2)])
def test_whole_pages_of_an_answer_are_read_at_once(chunk, most, monkeypatch):
    """Half of the steps are enough for episodes whose answers are four fifths of their tokens."""
    read, calls = Counting.read, []
    monkeypatch.setattr(Counting, "read", lambda devices, *given: (calls.append(given), read(devices, *given)))
    sizes = {"slots": 64, "chunk": chunk, "page": 32, "prompts": 32, "limit": 4096}
    (devices, work), (token_by_token, _) = walked(SEARCH, **sizes), walked(SEARCH, **sizes, reads=())
    assert chunk * devices.decodes.total() + len(calls) < 0.5 * chunk * token_by_token.decodes.total()
    assert work["decode"].efficiency > 1 / most
    some = dataclasses.replace(SMALL, pattern=(dataclasses.replace(SMALL.pattern[0], window=512), *SMALL.pattern))
    with_windows, _ = walked(SEARCH, arch=some, **sizes)
    assert with_windows.decodes.total() == devices.decodes.total()


@pytest.mark.parametrize(("kind", "limit", "most"), [(CALCULATOR, 320, 1.3), (LAKE, 320, 1.25), (SEARCH, 4096, 1.12)])
def test_rows_with_states_go_on_as_others_do(kind, limit, most):
    """Three of four layers have states. If a rule may end turns, rows begin again from their prompts."""
    layers = dataclasses.replace(SMALL.pattern[0], delta=True), SMALL.pattern[0]
    delta = Delta(key_heads=9, value_heads=9, key_dim=64, value_dim=64, filter_width=4)
    arch = dataclasses.replace(SMALL, pattern=(*[layers[0]] * 3, layers[1]), num_layers=32, delta=delta)
    sizes = {"slots": 64, "chunk": 0, "prompts": 32, "limit": limit, "arch": arch}
    found, again = (ratio(walked(kind, **sizes, stops=stops)) for stops in (False, True))
    assert found < most and again > 1.1 * found


@pytest.mark.short("1")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=["1", "8"])
@pytest.mark.parametrize("kind", ["stretches", "pages"])
def test_devices_do_what_the_walk_without_devices_does(kind, shape, monkeypatch):
    queues = queues_of(monkeypatch)
    found, turns = played(kind, mesh_of(shape), max_num_seqs=3)
    given, episodes = found.mask & ~found.by_policy, []
    for row, asked in enumerate(turns):
        own, said = found.by_policy[row], given[row]
        starts = np.flatnonzero(np.diff(said.astype(int), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(said.astype(int), append=0) == -1) + 1
        firsts, lasts = [0, *ends], [*starts, int(found.mask[row].sum())]
        answers = [int(n) for n in ends - starts] + [None if asked > len(starts) else 0]
        episodes.append([(int(b - a), s) for a, b, s in zip(firsts, lasts, answers, strict=True)])
        assert own.sum() == sum(one for one, _ in episodes[-1]) and len(starts) <= TURNS
    lengths = dense().prompt_lengths[:6]
    _, work = walk_episodes(
        dense().arch, queues[0].layout, lengths, episodes, limit=dense().length, delay=0, gathers=kind == "pages"
    )
    assert found.work == work and given.sum() > 50
    assert_all_pages_are_free(queues[0])


def test_what_an_environment_said_is_needed_once_and_without_scores():
    flops, sizes = token_flops(ARCH), (np.array([9]), np.array([[12, 7]]))
    plain, found = needed_work(ARCH, *sizes), needed_work(ARCH, *sizes, 5)
    assert plain["decode"] - found["decode"] == 5 * flops.head and plain["prefill"] == found["prefill"]
