"""Layers with linear attention: the engine samples as `forward` scores, whatever becomes of a row's slot."""

import dataclasses
import functools

import numpy as np
import pytest
from rollout.small_rollouts import FREE, assert_all_pages_are_free, assert_same, queues_of
from rollout.test_returns import played
from rollout.test_windows import LENGTHS, family
from shapes import mesh_of

from dapo_jax.errors import InputError
from dapo_jax.models.flops import token_flops
from dapo_jax.models.gated_delta import state_bytes
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.state_kernels import update_on_gpu
from dapo_jax.rollout import programs
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
@pytest.mark.long("stretches", "kernels")
@pytest.mark.parametrize("kind", ["pages", "stretches", "kernels"])
def test_rows_take_turns_in_slots(kind, rollouts, monkeypatch):
    if kind == "kernels":
        monkeypatch.setattr(programs, "update_for", lambda *_: INTERPRETED_UPDATE)
    same(rollouts.sample(rollouts.engine(kind, max_num_seqs=7, lookahead=1)), rollouts)


@pytest.mark.slow
def test_rows_given_up_draw_the_same_tokens_again(rollouts, monkeypatch):
    queues = queues_of(monkeypatch, 28)
    same(rollouts.sample(rollouts.engine("pages", lookahead=1)), rollouts)
    shard = queues[0].shards[0]
    assert shard.given_up > 5 and sorted(shard.free_states) == list(range(1, queues[0].layout.states))
    assert_all_pages_are_free(queues[0])


@pytest.mark.slow
@pytest.mark.long("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_devices_share_the_rows(kind, rollouts):
    same(rollouts.sample(rollouts.engine(kind, mesh_of((2, 2, 2)), max_num_seqs=16, lookahead=1)), rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_rows_that_wait_keep_their_state_or_are_read_again(kind, rollouts):
    found, turns = played(kind, rollouts=rollouts, max_num_seqs=7, delay=3, least_page=16)
    assert turns.sum() > 20
    rollouts.assert_tokens_drawn(found, FREE)


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
    assert with_states.slots < without.slots and (with_states.states, without.states) == (
        with_states.open_prompts + 1,
        0,
    )


def test_states_that_leave_no_room_for_pages_are_refused(rollouts):
    settings = rollouts.settings(max_num_seqs=16)
    with pytest.raises(InputError, match="do not fit rollout.kv_memory_share"):
        choose_layout(settings, attend_gathered, np.dtype(np.float32), LENGTHS, 4, LengthHistory(60), 2e4)


def test_work_counts_states_and_the_keys_of_one_layer(rollouts):
    flops, delta = token_flops(rollouts.arch), rollouts.arch.delta
    assert flops.pair == 4 * 4 * 16
    assert delta.flops == 6 * 4 * 8 * 12 + 2 * 4 * 80 and flops.layers > 3 * delta.flops
