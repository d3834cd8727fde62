"""Layers with linear attention: the engine samples as `forward` scores, whatever becomes of a row's slot."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rollout.small_rollouts import FREE, PAD, SAMPLES, assert_all_pages_are_free, assert_same, queues_of
from rollout.test_returns import played
from rollout.test_windows import LENGTHS, family
from shapes import mesh_of

from dapo_jax.data.padding import pad_prompts
from dapo_jax.errors import InputError
from dapo_jax.models.flops import token_flops
from dapo_jax.models.gated_delta import state_bytes
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.state_kernels import update_on_gpu
from dapo_jax.models.transformer import prefill
from dapo_jax.rollout import programs
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.sizes import choose_layout

INTERPRETED_UPDATE = functools.partial(update_on_gpu, interpret=True)
TOLERANCE = 3e-4  # float32 in chunks of a sequence and token by token: transformers' own are as far from exact ones


@pytest.fixture(scope="module")
def rollouts():
    found = dataclasses.replace(family("qwen3_5"), tolerance=TOLERANCE)
    assert [kind.delta for kind in found.arch.layers] == [True, True, True, False]
    assert 1 in LENGTHS, "a prompt of one token has no state on pages"
    assert not found.reference.finished.all() and found.reference.finished.any()
    return found


def same(found, rollouts):
    assert_same(found, rollouts.reference, tolerance=2 * TOLERANCE)


@pytest.mark.slow
@pytest.mark.long("stretches", "triton")
@pytest.mark.parametrize("kind", ["pages", "stretches", "triton"])
def test_rows_take_turns_in_slots(kind, rollouts, monkeypatch):
    if kind == "triton":
        monkeypatch.setattr(programs, "state_kernel", lambda *_: INTERPRETED_UPDATE)
    same(rollouts.sample(rollouts.engine(kind, max_num_seqs=7, lookahead=1)), rollouts)


@pytest.mark.slow
def test_rows_given_up_draw_the_same_tokens_again(rollouts, monkeypatch):
    queues = queues_of(monkeypatch, 28)
    same(rollouts.sample(rollouts.engine("pages", lookahead=1)), rollouts)
    assert queues[0].shards[0].given_up > 5
    assert_all_pages_are_free(queues[0])


@pytest.mark.slow
@pytest.mark.long("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_devices_share_the_rows(kind, rollouts):
    same(rollouts.sample(rollouts.engine(kind, mesh_of((2, 2, 2)), max_num_seqs=16, lookahead=1)), rollouts)


def turns_of_queues(monkeypatch):
    """What devices do from now on, chunk by chunk."""
    decode, found = Counting.decode, []
    monkeypatch.setattr(Counting, "decode", lambda devices, turn: (found.append(turn), decode(devices, turn))[1])
    return found


def begins_of(turns):
    """Tokens before each chunk that follows one of the host; without rows that are in their slot."""
    begins = [(turn.rows >= 0) & (turn.returns | (turn.sources < 0)) for turn in turns]
    return np.concatenate([turn.sampled[of_turn] for turn, of_turn in zip(turns, begins, strict=True)])


def times_begun(turns):
    return int((begins_of(turns) <= (turns[0].shape.stretch > 0)).sum())


@pytest.mark.slow
@pytest.mark.long("pages-16", "kernel", "eight")
@pytest.mark.parametrize(
    ("kind", "chunk", "shape"),
    [
        pytest.param("pages", 8, (1, 1, 1), id="pages-16"),
        pytest.param("pages", 4, (1, 1, 1), id="pages-4"),
        pytest.param("kernel", 8, (1, 1, 1), id="kernel"),
        pytest.param("stretches", 30, (1, 1, 1), id="stretches"),
        pytest.param("pages", 8, (2, 2, 2), id="eight"),
    ],
)
def test_rows_that_wait_keep_their_states(kind, chunk, shape, rollouts, monkeypatch):
    """On pages they go on inside of a chunk."""
    chunks, sizes = turns_of_queues(monkeypatch), {"delay": 3, "least_page": 16, "chunk_length": chunk}
    if kind == "kernel":
        monkeypatch.setattr(programs, "state_kernel", lambda *_: INTERPRETED_UPDATE)
        kind, sizes["least_page"] = "pages", 32  # programs of its own
    sizes["max_num_seqs"] = 10 * shape[0] * shape[1]
    found, turns = played(kind, mesh_of(shape), rollouts=rollouts, **sizes)
    rollouts.assert_tokens_drawn(found, FREE)
    begins = begins_of(chunks)
    returns = (np.diff((found.mask & ~found.by_policy).astype(int), prepend=0) == 1).sum()
    assert times_begun(chunks) == len(turns) and len(begins) - len(turns) == returns > 20
    assert set(begins % 4) == {0, 1, 2, 3}


@pytest.mark.slow
def test_rows_that_wait_give_up_their_states_with_their_pages(rollouts, monkeypatch):
    queues, chunks = queues_of(monkeypatch, 14), turns_of_queues(monkeypatch)
    found, _ = played("pages", rollouts=rollouts, max_num_seqs=7, delay=3, least_page=16)
    rollouts.assert_tokens_drawn(found, FREE)
    assert len(found.mask) + 5 < times_begun(chunks) <= len(found.mask) + queues[0].shards[0].given_up
    assert_all_pages_are_free(queues[0])


@pytest.mark.slow
def test_rows_whose_turns_a_rule_may_end_are_read_again_on_pages(rollouts, monkeypatch):
    """A state may have seen what comes after the stop."""
    chunks, fields = turns_of_queues(monkeypatch), {"stop": lambda tokens, start: None}
    found, turns = played("pages", rollouts=rollouts, max_num_seqs=7, delay=3, fields=fields)
    rollouts.assert_tokens_drawn(found, FREE)
    assert times_begun(chunks) > len(turns) + 10


@pytest.mark.slow
def test_experts_are_recorded_where_a_row_goes_on_inside_of_a_page(monkeypatch):
    mixture = dataclasses.replace(family("qwen3_5_moe"), tolerance=TOLERANCE)
    chunks, choices = turns_of_queues(monkeypatch), {"choices": mixture.arch.choices}
    found, turns = played("pages", rollouts=mixture, max_num_seqs=7, delay=3, least_page=16, **choices)
    assert turns.sum() > 20 and any(np.any(turn.sampled[turn.returns] % 8) for turn in chunks)
    read = jax.jit(functools.partial(prefill, arch=mixture.arch))
    for row in range(len(turns)):
        prompt, response = mixture.prompts[row // SAMPLES], found.responses[row][found.mask[row]].tolist()
        tokens, mask = pad_prompts([[*prompt, *response]], 128, PAD)
        chosen = np.asarray(read(mixture.params, tokens, mask)[2])[0][mask[0]]
        np.testing.assert_array_equal(found.prompt_experts[row // SAMPLES], chosen[: len(prompt)])
        np.testing.assert_array_equal(found.experts[row], chosen[len(prompt) : -1])


def test_a_stop_rule_that_a_state_has_seen_past_is_refused(rollouts):
    with pytest.raises(InputError, match="rollout.stop ends turns after a device has gone on"):
        played("stretches", rollouts=rollouts, fields={"stop": lambda tokens, start: None})


def test_slots_make_room_for_states(rollouts):
    """Of 8 prompts with 64 samples: with three states in float32 fewer rows fit the same memory."""
    arch, settings = rollouts.arch, rollouts.settings(max_num_seqs=0)
    assert state_bytes(arch.delta, np.float32) == 4 * (3 * 80 + 4 * 8 * 12)
    dense = tuple(dataclasses.replace(kind, delta=False) for kind in arch.pattern)
    alike = dataclasses.replace(settings, arch=dataclasses.replace(arch, pattern=dense[-1:], num_layers=1, delta=None))
    sizes = np.dtype(np.float32), LENGTHS, 64, LengthHistory(60), 4e6
    with_states, without = (choose_layout(one, attend_gathered, *sizes) for one in (settings, alike))
    places = [(one.states, one.row_states) for one in (with_states, without)]
    assert with_states.slots < without.slots and places == [(with_states.open_prompts + 2, with_states.slots), (0, 0)]


def test_states_that_leave_no_room_for_pages_are_refused(rollouts):
    settings = rollouts.settings(max_num_seqs=16)
    with pytest.raises(InputError, match="do not fit rollout.kv_memory_share"):
        choose_layout(settings, attend_gathered, np.dtype(np.float32), LENGTHS, 4, LengthHistory(60), 2e4)


def test_work_counts_states_and_the_keys_of_one_layer(rollouts):
    flops, delta = token_flops(rollouts.arch), rollouts.arch.delta
    assert flops.pair == 4 * 4 * 16
    assert delta.flops == 6 * 4 * 8 * 12 + 2 * 4 * 80 and flops.layers > 3 * delta.flops
