"""Kernels of attention on their own, with each kind of scores and head size, lowered for devices that are not here."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerators.programs import Parts, Program
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.data.containers import Bins
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.attention import Scores
from dapo_jax.models.fused_attention import bin_attention, kernels, unfit
from dapo_jax.models.paged_attention import Reads, Runs
from dapo_jax.parallel.mesh import BATCH_AXES, platform
from dapo_jax.parallel.sharding import on_mesh

SCORES = {"window": Scores(300), "cap": Scores(cap=50.0), "window and cap": Scores(300, 50.0)}
HEAD_SIZES, WIDTH, PAGE = (64, 128, 256), 1024, 32
HEADS, ROWS = PartitionSpec(BATCH_AXES, None, "tensor"), PartitionSpec(BATCH_AXES)


def windows_and_caps(parts: Parts) -> Iterator[Program]:
    """Every kernel that takes the scores: in bins, values and gradients; in pages, with soft caps."""
    device = parts.mesh.devices.flat[0]
    for size in HEAD_SIZES:
        for label, scores in SCORES.items():
            for name in kernels(device, 1):
                if not unfit(name, device, jnp.bfloat16, size, scores.cap):
                    yield f"{name}, {label}, heads of {size}", functools.partial(_bins, parts, name, scores, size)
        yield f"pages, cap, heads of {size}", functools.partial(_pages, parts, size)


def _bins(parts: Parts, name: str, scores: Scores, size: int) -> jax.stages.Lowered:
    kernel = bin_attention(name, parts.mesh.devices.flat[0], windows=scores.window is not None)
    slots = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), (8, WIDTH))
    trees, branches = 1 + slots // 600, slots // 200  # with a shared prompt, unless the kernel takes copies alone
    if not kernel.shared_width:
        branches = np.minimum(slots % 600 // 200, 1)
    bins = kernel.prepare(Bins(tokens=slots, positions=slots % 600, trees=trees, branches=branches))

    def values_and_gradients(query: Any, key: Any, value: Any, cotangent: Any, bins: Any) -> Any:
        attended, pull_back = jax.vjp(kernel.attend(bins, scores), query, key, value)
        return attended, *pull_back(cotangent)

    query, key = (_array(parts, (8, WIDTH, heads, size), jnp.bfloat16, HEADS) for heads in (8, 4))
    cotangent = _array(parts, query.shape, jnp.float32, HEADS)
    arrays = jax.tree.map(lambda x: _array(parts, x.shape, x.dtype, ROWS), bins)
    return jax.jit(values_and_gradients).lower(query, key, key, cotangent, arrays)


def _pages(parts: Parts, size: int) -> jax.stages.Lowered:
    attend = (paged_attention_tpu if platform(parts.mesh) == "tpu" else paged_attention_gpu).attend
    heads, rows = on_mesh((PartitionSpec(BATCH_AXES, "tensor"), ROWS))
    on_each_device = jax.shard_map(
        functools.partial(attend, cap=50.0),
        in_specs=(heads, heads, heads, PartitionSpec(), rows),
        out_specs=heads,
        check_vma=False,
    )
    query = _array(parts, (16, 32, size), jnp.bfloat16, heads)
    # 16 key-value heads on a device: the most
    pages, tail = (_array(parts, (number, 32, PAGE, 2 * size), jnp.bfloat16, heads) for number in (64, 16))
    table, number = (_array(parts, shape, jnp.int32, ROWS) for shape in ((16, 8), (16,)))
    index = _array(parts, (), jnp.int32, PartitionSpec())
    reads = Reads(table, number, number, Runs(number, number))
    return jax.jit(on_each_device).lower(query, pages, tail, index, reads)


def _array(parts: Parts, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(parts.mesh, on_mesh(spec)))
