"""The engine records the experts that tokens went to: those of one pass over the whole sequence."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rollout.small_rollouts import shared
from shapes import mesh_of, one_device_mesh
from small_experts import ARCH, LENGTH, NUMBERS, PROMPTS, SAMPLES, chosen_by_forward, engine, params, roll_out

from dapo_jax.data.containers import Rollout
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.architecture import Choices
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout.expert_records import ExpertRecords
from dapo_jax.rollout.responses import Begun, Request
from dapo_jax.rollout.sampling import EVALUATE, TRAIN, Sampling

CHOICES = Choices(layers=1, per_token=1, dtype="int8")


def expected(rollout: Rollout, row: int, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """The experts of the prompt and of the response without its last token."""
    prompt, response = PROMPTS[row // samples], rollout.responses[row][rollout.mask[row]].tolist()
    found = chosen_by_forward((*prompt, *response))
    return found[: len(prompt)], found[len(prompt) : -1]


def assert_recorded(rollout: Rollout) -> None:
    for row in range(len(rollout.mask)):
        prompt, response = expected(rollout, row)
        np.testing.assert_array_equal(rollout.prompt_experts[row // SAMPLES], prompt)
        np.testing.assert_array_equal(rollout.experts[row], response)


@functools.cache
def recorded():
    """Few slots, one device."""
    return roll_out(shared(engine("pages", one_device_mesh(), max_num_seqs=8)))


@pytest.mark.slow
@pytest.mark.long("pages-(1, 1, 1)-{'max_num_seqs': 8}", "stretches-(1, 1, 1)")  # each kind
@pytest.mark.parametrize(
    ("kind", "shape", "changes"),
    [
        ("stretches", (1, 1, 1), {"lookahead": 2, "max_num_seqs": 1024}),
        ("stretches", (2, 2, 2), {"max_num_seqs": 24}),
        ("pages", (1, 1, 1), {"max_num_seqs": 8}),
        ("pages", (1, 1, 1), {"lookahead": 2, "max_num_seqs": 7}),
        ("pages", (2, 2, 2), {"max_num_seqs": 24}),
    ],
    ids=str,
)
def test_records_are_the_choices_of_a_pass_over_the_sequence(kind, shape, changes):
    rollout = roll_out(shared(engine(kind, mesh_of(shape), **changes)))
    lengths = rollout.mask.sum(axis=1)
    assert lengths.min() < 4 and lengths.max() == LENGTH and not rollout.finished.all()
    assert {record.dtype.name for record in (*rollout.experts, *rollout.prompt_experts)} == {"int8"}
    assert_recorded(rollout)


@pytest.mark.slow
@pytest.mark.long("3-2-pages")
@pytest.mark.parametrize("kind", ["stretches", "pages"])
@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (3, 2)])
def test_devices_that_exchange_tokens_draw_the_same_tokens_and_record_the_same_experts(expert, tensor, kind):
    """On 2 x 2 devices, whose rows fsdp divides too, and on 3 x 2, which share the experts and the heads."""
    fsdp = 2 // tensor
    devices = jax.devices()[: fsdp * expert * tensor]
    used = engine(kind, make_mesh(1, fsdp, tensor, devices, expert=expert), max_num_seqs=24)
    alone = roll_out(shared(engine(kind, one_device_mesh(), max_num_seqs=24)))
    found = roll_out(used)
    np.testing.assert_array_equal(found.responses, alone.responses)
    np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-5)
    assert_recorded(found)


@pytest.mark.slow
@pytest.mark.long("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_a_continued_response_keeps_the_records_of_its_first_tokens(kind):
    """The records of the first segment are marked, so that ones made again would show."""
    whole = recorded()
    length = np.minimum(np.arange(len(whole.mask)) % 5 + 1, whole.mask.sum(axis=1) - 1)
    rows = np.flatnonzero(length > 0)
    kept = whole.mask & (np.arange(LENGTH) < length[:, None])
    arrays = [np.where(kept, array, 0)[rows] for array in (whole.responses, whole.mask, whole.logprobs)]
    marked = [np.full_like(whole.experts[row][: length[row] - 1], 99) for row in rows]
    found = roll_out(
        shared(engine(kind, one_device_mesh())),
        prompts=[PROMPTS[row // SAMPLES] for row in rows],
        numbers=[NUMBERS[row // SAMPLES] for row in rows],
        num_samples=1,
        begun=Begun(rows % SAMPLES, Rollout(*arrays, whole.finished[rows], experts=marked)),
    )
    np.testing.assert_array_equal(found.responses, whole.responses[rows])
    assert found.prompt_experts is None
    for record, before, row in zip(found.experts, marked, rows, strict=True):
        np.testing.assert_array_equal(record, np.concatenate([before, whole.experts[row][len(before) :]]))
    assert all((before == 99).all() for before in marked)  # they were not written to


@pytest.mark.short("pages")
@pytest.mark.long("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_nothing_is_recorded_for_evaluation(kind):
    rollout = roll_out(shared(engine(kind, one_device_mesh(), max_num_seqs=8)), purpose=EVALUATE)
    assert rollout.experts is None and rollout.prompt_experts is None


@pytest.mark.slow
@pytest.mark.long("stretches")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_nothing_is_recorded_with_the_option_off(kind):
    off = roll_out(engine(kind, one_device_mesh(), choices=None))
    np.testing.assert_array_equal(off.responses, recorded().responses)
    assert off.experts is None and off.prompt_experts is None


def test_the_smallest_dtype_holds_every_expert_and_minus_one():
    assert ARCH.choices == (4, 2, "int8") and ARCH.experts is not None
    for number, dtype in ((128, "int8"), (129, "int16"), (512, "int16")):
        arch = dataclasses.replace(ARCH, experts=dataclasses.replace(ARCH.experts, number=number))
        assert arch.choices is not None and arch.choices.dtype == dtype
    assert dataclasses.replace(ARCH, experts=None).choices is None


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.int8).reshape(*shape, 1, 1)


def test_what_is_unknown_of_a_response_is_minus_one():
    """Its first tokens were drawn by a run that recorded nothing."""
    for known in (None, [np.zeros((0, 0, 0), np.int8)]):
        records = ExpertRecords(CHOICES, [3], np.array([2]), known)
        records.add_chunk(np.array([0]), np.array([2]), numbered(1, 3))
        records.end(0, 5)
        assert records.responses[0].ravel().tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize(("fed", "expected"), [(8, [0, 1, 7, 8, 9]), (7, [0, 1, 8, 9])])
def test_tokens_with_which_a_response_has_paused_are_recorded_when_they_are_read(fed, expected):
    """A prompt of three tokens, and five of the response, of which the last three had not been fed."""
    records = ExpertRecords(CHOICES, [3], np.array([5]), [numbered(2)])
    records.add_prompts([0], [fed], numbered(1, 10))
    assert records.responses[0].ravel().tolist() == expected


def test_a_row_that_begins_again_is_recorded_again():
    records = ExpertRecords(CHOICES, [2], np.array([0, 0]), None)
    records.add_prompts([0], [1], numbered(1, 4))
    for _ in range(2):
        for start in (0, 3):
            records.add_chunk(np.array([0, 1]), np.array([start, start]), numbered(2, 3) + np.int8(10 * start))
    records.end(1, 4)
    assert records.prompts[0].ravel().tolist() == [3, 0] and records.responses[1].ravel().tolist() == [4, 5, 33]


@pytest.mark.slow
@pytest.mark.long("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_a_response_that_returns_has_records_of_all_its_tokens(kind):
    """Each waits once for two tokens of an environment."""
    used, waited = shared(engine(kind, one_device_mesh(), max_num_seqs=8, lookahead=1)), set()

    def waits(row, tokens):
        return row not in waited and not waited.add(row)

    with jax.set_mesh(one_device_mesh()):
        weights = jax.device_put(unstack_layers(params(), ARCH), replicated(one_device_mesh()))
        lengths = np.array([len(prompt) for prompt in PROMPTS])
        sizes = {"prompt_lengths": lengths, "num_prompts": len(PROMPTS)}
        request = Request(weights, SAMPLES, TRAIN, Sampling.create(1.0, 1.0, -1), **sizes, waits=waits)
        pending = used.submit(PROMPTS, NUMBERS, request)
        while used.step() or pending.parked.size:
            for row in pending.parked.tolist():
                try:
                    pending.resume(row, [30 + row % 7, 50])
                except ValueError:  # no room
                    pending.end(row)
        rollout = pending.wait()
    used.close()
    assert (~rollout.by_policy & rollout.mask).any(axis=1).sum() > 5
    assert_recorded(rollout)
