"""Host: what the rollout engine compiles and calls in a training step, from shapes alone; on CPUs without copies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dapo_jax.data.work import Work, total_work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.transformer import Params
from dapo_jax.preflight.compiled import CACHE, DECODING, Program, device_bytes
from dapo_jax.preflight.hlo_products import PagedKeys
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.layout import EngineSettings, Layout, Shape, cache_dtype
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.programs import Calls
from dapo_jax.rollout.queue import Queue, needed_work
from dapo_jax.rollout.rows import ALIVE, ENDED
from dapo_jax.rollout.sizes import choose_layout
from dapo_jax.run.sampler import page_attention

CONTINUED = "continued"  # begins the names of what continues responses


@dataclass(frozen=True)
class RoundPlan:
    """The programs of one generation round."""

    programs: list[Program]  # with the memory that the engine takes
    rows: int  # decoded at once, on all devices
    sizes: Mapping[str, int]  # for a report
    work: Mapping[str, Work]  # computed and needed, by stage


def plan_round(
    settings: EngineSettings,
    weights: Params,
    *,
    segment_length: int,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
    limits: bool = True,
    returns: bool = False,
    stops: bool = False,
) -> RoundPlan:
    """The round of an engine that has sampled such responses before, with responses and prompts of these lengths.

    With partial rollouts, a step begins such responses, and continues those of as many steps before it as the longest
    one takes.

    Args:
        weights: shapes and shardings of the decoding weights.
        segment_length: tokens that a response advances per step; 0 = whole responses.
        response_lengths: [Q, G] tokens, at most max_response_length.
        prompt_lengths: [Q] tokens, at most max_prompt_length.
        free_bytes: on each device, before the first call.
        limits: `Sampling.limits` of the draws.
        returns: responses are episodes; none of these waits, and all of their tokens are the policy's.
        stops: as in `choose_layout`.
    """

    def planned(responses: np.ndarray, prompts: np.ndarray) -> RoundPlan:
        return _plan(settings, weights, responses, prompts, free_bytes, segment_length or None, limits, returns, stops)

    if not segment_length:
        return planned(response_lengths, prompt_lengths)
    first = planned(np.minimum(response_lengths, segment_length), prompt_lengths)
    prompts, drawn = [], []
    for begun in range(segment_length, int(response_lengths.max()), segment_length):
        group, sample = np.nonzero(response_lengths > begun)
        prompts.append(prompt_lengths[group] + begun)
        drawn.append(np.minimum(response_lengths[group, sample] - begun, segment_length))
    if not prompts:
        return first
    further = planned(np.concatenate(drawn)[:, None], np.concatenate(prompts))
    continued = [replace(program, name=f"{CONTINUED}: {program.name}") for program in further.programs]
    return RoundPlan(
        programs=[*first.programs, *continued],
        rows=max(first.rows, further.rows),
        sizes={**first.sizes, **{f"{CONTINUED}_{name}": size for name, size in further.sizes.items()}},
        work=total_work([first.work, further.work]),
    )


def _plan(
    settings: EngineSettings,
    weights: Params,
    responses: np.ndarray,
    prompts: np.ndarray,
    free_bytes: float,
    max_tokens: int | None,
    limits: bool,
    returns: bool,
    stops: bool,
) -> RoundPlan:
    history = LengthHistory(settings.max_response_length)
    history.add(responses.reshape(-1))
    (attend, _), samples = page_attention(settings), responses.shape[1]
    given = cache_dtype(weights), prompts, samples, history, free_bytes
    layout = choose_layout(settings, attend, *given, max_tokens=max_tokens, returns=returns, stops=stops)
    limit = max_tokens or settings.max_response_length
    counted, work = walk_lengths(
        settings.arch,
        layout,
        responses,
        prompts,
        limit=limit,
        lookahead=settings.lookahead,
        gathers=attend is attend_gathered,
    )
    calls = Calls(settings, weights, layout, attend, limits=attend is None or limits)
    sizes = {"slots": layout.slots * layout.shards}
    if layout.stretches:
        sizes["slot_tokens"] = layout.page_length + layout.stretches[-1]
    else:
        sizes |= {"pages": layout.pages * layout.shards, "page_tokens": layout.page_length}
    return RoundPlan(list(_programs(calls, counted, weights)), sizes["slots"], sizes, work)


def _programs(calls: Calls, counted: Counting, weights: Params) -> Iterator[Program]:
    layout, of_weights = calls.layout, {DECODING: device_bytes(weights)}
    cache = {CACHE: device_bytes(calls.held().cache)}
    held = {**cache, **of_weights}
    room = f"{layout.slots} slots" if layout.stretches else f"{layout.slots} slots and {layout.pages} pages"
    yield Program("prefill", f"room for {room} a shard", 1, calls.lower_empty, cache, of_weights)
    for size in {**counted.prefills, layout.prefills[-1]: 0}:
        name = f"prefill {size.at_once} prompts a shard, width {size.width}"
        yield Program("prefill", name, counted.prefills[size], lambda size=size: calls.lower_prefill(size), held)
    for size, *_ in layout.reads:
        name = f"read {size.tokens} tokens of an environment of {size.rows} rows a shard"
        yield Program("prefill", name, 0, lambda size=size: calls.lower_read(size), held)
    shapes = counted.decodes if layout.stretches else [layout.first_shape._replace(slots=n) for n in layout.ladder]
    for shape in shapes:
        chunks, pairs = counted.decodes[shape], None
        if layout.stretches:
            name = f"{shape.slots} slots a shard, {shape.stretch} tokens of a response"
            held = {CACHE: device_bytes(calls.held(shape).cache), **of_weights}
        else:
            name = f"{shape.slots} slots a shard, {layout.pages} pages"
            if not counted.gathers:
                pairs = _paged_keys(counted, shape, layout, calls.settings.arch)
        yield Program(
            "decode", f"decode {name}", chunks, lambda shape=shape: calls.lower_decode(shape), held, pairs=pairs
        )


def _paged_keys(counted: Counting, shape: Shape, layout: Layout, arch: Architecture) -> PagedKeys:
    """Those of a device, in the mean chunk of this shape."""
    prompts, read = counted.prompt_pages[shape], counted.run_pages[shape]
    own = counted.pages[shape] - token_flops(arch).mean(lambda window: prompts if window is None else 0)
    tokens = layout.page_length / (max(counted.decodes[shape], 1) * layout.shards)
    return PagedKeys(own * tokens, prompts * tokens, read * tokens)


class KnownLengths:
    """Responses that end after a known number of tokens, [B]; `queue.Outcome`."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.seen = lengths, np.zeros(len(lengths), np.int64)

    def add(self, chunk: int, rows: np.ndarray, starts: np.ndarray) -> int:
        """Takes a chunk of so many tokens."""
        real = rows >= 0
        self.seen[rows[real]] = np.maximum(self.seen[rows[real]], starts[real] + chunk)
        return chunk

    def states(self, rows: np.ndarray) -> np.ndarray:
        """As `queue.Outcome`."""
        return np.where((rows >= 0) & (self.seen < self.lengths)[rows], ALIVE, ENDED)

    def are_given(self, rows: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """As `queue.Outcome`: the policy writes all."""
        return np.zeros((len(rows), length), bool)


def walk_lengths(
    arch: Architecture,
    layout: Layout,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    *,
    limit: int,
    lookahead: int,
    gathers: bool = False,
) -> tuple[Counting, dict[str, Work]]:
    """What an engine does whose responses turn out to have these lengths, and its work by stage.

    Args:
        response_lengths: [Q, G] tokens, from 1 to limit.
        prompt_lengths: [Q] tokens.
        limit: max_response_length.
        gathers: of `Counting`.
    """
    queue, devices = Queue(layout, lookahead=lookahead), Counting(arch, layout, gathers=gathers)
    queue.add(prompt_lengths, np.full(response_lengths.size, limit))
    outcome = KnownLengths(response_lengths.reshape(-1))
    while queue.step(devices, outcome):
        pass
    return devices, devices.take_work(needed_work(arch, prompt_lengths, response_lengths))
