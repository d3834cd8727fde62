"""Host: what the slot engine compiles and calls in one generation round, from shapes alone."""

from collections.abc import Iterator

import numpy as np

from dapo_jax.models.paged_attention import AttendPages
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.round_plan import ANY_SAMPLING, RoundPlan, RoundProgram
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.slot_programs import (
    layout_of_slots,
    lower_decode_slots,
    lower_empty_slots,
    lower_prefill_pages,
    slots_shape,
)
from dapo_jax.rollout.slot_walk import SlotWalk, walk_slots


def plan_slots(
    settings: EngineSettings,
    weights: Params,
    *,
    attend_pages: AttendPages,
    max_tokens: int | None,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
) -> RoundPlan:
    """The round of an engine that has sampled such responses before, with responses and prompts of these lengths.

    Args:
        weights: shapes and shardings of the decoding weights.
        attend_pages: attention to pages, of the mesh's platform.
        max_tokens: most to draw for a response; None = max_response_length.
        response_lengths: [Q, G] tokens, at most max_response_length.
        prompt_lengths: [Q] tokens, at most max_prompt_length.
        free_bytes: on each device, before the first call.
    """
    history, longest = LengthHistory(settings.max_response_length), settings.max_response_length
    history.add(response_lengths.reshape(-1))
    samples = response_lengths.shape[1]
    layout = layout_of_slots(
        settings, cache_dtype(weights), prompt_lengths, samples, history, free_bytes, max_tokens=max_tokens
    )
    limit = max_tokens or longest
    walk, work = walk_slots(
        settings.arch, layout, response_lengths, prompt_lengths, limit=limit, lookahead=settings.lookahead
    )
    rows = layout.slots * layout.shards
    sizes = {"slots": rows, "pages": layout.pages * layout.shards, "page_tokens": layout.page_length}
    return RoundPlan(list(_programs(settings, weights, attend_pages, walk)), rows, sizes, work)


def _programs(
    settings: EngineSettings, weights: Params, attend_pages: AttendPages, walk: SlotWalk
) -> Iterator[RoundProgram]:
    layout, dtype = walk.queue.layout, cache_dtype(weights)
    pages = slots_shape(settings, dtype, layout).pages
    yield RoundProgram(
        "prefill",
        f"room for {layout.slots} slots and {layout.pages} pages a shard",
        1,
        lambda: lower_empty_slots(settings, dtype, layout),
        pages,
        reads_weights=False,
    )
    for size in {**walk.prefills, layout.prefills[-1]: 0}:
        yield RoundProgram(
            "prefill",
            f"prefill {size.at_once} prompts a shard into pages, width {size.width}",
            walk.prefills[size],
            lambda size=size: lower_prefill_pages(settings, weights, layout, size),
            pages,
        )
    for slots in dict.fromkeys((layout.slots, layout.few_slots)):
        calls = walk.decodes[slots]
        read = walk.pages[slots] * layout.page_length / (calls * layout.shards) if calls else 0.0
        yield RoundProgram(
            "decode",
            f"decode {slots} slots a shard, {layout.pages} pages",
            calls,
            lambda slots=slots: lower_decode_slots(
                settings, weights, ANY_SAMPLING, layout, slots=slots, attend_pages=attend_pages
            ),
            pages,
            pairs=read,
        )
