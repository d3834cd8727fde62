"""Host: sizes of the slot engine, and its compiled functions, lowered from shapes alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dapo_jax.errors import InputError
from dapo_jax.models.paged_attention import AttendPages
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import batch_sharding, replicated
from dapo_jax.rollout.decoding import wave_spec
from dapo_jax.rollout.engine_settings import (
    PREFILL_BYTES,
    SCORES,
    EngineSettings,
    cache_dtype,
    prefill_bytes,
    token_bytes,
)
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import ROW_MULTIPLE, LengthHistory, prompt_width
from dapo_jax.rollout.slot_decoding import Plan, Slots, decode_slots, empty_slots, prefill_pages
from dapo_jax.rollout.slot_queue import PrefillSize, SlotLayout
from dapo_jax.rollout.window_pages import Seen

FILL = 0.8  # of the pages, that the expected keys and values of all slots take
PREFILLED = 2048  # tokens of a shard's prompts that are prefilled in one call, unless one prompt has more
CHEAP_ROWS = 64  # of a shard, that decode about as fast as fewer: what they take is reading the weights
SLOTS_OF_ROWS = 8  # one slot for so many rows; with more, too many are empty while the last rows decode
FEW_SLOTS = 3  # one slot in so many is in the program for the last rows


def layout_of_slots(
    settings: EngineSettings,
    dtype: np.dtype,
    prompt_lengths: Sequence[int] | np.ndarray,
    num_samples: int,
    history: LengthHistory,
    free_bytes: float,
    *,
    num_prompts: int | None = None,
    max_tokens: int | None = None,
) -> SlotLayout:
    """The slots of a generation: as many as max_num_seqs, or the memory if responses end as before, allows.

    A page and a chunk have no more tokens than the longest response, rounded up to a power of two.

    Args:
        dtype: of keys and values.
        prompt_lengths: [Q] tokens of its prompts, or of prompts like them.
        free_bytes: on each device, of which slots and pages may take `memory_share`; 0 = not known.
        num_prompts: of the generation; None = Q.
        max_tokens: most to draw for a response; None = max_response_length.

    Raises:
        InputError: the memory does not hold the pages of the longest response.
    """
    drawn, shards = max_tokens or settings.max_response_length, num_batch_shards(settings.mesh)
    length = min(settings.chunk_length, max(1 << (drawn - 1).bit_length(), settings.least_page))
    rows = -(-(num_prompts or len(prompt_lengths)) // shards) * num_samples  # of a shard
    prefills = _prefill_sizes(settings, length, prompt_width(int(max(prompt_lengths)), settings.max_prompt_length))
    width, at_once = prefills[-1].width, prefills[0].at_once
    prompt_pages, own_pages = width // length, max(-(-drawn // length) - 1, 0)
    reach = _reach(settings, length, prompt_pages + own_pages)
    full, windowed = _pages(settings, length * token_bytes(settings, dtype), own_pages, prompt_pages, reach)
    # a page in the making is in memory twice
    per_slot = (
        2 * (full.bytes + windowed.bytes) + 4.0 * SCORES * settings.arch.vocab_size / settings.mesh.shape["tensor"]
    )
    memory = free_bytes * settings.memory_share
    if settings.max_num_seqs:
        wanted = max(settings.max_num_seqs // shards, 1)
        slots = wanted if wanted <= rows else _rung(rows)
    else:
        held = history.mean_held() + length / 2 + (float(np.mean(prompt_lengths)) + length / 2) / num_samples
        per_row = held / length * full.bytes + min(held / length, windowed.own + windowed.prompt) * windowed.bytes
        slots = FILL * memory / (FILL * per_slot + per_row)
        slots = _rung(min(slots, max(CHEAP_ROWS, rows / SLOTS_OF_ROWS), rows))
    pages, most_windows = (kind.most(slots, waiting=2 * at_once) for kind in (full, windowed))
    if not settings.max_num_seqs or free_bytes > 0:
        pages = min(pages, _pages_in(memory - slots * per_slot, full, windowed, pages, most_windows))
    if pages < 1 + prompt_pages + own_pages:
        raise InputError(
            f"the keys and values of a response of data.max_response_length={settings.max_response_length} tokens do "
            f"not fit rollout.kv_memory_share={settings.memory_share} of {free_bytes / 2**30:.1f} free GiB on a device"
        )
    few = max(slots // FEW_SLOTS, min(ROW_MULTIPLE, slots))
    sizes = pages, length, prompt_pages + own_pages, prefills
    return SlotLayout(num_samples, shards, slots, few, *sizes, min(pages, most_windows) if reach else 0, reach)


class _Pages(NamedTuple):
    """Pages of the layers with a window, or of those without."""

    own: int  # of a response, at most
    prompt: int  # of a prompt, at most
    bytes: float  # of one in all these layers, on one device

    def most(self, slots: int, *, waiting: int) -> int:
        """As if all slots were at their longest, with a prompt for each and those that wait."""
        return 1 + slots * self.own + (slots + waiting) * self.prompt


def _pages(settings: EngineSettings, of_layer: float, own: int, prompt: int, reach: int) -> tuple[_Pages, _Pages]:
    """Of the layers without a window, and of those with one; `of_layer` are the bytes of a page in one layer."""
    layers = settings.arch.layers
    windows = sum(kind.window is not None for kind in layers)
    full = _Pages(own, prompt, of_layer * (len(layers) - windows))
    return full, _Pages(min(reach, own), min(reach, prompt), of_layer * windows)


def _reach(settings: EngineSettings, length: int, row_pages: int) -> int:
    """Pages that a window reaches behind a chunk, at least one; 0 without layers that have a window."""
    window = settings.arch.window
    return 0 if window is None else min(max(-(-(window - 1) // length), 1), max(row_pages, 1))


def _pages_in(memory: float, full: _Pages, windowed: _Pages, most: int, most_windows: int) -> int:
    """Pages that fit the memory, if layers with a window have as many, but at most `most_windows`.

    If all layers have a window, pages of the others take no memory: there are `most` of them once those of windows fit.
    """
    pages = memory / (full.bytes + windowed.bytes)
    if windowed.bytes and pages > most_windows:
        pages = (memory - most_windows * windowed.bytes) / full.bytes if full.bytes else most
    return int(pages)


def _prefill_sizes(settings: EngineSettings, length: int, widest: int) -> tuple[PrefillSize, ...]:
    """Calls of prefill for prompts of at most `widest` tokens: from PREFILLED on, an eighth wider than the one before.

    Only those that are used are compiled.
    """
    widths = [widest]
    while (narrower := widths[0] * 8 // 9) >= PREFILLED:
        widths.insert(0, narrower)
    return tuple(
        PrefillSize(
            -(-width // length) * length,
            max(min(int(PREFILL_BYTES / prefill_bytes(settings, width)), PREFILLED // width), 1),
        )
        for width in widths
    )


def _rung(slots: float) -> int:
    """At most `slots`: ROW_MULTIPLE times a power of the square root of 2, in whole ROW_MULTIPLEs, or what there is."""
    found, exact = ROW_MULTIPLE, float(ROW_MULTIPLE)
    while (above := round(exact * 2**0.5 / ROW_MULTIPLE) * ROW_MULTIPLE) <= slots:
        exact *= 2**0.5
        found = max(above, found)
        if above <= found and exact > slots:
            break
    return max(min(found, int(slots)), 1)


def lower_empty_slots(settings: EngineSettings, dtype: Any, layout: SlotLayout) -> jax.stages.Lowered:
    """Slots and pages of a call; `dtype` of keys and values."""
    return empty_slots.lower(**empty_shape(settings, dtype, layout))


def lower_prefill_pages(
    settings: EngineSettings, params: Params, layout: SlotLayout, size: PrefillSize
) -> jax.stages.Lowered:
    """The prefill of some prompts."""
    prompts, pages = size.at_once * layout.shards, size.width // layout.page_length
    return prefill_pages.lower(
        params,
        slots_shape(settings, cache_dtype(params), layout),
        _rows(settings, prompts, size.width, dtype=jnp.int32),
        _rows(settings, prompts, size.width, dtype=jnp.bool_),
        _rows(settings, prompts, pages, dtype=jnp.int32),
        _rows(settings, prompts, min(layout.reach, pages), dtype=jnp.int32) if layout.reach else None,
        arch=settings.arch,
        choices=settings.choices,
    )


def lower_decode_slots(
    settings: EngineSettings,
    params: Params,
    sampling: Sampling,
    layout: SlotLayout,
    *,
    slots: int,
    attend_pages: AttendPages,
) -> jax.stages.Lowered:
    """A chunk of decoding in `slots` slots of each shard."""
    used = slots * layout.shards
    row = _rows(settings, used, dtype=jnp.int32)
    table = _rows(settings, used, layout.row_pages, dtype=jnp.int32)
    windows = Seen(_rows(settings, used, layout.reach, dtype=jnp.int32), row, row) if layout.reach else None
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(settings.mesh))
    return decode_slots.lower(
        params,
        slots_shape(settings, cache_dtype(params), layout),
        Plan(row, row, row, row, row, row, row, table, row, windows),
        sampling,
        number,
        number,
        arch=settings.arch,
        attend_pages=attend_pages,
        eos_ids=settings.eos_ids,
        pad_id=settings.pad_id,
        choices=settings.choices,
    )


def empty_shape(settings: EngineSettings, dtype: Any, layout: SlotLayout) -> dict[str, Any]:
    """The arguments of `empty_slots`."""
    return {
        "arch": settings.arch,
        "slots": layout.slots * layout.shards,
        "pages": layout.pages * layout.shards,
        "window_pages": layout.window_pages * layout.shards,
        "page_length": layout.page_length,
        "dtype": np.dtype(dtype),
    }


def slots_shape(settings: EngineSettings, dtype: Any, layout: SlotLayout) -> Slots:
    """Shapes and shardings of the slots and the pages."""
    arch, slots = settings.arch, layout.slots * layout.shards
    sharding, shape = NamedSharding(settings.mesh, wave_spec(4)), (arch.num_kv_heads, layout.page_length)

    def pages(number: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number * layout.shards, *shape, 2 * arch.head_dim), dtype, sharding=sharding)

    tokens, finished = _rows(settings, slots, dtype=jnp.int32), _rows(settings, slots, dtype=jnp.bool_)
    held = [pages(layout.pages if kind.window is None else layout.window_pages) for kind in arch.layers]
    return Slots(tokens, finished, held)


def _rows(settings: EngineSettings, *shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(settings.mesh))
