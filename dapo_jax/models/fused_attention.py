"""Device: attention in bins by kernels that never store the scores: Triton or cuDNN on GPUs, splash on TPUs.

Sizes: N bins, T slots, M trees of a bin, K key-value heads, H head size.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.data.containers import Bins
from dapo_jax.models import cudnn, splash, tree_attention, tree_ranges
from dapo_jax.models.attention import PLAIN, XLA, Attend, BinAttention, Scores
from dapo_jax.models.flops import causal_pairs
from dapo_jax.parallel.devices import cuda_generation
from dapo_jax.parallel.mesh import BATCH_AXES, HEAD_AXES

PLATFORMS = {"splash": "tpu", "cudnn": "gpu", "triton": "gpu"}  # of each kernel
HOPPER = 9  # the compute capability from which cuDNN's attention takes packed sequences
SHORT = 2048  # tokens; a prompt is no small part of a response up to this length


def kernels(device: Any, max_response_length: int) -> tuple[str, ...]:
    """The kernels for a device, the best one for such responses first.

    cuDNN's has a copy of the prompt with every response, and before Hopper one sequence in a bin. That it makes up for
    it with faster kernels on long responses is expected, not measured.
    """
    if device.platform != "gpu":
        return tuple(name for name, platform in PLATFORMS.items() if platform == device.platform)
    shares = max_response_length <= SHORT or (cuda_generation(device) or 0) < HOPPER
    return ("triton", "cudnn") if shares else ("cudnn", "triton")


def bin_attention(name: str, device: Any, *, share_prompts: bool = True, windows: bool = False) -> BinAttention:
    """xla, cudnn, triton or splash. Padding affects no real token and no gradient of one.

    Under the mesh of `jax.set_mesh`, bins are sharded over the batch axes and heads over "tensor" and "context", which
    must divide N and K. Inside a shard_map over some of these axes (with check_vma=False), the other axes shard its
    local arrays.

    Args:
        share_prompts: let the responses of a bin share a prompt, if the implementation can.
        windows: some layers have a window.
    """
    if name == "cudnn":
        return dataclasses.replace(CUDNN, packs=(cuda_generation(device) or 0) >= HOPPER)
    chosen = IMPLEMENTATIONS[name]
    shares = share_prompts and (chosen.windows_share or not windows)
    return chosen if shares else dataclasses.replace(chosen, shared_width=0)


def unfit(
    implementation: str, device: Any, dtype: Any, head_dim: int, cap: float | None = None, *, sinks: bool = False
) -> str:
    """Why a kernel cannot run on `device`, as "needs ..."; empty if it can.

    Args:
        cap: of the model's scores, as in Scores.
        sinks: whether its heads have sinks.
    """
    needed = PLATFORMS[implementation]
    if device.platform != needed:
        return f"needs a {needed.upper()}, and JAX has {device.platform}"
    if implementation == "splash":
        return ""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs model.dtype=bfloat16, not {jnp.dtype(dtype).name}"
    generation = cuda_generation(device)
    if generation is None or generation < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, not {device.device_kind}"
    if implementation == "triton":
        most = tree_attention.MAX_HEAD_SIZE
        return "" if head_dim <= most else f"needs a head size of at most {most}, not {head_dim}"
    if cap is not None:
        return "needs scores without a soft cap, and this model caps its own"
    if sinks:
        return "needs attention without sinks, and this model has them"
    most = 256 if generation >= HOPPER and jax.default_backend() == "gpu" else 128  # JAX asks the running backend
    if head_dim > most or head_dim % 8:
        return f"needs a head size of a multiple of 8 up to {most} on {device.device_kind}, not {head_dim}"
    return ""


def _exact() -> AbstractContextManager[Any]:
    """Products of float32 arrays are not rounded; TPUs would round the operands to bfloat16."""
    return jax.default_matmul_precision("highest")


def on_each_device(kernel: Callable[..., jax.Array]) -> Callable[..., Attend]:
    """Runs `kernel` (query, key, value, bins, scores, sink) on each device's bins and heads.

    The compiler cannot shard it.
    """

    def attend(bins: Bins, scores: Scores = PLAIN) -> Attend:
        of_kind = functools.partial(kernel, scores=scores.within(bins.trees.shape[1]))
        mesh = jax.sharding.get_abstract_mesh()
        axes = set(mesh.axis_names) - set(mesh.manual_axes)  # an enclosing shard_map has already split the others
        rows = tuple(axis for axis in BATCH_AXES if axis in axes)
        spec = PartitionSpec(rows, None, tuple(axis for axis in HEAD_AXES if axis in axes))

        def one_device(query: Any, key: Any, value: Any, sink: Any, bins: Bins) -> jax.Array:
            return of_kind(query, key, value, bins, sink=sink)

        def attend_bins(query: jax.Array, key: jax.Array, value: jax.Array, sink: Any = None) -> jax.Array:
            chosen = cudnn.traced_in(_exact, one_device) if query.dtype == jnp.float32 else one_device
            if not axes:
                return chosen(query, key, value, sink, bins)
            divided = jax.shard_map(
                chosen,
                in_specs=(spec, spec, spec, PartitionSpec(spec[2]), PartitionSpec(rows)),
                out_specs=spec,
                axis_names=axes,
                check_vma=False,
            )
            return divided(query, key, value, sink, bins)

        return attend_bins

    return attend


CUDNN = BinAttention(
    name="cudnn",
    attend=on_each_device(cudnn.attend),
    prepare=cudnn.prepare,
    pairs=lambda bins, window=None: causal_pairs(bins.lengths, window).sum(axis=1),
    skips=True,
    rounded=lambda width: -(-width // 128) * 128,
)
SPLASH = BinAttention(
    name="splash",
    attend=on_each_device(splash.attend),
    prepare=splash.prepare,
    pairs=splash.pairs,
    skips=True,
    shared_width=splash.SHARED_WIDTH,
    windows_share=False,
    rounded=splash.rounded_width,
)
TRITON = BinAttention(
    name="triton",
    attend=on_each_device(tree_attention.attend),
    prepare=tree_ranges.prepare,
    pairs=tree_ranges.pairs,
    skips=True,
    shared_width=2**31,
    rounded=tree_ranges.rounded_width,
)
IMPLEMENTATIONS = {one.name: one for one in (XLA, CUDNN, TRITON, SPLASH)}
