import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models.experts import (
    RoutingCounts,
    expert_feed_forward,
    load_balancing_loss,
    relative_loads,
    replaced_share,
    routing_counts,
)
from dapo_jax.parallel.mesh import BATCH_AXES, make_mesh

B, T, D, F, E, K = 4, 12, 24, 40, 6, 2


def draw(seed=0, dtype=jnp.float32):
    """x, router, gate, up, down."""
    normal = np.random.default_rng(seed).normal
    shapes = (B, T, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    x, router, *weights = (jnp.float32(normal(size=shape)) for shape in shapes)
    return x, router * 0.3, *((weight * 0.2).astype(dtype) for weight in weights)


def dense(x, router, gate, up, down, *, normalized, replayed=None):
    """Every expert for every token, one after the other."""
    probabilities = jax.nn.softmax(jnp.einsum("btd,de->bte", x, router, precision="highest"))
    chosen = jnp.argsort(-probabilities, axis=-1)[..., :K]  # stable: the first of equals
    if replayed is not None:
        chosen = jnp.where((replayed < 0).any(axis=-1, keepdims=True), chosen, replayed)
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    result = jnp.zeros_like(x)
    for expert in range(E):
        product = functools.partial(jnp.matmul, precision="highest")
        hidden = jax.nn.silu(product(x, gate[expert])) * product(x, up[expert])
        weight = jnp.sum(jnp.where(chosen == expert, weights, 0), axis=-1, keepdims=True)
        result += weight * product(hidden, down[expert])
    return result


def sparse(*operands, normalized=True, replayed=None, k=K):
    return expert_feed_forward(*operands, experts_per_token=k, normalized=normalized, replayed=replayed)


def result_and_gradients(function, operands, cotangent):
    result, pull_back = jax.vjp(function, *operands)
    return result, *pull_back(cotangent)


def values(operands, cotangent, **settings):
    return result_and_gradients(lambda *operands: sparse(*operands, **settings)[0], operands, cotangent)


def check(operands, **settings):
    """Result and gradients are those of `dense`."""
    cotangent = jnp.float32(np.random.default_rng(9).normal(size=operands[0].shape))
    found = jax.jit(functools.partial(values, normalized=settings["normalized"]))(
        operands, cotangent, replayed=settings.get("replayed")
    )
    expected = result_and_gradients(lambda *operands: dense(*operands, **settings), operands, cotangent)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_equals_a_loop_over_dense_experts(normalized):
    check(draw(), normalized=normalized)


def test_equal_probabilities_choose_the_first_experts():
    x, router, *weights = draw()
    _, routing = sparse(x, jnp.zeros_like(router), *weights)
    assert (routing.chosen == jnp.arange(K)).all()
    check((x, jnp.zeros_like(router), *weights), normalized=True)  # and the others have no rows


def test_all_tokens_may_choose_one_expert():
    """No token is dropped, however many choose an expert."""
    x, router, *weights = draw()
    x = x.at[..., 0].set(3.0)
    router = router.at[0, 4].set(100.0)
    _, routing = sparse(x, router, *weights, k=1)
    assert (routing.chosen == 4).all()
    check((x, router, *weights), normalized=False)


def test_chosen_experts_fall_in_weight():
    _, routing = sparse(*draw())
    weights = jnp.take_along_axis(routing.probabilities, routing.chosen, axis=-1)
    assert (jnp.diff(weights, axis=-1) <= 0).all() and routing.own is None
    np.testing.assert_allclose(routing.probabilities.sum(axis=-1), 1.0, rtol=1e-6)
    assert routing.chosen.dtype == jnp.int32


def test_replaying_the_own_choice_changes_no_bit():
    operands, cotangent = draw(), jnp.ones((B, T, D))
    run = jax.jit(values)
    _, routing = jax.jit(sparse)(*operands)
    plain = run(operands, cotangent)
    for replayed in (routing.chosen, jnp.full_like(routing.chosen, -1)):
        for one, other in zip(plain, run(operands, cotangent, replayed=replayed), strict=True):
            np.testing.assert_array_equal(one, other)


def some_choices():
    """Experts to replay [B, T, K], some of them not recorded."""
    random = np.random.default_rng(3)
    replayed = np.array([[random.permutation(E)[:K] for _ in range(T)] for _ in range(B)])
    replayed[1, 3:] = -1
    replayed[2, 5, 1] = -1
    return jnp.int32(replayed)


@pytest.mark.parametrize("normalized", [True, False])
def test_replayed_choices_have_the_weights_of_this_router(normalized):
    check(draw(), normalized=normalized, replayed=some_choices())


def test_replayed_choices_are_reported_beside_the_own():
    _, plain = sparse(*draw())
    replayed = some_choices()
    _, routing = sparse(*draw(), replayed=replayed)
    recorded = (replayed >= 0).all(axis=-1, keepdims=True)
    np.testing.assert_array_equal(routing.own, plain.chosen)
    np.testing.assert_array_equal(routing.chosen, jnp.where(recorded, replayed, plain.chosen))


def test_a_token_does_not_depend_on_the_others():
    """Padding may hold anything."""
    x, *weights = draw()
    other = x.at[:, 7:].set(jnp.nan)
    np.testing.assert_array_equal(sparse(x, *weights)[0][:, :7], sparse(other, *weights)[0][:, :7])


def test_one_token_at_a_time_equals_whole_sequences():
    x, *weights = draw()
    whole, _ = sparse(x, *weights)
    for token in (0, 5):
        np.testing.assert_allclose(sparse(x[:, token, None], *weights)[0], whole[:, token, None], rtol=1e-5, atol=1e-6)


def shardings(mesh):
    """Of x, router, gate, up, down."""
    specs = PartitionSpec(BATCH_AXES), PartitionSpec(), *[PartitionSpec("tensor")] * 3
    return [NamedSharding(mesh, spec) for spec in specs]


def scanned(operands, cotangent, replayed):
    """Result and gradients of two layers in a scan with rematerialisation, as the model has them."""

    @jax.checkpoint
    def layer(x, weights):
        result, routing = sparse(x, *weights, replayed=replayed)
        return x + result, routing.chosen

    def both(x, *weights):
        stacked = jax.tree.map(lambda weight: jnp.stack([weight, weight[::-1]]), weights)
        result, chosen = jax.lax.scan(layer, x, stacked)
        return jnp.sum(result * cotangent), (result, chosen)

    (_, results), gradients = jax.value_and_grad(both, argnums=range(5), has_aux=True)(*operands)
    return results, gradients


@pytest.mark.short("True-axes0", "False-axes4")
@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 4, 2), (4, 1, 2), (1, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("replay", [False, True])
def test_the_mesh_changes_nothing(axes, replay):
    operands, replayed = draw(), some_choices() if replay else None
    cotangent = jnp.float32(np.random.default_rng(9).normal(size=(B, T, D)))
    (expected, chosen), expected_gradients = jax.jit(scanned)(operands, cotangent, replayed)
    mesh = make_mesh(*axes, devices=jax.devices()[: np.prod(axes)])
    with jax.set_mesh(mesh):
        placed = jax.device_put(operands, tuple(shardings(mesh)))
        (found, found_chosen), gradients = jax.jit(scanned)(placed, cotangent, replayed)
    np.testing.assert_array_equal(found_chosen, chosen)
    for one, other in zip((found, *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_inside_a_shard_map_the_other_axes_divide_the_work():
    operands, replayed = draw(), some_choices()
    cotangent = jnp.float32(np.random.default_rng(9).normal(size=(B, T, D)))
    expected = jax.jit(values)(operands, cotangent, replayed=replayed)
    mesh = make_mesh(2, 2, 2)

    def of_rows(x, cotangent, replayed, *weights):
        result, to_x, *to_weights = values((x, *weights), cotangent, replayed=replayed)
        return result, to_x, jax.lax.psum(to_weights, "data")

    rows, whole = PartitionSpec("data"), PartitionSpec()
    divided = jax.shard_map(
        of_rows,
        mesh=mesh,
        in_specs=(rows, rows, rows, *[whole] * 4),
        out_specs=(rows, rows, whole),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        x, *weights = jax.device_put(operands, tuple(shardings(mesh)))
        result, to_x, to_weights = jax.jit(divided)(x, cotangent, replayed, *weights)
    for one, other in zip((result, to_x, *to_weights), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_round_the_operands_of_products_alone():
    operands, cotangent = draw(dtype=jnp.bfloat16), jnp.ones((B, T, D))
    found = jax.jit(values)(operands, cotangent)
    assert [one.dtype for one in found] == [jnp.float32] * 3 + [jnp.bfloat16] * 3
    exact = jax.jit(values)(tuple(one.astype(jnp.float32) for one in operands), cotangent)
    for one, other in zip(found, exact, strict=True):
        other = np.asarray(other)
        np.testing.assert_allclose(np.float32(one), other, rtol=0.02, atol=0.02 * np.abs(other).max())


def test_counts_are_those_of_real_tokens():
    _, routing = sparse(*draw(), replayed=some_choices())
    mask = np.random.default_rng(1).random((B, T)) < 0.6
    counts = routing_counts(routing, jnp.asarray(mask))
    chosen, own = np.asarray(routing.chosen)[mask], np.asarray(routing.own)[mask]
    np.testing.assert_array_equal(counts.chosen, np.bincount(chosen.ravel(), minlength=E))
    np.testing.assert_allclose(counts.probabilities, np.asarray(routing.probabilities)[mask].sum(axis=0), rtol=1e-6)
    assert counts.choices == chosen.size
    different = sum(expert not in other for experts, other in zip(chosen, own, strict=True) for expert in experts)
    assert different and counts.replaced == different
    assert replaced_share(counts) == pytest.approx(different / chosen.size)


def test_the_same_experts_in_another_order_are_not_replaced():
    _, plain = sparse(*draw())
    _, routing = sparse(*draw(), replayed=plain.chosen[..., ::-1])
    assert routing_counts(routing, jnp.ones((B, T), bool)).replaced == 0
    assert routing_counts(plain, jnp.ones((B, T), bool)).replaced == 0


def test_the_load_balancing_loss_is_transformers():
    """By hand: 3 experts, 2 of them chosen, three tokens."""
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.15, 0.45]])
    # chosen 0, 1 and 1, 2 and 0, 2: each expert by 2 of 3 tokens; means of probabilities sum to 1
    counts = RoutingCounts(jnp.full(3, 2.0), jnp.float32(probabilities.sum(axis=0)), jnp.float32(6), jnp.float32(0))
    assert load_balancing_loss(counts, 2) == pytest.approx(3 * 2 / 3 * 1)
    counts = dataclasses.replace(counts, chosen=jnp.float32([3, 3, 0]))  # all by experts 0 and 1
    assert load_balancing_loss(counts, 2) == pytest.approx(3 * (1.0 / 3 + 1.05 / 3))


def test_the_largest_load_over_the_mean():
    counts = RoutingCounts(jnp.float32([[1, 2, 6], [3, 3, 3], [0, 0, 0]]), *map(jnp.zeros, ((3, 3), 3, 3)))
    np.testing.assert_allclose(relative_loads(counts).max(axis=-1), [2, 1, 0])
    assert (load_balancing_loss(counts, 2) == 0).all() and (replaced_share(counts) == 0).all()
