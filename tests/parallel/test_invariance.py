"""Laws: tokens, losses and parameters do not depend on the mesh or the micro-batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import ARCH, mesh_of
from small_policy import (
    EOS,
    LENGTH,
    PAD,
    PROMPTS,
    SAMPLES,
    actor_on,
    actor_settings,
    assert_close,
    assert_same_gradient,
    batch_of,
    bins,
    critic_of,
    gradient_of,
    logprobs_of,
    micro_batch,
    policy_on,
    reference,
    roll_out,
    rows,
    step,
    update_settings,
)

from dapo_jax.algorithms.aggregation import MODES
from dapo_jax.algorithms.kl import kl_penalty
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.data.containers import Batch
from dapo_jax.learner.actor import loss_fn, loss_of
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.update import compute_values, update_critic
from dapo_jax.models import transformer
from dapo_jax.models.weights import init_params
from dapo_jax.parallel.mesh import with_tensor
from dapo_jax.rollout.sampling import EVALUATE

METRICS = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")
TERMS = {"entropy_coeff": 0.01, "kl_loss_coef": 0.1}
DIVIDED = (2, 2, 2)  # trains what a mesh without "tensor" samples


def drifted(batch: Batch) -> Batch:
    """The batch as if the policy had changed since sampling: ratios on both sides of the clip range."""
    rng = np.random.default_rng(7)
    return batch.replace(old_logprobs=batch.old_logprobs + rng.normal(0, 0.4, batch.mask.shape).astype(np.float32))


def weighted(rollout) -> Batch:
    weights = np.random.default_rng(3).uniform(0.5, 2, rollout.mask.shape).astype(np.float32)
    return drifted(batch_of(rollout)).replace(importance_weights=weights)


def assert_same_rollout(found, expected):
    np.testing.assert_array_equal(found.responses, expected.responses)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def divided():
    """What a mesh of eight samples, and the state and metrics after an update with every term in packed passes."""
    sampling = mesh_of((2, 4, 1))
    with policy_on(with_tensor(sampling, 2), decode_mesh=sampling, loss_mode="clip_cov", **TERMS) as (
        mesh,
        actor,
        state,
    ):
        with jax.set_mesh(sampling):
            rollout = roll_out(actor, state, sampling)
        state, metrics = step(actor, state, weighted(rollout), mesh, mini=32, micro=bins(4, 40))
    assert mesh.devices.shape == DIVIDED
    return rollout, state, metrics


def test_a_mesh_of_eight_gives_the_tokens_and_the_gradient_of_one_device(divided):
    """With entropy bonus, KL loss, importance weights, and tokens that clip_cov chooses from the mini-batch."""
    rollout, state, metrics = divided
    assert_same_rollout(rollout, reference()[0])
    whole = gradient_of(weighted(rollout), micro=32, loss_mode="clip_cov", **TERMS)
    names = metrics.keys() - {"rollout_corr/k3_kl", "perf/update_efficiency"}
    assert_same_gradient((jax.device_get(state.moments[0].mu), metrics), whole, names, rtol=1e-4, atol=1e-6)


# Pairs: each mesh once, with a loss or with two optimizer steps after sampling on another mesh.


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "shape"), [("gspo", DIVIDED), ("clip_cov", (8, 1, 1))])
def test_no_loss_depends_on_micro_batches_or_mesh(loss, shape):
    batch = weighted(reference()[0])
    whole = gradient_of(batch, micro=32, loss_mode=loss, **TERMS)
    split = gradient_of(batch, micro=16, mesh=mesh_of(shape), loss_mode=loss, **TERMS)
    assert_same_gradient(split, whole, whole[1].keys() - {"rollout_corr/k3_kl"}, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.long("shape0")
@pytest.mark.parametrize(
    ("shape", "train_tensor"),
    [((1, 4, 2), 1), ((8, 1, 1), 1), ((1, 8, 1), 1), (DIVIDED, 1), (DIVIDED, 2), ((2, 4, 1), 2)],
)
def test_every_mesh_gives_the_tokens_losses_and_parameters_of_one_device(shape, train_tensor):
    rollout, metrics, params = reference()
    sampling = mesh_of(shape)
    with policy_on(with_tensor(sampling, train_tensor), decode_mesh=sampling) as (mesh, actor, state):
        with jax.set_mesh(sampling):
            sharded = roll_out(actor, state, sampling)
        state, found = step(actor, state, batch_of(sharded), mesh)  # two rows per device and micro-batch
    assert_same_rollout(sharded, rollout)
    for name in METRICS:
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-5, atol=1e-6)
    assert_close(jax.device_get(state.params), params, 1e-5)


def test_parameters_and_moments_are_really_divided(divided):
    _, state, _ = divided
    for tree in (state.params, state.moments[0].mu, state.moments[0].nu):
        for leaf in (*(tree["layers"][name] for name in ("query", "output", "gate", "down")), tree["embedding"]):
            assert leaf.addressable_shards[0].data.size * 4 == leaf.size, leaf.shape


def test_the_purpose_and_the_seed_change_the_draws():
    rollout, _, _ = reference()
    with policy_on() as (mesh, actor, state):
        for changes in ({"purpose": EVALUATE}, {"seed": 1}):
            assert (roll_out(actor, state, mesh, **changes).responses != rollout.responses).any()
        np.testing.assert_array_equal(roll_out(actor, state, mesh).responses, rollout.responses)


def test_responses_end_with_the_first_end_of_sequence_token_which_is_part_of_them():
    rollout, _, _ = reference()
    lengths = rollout.mask.sum(axis=1)
    assert rollout.finished.any() and not rollout.finished.all()
    for row, length in enumerate(lengths):
        real = rollout.responses[row, :length]
        assert rollout.mask[row, :length].all() and not np.isin(real[:-1], EOS).any()
        assert rollout.finished[row] == np.isin(real[-1], EOS)
        assert rollout.finished[row] or length == LENGTH
        assert (rollout.responses[row, length:] == PAD).all() and (rollout.logprobs[row, length:] == 0).all()


def test_end_of_sequence_as_the_first_token_is_a_response_of_one_token():
    with policy_on() as (mesh, actor, state):
        rollout = roll_out(actor, state, mesh, eos_ids=tuple(range(64)))
    assert (rollout.mask.sum(axis=1) == 1).all() and rollout.finished.all() and (rollout.logprobs[:, 0] < 0).all()


def test_one_model_sampler_and_training_logprobs_agree():
    rollout, _, _ = reference()
    with policy_on() as (mesh, actor, state):
        for split, width in ((rows(12), 8), (bins(1, 24), 12)):
            trained = logprobs_of(actor, state.params, batch_of(rollout, width), split, mesh)
            np.testing.assert_allclose(trained, rollout.logprobs, atol=1e-4)


@pytest.mark.long("token-mean-rows", "-bins")
@pytest.mark.short("-bins")
@pytest.mark.parametrize("split", [bins(1, 70), rows(6)], ids=["bins", "rows"])
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_packing_and_padding_change_no_gradient(mode, split):
    rollout, _, _ = reference()
    whole = gradient_of(batch_of(rollout), micro=32, mode=mode)
    found = gradient_of(batch_of(rollout, 16), micro=split, mode=mode, logprob_chunk_size=7)
    assert_same_gradient(found, whole, (*METRICS, "actor/ppo_kl"), rtol=1e-4, atol=1e-6)


def test_empty_rows_change_nothing_unless_they_are_counted():
    batch = batch_of(reference()[0])
    empty = batch.replace(loss_mask=batch.mask & (np.arange(32) < 28)[:, None])
    losses = {}
    for count in (False, True):
        with policy_on() as (mesh, actor, state):
            changes = {"mini": 32, "count_empty": count, "mode": "seq-mean-token-mean"}
            losses[count] = step(actor, state, empty, mesh, **changes)[1]["actor/pg_loss"]
    np.testing.assert_allclose(losses[True], losses[False] * 28 / 32, rtol=1e-5)


def test_the_first_update_sees_the_sampling_policy():
    _, metrics, _ = reference()
    assert metrics["rollout_corr/logprob_abs_diff"] < 1e-5 and metrics["rollout_corr/first_clipfrac"] == 0
    assert metrics["rollout_corr/logprob_abs_diff"] <= metrics["rollout_corr/logprob_abs_diff_max"] < 1e-4
    assert metrics["actor/num_updates"] == 2


@pytest.mark.short("vanilla", "gspo", "clip_cov")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_pieces_of_a_loss_add_up(loss):
    """And so do their metrics, and the gradients are those of the whole; with all terms, and tokens chosen before."""
    batch, rng = drifted(batch_of(reference()[0])), np.random.default_rng(3)
    shape = batch.mask.shape
    batch = batch.replace(
        importance_weights=rng.uniform(0.5, 2, shape).astype(np.float32),
        loss_weights=(batch.mask / batch.mask.sum()).astype(np.float32),
        selected=rng.uniform(size=shape) < 0.3,
        values=rng.uniform(-3, 0, shape).astype(np.float32),  # log-probabilities
    )
    settings = actor_settings(loss_mode=loss, off_policy_mask_threshold=0.05, **TERMS)

    @jax.jit
    def found(piece):
        def of_logprobs(logprobs):
            return loss_of(TokenStatistics(logprobs, -logprobs, None), piece, settings)

        return jax.value_and_grad(of_logprobs, has_aux=True)(piece.values)

    results = []
    for size in (32, 6):
        total, merged, gradient = 0.0, {}, np.zeros(shape, np.float32)
        for piece in rows(size).split(batch):
            (loss, metrics), part = found(jax.tree.map(jnp.asarray, piece.micro_batch))
            piece.write(np.asarray(part), gradient)
            merged = {name: merged[name].merge(metrics[name]) if merged else metrics[name] for name in metrics}
            total += loss
        results.append((total, merged, gradient))
    (whole, of_whole, expected), (total, merged, gradient) = results
    np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-6)
    assert_close(merged, of_whole, 1e-4)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    assert np.abs(expected).max() > 0


@pytest.mark.slow
def test_the_critic_does_not_depend_on_micro_batches_or_mesh():
    batch, results = batch_of(reference()[0]), []
    meshes = mesh_of((1, 1, 1)), mesh_of(DIVIDED), with_tensor(mesh_of(DIVIDED), 2, context=2)
    for micro, mesh in ((32, meshes[0]), (6, meshes[0]), (16, meshes[1]), (16, meshes[2])):
        with jax.set_mesh(mesh):
            critic = critic_of(mesh)
            state = critic.init_from_policy(actor_on(mesh).trainable.init_random(0).params)
            assert (compute_values(critic, state.params, batch, rows(micro), mesh) == 0).all()  # a zero head
            for _ in range(2):  # the head learns first, then the layers below it
                state, finish = update_critic(critic, state, batch, update_settings(mini=32, micro=micro), mesh)
            values = compute_values(critic, state.params, batch, rows(micro), mesh)
            results.append((jax.device_get(state.moments[0].mu), values, finish()[0]["critic/vf_loss"]))
    for moments, values, loss in results[1:]:
        assert_close(moments, results[0][0], 1e-5)
        np.testing.assert_allclose(values, results[0][1], atol=1e-5)
        np.testing.assert_allclose(loss, results[0][2], rtol=1e-5)
    assert np.abs(results[0][0]["layers"]["query"]).max() > 0 and np.abs(results[0][1]).max() > 0


def test_what_is_not_trained_on_is_still_read():
    """A token outside the loss mask has no loss, but later tokens still attend to it."""
    rollout, _, _ = reference()
    batch = batch_of(rollout)
    masked = batch.replace(loss_mask=batch.mask & (np.arange(LENGTH) % 2 == 0))
    with policy_on() as (mesh, actor, state):
        trained = logprobs_of(actor, state.params, masked, rows(12), mesh)
        np.testing.assert_allclose(trained, rollout.logprobs, atol=1e-4)
        _, metrics = step(actor, state, masked, mesh, mini=32)
    expected = -np.mean(batch.advantages[masked.loss_mask])
    np.testing.assert_allclose(metrics["actor/pg_loss"], expected, rtol=1e-4)


@pytest.mark.slow
def test_entropy_bonus_and_kl_loss_have_the_gradient_of_what_they_say():
    """Against log-probabilities and entropies from whole logits, without chunks."""
    batch, arch = batch_of(reference()[0]), dataclasses.replace(ARCH, num_layers=1)
    weights = (batch.mask / batch.mask.sum()).astype(np.float32)
    batch = batch.replace(loss_weights=weights, advantages=0 * batch.advantages)
    params = jax.jit(init_params, static_argnums=0)(arch, 0)

    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
    tokens = np.zeros((len(prompts), max(map(len, prompts)) + LENGTH), np.int32)  # padded on the right
    before = np.zeros(batch.responses.shape, np.int32)  # the place before each response token
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt) + LENGTH] = [*prompt, *batch.responses[row]]
        before[row] = len(prompt) - 1 + np.arange(LENGTH)

    def expected(params):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = transformer.forward(params, tokens, places, tokens >= 0, arch)
        hidden = jnp.take_along_axis(hidden, before[:, :, None], axis=1)
        log_probabilities = jax.nn.log_softmax(transformer.logits(params, hidden, arch) / 0.8)
        entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
        chosen = jnp.take_along_axis(log_probabilities, batch.responses[:, :, None], axis=-1)[:, :, 0]
        kl = kl_penalty(chosen, batch.ref_logprobs, "k2")
        return jnp.sum(weights * (0.2 * kl - 0.3 * entropy))

    packed = jax.tree.map(jnp.asarray, micro_batch(batch))
    settings = actor_settings(arch=arch, entropy_coeff=0.3, kl_loss_coef=0.2, kl_loss_type="k2", logprob_chunk_size=50)
    found = jax.jit(jax.value_and_grad(lambda params: loss_fn(params, None, packed, settings), has_aux=True))
    (loss, metrics), gradient = found(params)
    value, expected_gradient = jax.jit(jax.value_and_grad(expected))(params)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert_close(gradient, expected_gradient, 1e-5)
    assert metrics["entropy"].count == batch.mask.sum() and metrics["kl_loss"].total > 0
