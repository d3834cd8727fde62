"""Which mini-batches have a step, and how many tokens each share of the devices is given in an epoch."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import one_device_mesh
from small_policy import actor_on, actor_settings, micro_batch, plain_batch, update_settings

from dapo_jax.algorithms.distillation import coarse_reverse_kl
from dapo_jax.config.sections import DistillationConfig
from dapo_jax.data.containers import Mean
from dapo_jax.learner.actor import loss_of, policy_token_loss
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.update import Update, _optimizer_steps, mini_batches, sequence_lengths, tokens_of_devices
from dapo_jax.parallel.sharding import fetch
from dapo_jax.parallel.stopping import unpaced

PROMPTS = np.array([1, 2, 4, 8])  # tokens; two responses to each
RESPONSES = np.array([1, 1, 16, 1, 32, 1, 1, 64])
BATCH = plain_batch(np.arange(8) >= 8 - PROMPTS[:, None], np.arange(64) < RESPONSES[:, None])


def settings_of(micro_batches, mini) -> Update:
    return update_settings(micro=micro_batches, mini=mini, lr=0.0, epochs=2)


def tokens(shares, rows, *, mini=8, budget=0):
    micro_batches = MicroBatches(shares, budget, 0 if budget else rows)
    return tokens_of_devices(BATCH, settings_of(micro_batches, mini).network, micro_batches).tolist()


class Recorded:
    """A learner whose state is the list of its gradients, which are the summed weights of a mini-batch."""

    def operands(self, params):
        return params

    def zero_gradients(self, params):
        return 0.0

    def accumulate(self, params, gradients, micro_batch):
        return gradients + float(micro_batch.loss_weights.sum()), {"loss": Mean(jnp.float32(1), jnp.float32(1))}

    def apply(self, state, gradients, learning_rate):
        return SimpleNamespace(params=None, steps=[*state.steps, gradients]), np.float32(1)


def test_a_mini_batch_without_a_token_to_train_on_has_no_step():
    batch = BATCH.replace(loss_mask=BATCH.loss_mask & (np.arange(8) >= 4)[:, None])
    settings = settings_of(MicroBatches(1, rows_per_device=4), mini=4)
    learner, state = cast(Any, Recorded()), cast(Any, SimpleNamespace(params=None, steps=[]))
    state, steps, _ = _optimizer_steps(learner, state, batch, settings, one_device_mesh(), unpaced)
    assert state.steps == pytest.approx([1.0, 1.0]) and len(steps) == 2  # the second half, in each of two epochs


@pytest.mark.parametrize(("given", "sizes"), [(6, [3, 3]), (5, [3, 2]), (4, [2, 2]), (3, [3]), (1, [1])])
def test_a_partial_step_is_split_evenly_into_mini_batches_of_the_same_shape(given, sizes):
    batch = plain_batch(np.ones((6, 8), bool), np.ones((12, 64), bool) & (np.arange(12) < 2 * given)[:, None])
    found = list(mini_batches(batch, 6))
    real = [one.group_ids[one.mask.any(axis=1)] for one in found]
    assert [len(ids) // 2 for ids in real] == sizes and np.concatenate(real).tolist() == np.repeat(
        np.arange(given), 2
    ).tolist()
    assert {one.mask.shape for one in found} == {(6, 64)} and {len(one.prompts) for one in found} == {3}


def test_the_off_policy_mask_compares_with_the_sampler_and_no_token_is_drawn_that_it_leaves_out():
    mask, zeros = BATCH.mask, np.zeros(BATCH.mask.shape, np.float32)
    sampled = np.where(np.arange(8) >= 4, 1.0, 0.1)[:, None].astype(np.float32) * mask
    batch = BATCH.replace(advantages=zeros - 1, old_logprobs=zeros, sampled_logprobs=sampled, noise=zeros)
    changes = {"loss_mode": "kl_cov", "off_policy_mask_threshold": 0.5}
    mesh = one_device_mesh()
    with jax.set_mesh(mesh):
        select = actor_on(mesh, **changes).select
        assert select is not None
        selected = fetch(select(batch, -np.broadcast_to(np.arange(8.0)[:, None], mask.shape) * mask * 0.01))
        assert selected.any() and not selected[4:].any()
        piece = micro_batch(batch.replace(selected=selected))
    loss, metrics = policy_token_loss(jnp.zeros(piece.mask.shape), piece, actor_settings(**changes).options)
    left_out = np.asarray(piece.sampled_logprobs) > 0.5
    np.testing.assert_array_equal(np.asarray(loss)[piece.mask] == 0, left_out[piece.mask])
    assert metrics["off_policy_masked"].total == mask[4:].sum() and metrics["off_policy_masked"].count == mask.sum()


def test_the_loss_is_the_weighted_sum_of_its_terms():
    rng, shape = np.random.default_rng(0), BATCH.mask.shape
    names = ("advantages", "old_logprobs", "ref_logprobs", "loss_weights")
    fields: dict[str, Any] = {name: rng.uniform(0.1, 1, shape).astype(np.float32) for name in names}
    fields["teacher_logprobs"] = -rng.uniform(1, 2, (*shape, 2)).astype(np.float32)
    piece = micro_batch(BATCH.replace(**fields, loss_mask=BATCH.mask & (np.arange(64) % 3 > 0)))
    of_candidates, entropy = piece.teacher_logprobs - 0.5, rng.uniform(1, 2, piece.mask.shape).astype(np.float32)
    teacher = DistillationConfig(path="random", form="top_k", top_k=2, weight=0.5)
    settings = actor_settings(entropy_coeff=0.3, kl_loss_coef=0.2, kl_loss_type="k2", distillation=teacher)
    found, _ = loss_of(TokenStatistics(piece.old_logprobs, entropy, None, of_candidates), piece, settings)
    kl = np.square(piece.old_logprobs - piece.ref_logprobs) / 2
    distilled = np.asarray(coarse_reverse_kl(jnp.asarray(of_candidates), jnp.asarray(piece.teacher_logprobs)))
    terms = -piece.advantages + 0.2 * kl + 0.5 * distilled - 0.3 * entropy  # ratios are 1
    np.testing.assert_allclose(found, np.sum(piece.loss_weights * terms, where=piece.loss_mask), rtol=1e-5)


@pytest.mark.parametrize("loss", ["vanilla", "geo_mean"])
def test_importance_weights_scale_the_loss_once(loss):
    """Also that of a loss which takes them itself."""
    ones = BATCH.mask.astype(np.float32)
    batch, options = BATCH.replace(advantages=ones, old_logprobs=0.1 * ones), actor_settings(loss_mode=loss).options

    def token_loss(**weights):
        piece = micro_batch(batch.replace(**weights))
        return policy_token_loss(jnp.zeros(piece.mask.shape), piece, options)[0] * piece.mask

    plain = token_loss()
    np.testing.assert_allclose(token_loss(importance_weights=1.5 * ones), 1.5 * plain, rtol=1e-5)
    assert np.abs(plain).sum() > 0


def test_a_sequence_is_a_response_with_its_own_prompt():
    assert sequence_lengths(BATCH).tolist() == [2, 2, 18, 3, 36, 5, 9, 72]


def test_shares_of_micro_batches_add_up_and_rows_of_padding_have_no_tokens():
    assert tokens(2, 4) == [2 + 2 + 18 + 3, 36 + 5 + 9 + 72]
    assert tokens(2, 2) == [2 + 2 + 36 + 5, 18 + 3 + 9 + 72]
    assert tokens(2, 2, mini=4) == tokens(2, 2), "a mini-batch is a micro-batch here"
    assert tokens(1, 8) == [147] and tokens(4, 4) == [25, 122, 0, 0]


def test_token_budgets_divide_the_same_tokens():
    for shares in (1, 2, 4):
        found = tokens(shares, 8, budget=300)
        assert sum(found) == 147 and len(found) == shares
