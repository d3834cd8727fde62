"""Device: causal attention in a fused kernel that never stores the scores: cuDNN's on a GPU, splash on a TPU.

Sizes: B rows, T tokens, N query heads, K key-value heads, H head size.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from dapo_jax.errors import InputError
from dapo_jax.models.remat import ATTENDED
from dapo_jax.parallel.devices import cuda_generation
from dapo_jax.parallel.mesh import BATCH_AXES

KERNELS = {"gpu": "cudnn", "tpu": "splash"}  # by the platform that they run on
MAX_BLOCK, LANES = 512, 128  # splash's tiles: T is cut into as few as possible, each a multiple of LANES


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str,
    interpret: bool = False,
) -> jax.Array:
    """`attention` under a causal mask, for right-padded rows. Padding affects no real token and no gradient of one.

    Under the mesh of `jax.set_mesh`, rows are sharded over ("data", "fsdp") and heads over "tensor", which must divide
    B and K. Inside a shard_map over some of these axes (with check_vma=False), the other axes shard its local arrays.

    Args:
        query: [B, T, N, H], key, value: [B, T, K, H]; query head n reads key-value head n // (N // K).
        lengths: [B] int32, real tokens of each row; 0 is allowed.
        implementation: "cudnn" (bfloat16 or float16 only) or "splash".
        interpret: run splash in Pallas' interpreter, on any device.

    Returns:
        [B, T, N, H] float32; finite, but unspecified, on padding.
    """
    kernels: dict[str, Callable[..., jax.Array]] = {
        "cudnn": _cudnn,
        "splash": functools.partial(_splash, interpret=interpret),
    }
    if implementation not in kernels:
        raise InputError(f"implementation={implementation!r} is unknown: choose one of {', '.join(kernels)}")
    if implementation == "cudnn" and query.dtype not in (jnp.bfloat16, jnp.float16):
        raise InputError(
            f"query.dtype={query.dtype} must be bfloat16 or float16 with implementation='cudnn': "
            "cast the weights to bfloat16, or choose another implementation"
        )
    kernel = kernels[implementation]
    return _on_each_device(_exact(kernel) if query.dtype == jnp.float32 else kernel, query, key, value, lengths)


def unfit(implementation: str, device: Any, dtype: Any, head_dim: int) -> str:
    """Why a kernel cannot run on `device`, as "needs ..."; empty if it can."""
    needed = next(platform for platform, kernel in KERNELS.items() if kernel == implementation)
    if device.platform != needed:
        return f"needs a {needed.upper()}, and JAX has {device.platform}"
    if implementation == "splash":
        return ""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs model.dtype=bfloat16, not {jnp.dtype(dtype).name}"
    generation = cuda_generation(device)
    if generation is None or generation < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, not {device.device_kind}"
    most = 256 if generation >= 9 and jax.default_backend() == "gpu" else 128  # JAX asks the running backend
    if head_dim > most or head_dim % 8:
        return f"needs a head size of a multiple of 8 up to {most} on {device.device_kind}, not {head_dim}"
    return ""


def _exact(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`kernel` with float32 products, in the backward pass too; TPUs would round the operands to bfloat16."""

    @jax.custom_vjp
    def attend(*arrays: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return kernel(*arrays)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        with jax.default_matmul_precision("highest"):
            return jax.vjp(lambda *operands: kernel(*operands, lengths), query, key, value)

    def backward(pull_back: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        with jax.default_matmul_precision("highest"):
            return *pull_back(cotangent), None

    attend.defvjp(forward, backward)
    return attend


def _on_each_device(kernel: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Runs `kernel` on the rows and heads of each device: the compiler cannot shard a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # an enclosing shard_map has already split the others
    if not axes:
        return kernel(*arrays)
    rows = tuple(axis for axis in BATCH_AXES if axis in axes)
    spec = PartitionSpec(rows, None, "tensor" if "tensor" in axes else None)
    divided = jax.shard_map(
        kernel, in_specs=(spec, spec, spec, PartitionSpec(rows)), out_specs=spec, axis_names=axes, check_vma=False
    )
    return divided(*arrays)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """Padding is zeroed before and after: cuDNN leaves any value there, and it takes no row without keys.

    Its backward pass needs an even number of tokens.
    """
    length = query.shape[1]
    query, key, value = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (query, key, value))
    real = (jnp.arange(query.shape[1]) < lengths[:, None])[:, :, None, None]
    at_least_one = jnp.maximum(lengths, 1)
    attended = jax.nn.dot_product_attention(
        *(jnp.where(real, x, 0) for x in (query, key, value)),
        is_causal=True,
        query_seq_lengths=at_least_one,
        key_value_seq_lengths=at_least_one,
        implementation="cudnn",
    )
    return jnp.where(real, attended, 0)[:, :length].astype(jnp.float32)


def _splash(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, interpret: bool) -> jax.Array:
    """Splash attention does not scale the scores and needs whole blocks of tokens; padding is a segment of its own."""
    _, length, heads, size = query.shape
    blocks = -(-length // MAX_BLOCK)
    block = -(-length // (blocks * LANES)) * LANES
    padded = blocks * block

    def heads_first(x: jax.Array) -> jax.Array:  # [B, T, heads, H] -> [B, heads, padded T, H]
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - length), (0, 0)))

    kernel = splash_attention.make_splash_mha_single_device(
        mask=splash_attention.MultiHeadMask([splash_attention.CausalMask((padded, padded))] * heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
        residual_checkpoint_name=ATTENDED,
    )
    segments = (jnp.arange(padded) < lengths[:, None]).astype(jnp.int32)
    scaled = (query.astype(jnp.float32) * size**-0.5).astype(query.dtype)
    attended = jax.vmap(cast(Callable[..., jax.Array], kernel))(
        *(heads_first(x) for x in (scaled, key, value)), splash_attention.SegmentIds(segments, segments)
    )
    return attended.swapaxes(1, 2)[:, :length].astype(jnp.float32)
