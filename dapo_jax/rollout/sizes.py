"""Host: how an engine chooses its sizes: slots, pages, stretches and calls, from lengths and memory."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.data.padding import bucket
from dapo_jax.errors import InputError
from dapo_jax.models.attention import queries_at_once
from dapo_jax.models.gated_delta import state_bytes
from dapo_jax.models.paged_attention import AttendPages, attend_gathered, most_together
from dapo_jax.models.state_kernels import fits_all
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.layout import (
    RESERVED_STATES,
    EngineSettings,
    Layout,
    PrefillSize,
    ReadSize,
    open_prompts,
    own_pages,
)
from dapo_jax.rollout.lengths import LengthHistory

ROW_MULTIPLE = 8  # rows of a device: with fewer, decoding on accelerators is not faster
CPU_CHUNK, CHUNK = 16, 32  # tokens of a chunk on CPUs and elsewhere, where none is set
LONG, LONG_CHUNK = 2048, 64  # the same elsewhere, if a response may have LONG tokens ...
EPISODE_CHUNK, FEW_ROWS = 4, 256  # ... and in episodes, whose turns end often: of so many rows of a shard; of more, 8
LISTED = 2**17  # pages that a call which reads chunks may list: half of the 1 MiB that a TPU has for such numbers
EPISODES = 16  # of a shard that have slots on a CPU, if there are so many; of more, half
WIDEST_STEP = 512  # tokens between two stretches
PREFILLED = 2048  # tokens of a shard's prompts that are prefilled in one call, unless one prompt has more
PREFILL_BYTES = 2.0**30  # of a device's memory for one call of prefill, besides keys and values
SCORES = 4  # float32 arrays of a row's scores of the vocabulary that a draw has in memory at once
MARGIN = 0.3  # of the memory stays free of expected keys and values, the less the more equal lengths are
CHEAP_ROWS = 64  # of a shard, that decode about as fast as fewer: what they take is reading the weights
ALIKE = 0.43  # the evenness from which all rows have slots at once, if they fit
STEPS = 4  # of the ladder of pages, each a half of the one before; from an evenness of EQUAL on, when slots empty ...
EQUAL, FEW_STEPS = 0.75, 2  # ... together, so many


def choose_layout(
    settings: EngineSettings,
    attend: AttendPages | None,
    dtype: np.dtype,
    prompt_lengths: Sequence[int] | np.ndarray,
    num_samples: int,
    history: LengthHistory,
    free_bytes: float,
    *,
    num_prompts: int | None = None,
    max_tokens: int | None = None,
    returns: bool = False,
    stops: bool = False,
) -> Layout:
    """The sizes of a queue: as many slots as max_num_seqs, or else the memory and earlier lengths, allow.

    Args:
        attend: attention to pages; None = each slot holds a stretch.
        dtype: of keys and values.
        prompt_lengths: [Q] tokens of its prompts, or of prompts like them.
        history: how long responses have been.
        free_bytes: on each device, of which keys and values may take `memory_share`; 0 = not known.
        num_prompts: of the queue; None = Q.
        max_tokens: most to draw for a response; None = max_response_length.
        returns: as in Layout.
        stops: turns may end before what a device has drawn, by a stop rule.

    Raises:
        InputError: the memory does not hold the pages of the longest response.
    """
    drawn, shards, arch = max_tokens or settings.max_response_length, num_batch_shards(settings.mesh), settings.arch
    token_bytes = 2 * arch.num_kv_heads * arch.head_dim / settings.mesh.shape["tensor"] * dtype.itemsize
    rows = -(-(num_prompts or len(prompt_lengths)) // shards) * num_samples  # of a shard
    width = prompt_width(int(max(prompt_lengths)), settings.max_prompt_length)
    states = sum(kind.delta for kind in arch.layers) * (0.0 if arch.delta is None else state_bytes(arch.delta, dtype))
    memory = free_bytes * settings.memory_share
    states /= settings.mesh.shape["tensor"]
    sizes = _Sizes(settings, token_bytes, memory, num_samples, shards, rows, drawn, width, states)
    if attend is None:
        return _of_stretches(sizes, returns)
    gathers, mean_prompt = attend is attend_gathered, float(np.mean(prompt_lengths))
    keeps_states = returns and bool(arch.delta) and not stops
    return _of_pages(sizes, history, mean_prompt, gathers=gathers, returns=returns, keeps_states=keeps_states)


class _Sizes(NamedTuple):
    """What stretches and pages follow from."""

    settings: EngineSettings
    token_bytes: float  # of a token's keys and values in one layer on one device
    memory: float  # bytes of a device that keys and values may take; 0 = not known
    num_samples: int  # of a prompt
    shards: int
    rows: int  # of a shard
    drawn: int  # most tokens of a response
    width: int  # tokens of a prompt, at most, with padding
    state_bytes: float  # of a row's states in all layers with linear attention, on one device

    @property
    def attention_layers(self) -> int:
        return sum(not kind.delta for kind in self.settings.arch.layers)

    def at_once(self, width: int) -> int:
        """Prompts of this width in a call of prefill: about so many that scores and activations of a layer fit."""
        arch, tensor = self.settings.arch, self.settings.mesh.shape["tensor"]
        divided = 3 * arch.num_heads * queries_at_once(width) + 4 * arch.forward_size
        prompt_bytes = 4.0 * width * (divided / tensor + 8 * arch.hidden_size)
        return max(min(int(PREFILL_BYTES / prompt_bytes), PREFILLED // width), 1)


def prompt_width(longest: int, limit: int) -> int:
    """Width of prompts of which the longest has so many tokens: a bucket, at least a quarter of that of `limit`."""
    return bucket(max(longest, bucket(limit) // 4))


def _of_stretches(sizes: _Sizes, returns: bool) -> Layout:
    """As many slots as fit if all responses are longest; for episodes, whose lengths differ much, at most for half.

    Chunks are equally long, as many as the longest response needs, and short: on a CPU the last rows take most of the
    time, and few of their tokens should be drawn after their end.
    """
    settings, num_samples, width = sizes.settings, sizes.num_samples, sizes.width
    further = max(sizes.drawn - 1, 1)  # after the token that prefill draws
    chunk = -(-further // -(-further // (settings.chunk_length or CPU_CHUNK)))
    stretches = stretches_of(further, chunk)
    most = min(sizes.rows, max(sizes.rows // 2, EPISODES)) if returns else sizes.rows
    slots = min(most, settings.max_num_seqs // sizes.shards or most)
    if not settings.max_num_seqs:
        per_slot = sizes.token_bytes * sizes.attention_layers * (width + stretches[-1]) + sizes.state_bytes
        slots = min(slots, int(sizes.memory / per_slot))
    slots, at_once = max(slots, 1), sizes.at_once(width)
    prompts = 2 + -(-slots // num_samples) + max(at_once // 2, 4 // num_samples, 1) + 2 * at_once
    prefill = PrefillSize(width, min(at_once, -(-sizes.rows // num_samples)))
    ladder = rungs(slots, slots.bit_length(), least=1)
    return Layout(num_samples, sizes.shards, ladder, prompts, width, chunk, 1, (prefill,), stretches, returns=returns)


def stretches_of(tokens: int, chunk: int) -> tuple[int, ...]:
    """Tokens of stretches, in whole chunks, up to `tokens`: each twice the one before, or WIDEST_STEP more."""
    found, last = [chunk], -(-tokens // chunk) * chunk
    while found[-1] < last:
        more = min(found[-1], max(WIDEST_STEP // chunk, 1) * chunk)
        found.append(min(found[-1] + more, last))
    return tuple(found)


def rungs(slots: int, steps: int, *, least: int) -> tuple[int, ...]:
    """The ladder of slots: so many halves, down to `least` if there are so many."""
    return tuple(dict.fromkeys(max(slots >> step, min(least, slots)) for step in range(steps)))


class _Pages(NamedTuple):
    """Pages of the layers with a window, or of those without."""

    own: int  # of a response, at most
    prompt: int  # of a prompt, at most
    bytes: float  # of one in all these layers, on one device

    def most(self, slots: int, *, waiting: int) -> int:
        """As if all slots were at their longest, with a prompt for each and those that wait."""
        return 1 + slots * self.own + (slots + waiting) * self.prompt


def _of_pages(
    sizes: _Sizes, history: LengthHistory, mean_prompt: float, *, gathers: bool, returns: bool, keeps_states: bool
) -> Layout:
    """As many slots as `_slots` says. A page has the tokens of a chunk, or of several.

    Without decode_chunk_length a page has 32 tokens, with which few are drawn after the end of a short response, and 64
    for long ones: larger pages are read faster, and the host looks less often. A page is no longer than the longest
    response, rounded up to a power of two. After the end of its turn a row idles to the end of the chunk, so chunks of
    episodes are shorter; with many rows not by as much, as the host's time for a chunk grows with them. Otherwise
    layers with a window see whole pages before a chunk, which is then a page.
    """
    settings, drawn, arch = sizes.settings, sizes.drawn, sizes.settings.arch
    chosen = settings.chunk_length or (LONG_CHUNK if drawn >= LONG else CHUNK)
    length = min(max(chosen, settings.least_page), max(1 << (drawn - 1).bit_length(), settings.least_page))
    at_once = min(sizes.rows, settings.max_num_seqs // sizes.shards or sizes.rows)
    of_episodes = EPISODE_CHUNK * (1 if at_once <= FEW_ROWS else 2)
    chunk = settings.chunk_length or (of_episodes if returns else length)
    divided = chunk < length and (returns or arch.window is None)
    chunk = max(1 << chunk.bit_length() - 1, settings.least_chunk) if divided else length
    assert length % chunk == 0, "a page has whole chunks"
    prefills = _prefills(sizes, length)
    prompt, own = prefills[-1].width // length, own_pages(drawn, chunk, length, returns)
    of_layer = length * sizes.token_bytes
    row_pages, with_window = prompt + own, sum(kind.window is not None for kind in arch.layers)
    # A chunk that begins inside a page sees one page more, and another if a turn ends before a page that it had begun.
    reach = 0 if arch.window is None else min(max(-(-(arch.window - 1) // length), 1) + 2 * returns, max(row_pages, 1))
    full = _Pages(own, prompt, of_layer * (sizes.attention_layers - with_window))
    windowed = _Pages(min(reach, own), min(reach, prompt), of_layer * with_window)
    # of a slot: a page in the making is in memory twice, as are the gathered pages of a layer
    scores = 4.0 * SCORES * arch.vocab_size / settings.mesh.shape["tensor"]
    per_slot = 2 * (full.bytes + windowed.bytes + gathers * row_pages * of_layer) + scores
    copied = gathers or arch.delta is None or not fits_all(arch.delta)  # without a kernel a state is in memory twice
    per_slot += (2 + keeps_states + copied) * sizes.state_bytes  # of a row, its prompt, and a row that waits
    tokens = min(history.held(), drawn) + length / 2 + (mean_prompt + length / 2) / sizes.num_samples
    per_row = tokens / length * full.bytes + min(tokens / length, windowed.own + windowed.prompt) * windowed.bytes
    places = (3 * prefills[0].at_once + RESERVED_STATES) * sizes.state_bytes  # of prompts that wait, and are being read
    sizes = sizes._replace(memory=max(sizes.memory - places, 1.0) if sizes.memory else 0.0)  # 0 = not known
    slots = _slots(sizes, history.evenness(), per_slot=per_slot, per_row=per_row)
    keeps = returns and (keeps_states or not arch.delta)  # rows that wait for an environment keep their pages
    begun = slots * (1 + keeps)
    pages, windows = (kind.most(begun, waiting=2 * prefills[0].at_once) for kind in (full, windowed))
    if not settings.max_num_seqs or sizes.memory > 0:
        pages = min(pages, _pages_in(sizes.memory - slots * per_slot, full, windowed, pages, windows))
    if pages < 1 + row_pages:
        free = sizes.memory / settings.memory_share / 2**30
        raise InputError(
            f"the keys and values of a response of data.max_response_length={settings.max_response_length} tokens do "
            f"not fit rollout.kv_memory_share={settings.memory_share} of {free:.1f} free GiB on a "
            "device"
        )
    ladder = rungs(slots, FEW_STEPS if history.evenness() >= EQUAL else STEPS, least=ROW_MULTIPLE)
    held = pages, length, chunk, row_pages, prefills, (), min(pages, windows) if reach else 0, reach
    of_device = arch.num_heads // arch.num_kv_heads, arch.num_kv_heads // settings.mesh.shape["tensor"]
    together = most_together(*of_device) if sizes.num_samples > 1 else 0
    states = (open_prompts(slots, prefills) + RESERVED_STATES, slots * (1 + keeps_states)) if arch.delta else (0, 0)

    def reading(tokens: int) -> tuple[ReadSize, ...]:
        # The pages of a row are listed for each token; where they are gathered, that takes as much memory as a slot.
        fitting = slots // tokens if gathers else LISTED // (tokens * row_pages)
        most = max(min(sizes.at_once(tokens), slots, fitting), 1)
        rows = [1 << step for step in range(most.bit_length() - 1, 0, -2)]
        return tuple(ReadSize(tokens, number) for number in (*rows, 1))

    reads = tuple(map(reading, dict.fromkeys((length, chunk)))) if returns else ()
    return Layout(sizes.num_samples, sizes.shards, ladder, *held, *states, together, returns, keeps_states, reads)


def _slots(sizes: _Sizes, evenness: float, *, per_slot: float, per_row: float) -> int:
    """Slots of a shard: max_num_seqs, or by memory and lengths; for few programs, a bucket of them.

    Rows that fit the memory all have slots at once if their lengths are alike. Otherwise some wait for slots. The last
    of them leave slots empty, the longer the less equal the lengths are, so with few rows a part of the memory is free.

    Args:
        per_slot, per_row: bytes that a slot takes, and that are expected of the keys and values of its row.
    """
    rows, most = sizes.rows, sizes.settings.max_num_seqs
    if most:
        return min(max(most // sizes.shards, 1), bucket(rows))
    part = 1 - MARGIN * (1 - evenness)
    fitting = int(part * sizes.memory / (part * per_slot + per_row))
    share = min(evenness / ALIKE, 1.0) if rows <= fitting else evenness
    slots = min(fitting, max(CHEAP_ROWS, int(share * rows)))
    if slots >= rows:
        return bucket(rows)
    half = 1 << max(slots, 1).bit_length() - 1
    return half * 3 // 2 if slots >= half * 3 // 2 else half


def _pages_in(memory: float, full: _Pages, windowed: _Pages, most: int, most_windows: int) -> int:
    """Pages that fit the memory, if layers with a window have as many, but at most `most_windows`.

    If all layers have a window, pages of the others take no memory: there are `most` of them once those of windows fit.
    """
    pages = memory / (full.bytes + windowed.bytes)
    if windowed.bytes and pages > most_windows:
        pages = (memory - most_windows * windowed.bytes) / full.bytes if full.bytes else most
    return int(pages)


def _prefills(sizes: _Sizes, length: int) -> tuple[PrefillSize, ...]:
    """Calls of prefill of whole pages: from PREFILLED tokens on, each an eighth wider than the one before.

    Only those that are used are compiled.
    """
    widths = [sizes.width]
    while (narrower := widths[0] * 8 // 9) >= PREFILLED:
        widths.insert(0, narrower)
    return tuple(PrefillSize(-(-width // length) * length, sizes.at_once(width)) for width in widths)
