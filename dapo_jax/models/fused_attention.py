"""Device: attention in bins by kernels that never store the scores: Triton or cuDNN on GPUs, splash on TPUs.

Sizes: N bins, T slots, M trees of a bin, K key-value heads, H head size.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the public function takes no packed sequences
from jax.sharding import PartitionSpec

from dapo_jax.data.containers import Bins
from dapo_jax.data.padding import bucket
from dapo_jax.errors import InputError
from dapo_jax.models import splash, tree_attention, tree_ranges
from dapo_jax.models.attention import PLAIN, XLA, Attend, BinAttention, Scores
from dapo_jax.models.flops import causal_pairs
from dapo_jax.parallel.devices import cuda_generation
from dapo_jax.parallel.mesh import BATCH_AXES

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

    Under the mesh of `jax.set_mesh`, bins are sharded over ("data", "fsdp") and heads over "tensor", which must divide
    N and K. Inside a shard_map over some of these axes (with check_vma=False), the other axes shard its local arrays.

    Args:
        share_prompts: let the responses of a bin share a prompt, if the implementation can.
        windows: some layers have a window.
    """
    if name == "cudnn":
        return dataclasses.replace(CUDNN, packs=(cuda_generation(device) or 0) >= HOPPER)
    chosen = IMPLEMENTATIONS[name]
    shares = share_prompts and (chosen.windows_share or not windows)
    return chosen if shares else dataclasses.replace(chosen, shared_width=0)


def unfit(implementation: str, device: Any, dtype: Any, head_dim: int, cap: float | None = None) -> str:
    """Why a kernel cannot run on `device`, as "needs ..."; empty if it can.

    Args:
        cap: of the model's scores, as in Scores.
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
    most = 256 if generation >= HOPPER and jax.default_backend() == "gpu" else 128  # JAX asks the running backend
    if head_dim > most or head_dim % 8:
        return f"needs a head size of a multiple of 8 up to {most} on {device.device_kind}, not {head_dim}"
    return ""


def _traced_in(context: Callable[[], AbstractContextManager[Any]], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` (query, key, value, bins), traced inside a context in its backward pass too."""

    @jax.custom_vjp
    def attend(*arrays: Any) -> jax.Array:
        with context():
            return kernel(*arrays)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, bins: Bins) -> tuple[jax.Array, Any]:
        with context():
            return jax.vjp(lambda *operands: kernel(*operands, bins), query, key, value)

    def backward(pull_back: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        with context():
            return *pull_back(cotangent), None

    attend.defvjp(forward, backward)
    return attend


def _exact() -> AbstractContextManager[Any]:
    """Products of float32 arrays are not rounded; TPUs would round the operands to bfloat16."""
    return jax.default_matmul_precision("highest")


def _trusted() -> AbstractContextManager[Any]:
    """JAX asks whether this machine's GPU has the kernel; `unfit` and `bin_attention` have asked those of the mesh."""
    return mock.patch.object(cudnn, "check_compute_capability", lambda capability: True)


def on_each_device(kernel: Callable[..., jax.Array]) -> Callable[..., Attend]:
    """Runs `kernel` (query, key, value, bins, scores) on each device's bins and heads: the compiler cannot shard it."""

    def attend(bins: Bins, scores: Scores = PLAIN) -> Attend:
        one_device = functools.partial(kernel, scores=scores.within(bins.trees.shape[1]))
        mesh = jax.sharding.get_abstract_mesh()
        axes = set(mesh.axis_names) - set(mesh.manual_axes)  # an enclosing shard_map has already split the others
        rows = tuple(axis for axis in BATCH_AXES if axis in axes)
        spec = PartitionSpec(rows, None, "tensor" if "tensor" in axes else None)

        def attend_bins(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            chosen = _traced_in(_exact, one_device) if query.dtype == jnp.float32 else one_device
            if not axes:
                return chosen(query, key, value, bins)
            divided = jax.shard_map(
                chosen,
                in_specs=(spec, spec, spec, PartitionSpec(rows)),
                out_specs=spec,
                axis_names=axes,
                check_vma=False,
            )
            return divided(query, key, value, bins)

        return attend_bins

    return attend


def _lengths(bins: Bins) -> Bins:
    """Host: adds the slots of each tree. An empty bin has one, since cuDNN takes no row without keys."""
    trees = max(int(bins.trees.max()), 1)
    trees = trees if trees < 4 else bucket(trees)
    found = (bins.trees[:, :, None] == np.arange(1, trees + 1)).sum(axis=1, dtype=np.int32)
    found[:, 0] = np.maximum(found[:, 0], 1)
    return dataclasses.replace(bins, lengths=found)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, bins: Bins, scores: Scores = PLAIN) -> jax.Array:
    """Padding is zeroed before and after: cuDNN leaves any value there."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise InputError(f"query.dtype={query.dtype} must be bfloat16 or float16 with cuDNN: cast the weights")
    assert scores.cap is None
    real = (bins.trees > 0)[:, :, None, None]
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))
    return jnp.where(real, _cudnn_kernel(query, key, value, bins.lengths, scores.window), 0).astype(jnp.float32)


def _cudnn_kernel(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, window: int | None) -> Any:
    """cuDNN's attention, causal within sequences that begin one after the other.

    Args:
        lengths: [N, M], 0 where a bin has fewer than M sequences.
        window: as in Scores.
    """
    sizes: dict[str, Any] = {"q_seqlen": lengths[:, 0], "kv_seqlen": lengths[:, 0]}
    if lengths.shape[1] > 1:
        begins = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
        begins = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
        lengths = jnp.where(lengths > 0, lengths, -1)
        sizes = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": begins, "kv_offsets": begins}
    return cudnn.dot_product_attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
        **sizes,
    )


def _trusted_cudnn(*arrays: Any, scores: Scores = PLAIN) -> jax.Array:
    return _traced_in(_trusted, functools.partial(_cudnn, scores=scores))(*arrays)


CUDNN = BinAttention(
    name="cudnn",
    attend=on_each_device(_trusted_cudnn),
    prepare=_lengths,
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
