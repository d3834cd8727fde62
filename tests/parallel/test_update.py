"""The update: memory, reductions, adapters, and equivalent ways to compute the gradient."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from shapes import ARCH, mesh_of, one_device_mesh
from small_policy import (
    OPTIONS,
    actor_settings,
    assert_close,
    assert_same_gradient,
    batch_of,
    bins,
    gradient_of,
    logprobs_of,
    micro_batch,
    passes,
    plain_batch,
    policy_on,
    reference,
    roll_out,
    rows,
    step,
    update_settings,
)

from dapo_jax.data.containers import Bins, MicroBatch
from dapo_jax.learner.actor import RATIO_BUCKETS, build_actor, count_ratios, loss_fn
from dapo_jax.learner.token_logprobs import response_statistics
from dapo_jax.learner.update import update_policy
from dapo_jax.models import fused_attention, splash, tree_attention
from dapo_jax.models.attention import XLA
from dapo_jax.models.fused_attention import on_each_device
from dapo_jax.models.lora import Lora, adapter_table, merged
from dapo_jax.models.weights import build_freeze, init_params
from dapo_jax.parallel.mesh import make_mesh, num_batch_shards
from dapo_jax.parallel.sharding import batch_sharding, put, shards_left

SPLASH = dataclasses.replace(
    fused_attention.SPLASH, attend=on_each_device(functools.partial(splash.attend, interpret=True))
)
TRITON = dataclasses.replace(
    fused_attention.TRITON, attend=on_each_device(functools.partial(tree_attention.attend, interpret=True))
)
new_params = jax.jit(init_params, static_argnums=0)
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))


# Pairs: each form of attention with a mesh; on one device `test_invariance` packs with XLA's.
@pytest.mark.slow
@pytest.mark.long("xla", "splash-", "triton")
@pytest.mark.parametrize(
    ("shape", "attention", "tokens"),
    [
        pytest.param((4, 2, 1), XLA, 30, id="xla"),
        pytest.param((2, 2, 2), SPLASH, 200, id="splash-shared"),
        pytest.param((2, 2, 2), TRITON, 200, id="triton"),
        pytest.param((1, 1, 1), dataclasses.replace(XLA, shared_width=0), 60, id="copied"),
        pytest.param((2, 2, 2), dataclasses.replace(XLA, packs=False), 60, id="one by one"),
        pytest.param((8, 1, 1), dataclasses.replace(SPLASH, shared_width=0), 1, id="splash, copied"),
    ],
)
def test_packing_changes_no_gradient(shape, attention, tokens):
    batch, mesh = batch_of(reference()[0]), mesh_of(shape)
    packed = bins(num_batch_shards(mesh), tokens, attention)
    split = gradient_of(batch, mesh=mesh, micro=packed, attention=attention)
    names = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")
    assert_same_gradient(split, gradient_of(batch, micro=32), names, rtol=1e-4, atol=1e-6)


def compiled_accumulate(actor, state, batch, mesh):
    weights = (batch.mask / batch.mask.sum()).astype(np.float32)
    placed = put(micro_batch(batch.replace(loss_weights=weights)), batch_sharding(mesh))
    gradients = actor.trainable.zero_gradients(state.params)
    return actor.trainable.accumulate.lower(state.params, gradients, placed).compile()


def test_weights_cast_once_an_optimizer_step_give_the_same_gradient():
    batch = batch_of(reference()[0])
    weights = (batch.mask / batch.mask.sum()).astype(np.float32)
    with policy_on(dtype=jnp.bfloat16) as (mesh, actor, state):
        placed = put(micro_batch(batch.replace(loss_weights=weights)), batch_sharding(mesh))
        functions, operands = actor.trainable, actor.trainable.operands(state.params)
        assert operands["layers"]["query"].dtype == jnp.bfloat16 and operands["embedding"].dtype == jnp.float32
        once, each = (
            functions.accumulate(weights, functions.zero_gradients(state.params), placed)[0]
            for weights in (operands, state.params)
        )
        jax.tree.map(np.testing.assert_array_equal, once, each)
    with policy_on() as (_, actor, _):
        assert not actor.trainable.operands.names  # nothing to cast


def all_reduced(compiled):
    """The sizes of arrays that are summed over devices."""
    sizes = [0]
    for result in re.findall(r" = (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", compiled.as_text()):
        for shape in re.findall(r"f32\[([\d,]*)\]", result):
            sizes.append(math.prod(int(size) for size in shape.split(",") if size))
    return set(sizes)


@pytest.mark.slow
def test_gradients_cross_the_data_axis_once_an_optimizer_step():
    batch = batch_of(reference()[0])
    with policy_on(mesh_of((2, 1, 1))) as (mesh, actor, state):
        gradients = actor.trainable.zero_gradients(state.params)
        sums = all_reduced(compiled_accumulate(actor, state, batch, mesh))
        assert max(sums - {RATIO_BUCKETS}) <= 8  # the metrics
        applied = jax.jit(actor.trainable.apply).lower(state, gradients, np.float32(1e-3)).compile()
    assert max(all_reduced(applied)) >= ARCH.hidden_size * ARCH.intermediate_size
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32 and leaf.addressable_shards[0].data.size * 2 == leaf.size


def test_ratios_are_counted_by_hundredths():
    ratio = [[0.0, 0.004, 0.006, 0.999999], [1.000001, 1.994, 1.996, 70.0], [np.nan, np.inf, 1.0, 1.0]]
    ratio, mask = np.array(ratio, np.float32), np.arange(12).reshape(3, 4) < 11
    counts = np.asarray(jax.jit(count_ratios)(ratio, mask))
    filled = {int(bucket): int(counts[bucket]) for bucket in np.flatnonzero(counts)}
    assert filled == {0: 2, 1: 1, 100: 3, 199: 1, 200: 3}


def test_an_infinite_loss_whose_gradient_is_finite_changes_nothing():
    """That of k1 at a token that the reference policy never draws."""
    never = np.where(np.arange(4) == 1, -np.inf, np.zeros((2, 4))).astype(np.float32)
    batch = plain_batch(np.ones((1, 2), bool), np.ones((2, 4), bool), ref_logprobs=never)
    with policy_on(kl_loss_coef=0.1, kl_loss_type="k1") as (mesh, actor, state):
        before = jax.device_get(state.params)
        state, metrics = step(actor, state, batch, mesh, mini=2, micro=2)
    assert metrics["actor/loss"] == np.inf and metrics["actor/skipped_updates"] == metrics["actor/num_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "micro", "shape"), [("clip_cov", 16, (2, 2, 2)), ("gspo", 6, (1, 1, 1))])
def test_ratios_of_trained_tokens_are_counted_alike_in_every_piece_and_on_every_mesh(loss, micro, shape):
    batch = batch_of(reference()[0])
    drawn = np.random.default_rng(0).choice([0.3, 0.8, 1.0, 1.28, 1.5, 4.0], batch.mask.shape).astype(np.float32)
    trained = batch.mask & (np.arange(batch.mask.shape[1]) % 3 != 0)
    expected = {value: int(np.sum(drawn[trained] == np.float32(value))) for value in (0.3, 0.8, 1.0, 1.28, 1.5)}
    expected[2.0] = int(np.sum(drawn[trained] == 4))
    with policy_on(mesh_of(shape), loss_mode=loss) as (mesh, actor, state):
        logprobs = logprobs_of(actor, state.params, batch, rows(32), mesh)
        changed = batch.replace(old_logprobs=logprobs - np.log(drawn), loss_mask=trained)
        _, finish = update_policy(actor, state, changed, update_settings(mini=32, micro=micro), mesh)
        ratios = finish()[1]["actor/ratio"]
    low, high = ratios["edges"]
    middles = np.round(np.linspace(low, high, 2 * len(ratios["counts"]) + 1)[1::2], 6)
    assert {at: count for at, count in zip(middles, ratios["counts"], strict=True) if count} == expected


@pytest.mark.slow
def test_what_the_tables_of_tokens_get_from_many_tokens_adds_up_in_float32():
    """700 equal contributions: a bfloat16 sum stops growing once they are below half its last digit."""
    length = 700
    arch = dataclasses.replace(ARCH, num_layers=1, tie_embeddings=False)
    params = new_params(arch, 0)
    mask, ones = np.ones((1, length), bool), np.ones((1, length), np.float32)
    weights = dict.fromkeys(("old_logprobs", "advantages", "loss_weights"), ones)
    batch = micro_batch(plain_batch(mask[:, :2], mask, responses=np.full((1, length), 5, np.int32), **weights))

    def gradients(dtype):
        settings = actor_settings(arch=arch, dtype=jnp.dtype(dtype), logprob_chunk_size=1)
        return jax.jit(jax.grad(lambda params: loss_fn(params, None, batch, settings)[0]))(params)

    exact, rounded = gradients(jnp.float32), gradients(jnp.bfloat16)
    for name in ("head", "embedding"):
        expected, found = np.asarray(exact[name]), np.asarray(rounded[name])
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected), name


@pytest.mark.slow
def test_what_a_layer_keeps_is_divided_over_tensor():
    batch = batch_of(reference()[0])
    with policy_on(mesh_of((1, 1, 2))) as (mesh, actor, state):
        text = compiled_accumulate(actor, state, batch, mesh).as_text()
    tokens = batch.prompts.shape[1] + batch.mask.shape[1]
    kept = re.findall(rf"f32\[{ARCH.num_layers},{len(batch.mask)},{tokens},(\d+)\]", text)
    assert set(kept) == {str(ARCH.hidden_size // 2)}


@pytest.mark.slow
def test_logits_of_a_large_vocabulary_never_exist_whole():
    """Compiled temporaries of the head with its backward pass, at the vocabulary of Qwen2.5."""
    arch = dataclasses.replace(ARCH, vocab_size=151936, num_layers=1, tie_embeddings=True)
    params = jax.eval_shape(lambda: init_params(arch, 0))
    tokens, mask, values = (jax.ShapeDtypeStruct((16, 128), dtype) for dtype in (np.int32, np.bool_, np.float32))
    bins = Bins(tokens, tokens, tokens, tokens)
    of_rows = {"sources": tokens, "sequences": tokens, "responses": tokens, "mask": mask, "loss_mask": mask}
    batch = MicroBatch(bins=bins, **of_rows, old_logprobs=values, advantages=values)
    options = {"temperature": 1.0, "remat": "full", "entropy_gradient": False}

    def temporaries(chunk_size):
        def loss(params, batch):
            return jnp.sum(
                response_statistics(params, batch, passes(arch=arch), chunk_size=chunk_size, **options)[0].logprobs
            )

        return jax.jit(jax.grad(loss)).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(128) < temporaries(16 * 128) / 4


def test_a_device_is_counted_for_the_axes_that_a_shard_map_leaves():
    mesh, found = make_mesh(2, 4, 1), []

    def count(x):
        found.append(shards_left())
        return x

    inside = jax.shard_map(
        count, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        jax.jit(count).lower(np.zeros(8))
        jax.jit(inside).lower(np.zeros(8))
    jax.jit(count).lower(np.zeros(8))
    assert found == [8, 4, 1]


def lora_actor(mesh, **changes):
    freeze = build_freeze(ARCH, jnp.float32, mesh)
    return build_actor(actor_settings(lora=LORA, **changes), mesh, freeze(new_params(ARCH, 0)))


@pytest.mark.slow
def test_fresh_adapters_change_nothing_and_they_alone_are_trained():
    rollout, _, _ = reference()
    mesh, batch = one_device_mesh(), batch_of(rollout)
    with jax.set_mesh(mesh):
        actor = lora_actor(mesh)
        state = actor.trainable.init_random(1)
        assert set(state.params["layers"]) == {weight.path[1] for weight in adapter_table(ARCH, LORA)}
        logprobs = logprobs_of(actor, state.params, batch, rows(32), mesh)
        np.testing.assert_allclose(logprobs, rollout.logprobs, atol=1e-4)
        without = logprobs_of(actor, {}, batch, rows(32), mesh)  # the reference policy
        np.testing.assert_array_equal(without, logprobs)
        before = jax.device_get(state.params)
        state, _ = step(actor, state, batch, mesh, lr=1e-2)
    moved = {name: np.abs(leaf - before["layers"][name]).max() for name, leaf in state.params["layers"].items()}
    assert all(size > 0 for size in moved.values()), moved


@pytest.mark.slow
def test_sampling_with_merged_weights_and_training_with_separate_adapters_agree():
    mesh = one_device_mesh()
    with jax.set_mesh(mesh):
        actor = lora_actor(mesh)
        state, _ = step(actor, actor.trainable.init_random(1), batch_of(reference()[0]), mesh, lr=1e-2)
        sampled = roll_out(actor, state, mesh)
        trained = logprobs_of(actor, state.params, batch_of(sampled), rows(32), mesh)
    np.testing.assert_allclose(trained, sampled.logprobs, atol=1e-4)
    assert np.abs(sampled.logprobs - reference()[0].logprobs).max() > 1e-3


def test_the_update_of_adapters_computes_no_gradients_of_the_matrices():
    """FLOPs: forward plus one product backward, against forward plus two."""
    batch = batch_of(reference()[0])
    batch = micro_batch(batch.replace(loss_weights=(batch.mask / batch.mask.sum()).astype(np.float32)))
    adapters = {weight.path[1]: np.zeros(weight.shape, np.float32) for weight in adapter_table(ARCH, LORA)}

    def apart(adapters, base):
        return loss_fn(adapters, base, batch, actor_settings(lora=LORA))[0]

    def together(adapters, base):
        return loss_fn(merged(base, adapters, LORA), None, batch, actor_settings())[0]

    given = {"layers": adapters}, new_params(ARCH, 0)
    found = jax.jit(jax.value_and_grad(apart)).lower(*given)
    whole = jax.jit(jax.value_and_grad(together, argnums=(0, 1))).lower(*given)
    assert found.cost_analysis()["flops"] < 0.85 * whole.cost_analysis()["flops"]


@pytest.mark.slow
def test_adapters_do_not_depend_on_the_mesh():
    batch, results = batch_of(reference()[0]), []
    for shape in ((1, 1, 1), (2, 2, 2)):
        mesh = mesh_of(shape)
        with jax.set_mesh(mesh):
            actor = lora_actor(mesh)
            state, metrics = step(actor, actor.trainable.init_random(1), batch, mesh, lr=1e-3)
            results.append((jax.device_get(state.params), metrics))
    assert_same_gradient(results[1], results[0], ("actor/grad_norm",), rtol=1e-4)


@pytest.mark.slow
def test_moments_in_bfloat16_follow_those_in_float32():
    found = {}
    for dtype in ("float32", "bfloat16"):
        optim = dataclasses.replace(OPTIONS.optim, moments_dtype=dtype)
        with policy_on(optim=optim) as (mesh, actor, state):
            state, _ = update_policy(actor, state, batch_of(reference()[0]), update_settings(mini=32, epochs=3), mesh)
        moments = state.moments[0].mu, state.moments[0].nu
        assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(dtype)}
        found[dtype] = jax.device_get(state)
    for path in ("query", "gate", "down"):
        exact, rounded = (np.asarray(state.params["layers"][path]) for state in found.values())
        change = exact - np.asarray(new_params(ARCH, 0)["layers"][path])
        assert np.abs(rounded - exact).mean() < 0.02 * np.abs(change).mean()


@pytest.mark.slow
def test_muon_does_not_depend_on_the_mesh_and_its_momentum_is_divided():
    muon, results = dataclasses.replace(OPTIONS.optim, optimizer="muon"), []
    for shape in ((1, 1, 1), (2, 2, 2)):
        with policy_on(mesh_of(shape), optim=muon) as (mesh, actor, state):
            state, _ = step(actor, state, batch_of(reference()[0]), mesh, lr=1e-3)
        results.append(jax.device_get(state.params))
    assert_close(results[1], results[0], 1e-5)
    momentum = state.moments[0].inner_states["muon"].inner_state[0].mu["layers"]
    for name in ("query", "output", "gate", "down"):
        assert momentum[name].addressable_shards[0].data.size * 4 == momentum[name].size, name
