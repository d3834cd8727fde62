"""Sums by number: right for every division into blocks, and without atomics in what is lowered for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scatters import scatters, unordered
from shapes import mesh_of

from dapo_jax.algorithms.group_relative import grpo
from dapo_jax.parallel.ordered_sums import BLOCK, rows_along, rows_of, segment_sum, sum_rows
from dapo_jax.parallel.sharding import lookup


def for_gpus(function, *arguments):
    """The text of `function`, lowered for a GPU that is not here."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("numbers", ["all", "few", "one", "none"])
def test_sums_are_those_of_each_number(count, numbers):
    """Also of one number in several blocks. Numbers outside of the result count for nothing."""
    dice, size = np.random.default_rng(count), 7 * BLOCK
    places = {
        "all": dice.integers(0, size, count),
        "few": dice.integers(0, 3, count) * 5,
        "one": np.full(count, size - 1),
        "none": np.where(dice.random(count) < 0.5, -1, size),
    }[numbers]
    rows, expected = dice.normal(size=(count, 3)).astype(np.float32), np.zeros((size, 3))
    inside = (places >= 0) & (places < size)
    np.add.at(expected, places[inside], rows[inside])
    np.testing.assert_allclose(jax.jit(sum_rows, static_argnums=2)(rows, places, size), expected, atol=1e-5)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_counts_nowhere_may_be_no_number(number):
    rows = jnp.array([[1.0], [number], [3.0], [number]])
    np.testing.assert_array_equal(sum_rows(rows, jnp.array([1, 2, 1, -1]), 2), [[0.0], [4.0]])


def test_padding_is_in_no_group_on_a_gpu_either(monkeypatch):
    """The mean of the group that stands for padding is 0 / 0 in a partial batch."""
    rewards, mask = np.zeros((6, 2), np.float32), np.ones((6, 2), bool)
    rewards[0, 1], mask[4:] = 1.0, False
    given = jnp.asarray(rewards), jnp.asarray(mask), jnp.array([0, 0, 1, 1, 3, 3])
    expected, _ = grpo(*given, num_groups=3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x))
    found, _ = grpo(*given, num_groups=3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_elsewhere_a_gradient_is_that_of_a_gather():
    dice = np.random.default_rng(0)
    table, places = dice.normal(size=(5, 3)).astype(np.float32), jnp.asarray(dice.integers(0, 5, (2, 9)))
    weights = dice.normal(size=(2, 9, 3)).astype(np.float32)
    pairs = [
        (lambda x: rows_of(x, places), lambda x: x[places], table),
        (
            lambda x: rows_along(x, places),
            lambda x: jnp.take_along_axis(x, places[..., None], axis=1),
            np.stack([table, table + 1]),
        ),
    ]
    for ours, plain, x in pairs:
        (found, pull_ours), (expected, pull_plain) = jax.vjp(ours, x), jax.vjp(plain, x)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(pull_ours(weights)[0], pull_plain(weights)[0])


def test_what_is_lowered_for_gpus_has_no_atomics():
    table, places, values = jnp.zeros((8, 3)), jnp.zeros((2, 4), jnp.int32), jnp.zeros(4)
    pairs = {
        "rows_of": (lambda x: rows_of(x, places), lambda x: x[places], table),
        "rows_along": (
            lambda x: rows_along(x[None], places[:1]),
            lambda x: jnp.take_along_axis(x[None], places[:1, :, None], axis=1),
            table,
        ),
    }
    for ours, plain, x in pairs.values():
        text, of_plain = (for_gpus(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)), x) for f in (ours, plain))
        assert scatters(text) and not unordered(text) and unordered(of_plain)
    for x in (values, table[:4]):
        assert not unordered(for_gpus(lambda x: segment_sum(x, places[0], 3), x))
        assert not unordered(for_gpus(jax.grad(lambda x: jnp.sum(segment_sum(x, places[0], 3) ** 2)), x))
    assert unordered(for_gpus(lambda x: jax.ops.segment_sum(x, places[0], 3), values))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 1), (2, 2, 2)])
def test_a_lookup_on_any_mesh_has_the_same_gradient(shape, monkeypatch):
    """With what a GPU computes, here on CPUs; rows are divided, and with "tensor" the vocabulary too.

    XLA's compiler for CPUs ends the process if bfloat16 is summed over a part of the mesh's axes.
    """
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x))
    dice, mesh = np.random.default_rng(0), mesh_of(shape)
    tokens, weights = dice.integers(0, 16, (8, 5)), dice.normal(size=(8, 5, 4)).astype(np.float32)
    expected = np.zeros((16, 4))
    np.add.at(expected, tokens, weights)
    table = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, PartitionSpec("tensor", "fsdp")))
    with jax.set_mesh(mesh):
        rounded = jnp.asarray(dice.normal(size=(16, 4)), jnp.bfloat16)
        np.testing.assert_array_equal(jax.jit(lookup)(rounded, jnp.asarray(tokens)), rounded[tokens])
        gradient = jax.jit(jax.grad(lambda table: jnp.sum(lookup(table, jnp.asarray(tokens)) * weights)))
        np.testing.assert_allclose(gradient(table), expected, atol=1e-5)
        assert scatters(gradient.lower(table).as_text()) and not unordered(gradient.lower(table).as_text())
