"""Device: prefill of prompts and a chunk of decoding, one compiled function each, whatever holds keys and values.

Sizes: B slots, b of them in use, C tokens of a chunk, Q prompts of P tokens with G rows each. Keys and values lie in
pages (pages.py), or in a stretch of each slot (stretches.py).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture, Choices
from dapo_jax.models.transformer import Params
from dapo_jax.models.vocabulary_blocks import BlockSums, block_logits
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import constrain, on_mesh
from dapo_jax.rollout.sampling import Sampling, keys_of, sample, sample_of_blocks

PART = 64  # of the slots: rows that may end before a chunk does, if it ends early ...
MEANWHILE = 4  # ... and its tokens while others wait for an environment
ROWS, HEADS = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, "tensor")  # of what each row has; of keys and values


class Cache(Protocol):
    """Keys and values on the devices: `Pages` or `Stretches`."""

    def with_prompts(self, found: list[Any], places: Any, arch: Architecture) -> Any:
        """The cache with those of prompts, of each layer [Q, K, H, P] and [Q, K, P, H], or a `State`, at places."""
        ...

    def opened(self, plan: "Plan", arch: Architecture) -> "OpenedCache":
        """What a chunk does with it."""
        ...


class OpenedCache(NamedTuple):
    """A cache during a chunk."""

    fixed: list[Any]  # of each layer, what no token changes
    carried: list[Any]  # of each layer, what goes from token to token
    # ((index of the token, rows [b] that go on), kind, (fixed, carried), ...), see transformer.decode
    attend: Callable[..., Any]
    closed: Callable[[list[Any]], Any]  # what is carried in the end -> the cache after the chunk


@struct.dataclass
class Held:
    """What the devices keep between two chunks."""

    tokens: jax.Array  # [B] int32, the last token of each row
    finished: jax.Array  # [B] bool
    cache: Any  # a `Cache`


@struct.dataclass
class Plan:
    """What b slots do in a chunk, in arrays of the host or of the devices. A slot without a row has number -1."""

    # [b] int32, where the row was in the last chunk among the shard's own slots; -1 = it begins, or returns to a slot
    sources: Any
    first_tokens: Any  # [b] int32, the token before the first that such a row draws
    numbers: Any  # [b] int32, prompt number, ...
    samples: Any  # [b] int32, ... and sample: the address of its draws
    prompt_lengths: Any  # [b] int32
    begun: Any  # [b] int32, tokens of the response that its prompt ends with
    sampled: Any  # [b] int32, tokens drawn since
    table: Any  # [b, M] int32, pages of the prompt, then its own; the place of its prompt for stretches
    # [b] int32, the page that takes what this chunk adds; 0 = none. Where chunks begin anywhere [b, 2]
    destinations: Any
    states: Any  # of layers with linear attention on pages, as in counting.RowStates; None = no layer has it
    windows: Any  # of layers with a window, as in counting.Seen; None = no layer has one
    # [b] int32, slots of the run of rows with one prompt that begins with each slot, 0 = none does; None for stretches
    runs: Any = None
    given: Any = None  # [b, C] int32, tokens that are not drawn but taken as they are, -1 = drawn; None = all are drawn
    room: Any = None  # [b] int32, where tokens are given: after so many tokens of the chunk the row ends


@struct.dataclass
class Reading:
    """C known tokens of each of r rows, in arrays of the host or of the devices. Without a row all is 0."""

    tokens: Any  # [r, C] int32, that are fed: they begin with the last one before the chunk
    prompt_lengths: Any  # [r] int32
    sampled: Any  # [r] int32, tokens of the response before these
    follows: Any  # [r] bool, they follow those of the row before, which is the same one
    table: Any  # [r, M] int32, with the pages that take the chunk, ...
    destinations: Any  # [r, 2] int32, ... as in `Plan`
    states: Any  # as in `Plan`
    windows: Any  # as in `Plan`, with the pages that take the chunk


@struct.dataclass
class FirstDraws:
    """Rows whose first token a prefill draws; number -1 = no row."""

    numbers: Any  # [Q * G] int32, prompt number, ...
    samples: Any  # [Q * G] int32, ... and sample: the address of its draws
    begun: Any  # [Q * G] int32, tokens of the response that its prompt ends with


@struct.dataclass
class Chunk:
    """C tokens of each row, replicated on every device."""

    tokens: jax.Array  # [B, C] int32, pad_id where the mask is False
    mask: jax.Array  # [B, C] bool, False after the row's end-of-sequence token
    logprobs: jax.Array  # [B, C] float32
    count: jax.Array | None = None  # int32, of these C tokens the first ones that are anything; None = all
    # [B, C, l, k], of the tokens that were fed: each is one place before the token that was drawn from it
    experts: jax.Array | None = None


@functools.partial(jax.jit, static_argnames=("arch", "eos_ids", "choices"), donate_argnames=("held",))
def prefill(
    params: Params,
    held: Held,
    tokens: jax.Array,
    mask: jax.Array,
    places: Any,
    rows: FirstDraws | None,
    sampling: Sampling,
    seed: Any,
    purpose: Any,
    *,
    arch: Architecture,
    eos_ids: tuple[int, ...],
    choices: Choices | None = None,
) -> tuple[Held, Chunk | None, jax.Array | None]:
    """Runs prompts, each once, and keeps their keys and values; draws the first token of `rows`, if they are given.

    The third result is the experts [Q, P, l, k] of these tokens, if they are recorded.

    Args:
        tokens, mask: [Q, P] left-padded prompts, on the shards that have their rows.
        places: for `Cache.with_prompts`.
        rows: of the prompts; without them the prompts lack their last token, from which a chunk draws the first.
        seed, purpose: the first parts of the addresses of all draws (sampling.py).
        choices: how experts are recorded; None = they are not.
    """
    hidden, found, experts = transformer.prefill(params, tokens, mask, arch)
    held = held.replace(cache=held.cache.with_prompts(found, places, arch))  # pyright: ignore[reportAttributeAccessIssue]
    chunk = None
    if rows is not None:
        logits = jnp.repeat(block_logits(params, hidden, arch), len(rows.numbers) // len(tokens), axis=0)
        keys = keys_of(seed, purpose, rows.numbers, rows.samples)
        drawn, logprobs = sample(logits, keys, rows.begun, sampling, eos_ids)
        chunk = _chunk_of(drawn[:, None], (rows.numbers >= 0)[:, None], logprobs[:, None])
    return laid_out(held), chunk, _everywhere(_recorded(experts, choices))


@functools.partial(jax.jit, static_argnames=("arch", "choices"), donate_argnames=("held",))
def read(
    params: Params, held: Held, reading: Reading, *, arch: Architecture, choices: Choices | None = None
) -> tuple[Held, jax.Array | None]:
    """Runs known tokens of each row, all at once, and keeps their keys and values.

    Each token is a row of one step of decoding. The second result is the experts [r, C, l, k] of these tokens, if they
    are recorded.
    """
    places = (reading.prompt_lengths - 1 + reading.sampled)[:, None] + jnp.arange(reading.tokens.shape[1])
    attend, fed = held.cache.attend_to_read(reading, arch), (reading.tokens.reshape(-1), places.reshape(-1))
    _, layers, experts = transformer.decode(attend, params, *fed, held.cache.layers, arch)
    held = held.replace(cache=held.cache.replace(layers=layers))  # pyright: ignore[reportAttributeAccessIssue]
    if experts is not None:
        experts = experts.reshape(*reading.tokens.shape, *experts.shape[1:])
    return laid_out(held), _everywhere(_recorded(experts, choices))


@functools.partial(
    jax.jit,
    static_argnames=("arch", "num_tokens", "eos_ids", "pad_id", "choices", "limits", "ends_early", "block_sums"),
    donate_argnames=("held",),
)
def decode(
    params: Params,
    held: Held,
    plan: Plan,
    sampling: Sampling,
    seed: Any,
    purpose: Any,
    *,
    arch: Architecture,
    num_tokens: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    choices: Choices | None = None,
    limits: bool = True,
    ends_early: bool = False,
    block_sums: Callable[..., BlockSums] | None = None,
) -> tuple[Held, Chunk]:
    """Draws `num_tokens` for each of the plan's slots; finished rows draw padding.

    Args:
        seed, purpose, choices: as in `prefill`.
        ends_early: fewer tokens, if a PART of the slots' rows end before, or rows that wait keep their slots meanwhile.
        limits: as in `sample`.
        block_sums: a kernel for the logits, where `limits` is False, see vocabulary_blocks_gpu.py.
    """
    idle, begins = plan.numbers < 0, plan.sources < 0
    keys = keys_of(seed, purpose, plan.numbers, plan.samples)
    tokens = jnp.where(begins, plan.first_tokens, taken(held.tokens, plan.sources))
    finished = before = idle | (~begins & taken(held.finished, plan.sources))
    cache = held.cache.opened(plan, arch)

    def step(carry: Any, index: jax.Array) -> tuple[Any, Any]:
        tokens, finished, carried = carry
        attend = functools.partial(cache.attend, (index, ~finished))
        layers = list(zip(cache.fixed, carried, strict=True))
        places = plan.prompt_lengths - 1 + plan.sampled + index
        hidden, layers, experts = transformer.decode(attend, params, tokens, places, layers, arch)
        position = plan.begun + plan.sampled + index
        if block_sums is not None:
            drawn, logprobs = sample_of_blocks(block_sums(params, hidden, sampling.temperature, arch), keys, position)
        else:
            logits = block_logits(params, hidden, arch)
            drawn, logprobs = sample(logits, keys, position, sampling, eos_ids, limits=limits)
        ended = jnp.isin(drawn, jnp.array(eos_ids, jnp.int32))
        if plan.given is not None:
            given = plan.given[:, index]
            drawn, ended = jnp.where(given < 0, drawn, given), (ended & (given < 0)) | (index + 1 >= plan.room)
        drawn = jnp.where(finished, pad_id, drawn)
        carry = drawn, finished | ended, [carried for _, carried in layers]
        return carry, (drawn, ~finished, logprobs, _recorded(experts, choices))

    def enough(index: jax.Array, carry: Any) -> jax.Array:
        waits = jnp.any(idle & (plan.sources >= 0))
        return (waits & (index >= MEANWHILE)) | (jnp.sum(carry[1] & ~before) >= max(len(before) // PART, 1))

    start, count = (tokens, finished, cache.carried), None
    if ends_early:
        count, (tokens, finished, carried), outputs = _scan_until(enough, step, start, num_tokens)
    else:
        (tokens, finished, carried), outputs = jax.lax.scan(step, start, jnp.arange(num_tokens))
    held = Held(put_first(held.tokens, tokens), put_first(held.finished, finished), cache.closed(carried))
    return laid_out(held), _chunk_of(*jax.tree.map(lambda output: output.swapaxes(0, 1), outputs), count=count)


def _scan_until(enough: Callable, step: Callable, carry: Any, length: int) -> tuple[jax.Array, Any, Any]:
    """As jax.lax.scan of `step` over `length` indices, but no further once `enough`; first, how many."""
    outputs = jax.tree.map(
        lambda x: jnp.zeros((length, *x.shape), x.dtype), jax.eval_shape(lambda: step(carry, jnp.int32(0))[1])
    )

    def goes_on(state: Any) -> jax.Array:
        return (state[0] < length) & ~enough(*state[:2])

    def body(state: Any) -> Any:
        index, carry, outputs = state
        carry, new = step(carry, index)
        return index + 1, carry, jax.tree.map(lambda held, one: held.at[index].set(one), outputs, new)

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), carry, outputs))


def taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """Elements of `x` [B, ...] at `places` [b] among each shard's own; any for a negative place."""
    spec, rows = on_mesh((HEADS if x.ndim > 1 else ROWS, ROWS))
    return jax.shard_map(lambda x, places: x[jnp.maximum(places, 0)], in_specs=(spec, rows), out_specs=spec)(x, places)


def laid_out(tree: Any) -> Any:
    """Rows on the shards of the batch, heads of keys and values on those of `tensor`."""
    return jax.tree.map(lambda x: constrain(x, HEADS if x.ndim > 1 else ROWS), tree)


def put_first(x: jax.Array, new: jax.Array) -> jax.Array:
    """`x` [B] whose first elements on each shard are those of `new` [b]."""
    spec = on_mesh(HEADS if x.ndim > 1 else ROWS)
    return jax.shard_map(lambda x, new: x.at[: len(new)].set(new), in_specs=(spec, spec), out_specs=spec)(x, new)


def _recorded(experts: jax.Array | None, choices: Choices | None) -> jax.Array | None:
    """The experts of tokens [..., l, k] as they are recorded; None if they are not."""
    return None if experts is None or choices is None else experts.astype(choices.dtype)


def _chunk_of(tokens, mask, logprobs, experts=None, count=None) -> Chunk:
    return _everywhere(Chunk(tokens, mask, jnp.where(mask, logprobs, 0.0), count, experts))


def _everywhere(tree: Any) -> Any:
    """Arrays replicated on every device."""
    return jax.tree.map(lambda x: constrain(x, PartitionSpec()), tree)
