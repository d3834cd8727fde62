"""Laws of a teacher: its scores, candidates and their loss do not depend on the mesh or on packing."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import ARCH, mesh_of, one_device_mesh
from small_policy import (
    SAMPLES,
    actor_settings,
    assert_same_gradient,
    batch_of,
    bins,
    gradient_of,
    logprobs_of,
    policy_on,
    reference,
    rows,
)

from dapo_jax.config.sections import DistillationConfig
from dapo_jax.learner.actor import build_statistics
from dapo_jax.learner.distillation import ABSENT, judged
from dapo_jax.learner.token_logprobs import TokenStatistics, highest, logits_of
from dapo_jax.learner.update import in_pieces
from dapo_jax.models.weights import init_params, weight_shardings, weight_table
from dapo_jax.parallel.mesh import num_batch_shards, with_tensor
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, put, replicated
from dapo_jax.parallel.stopping import unpaced

WHOLE = {"vocab_size": ARCH.vocab_size, "weight": 2.0}
TOP_K = {"distillation": DistillationConfig(path="teacher", form="top_k", top_k=5, weight=0.7)}
WIDER = dataclasses.replace(ARCH, num_layers=1, intermediate_size=96, vocab_size=72)  # more padding, too


def teacher_on(mesh):
    shardings = weight_shardings(weight_table(WIDER), mesh, TRAIN_RULES)
    params = jax.jit(lambda seed: init_params(WIDER, seed), out_shardings=shardings)(3)
    return build_statistics(actor_settings(arch=WIDER, temperature=0.9), mesh), params


def scored(mesh, split):
    """The reference's batch with candidates and the teacher's log-probabilities of both kinds."""
    batch = batch_of(reference()[0])
    with policy_on(mesh, **TOP_K) as (_, actor, state):
        candidates = in_pieces(actor.most_likely, state.params, batch, split, mesh, unpaced)
        batch = batch.replace(candidates=candidates)
        scores, params = teacher_on(mesh)
        found = in_pieces(scores, params, batch, split, mesh, unpaced)
    return batch.replace(teacher_logprobs=found.of_candidates), found.logprobs


@pytest.fixture(scope="module")
def whole():
    """The scores of one device."""
    return scored(one_device_mesh(), rows(32))


@pytest.fixture(scope="module")
def gradient(whole):
    return gradient_of(whole[0], micro=32, **TOP_K)


@pytest.mark.slow
@pytest.mark.long("shape0")
@pytest.mark.parametrize(("shape", "context"), [((1, 2, 2), 1), ((2, 2, 2), 1), ((2, 2, 2), 2)])
def test_every_mesh_and_packing_gives_the_scores_and_gradients_of_one_device(shape, context, whole, gradient):
    expected, logprobs = whole
    mesh = with_tensor(mesh_of(shape), shape[2], context)
    split = bins(num_batch_shards(mesh), 40, parts=context)
    batch, found = scored(mesh, split)
    np.testing.assert_array_equal(batch.candidates, expected.candidates)
    np.testing.assert_allclose(found, logprobs, atol=1e-5)
    np.testing.assert_allclose(batch.teacher_logprobs, expected.teacher_logprobs, atol=1e-5)
    divided = gradient_of(batch, micro=split, mesh=mesh, logprob_chunk_size=7, **TOP_K)
    names = ("actor/distillation_loss", "actor/loss", "actor/grad_norm")
    assert_same_gradient(divided, gradient, names, rtol=1e-4, atol=1e-6)
    assert gradient[1]["actor/distillation_loss"] > 0.1


def test_the_candidates_are_the_most_likely_tokens_and_the_sampled_one_has_its_log_probability(whole):
    batch, logprobs = whole
    assert batch.candidates.shape == (*batch.mask.shape, 5) and not batch.candidates[~batch.mask].any()
    same = (batch.candidates == batch.responses[..., None]) & batch.mask[..., None]
    assert same.any(axis=-1).sum() > 10
    sampled = np.broadcast_to(logprobs[..., None], same.shape)
    np.testing.assert_allclose(batch.teacher_logprobs[same], sampled[same], atol=1e-5)


@pytest.mark.slow
def test_the_mass_is_that_of_the_policy_on_its_candidates(gradient, whole):
    found = gradient[1]["distillation/student_mass"]
    with policy_on(**TOP_K) as (mesh, actor, state):
        own = in_pieces(actor.statistics, state.params, whole[0], rows(32), mesh, unpaced).of_candidates
    assert found == pytest.approx(np.exp(own).sum(axis=-1)[whole[0].loss_mask].mean(), rel=1e-5) and 0 < found < 1


def test_a_vocabulary_in_parts_is_picked_and_sorted_as_a_whole():
    logits = np.random.default_rng(0).normal(size=(4, 6, 64)).astype(np.float32).round(1)  # with ties
    tokens = np.arange(4 * 6 * 3).reshape(4, 6, 3) % 70
    mesh = mesh_of((1, 4, 2))
    with jax.set_mesh(mesh):
        arrays = put((logits, tokens), replicated(mesh))
        best, picked = jax.jit(lambda x, t: (highest(x, 20), logits_of(x, t)))(*arrays)
    np.testing.assert_array_equal(best, jax.lax.top_k(logits, 20)[1])
    expected = np.take_along_axis(np.pad(logits, ((0, 0), (0, 0), (0, 6))), tokens, axis=-1)
    np.testing.assert_array_equal(picked, expected)


@pytest.mark.slow
def test_no_device_has_the_logits_of_the_whole_vocabulary():
    batch = batch_of(reference()[0])
    candidates, zeros = np.zeros((*batch.mask.shape, 5), np.int32), np.zeros(batch.mask.shape, np.float32)
    batch = batch.replace(candidates=candidates, teacher_logprobs=candidates * zeros[..., None], loss_weights=zeros)
    (piece,) = rows(32).split(batch)
    with policy_on(mesh_of((1, 1, 2)), **TOP_K) as (mesh, actor, state):
        micro = put(piece.micro_batch, batch_sharding(mesh))
        gradients = actor.trainable.zero_gradients(state.params)
        lowered = [
            actor.most_likely.lower(state.params, micro),
            actor.trainable.accumulate.lower(state.params, gradients, micro),
        ]
    for program in lowered:
        shapes = set(re.findall(r"f32\[[\d,]+\]", program.compile().as_text()))
        vocabulary = ARCH.vocab_size
        assert any(shape.endswith(f",{vocabulary // 2}]") for shape in shapes)
        assert not [shape for shape in shapes if shape.endswith(f",{vocabulary}]")]


def test_a_teacher_that_is_the_policy_changes_nothing():
    batch = batch_of(reference()[0])
    with policy_on() as (mesh, actor, state):
        own = logprobs_of(actor, state.params, batch, rows(32), mesh)
        found = in_pieces(build_statistics(actor_settings(), mesh), state.params, batch, rows(32), mesh, unpaced)
    batch = batch.replace(old_logprobs=own)
    judgement, metrics = judged(batch, found, **WHOLE, use_task_rewards=True)
    np.testing.assert_array_equal(judgement.advantages, batch.advantages)
    assert metrics == {"distillation/reverse_kl": 0.0}
    alone, _ = judged(batch, found, **WHOLE, use_task_rewards=False)
    assert not alone.advantages.any()


def test_the_sampled_form_adds_the_weighted_difference_of_log_probabilities(whole):
    batch, logprobs = whole
    found, metrics = judged(batch, TokenStatistics(logprobs, None, None), **WHOLE, use_task_rewards=True)
    difference = np.where(batch.mask, logprobs - batch.old_logprobs, 0)
    np.testing.assert_allclose(found.advantages, batch.advantages + 2 * difference, atol=1e-5)
    np.testing.assert_allclose(metrics["distillation/reverse_kl"], -difference[batch.loss_mask].mean(), rtol=1e-4)
    assert len(batch.mask) % SAMPLES == 0 and jnp.isfinite(found.advantages).all()


def test_tokens_that_the_teacher_lacks_have_a_floor(whole):
    batch, logprobs = whole
    found, size = TokenStatistics(logprobs, None, None, batch.teacher_logprobs), 20
    assert (batch.responses >= size).any() and (batch.candidates >= size).any()
    judgement, _ = judged(batch, found, vocab_size=size, weight=1.0, use_task_rewards=True)
    lacks = batch.candidates >= size
    assert (judgement.teacher_logprobs[lacks] == ABSENT).all()
    np.testing.assert_array_equal(judgement.teacher_logprobs[~lacks], batch.teacher_logprobs[~lacks])
    alone, _ = judged(batch, found._replace(of_candidates=None), vocab_size=size, weight=1.0, use_task_rewards=False)
    lacks = (batch.responses >= size) & batch.mask
    np.testing.assert_allclose(alone.advantages[lacks], ABSENT - batch.old_logprobs[lacks], rtol=1e-6)
