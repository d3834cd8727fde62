"""Device: decoding in slots whose keys and values lie in pages, one compiled function each for prefill and a chunk.

Sizes: B slots, b of them in use, A pages, C tokens of a page and of a chunk, M pages that a row has at most; pages are
numbered on each shard of the batch, and page 0 of a shard takes what nobody reads. Layers with a window have fewer
pages, R of a row: those that the window reaches from a chunk (window_pages.py). A row's first token is drawn from the
last token of its prompt, as every other one from the token before: prefill draws nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture, Choices, Layer
from dapo_jax.models.paged_attention import AttendPages, attend_tail, merged
from dapo_jax.models.transformer import Params
from dapo_jax.models.vocabulary_blocks import block_logits
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import constrain
from dapo_jax.rollout.decoding import Chunk, chunk_of, everywhere, laid_out, recorded, settle, wave_spec
from dapo_jax.rollout.sampling import Sampling, keys_of, sample

ROWS, HEADS = PartitionSpec(BATCH_AXES), wave_spec(4)


@struct.dataclass
class Slots:
    """What the devices keep between two chunks."""

    tokens: jax.Array  # [B] int32, the last token of each row
    finished: jax.Array  # [B] bool
    pages: list[Any]  # of each layer [A, K, C, 2H], see models/paged_attention.py; fewer of layers with a window


@struct.dataclass
class Plan:
    """What b slots do in a chunk, in arrays of the host or of the devices. A slot without a row has number -1."""

    sources: Any  # [b] int32, where the row was in the last chunk among the shard's own slots; -1 = it begins
    first_tokens: Any  # [b] int32, the last token of its prompt
    numbers: Any  # [b] int32, prompt number, ...
    samples: Any  # [b] int32, ... and sample: the address of its draws
    prompt_lengths: Any  # [b] int32
    begun: Any  # [b] int32, tokens of the response that its prompt ends with
    sampled: Any  # [b] int32, tokens drawn since
    table: Any  # [b, M] int32, pages of the prompt, then its own
    destinations: Any  # [b] int32, the page that takes what this chunk adds; 0 = none
    windows: Any  # of layers with a window, as in window_pages.Seen; None = no layer has one


@functools.partial(jax.jit, static_argnames=("arch", "slots", "pages", "window_pages", "page_length", "dtype"))
def empty_slots(
    *, arch: Architecture, slots: int, pages: int, window_pages: int, page_length: int, dtype: Any
) -> Slots:
    """Slots without rows, and pages that hold nothing; all counted on all shards."""
    shape = arch.num_kv_heads, page_length, 2 * arch.head_dim
    numbers = [pages if kind.window is None else window_pages for kind in arch.layers]
    cache = [jnp.zeros((number, *shape), dtype) for number in numbers]
    return laid_out(Slots(jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool), cache))


@functools.partial(jax.jit, static_argnames=("arch", "choices"), donate_argnames=("slots",))
def prefill_pages(
    params: Params,
    slots: Slots,
    tokens: jax.Array,
    mask: jax.Array,
    destinations: jax.Array,
    window_destinations: jax.Array | None,
    *,
    arch: Architecture,
    choices: Choices | None = None,
) -> tuple[Slots, jax.Array | None]:
    """Runs the prompts without their last token, each once, and puts their keys and values into pages.

    The second result is the experts [Q, P, l, k] of these tokens, if they are recorded.

    Args:
        tokens, mask: [Q, P] left-padded prompts on the shards that have their rows; P is a multiple of C.
        destinations: [Q, P // C] int32, pages; 0 where there is only padding.
        window_destinations: [Q, at most R] int32, pages of layers with a window, if there are any, for a prompt's end.
        choices: how experts are recorded; None = they are not.
    """
    _, caches, experts = transformer.prefill(params, tokens, mask, arch)
    pages = []
    for kind, held, (key, value) in zip(arch.layers, slots.pages, caches, strict=True):
        places = destinations if kind.window is None else window_destinations
        assert places is not None
        columns = places.shape[1] * held.shape[2]
        kept = _as_pages(key[..., -columns:], value[:, :, -columns:], held.shape[2])
        pages.append(_put_pages(held, kept, places.reshape(-1)))
    slots = slots.replace(pages=pages)  # pyright: ignore[reportAttributeAccessIssue]
    return laid_out(slots), everywhere(recorded(experts, choices))


@functools.partial(
    jax.jit, static_argnames=("arch", "attend_pages", "eos_ids", "pad_id", "choices"), donate_argnames=("slots",)
)
def decode_slots(
    params: Params,
    slots: Slots,
    plan: Plan,
    sampling: Sampling,
    seed: Any,
    purpose: Any,
    *,
    arch: Architecture,
    attend_pages: AttendPages,
    eos_ids: tuple[int, ...],
    pad_id: int,
    choices: Choices | None = None,
) -> tuple[Slots, Chunk]:
    """Draws C tokens for each of the plan's slots; finished rows draw padding.

    Args:
        seed, purpose: the first parts of the addresses of all draws (sampling.py).
    """
    page_length, idle = slots.pages[0].shape[2], plan.numbers < 0
    keys = keys_of(seed, purpose, plan.numbers, plan.samples)
    begins = plan.sources < 0
    tokens = jnp.where(begins, plan.first_tokens, _own(slots.tokens, plan.sources))
    finished = idle | (~begins & _own(slots.finished, plan.sources))
    cached = plan.prompt_lengths - 1  # tokens of the prompt in its pages, which end with the last of them
    starts = -cached % page_length
    ends = jnp.where(idle, 0, cached + starts + plan.sampled)
    attend_each = jax.shard_map(
        functools.partial(attend_pages, cap=arch.attention_cap),
        in_specs=(HEADS, HEADS, ROWS, ROWS, ROWS),
        out_specs=HEADS,
        check_vma=False,
    )

    def step(carry: Any, index: jax.Array) -> tuple[Any, Any]:
        tokens, finished, tails = carry

        def attend(kind, layer, query, key, value):
            held, tail = layer
            new = jnp.concatenate([key, value], axis=-1).swapaxes(1, 2)
            tail = jax.lax.dynamic_update_slice_in_dim(tail, new, index, axis=2)
            paged = attend_each(query[:, 0], held, *_reached(kind, plan, starts, ends, index, page_length))
            newest = attend_tail(query[:, 0], tail, index, kind.window, arch.attention_cap)
            return merged(paged, newest)[:, None], (held, tail)

        caches = list(zip(slots.pages, tails, strict=True))
        places = cached + plan.sampled + index
        hidden, caches, experts = transformer.decode_with(attend, params, tokens, places, caches, arch)
        logits = block_logits(params, hidden, arch)
        drawn, logprobs = sample(logits, keys, plan.begun + plan.sampled + index, sampling, eos_ids)
        drawn, ended = settle(drawn, finished, eos_ids, pad_id)
        outputs = drawn, ~finished, logprobs, recorded(experts, choices)
        return (drawn, ended, [tail for _, tail in caches]), outputs

    rows = len(tokens)
    tails = laid_out([jnp.zeros((rows, *held.shape[1:]), held.dtype) for held in slots.pages])
    (tokens, finished, tails), outputs = jax.lax.scan(step, (tokens, finished, tails), jnp.arange(page_length))
    pages = [
        _put_pages(held, tail, plan.destinations if kind.window is None else plan.windows.destinations)
        for kind, held, tail in zip(arch.layers, slots.pages, tails, strict=True)
    ]
    kept = Slots(_put_own(slots.tokens, tokens), _put_own(slots.finished, finished), pages)
    return laid_out(kept), chunk_of(*jax.tree.map(lambda output: output.swapaxes(0, 1), outputs))


def _reached(kind: Layer, plan: Plan, starts: jax.Array, ends: jax.Array, index: jax.Array, page_length: int) -> Any:
    """The page table, and where the keys in it start and end that token `index` of a chunk sees."""
    if kind.window is None:
        return plan.table, starts, ends
    before = plan.windows.first * page_length  # tokens in pages that the table of windows does not have
    return plan.windows.table, jnp.maximum(starts, ends + index - kind.window + 1) - before, ends - before


def _as_pages(key: jax.Array, value: jax.Array, page_length: int) -> jax.Array:
    """Keys [Q, K, H, P] and values [Q, K, P, H] of prompts as pages [Q * P // C, K, C, 2H]."""
    both = jnp.concatenate([key.swapaxes(2, 3), value], axis=-1)
    prompts, heads, width, size = both.shape
    pages = both.reshape(prompts, heads, width // page_length, page_length, size).swapaxes(1, 2)
    return constrain(pages.reshape(-1, heads, page_length, size), HEADS)


def _put_pages(held: jax.Array, pages: jax.Array, places: jax.Array) -> jax.Array:
    """`held` with `pages` at `places`, each shard's own."""
    local = jax.shard_map(
        lambda held, pages, places: held.at[places].set(pages), in_specs=(HEADS, HEADS, ROWS), out_specs=HEADS
    )
    return local(held, pages, places)


def _own(x: jax.Array, places: jax.Array) -> jax.Array:
    """Elements of `x` [B] at `places` [b] among each shard's own; any for a negative place."""
    return jax.shard_map(lambda x, places: x[jnp.maximum(places, 0)], in_specs=(ROWS, ROWS), out_specs=ROWS)(x, places)


def _put_own(x: jax.Array, new: jax.Array) -> jax.Array:
    """`x` [B] whose first elements on each shard are those of `new` [b]."""
    return jax.shard_map(lambda x, new: x.at[: len(new)].set(new), in_specs=(ROWS, ROWS), out_specs=ROWS)(x, new)
