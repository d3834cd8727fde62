import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models import expert_exchange
from dapo_jax.models.architecture import Experts
from dapo_jax.models.experts import (
    RoutingCounts,
    expert_feed_forward,
    load_balancing_loss,
    relative_loads,
    replaced_share,
    routing_counts,
)
from dapo_jax.parallel.mesh import BATCH_AXES, EXPERT_AXES, make_mesh

B, T, D, F, E, K = 4, 12, 24, 40, 6, 2
SCALE = 1.5


def draw(seed=0, dtype=jnp.float32, E=E):
    """x, router, gate, up, down."""
    normal = np.random.default_rng(seed).normal
    shapes = (B, T, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    x, router, *weights = (normal(size=shape).astype(np.float32) for shape in shapes)
    return x, router * np.float32(0.3), *((weight * np.float32(0.2)).astype(dtype) for weight in weights)


COTANGENT = np.random.default_rng(9).normal(size=(B, T, D)).astype(np.float32)


def some_choices():
    """Experts to replay [B, T, K], some of them not recorded."""
    random = np.random.default_rng(3)
    replayed = np.array([[random.permutation(E)[:K] for _ in range(T)] for _ in range(B)], np.int32)
    replayed[1, 3:] = -1
    replayed[2, 5, 1] = -1
    return replayed


def dense(x, router, gate, up, down, *, normalized, replayed, biases=None):
    """Every expert for every token; with `biases`, scores of each alone, which they are added to for the choice."""
    product = functools.partial(jnp.einsum, precision="highest")
    logits = product("btd,de->bte", x, router)
    scores = jax.nn.softmax(logits) if biases is None else jax.nn.sigmoid(logits)
    by = scores if biases is None else scores + biases
    chosen = jnp.argsort(-by, axis=-1)[..., :K]  # stable: the first of equals
    chosen = jnp.where((replayed < 0).any(axis=-1, keepdims=True), chosen, replayed)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    weights = jnp.where(normalized, weights / weights.sum(axis=-1, keepdims=True), weights)
    weights = weights if biases is None else weights * SCALE
    weights = jnp.sum(jnp.where(chosen[..., None] == jnp.arange(E), weights[..., None], 0), axis=2)
    hidden = jax.nn.silu(product("btd,edf->btef", x, gate)) * product("btd,edf->btef", x, up)
    return product("bte,btef,efd->btd", weights, hidden, down)


def sparse(*operands, normalized=True, replayed=None, biases=None):
    experts = Experts(operands[1].shape[1], K, F, normalized)
    if biases is not None:
        experts = dataclasses.replace(experts, scores="sigmoid", biased=True, scale=SCALE)
    return expert_feed_forward(*operands, experts=experts, bias=biases, replayed=replayed)


def values_and_routing(operands, cotangent, **settings):
    """The result and the gradients of all operands; the routing."""
    result, pull_back, routing = jax.vjp(lambda *operands: sparse(*operands, **settings), *operands, has_aux=True)
    return (result, *pull_back(cotangent)), routing


jit_values_and_routing = jax.jit(values_and_routing, static_argnames="normalized")
jit_routing_counts = jax.jit(routing_counts)


def run(operands, *, normalized=True, **replayed):
    """All operands are of one shape, so that each setting is compiled once."""
    return jax.device_get(jit_values_and_routing(operands, COTANGENT, normalized=normalized, **replayed))


@jax.jit
def dense_values(operands, cotangent, normalized, replayed, biases):
    function = functools.partial(dense, normalized=normalized, replayed=replayed, biases=biases)
    result, pull_back = jax.vjp(function, *operands)
    return result, *pull_back(cotangent)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def check(operands, *, normalized=True, **replayed):
    """Result and gradients are those of `dense`; the routing."""
    found, routing = run(operands, normalized=normalized, **replayed)
    choices = replayed.get("replayed", np.full((B, T, K), -1, np.int32))
    assert_close(found, dense_values(operands, COTANGENT, normalized, choices, replayed.get("biases")))
    return routing


@pytest.mark.parametrize("normalized", [True, False])
def test_equals_dense_experts_with_weights_of_the_own_or_of_replayed_choices(normalized):
    plain, replayed = check(draw(), normalized=normalized), some_choices()
    routing = check(draw(), normalized=normalized, replayed=replayed)
    recorded = (replayed >= 0).all(axis=-1, keepdims=True)
    np.testing.assert_array_equal(routing.own, plain.chosen)
    np.testing.assert_array_equal(routing.chosen, np.where(recorded, replayed, plain.chosen))


def test_biases_change_the_choice_and_no_weight_and_have_no_gradient():
    operands, biases = draw(), np.linspace(-1, 1, E).astype(np.float32)
    routing, without = check(operands, biases=biases), check(operands, biases=np.zeros_like(biases))
    assert (routing.chosen[..., 0] == E - 1).mean() > (without.chosen[..., 0] == E - 1).mean()
    np.testing.assert_allclose(routing.probabilities.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(routing.probabilities, without.probabilities)
    check(operands, biases=biases, replayed=some_choices())
    of_biases = jax.jit(jax.grad(lambda biases: sparse(*operands, biases=biases)[0].sum()))(biases)
    assert not of_biases.any()


BIASED = Experts(E, K, F, normalized=True, biases=True, clamp=0.8, slope=1.702)


def draw_biases():
    """Of the router's logits, and of gate, up and down."""
    normal = np.random.default_rng(4).normal
    return tuple(normal(size=shape).astype(np.float32) for shape in ((E,), (E, F), (E, F), (E, D)))


def dense_with_biases(x, router, gate, up, down, of_router, of_gate, of_up, of_down, replayed=None):
    """As transformers computes gpt-oss: a softmax over the logits of the chosen."""
    product = functools.partial(jnp.einsum, precision="highest")
    logits = product("btd,de->bte", x, router) + of_router
    chosen = jnp.argsort(-logits, axis=-1)[..., :K]
    if replayed is not None:
        chosen = jnp.where((replayed < 0).any(axis=-1, keepdims=True), chosen, replayed)
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))
    weights = jnp.sum(jnp.where(chosen[..., None] == jnp.arange(E), weights[..., None], 0), axis=2)
    gate = jnp.minimum(product("btd,edf->btef", x, gate) + of_gate, BIASED.clamp)
    up = jnp.clip(product("btd,edf->btef", x, up) + of_up, -BIASED.clamp, BIASED.clamp)
    hidden = gate * jax.nn.sigmoid(BIASED.slope * gate) * (up + 1)
    return product("bte,bted->btd", weights, product("btef,efd->bted", hidden, down) + of_down)


def sparse_with_biases(*operands, replayed=None):
    *operands, of_router, of_gate, of_up, of_down = operands
    settings = {"experts": BIASED, "logit_bias": of_router, "biases": (of_gate, of_up, of_down), "replayed": replayed}
    return expert_feed_forward(*operands, **settings)[0]


@pytest.mark.parametrize("axes", [None, (2, 2, 2)], ids=["one device", "2x2x2"])
@pytest.mark.parametrize("replay", [False, True], ids=["own", "replay"])
def test_biases_of_all_products_and_clamped_gates_equal_dense_experts(axes, replay):
    operands, replayed = (*draw(), *draw_biases()), some_choices() if replay else None

    def both(function):
        def values(*operands):
            result, pull_back = jax.vjp(functools.partial(function, replayed=replayed), *operands)
            return result, *pull_back(COTANGENT)

        return jax.jit(values)

    expected = both(dense_with_biases)(*operands)
    assert all(np.abs(gradient).max() > 0.1 for gradient in expected)
    if axes is None:
        assert_close(both(sparse_with_biases)(*operands), expected)
        return
    mesh = make_mesh(*axes)
    of_biases = [NamedSharding(mesh, spec) for spec in (PartitionSpec(), *[PartitionSpec("tensor")] * 3)]
    with jax.set_mesh(mesh):
        found = both(sparse_with_biases)(*jax.device_put(operands, (*shardings(mesh), *of_biases)))
    assert_close(found, expected)


def test_equal_probabilities_choose_the_first_experts():
    x, router, *weights = draw()
    routing = check((x, np.zeros_like(router), *weights))  # and the others have no rows
    assert (routing.chosen == np.arange(K)).all()


def test_all_tokens_may_choose_one_expert():
    """No token is dropped, however many choose an expert."""
    x, router, *weights = draw()
    x[..., 0], router[0, 4] = 3.0, 100.0
    routing = check((x, router, *weights), normalized=False)
    assert (routing.chosen[..., 0] == 4).all()


def test_chosen_experts_fall_in_weight():
    _, routing = run(draw())
    weights = np.take_along_axis(routing.probabilities, routing.chosen, axis=-1)
    assert (np.diff(weights, axis=-1) <= 0).all() and routing.own is None
    np.testing.assert_allclose(routing.probabilities.sum(axis=-1), 1.0, rtol=1e-6)
    assert routing.chosen.dtype == jnp.int32


def test_replaying_the_own_choice_changes_no_bit():
    plain, routing = run(draw())
    for replayed in (routing.chosen, np.full_like(routing.chosen, -1)):
        jax.tree.map(np.testing.assert_array_equal, run(draw(), replayed=replayed)[0], plain)


def test_a_token_does_not_depend_on_the_others():
    """Padding may hold anything."""
    x, *weights = draw()
    (whole, *_), _ = run((x, *weights))
    other = x.copy()
    other[:, 7:] = np.nan
    np.testing.assert_array_equal(run((other, *weights))[0][0][:, :7], whole[:, :7])
    one_at_a_time = jax.jit(lambda *operands: sparse(*operands)[0])
    for token in (0, 5):
        found = one_at_a_time(x[:, token, None], *weights)
        np.testing.assert_allclose(found, whole[:, token, None], rtol=1e-5, atol=1e-6)


def shardings(mesh):
    """Of x, router, gate, up, down."""
    rows, experts = (tuple(axis for axis in axes if axis in mesh.axis_names) for axes in (BATCH_AXES, EXPERT_AXES))
    specs = PartitionSpec(rows), PartitionSpec(), *[PartitionSpec(experts)] * 3
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


jit_scanned = jax.jit(scanned)


# Pairs: each mesh once, and own and replayed choices both with rows divided and with experts alone.
@pytest.mark.slow
@pytest.mark.long("replay-1x1x2", "own-2x2x1", "own-1x4x2", "replay-4x1x2", "own-2x2x2")
@pytest.mark.parametrize("axes", ["2x2x2", "1x4x2", "4x1x2", "1x1x2", "2x2x1"])
@pytest.mark.parametrize("replay", [False, True], ids=["own", "replay"])
def test_the_mesh_changes_nothing(axes, replay):
    operands, replayed = draw(), some_choices() if replay else None
    (expected, chosen), expected_gradients = jit_scanned(operands, COTANGENT, replayed)
    axes = tuple(map(int, axes.split("x")))
    mesh = make_mesh(*axes, devices=jax.devices()[: np.prod(axes)])
    with jax.set_mesh(mesh):
        placed = jax.device_put(operands, tuple(shardings(mesh)))
        (found, found_chosen), gradients = jit_scanned(placed, COTANGENT, replayed)
    np.testing.assert_array_equal(found_chosen, chosen)
    assert_close((found, *gradients), (expected, *expected_gradients))


def on_devices(axes, operands, replayed, cotangent=COTANGENT):
    """Result, choices and gradients of `scanned` on a mesh of data x fsdp x expert x tensor."""
    *others, expert, tensor = axes
    mesh = make_mesh(*others, tensor, expert=expert, devices=jax.devices()[: np.prod(axes)])
    with jax.set_mesh(mesh):
        (found, chosen), gradients = jit_scanned(jax.device_put(operands, tuple(shardings(mesh))), cotangent, replayed)
    return chosen, (found, *gradients)


def many(choices="own"):
    """Operands for 512 tokens and 8 experts, of which one may have rows for several blocks, and what is replayed."""
    random = np.random.default_rng(5)
    x = random.normal(size=(8, 64, D)).astype(np.float32)
    _, router, *weights = draw(E=8)
    replayed = None
    if choices == "one expert":
        x[..., 0], router[0, 4] = 3.0, 100.0
    if choices == "replay":
        replayed = np.stack([random.permutation(8)[:K] for _ in range(512)]).reshape(8, 64, K).astype(np.int32)
        replayed[1, 3:] = -1
    return (x, router, *weights), random.normal(size=x.shape).astype(np.float32), replayed


@pytest.mark.parametrize("choices", ["own", "one expert", "replay"])
@pytest.mark.parametrize(
    "axes", [(1, 1, 8, 1), pytest.param((1, 2, 2, 2), marks=pytest.mark.slow)], ids=["1x1x8x1", "1x2x2x2"]
)
def test_devices_that_exchange_tokens_change_nothing(axes, choices, monkeypatch):
    """Values and gradients, also where all tokens want the experts of one device, more than a block has rows for."""
    monkeypatch.setattr(expert_exchange, "WHOLE", 0)
    monkeypatch.setattr(expert_exchange, "MULTIPLE", 16)
    jit_scanned.clear_cache()
    operands, cotangent, replayed = many(choices)
    (expected, chosen), gradients = jit_scanned(operands, cotangent, replayed)
    found_chosen, found = on_devices(axes, operands, replayed, cotangent)
    np.testing.assert_array_equal(found_chosen, chosen)
    for one, other in zip(found, (expected, *gradients), strict=True):  # of sums over 512 tokens
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_inside_a_shard_map_the_other_axes_divide_the_work():
    operands, replayed = draw(), some_choices()
    expected, _ = run(operands, replayed=replayed)
    mesh = make_mesh(2, 2, 2)

    def of_rows(x, cotangent, replayed, *weights):
        result, to_x, *to_weights = values_and_routing((x, *weights), cotangent, replayed=replayed)[0]
        return result, to_x, jax.lax.psum(to_weights, "data")

    rows, whole = PartitionSpec("data"), PartitionSpec()
    specs = {"in_specs": (rows, rows, rows, *[whole] * 4), "out_specs": (rows, rows, whole)}
    divided = jax.shard_map(of_rows, mesh=mesh, **specs, axis_names={"data"}, check_vma=False)
    with jax.set_mesh(mesh):
        x, *weights = jax.device_put(operands, tuple(shardings(mesh)))
        result, to_x, to_weights = jax.jit(divided)(x, COTANGENT, replayed, *weights)
    assert_close((result, to_x, *to_weights), expected)


def test_bfloat16_weights_round_the_operands_of_products_alone():
    operands = draw(dtype=jnp.bfloat16)
    found, _ = run(operands)
    assert [one.dtype for one in found] == [jnp.float32] * 3 + [jnp.bfloat16] * 3
    exact, _ = run(tuple(map(np.float32, operands)))
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.float32(one), other, rtol=0.02, atol=0.02 * np.abs(other).max())


def test_counts_are_those_of_real_tokens():
    _, routing = run(draw(), replayed=some_choices())
    mask = np.random.default_rng(1).random((B, T)) < 0.6
    counts = jit_routing_counts(routing, mask)
    chosen, own = routing.chosen[mask], routing.own[mask]
    np.testing.assert_array_equal(counts.chosen, np.bincount(chosen.ravel(), minlength=E))
    np.testing.assert_allclose(counts.probabilities, routing.probabilities[mask].sum(axis=0), rtol=1e-6)
    assert counts.choices == chosen.size
    different = sum(expert not in other for experts, other in zip(chosen, own, strict=True) for expert in experts)
    assert different and counts.replaced == different
    assert replaced_share(counts) == pytest.approx(different / chosen.size)


def test_the_same_experts_in_another_order_are_not_replaced():
    _, plain = run(draw())
    _, routing = run(draw(), replayed=plain.chosen[..., ::-1])
    for found in (routing, plain):
        assert jit_routing_counts(found, np.ones((B, T), bool)).replaced == 0


def test_the_load_balancing_loss_is_transformers():
    """By hand: 3 experts, 2 of them chosen, three tokens."""
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.15, 0.45]])
    # chosen 0, 1 and 1, 2 and 0, 2: each expert by 2 of 3 tokens; means of probabilities sum to 1
    counts = RoutingCounts(np.full(3, 2.0), probabilities.sum(axis=0), np.float64(6), np.float64(0))
    assert load_balancing_loss(counts, 2) == pytest.approx(3 * 2 / 3 * 1)
    counts = dataclasses.replace(counts, chosen=np.array([3.0, 3, 0]))  # all by experts 0 and 1
    assert load_balancing_loss(counts, 2) == pytest.approx(3 * (1.0 / 3 + 1.05 / 3))


def test_the_largest_load_over_the_mean():
    counts = RoutingCounts(np.array([[1.0, 2, 6], [3, 3, 3], [0, 0, 0]]), *map(np.zeros, ((3, 3), 3, 3)))
    np.testing.assert_allclose(relative_loads(counts).max(axis=-1), [2, 1, 0])
    assert (load_balancing_loss(counts, 2) == 0).all() and (replaced_share(counts) == 0).all()
