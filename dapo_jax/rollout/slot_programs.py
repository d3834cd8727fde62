"""Host: sizes of the slot engine, and its compiled functions, lowered from shapes alone."""

from collections.abc import Sequence
from typing import Any

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
    cache_bytes,
    cache_dtype,
    prefill_bytes,
)
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import ROW_MULTIPLE, LengthHistory, prompt_width
from dapo_jax.rollout.slot_decoding import Plan, Slots, decode_slots, empty_slots, prefill_pages
from dapo_jax.rollout.slot_queue import PrefillSize, SlotLayout

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

    Args:
        dtype: of keys and values.
        prompt_lengths: [Q] tokens of its prompts, or of prompts like them.
        free_bytes: on each device, of which slots and pages may take `memory_share`; 0 = not known.
        num_prompts: of the generation; None = Q.
        max_tokens: most to draw for a response; None = max_response_length.

    Raises:
        InputError: the memory does not hold the pages of the longest response.
    """
    shards, length = num_batch_shards(settings.mesh), settings.chunk_length
    rows = -(-(num_prompts or len(prompt_lengths)) // shards) * num_samples  # of a shard
    prefills = _prefill_sizes(settings, prompt_width(int(max(prompt_lengths)), settings.max_prompt_length))
    width, at_once = prefills[-1].width, prefills[0].at_once
    drawn = max_tokens or settings.max_response_length
    prompt_pages, own_pages = width // length, max(-(-drawn // length) - 1, 0)
    per_page = length * cache_bytes(settings, dtype)
    # a page in the making is in memory twice
    per_slot = 2 * per_page + 4.0 * SCORES * settings.arch.vocab_size / settings.mesh.shape["tensor"]
    memory = free_bytes * settings.memory_share
    if settings.max_num_seqs:
        wanted = max(settings.max_num_seqs // shards, 1)
        slots = wanted if wanted <= rows else _rung(rows)
    else:
        held = history.mean_held() + length / 2 + (float(np.mean(prompt_lengths)) + length / 2) / num_samples
        slots = FILL * memory / (FILL * per_slot + held / length * per_page)
        slots = _rung(min(slots, max(CHEAP_ROWS, rows / SLOTS_OF_ROWS), rows))
    # as if all slots were at their longest, with a prompt for each and those that wait
    most = 1 + slots * own_pages + (slots + 2 * at_once) * prompt_pages
    known = not settings.max_num_seqs or free_bytes > 0
    pages = min(most, int((memory - slots * per_slot) / per_page)) if known else most
    if pages < 1 + prompt_pages + own_pages:
        raise InputError(
            f"the keys and values of a response of data.max_response_length={settings.max_response_length} tokens do "
            f"not fit rollout.kv_memory_share={settings.memory_share} of {free_bytes / 2**30:.1f} free GiB on a device"
        )
    few = max(slots // FEW_SLOTS, min(ROW_MULTIPLE, slots))
    return SlotLayout(num_samples, shards, slots, few, pages, length, prompt_pages + own_pages, prefills)


def _prefill_sizes(settings: EngineSettings, widest: int) -> tuple[PrefillSize, ...]:
    """Calls of prefill for prompts of at most `widest` tokens: from PREFILLED on, an eighth wider than the one before.

    Only those that are used are compiled.
    """
    length, widths = settings.chunk_length, [widest]
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
    prompts = size.at_once * layout.shards
    return prefill_pages.lower(
        params,
        slots_shape(settings, cache_dtype(params), layout),
        _rows(settings, prompts, size.width, dtype=jnp.int32),
        _rows(settings, prompts, size.width, dtype=jnp.bool_),
        _rows(settings, prompts, size.width // layout.page_length, dtype=jnp.int32),
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
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(settings.mesh))
    return decode_slots.lower(
        params,
        slots_shape(settings, cache_dtype(params), layout),
        Plan(row, row, row, row, row, row, row, table, row),
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
        "page_length": layout.page_length,
        "dtype": np.dtype(dtype),
    }


def slots_shape(settings: EngineSettings, dtype: Any, layout: SlotLayout) -> Slots:
    """Shapes and shardings of the slots and the pages."""
    arch, slots = settings.arch, layout.slots * layout.shards
    shape = layout.pages * layout.shards, arch.num_kv_heads, layout.page_length, 2 * arch.head_dim
    pages = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(settings.mesh, wave_spec(4)))
    tokens, finished = _rows(settings, slots, dtype=jnp.int32), _rows(settings, slots, dtype=jnp.bool_)
    return Slots(tokens, finished, [pages] * arch.num_layers)


def _rows(settings: EngineSettings, *shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(settings.mesh))
