"""Training sends tokens to the experts that the sampler chose, and counts where it would have differed."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from shapes import mesh_of, one_device_mesh
from small_experts import ARCH, LENGTH, PROMPTS, SAMPLES, chosen_by_forward, engine, params, roll_out, shifted
from small_policy import actor_settings, plain_batch, update_settings

from dapo_jax.data.containers import Batch
from dapo_jax.data.padding import pad_prompts
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.router_replay import choosing_experts, expert_records, router_metrics, saved_fields
from dapo_jax.learner.update import compute_statistics, mini_batches, update_policy
from dapo_jax.models.experts import RoutingCounts

LAYERS, PER_TOKEN, TEMPERATURE = 4, 2, 1.0
ROWS = MicroBatches(1, rows_per_device=8, choices=ARCH.choices)
BINS = MicroBatches(1, max_tokens_per_device=150, choices=ARCH.choices)  # prompts are shared


def batch_of(rollout) -> Batch:
    prompts, prompt_mask = pad_prompts(PROMPTS, 8, 0)
    advantages = np.random.default_rng(0).normal(size=(len(rollout.mask), 1)) * rollout.mask
    return plain_batch(
        prompt_mask,
        rollout.mask,
        prompts=prompts,
        responses=rollout.responses,
        old_logprobs=rollout.logprobs,
        advantages=advantages.astype(np.float32),
        experts=expert_records(rollout.experts, len(rollout.mask)),
        prompt_experts=expert_records(rollout.prompt_experts, len(PROMPTS)),
    )


@functools.cache
def batch() -> Batch:
    """Any responses, with the experts that a pass over each sequence gives its tokens."""
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, len(PROMPTS) * SAMPLES)[:, None]
    responses = np.where(mask, rng.integers(4, 140, mask.shape), 0).astype(np.int32)
    found = [chosen_by_forward(sequence(responses, mask, row)) for row in range(len(mask))]
    ends = np.repeat([len(prompt) for prompt in PROMPTS], SAMPLES)
    experts = [chosen[end:-1].astype(np.int8) for chosen, end in zip(found, ends, strict=True)]
    prompt_experts = [found[row][: ends[row]].astype(np.int8) for row in range(0, len(mask), SAMPLES)]
    logprobs = np.zeros(mask.shape, np.float32)
    fields = {"responses": responses, "mask": mask, "experts": experts, "prompt_experts": prompt_experts}
    return batch_of(SimpleNamespace(**fields, logprobs=logprobs))


@functools.cache
def sampled() -> Batch:
    """Responses of an engine, with what it has recorded."""
    return batch_of(roll_out(engine("stretches", one_device_mesh())))


def sequence(responses, mask, row) -> tuple[int, ...]:
    return (*PROMPTS[row // SAMPLES], *responses[row][mask[row]].tolist())


@functools.cache
def actor_on(mesh, **changes):
    return build_actor(actor_settings(arch=ARCH, temperature=TEMPERATURE, **changes), mesh)


def with_actor(mesh=None):
    mesh = mesh or one_device_mesh()
    actor = actor_on(mesh)
    return mesh, actor, actor.trainable.init_from(jax.device_put(params(), actor.trainable.shardings))


def logprobs(batch, micro_batches, mesh=None):
    mesh, actor, state = with_actor(mesh)
    with jax.set_mesh(mesh):
        return compute_statistics(actor, state.params, batch, micro_batches, mesh).logprobs


def update(batch, micro_batches, mesh=None, mini=32):
    """The first moments after one optimizer step, which are the gradient, and the metrics."""
    mesh, actor, state = with_actor(mesh)
    with jax.set_mesh(mesh):
        settings = update_settings(mini=mini, micro=micro_batches, lr=0.0)
        state, finish = update_policy(actor, state, batch, settings, mesh)
        return jax.device_get(state.moments[0].mu), finish()[0]


def with_records(change, which=("experts",)) -> Batch:
    """The batch whose records are changed."""
    records = {name: [change(record) for record in getattr(batch(), name)] for name in which}
    return dataclasses.replace(batch(), **{name: expert_records(of, len(of)) for name, of in records.items()})


@pytest.mark.parametrize("split", [ROWS, BINS], ids=["rows", "bins"])
def test_each_slot_has_the_experts_of_its_token(split):
    """Those that a pass over its sequence gives it; padding may go anywhere."""
    found = 0
    for piece in split.split(batch()):
        bins = piece.micro_batch.bins
        assert bins.experts.shape == (*bins.tokens.shape, LAYERS, PER_TOKEN) and bins.experts.dtype == np.int8
        assert (bins.experts[bins.trees == 0] == -1).all()
        numbers = np.broadcast_to(np.arange(len(bins.trees))[:, None], bins.trees.shape)
        for number, tree, branch in np.unique(
            np.stack([numbers, bins.trees, bins.branches], axis=-1).reshape(-1, 3), axis=0
        ):
            if tree and branch:
                slots = (bins.trees[number] == tree) & np.isin(bins.branches[number], (0, branch))
                expected = chosen_by_forward(tuple(bins.tokens[number][slots].tolist()))
                np.testing.assert_array_equal(bins.experts[number][slots], expected)
                found += 1
    assert found == np.sum(batch().mask.sum(axis=1) > 1)


def test_replaying_what_training_would_choose_changes_nothing():
    replayed = logprobs(batch(), BINS)
    np.testing.assert_allclose(replayed, logprobs(batch(), dataclasses.replace(BINS, choices=None)), atol=1e-6)
    np.testing.assert_allclose(replayed, logprobs(choosing_experts(batch()), BINS), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("split", [ROWS, BINS], ids=["rows", "bins"])
def test_replaying_what_the_sampler_chose_gives_its_log_probabilities(split):
    mask, replayed = sampled().mask, logprobs(sampled(), split)
    np.testing.assert_allclose(replayed, logprobs(sampled(), dataclasses.replace(split, choices=None)), atol=1e-6)
    np.testing.assert_allclose(replayed[mask], sampled().old_logprobs[mask], atol=1e-5)


@pytest.mark.parametrize("which", ["experts", "prompt_experts"])
def test_other_experts_give_other_probabilities(which):
    changed, plain = logprobs(with_records(shifted, (which,)), BINS), logprobs(batch(), BINS)
    first, later = np.abs(changed - plain)[:, :1], np.abs(changed - plain)[:, 1:]
    assert later.max() > 0.1 and (first.max() > 0.1) == (which == "prompt_experts")


@pytest.mark.full  # the long lane has runs on two meshes: test_experts_run
def test_the_mesh_and_the_split_change_nothing():
    both = "experts", "prompt_experts"
    changed = with_records(shifted, both)
    np.testing.assert_allclose(logprobs(changed, ROWS), logprobs(changed, BINS), atol=1e-5)
    gradient, metrics = update(changed, ROWS)
    divided = dataclasses.replace(BINS, num_shards=4, max_tokens_per_device=50)
    other, found = update(changed, divided, mesh_of((2, 2, 2)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3), other, gradient)
    assert min(found["router/replay_differs"], metrics["router/replay_differs"]) > 0.3


@pytest.mark.slow
def test_the_share_of_choices_that_training_would_not_have_made():
    """One expert of each token of one response is replaced in the last layer, where no later choice can change."""

    def replaced(record):
        other = record.copy()
        last = other[:, -1]
        for choice in last:
            choice[0] = next(expert for expert in range(6) if expert not in choice)
        return other

    _, metrics = update(batch(), ROWS)
    assert metrics["router/replay_differs"] == 0.0
    longest = int(np.argmax(batch().mask.sum(axis=1)))
    experts = batch().experts.copy()
    experts[longest] = replaced(experts[longest])
    changed = dataclasses.replace(batch(), experts=experts)
    passed = np.sum(batch().mask.sum(axis=1) - 1)  # the last token of a response is not
    share = len(experts[longest]) / (passed * LAYERS * PER_TOKEN)
    for mini in (32, 8):  # one optimizer step, and four
        _, metrics = update(changed, ROWS, mini=mini)
        assert metrics["router/replay_differs"] == pytest.approx(share, rel=1e-6)
    _, off = update(changed, dataclasses.replace(ROWS, choices=None))
    assert "router/replay_differs" not in off and off["router/aux_loss"] > 0


@pytest.mark.slow
def test_loads_are_those_of_the_choices_in_use():
    """Of the responses, but their last tokens, which are not passed over, however prompts are shared."""
    loads = np.zeros((LAYERS, 6))
    for row in range(len(batch().mask)):
        chosen = chosen_by_forward(sequence(batch().responses, batch().mask, row))[:-1]
        of_response = chosen[len(PROMPTS[row // SAMPLES]) :]
        for layer, of_layer in enumerate(np.moveaxis(of_response, 1, 0)):
            loads[layer] += np.bincount(of_layer.ravel(), minlength=6)
    loads /= loads.mean(axis=1, keepdims=True)
    for split in (ROWS, BINS):
        _, metrics = update(batch(), split)
        assert metrics["router/max_load"] == pytest.approx(loads.max(), rel=1e-6)
        assert metrics["router/min_load"] == pytest.approx(loads.min(), rel=1e-6)


def test_metrics_of_two_steps_are_those_of_their_sum():
    """Two layers, two experts, one of them for a token; the numbers by hand."""
    first = RoutingCounts(*map(np.float32, ([[3, 1], [2, 2]], [[2, 2], [2, 2]], [4, 4], [1, 0])))
    second = RoutingCounts(*map(np.float32, ([[1, 3], [4, 0]], [[1, 3], [3, 1]], [4, 4], [0, 2])))
    found = router_metrics([first, second], 1, replayed=True)
    # In all, 10 and 6 of 16 tokens, with mean probabilities 8 / 16 each.
    assert found["router/aux_loss"] == pytest.approx(2 * (10 / 16 * 8 / 16 + 6 / 16 * 8 / 16))
    assert found["router/max_load"] == pytest.approx(6 / 4) and found["router/min_load"] == pytest.approx(2 / 4)
    assert found["router/replay_differs"] == pytest.approx(3 / 16)


def test_mini_batches_take_their_records_along():
    second = list(mini_batches(batch(), 8))[1]
    assert len(second.experts) == 8 and len(second.prompt_experts) == 2
    np.testing.assert_array_equal(second.experts[0], batch().experts[8])
    np.testing.assert_array_equal(second.prompt_experts[1], batch().prompt_experts[3])


def test_a_batch_is_saved_with_its_records_as_plain_arrays(tmp_path):
    np.savez(tmp_path / "batch.npz", allow_pickle=False, **saved_fields(batch()))
    with np.load(tmp_path / "batch.npz") as saved:
        for name, count in (("experts", len(batch().mask)), ("prompt_experts", len(PROMPTS))):
            parts = np.split(saved[name], np.cumsum(saved[f"{name}_tokens"])[:-1])
            assert len(parts) == count
            for part, record in zip(parts, getattr(batch(), name), strict=True):
                np.testing.assert_array_equal(part, record)
    assert "experts" not in saved_fields(choosing_experts(batch()))


def test_rows_of_padding_have_empty_records():
    found = expert_records([np.ones((2, 4, 2), np.int8), np.ones((2, 4, 2), np.int8)], 3)
    assert found is not None and [record.shape for record in found] == [(2, 4, 2), (2, 4, 2), (0, 4, 2)]
    assert expert_records(None, 3) is None
