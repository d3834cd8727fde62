import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import grouped_products, grouped_products_gpu, grouped_products_tpu
from dapo_jax.models.grouped_products import grouped_product
from dapo_jax.models.row_blocks import LARGEST, SMALLEST, block_rows, most_blocks, row_blocks

# rows, columns, columns of the result, rows of each group
CASES = {
    "rows of no group": (100, 24, 40, [3, 0, 50, 17, 0, 10]),
    "one group": (64, 24, 40, [0, 0, 64, 0]),
    "several blocks and tiles": (700, 130, 140, [300, 0, 200, 33, 1, 166]),
    "no rows at all": (20, 8, 8, [0] * 3),
    "fewer rows than groups": (5, 16, 16, [0, 1, 0, 0, 2, 0, 1, 0, 1]),
}
PLATFORMS = {
    "loop": (grouped_products, {}),
    "triton": (grouped_products_gpu, {"interpret": True}),
    "mosaic": (grouped_products_tpu, {"interpret": True}),
}


def operands(case):
    """x, y, weights, sizes; rows of no group are not finite."""
    rows, inner, columns, sizes = CASES[case]
    normal = np.random.default_rng(0).normal
    shapes = (rows, inner), (rows, columns), (len(sizes), inner, columns)
    x, y, weights = (normal(size=shape).astype(np.float32) for shape in shapes)
    x[sum(sizes) :] = y[sum(sizes) :] = np.nan
    return x, y, weights, np.int32(sizes)


def expected(x, y, weights, sizes):
    """Products, products with transposed weights, outer products."""
    x, y, weights = (np.asarray(one, np.float64) for one in (x, y, weights))
    results = [np.zeros_like(y), np.zeros_like(x), np.zeros_like(weights)]
    end = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(end, end + size)
        results[0][rows] = x[rows] @ weights[group]
        results[1][rows] = y[rows] @ weights[group].T
        results[2][group] = x[rows].T @ y[rows]
        end += size
    return results


def assert_close(found, expected, tolerance_of_outer_products):
    for one, other, tolerance in zip(found, expected, (1e-5, 1e-5, tolerance_of_outer_products), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=tolerance, atol=10 * tolerance)


# A dtype for each platform, and the other one in the long lane; the other sizes of groups with float32 alone.
@pytest.mark.short(*(f"several blocks and tiles-{kind}" for kind in ("triton-bfloat16", "mosaic-float32")))
@pytest.mark.long("several blocks and tiles", "float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_platform_multiplies_rows_by_their_group(case, platform, dtype):
    module, settings = PLATFORMS[platform]
    x, y, weights, sizes = operands(case)
    x, y, weights = (one.astype(dtype) for one in (x, y, weights))

    @jax.jit
    def products(x, y, weights, sizes):
        return (
            module.products(x, weights, sizes, transposed=False, **settings),
            module.products(y, weights, sizes, transposed=True, **settings),
            module.outer_products(x, y, sizes, **settings),
        )

    found = products(x, y, weights, sizes)
    assert [one.dtype for one in found] == [jnp.float32, jnp.float32, dtype]
    assert_close(found, expected(x, y, weights, sizes), 1e-5 if dtype == jnp.float32 else 1e-2)


def test_gradients_have_operands_in_the_dtype_of_the_weights():
    x, y, weights, sizes = operands("several blocks and tiles")

    @jax.jit
    def product_and_gradients(x, y, weights):
        result, pull_back = jax.vjp(functools.partial(grouped_product, sizes=sizes), x, weights)
        return result, *pull_back(y)

    found = product_and_gradients(x, y, weights.astype(jnp.bfloat16))
    assert [one.dtype for one in found] == [jnp.float32, jnp.float32, jnp.bfloat16]
    assert_close(found, expected(*(one.astype(jnp.bfloat16) for one in (x, y, weights)), sizes), 1e-2)


jit_row_blocks = jax.jit(row_blocks, static_argnums=(1, 2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [16, 64])
def test_blocks_cover_each_group_once(case, block):
    rows, _, _, sizes = CASES[case]
    covered = np.full(rows, -1)
    groups, starts, ends = map(np.asarray, jit_row_blocks(np.int32(sizes), rows, block))
    assert len(groups) == most_blocks(rows, len(sizes), block)
    for group, start, end in zip(groups, starts, ends, strict=True):
        there = slice(start, min(start + block, end))
        assert (covered[there] == -1).all()
        covered[there] = group
    np.testing.assert_array_equal(covered[: sum(sizes)], np.repeat(np.arange(len(sizes)), sizes))
    assert (covered[sum(sizes) :] == -1).all()


def test_groups_never_fill_more_blocks_than_there_are():
    random = np.random.default_rng(0)
    for _ in range(200):
        groups, block = int(random.integers(1, 20)), 16
        sizes = random.multinomial(random.integers(0, 300), random.dirichlet(np.full(groups, 0.3)))
        rows = sizes.sum() + random.integers(0, 5)
        assert sum(-(-sizes // block)) <= most_blocks(rows, groups, block)


def test_few_rows_are_computed_for_nothing():
    """Of groups of about equal size, an eighth more than needed."""
    assert block_rows(64, 128) == SMALLEST and block_rows(10**6, 8) == LARGEST
    rows, groups = 64 * 1024, 128
    assert block_rows(rows, groups) == 128
    sizes = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
    _, _, ends = jit_row_blocks(np.int32(sizes), rows, 128)
    assert 1.0 < 128 * np.count_nonzero(ends) / rows < 1.15, "empty blocks end at 0"
