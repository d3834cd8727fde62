"""Device: rows sorted by group, in blocks that each belong to one group.

Sizes: M rows, E groups. Rows after the last group belong to none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SMALLEST, LARGEST = 16, 128  # rows of a block; Triton multiplies no fewer than 16


class RowBlocks(NamedTuple):
    """Where each block's rows are, each [blocks] int32. Groups fill fewer blocks than there are: the rest are empty."""

    group: jax.Array
    start: jax.Array  # the first row
    end: jax.Array  # after the last row of the group; a block ends there at the latest


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: about a quarter of a mean group's, so that few rows of the groups' last blocks are wasted."""
    quarter = rows // (4 * groups)
    return min(max(1 << max(quarter.bit_length() - 1, 0), SMALLEST), LARGEST)


def row_blocks(sizes: jax.Array, rows: int, block: int) -> RowBlocks:
    """The blocks of groups of `sizes` [E], which are next to each other from row 0 on, and `rows` at most."""
    ends = jnp.cumsum(sizes)
    last = jnp.cumsum(-(-sizes // block))  # after each group's last block
    number = jnp.arange(most_blocks(rows, len(sizes), block), dtype=jnp.int32)
    group = jnp.searchsorted(last, number, side="right", method="compare_all").astype(jnp.int32)
    used = group < len(sizes)
    group = jnp.where(used, group, 0)
    before = jnp.pad(last, (1, 0))[group]
    start = (ends - sizes)[group] + (number - before) * block
    return RowBlocks(group, *(jnp.where(used, place, 0).astype(jnp.int32) for place in (start, ends[group])))


def most_blocks(rows: int, groups: int, block: int) -> int:
    """The largest number of blocks that groups of `rows` rows in all can fill."""
    return rows // block + min(groups, rows)


def in_groups(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M, ...] with zeros in the rows that belong to no group, whatever they hold."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, 0)
