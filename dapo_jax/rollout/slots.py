"""Host: the rollout engine that decodes in slots, which go to the next response as soon as one has ended.

slot_queue.py decides which row has which slot and pages, slot_walk.py when; here is what the devices do. None of this
changes a token: every draw has an address (sampling.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.parallel.sharding import batch_sharding, fetch, put
from dapo_jax.rollout.engine import Begun, Generation, GivenUp, OnFinished
from dapo_jax.rollout.engine_base import Block, Call, EngineBase
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.needed_work import work_of
from dapo_jax.rollout.responses import JoinedResponses
from dapo_jax.rollout.sampling import TRAIN
from dapo_jax.rollout.slot_decoding import Chunk, Plan, empty_slots, prefill_pages
from dapo_jax.rollout.slot_programs import empty_shape, layout_of_slots, lower_decode_slots
from dapo_jax.rollout.slot_queue import Opened, PrefillSize, SlotLayout, SlotQueue, Turn
from dapo_jax.rollout.slot_walk import SlotWalk


class SlotEngine(EngineBase):
    """A `RolloutEngine`, see `EngineBase`.

    Args:
        attend_pages: attention to pages, of the mesh's platform.
    """

    overlaps = True

    def __init__(
        self, settings: EngineSettings, attend_pages: AttendPages, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(settings, check)
        self.attend_pages = attend_pages

    def _open(self, call: Call) -> Generation:
        layout = layout_of_slots(
            self.settings,
            cache_dtype(call.params),
            call.prompt_lengths,
            call.num_samples,
            self.learnt.history(call.purpose),
            self.learnt.free_memory(),
            num_prompts=call.num_prompts,
            max_tokens=call.max_tokens,
        )
        return _Queued(self, call, layout)


class _Queued:
    """A `Generation` in which all prompts form one queue: slots are refilled as long as any wait."""

    def __init__(self, engine: SlotEngine, call: Call, layout: SlotLayout) -> None:
        self.engine, self.call, self.responses = engine, call, JoinedResponses()
        settings, gathers = engine.settings, engine.attend_pages is attend_gathered
        self.walk = SlotWalk(settings.arch, SlotQueue(layout), settings.lookahead, gathers)
        self.devices = _Slots(engine, call, layout, self.responses)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> Callable[[], Rollout]:
        block = self.engine.block(self.call, prompts, numbers, begun, limits, on_finished)
        first_row = self.walk.queue.add(block.prompt_lengths, block.responses.room())
        self.responses.parts[first_row] = block.responses
        self.devices.add(block)

        def wait() -> Rollout:
            while not block.responses.ended.all():
                going_on = self.walk.advance(self.devices, self.responses)
                assert going_on or block.responses.ended.all(), "responses are left that no slot takes"
            del self.responses.parts[first_row]
            if not self.responses.parts:
                self.devices.free()
            self.engine.learnt.history(self.call.purpose).add(block.responses.drawn())
            return self.engine.finished(block, [self.walk.take_computed()])

        return wait

    def close(self) -> GivenUp:
        drawn = np.concatenate([np.zeros(0, np.int64), *(part.drawn() for part in self.responses.parts.values())])
        self.responses.parts.clear()
        self.walk.queue.release(self.responses.alive)
        computed = self.walk.take_computed()
        return GivenUp(int(np.sum(drawn > 0)), int(drawn.sum()), work_of([computed], dict.fromkeys(computed, 0.0)))


class _Slots:
    """All slots and pages on the devices."""

    def __init__(self, engine: SlotEngine, call: Call, layout: SlotLayout, responses: JoinedResponses) -> None:
        self.engine, self.settings, self.call, self.layout = engine, engine.settings, call, layout
        self.responses = responses
        # Calls of prefill whose prompts' experts are to be recorded: prompts, their places in the call, experts.
        self.prefilled: list[tuple[np.ndarray, np.ndarray, jax.Array]] = []
        for slots in (layout.slots, layout.few_slots):
            engine.programs.prepare(*self._lowering(slots))
        self.slots: Any = None  # while there are prompts
        self.prompts: list[Sequence[int]] = []
        # Of each row: tokens and last token of its prompt, number, sample, tokens begun. Row -1, the last, is no row.
        self.rows = np.array([[1], [self.settings.pad_id], [-1], [0], [0]], np.int32)

    def free(self) -> None:
        """Frees the memory of slots and pages, which hold nothing that is needed."""
        self.slots = None

    def add(self, block: Block) -> None:
        if self.slots is None:
            self.slots = empty_slots(**empty_shape(self.settings, cache_dtype(self.call.params), self.layout))
        prompts = [(len(prompt), prompt[-1]) for prompt in block.prompts]
        of_prompts = np.repeat(np.array(prompts, np.int32).T, self.layout.num_samples, axis=1)
        new = np.stack([*of_prompts, block.numbers, block.samples, block.responses.begun.astype(np.int32)])
        self.rows = np.concatenate([self.rows[:, :-1], new, self.rows[:, -1:]], axis=1)
        self.prompts.extend(block.prompts)

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> None:
        layout = self.layout
        prompts: list[Sequence[int]] = [[self.settings.pad_id]] * (layout.shards * size.at_once)
        most = size.width // layout.page_length
        destinations = np.zeros((len(prompts), most), np.int32)
        window_destinations = np.zeros((len(prompts), min(layout.reach, most)), np.int32)
        used, places = [0] * layout.shards, []
        for one in opened:
            place = one.shard * size.at_once + used[one.shard]
            used[one.shard] += 1
            places.append(place)
            prompts[place] = self.prompts[one.prompt][:-1]
            destinations[place, -len(one.pages) :] = one.pages
            if one.window_pages:
                window_destinations[place, -len(one.window_pages) :] = one.window_pages
        tokens, mask = pad_prompts(prompts, size.width, self.settings.pad_id)
        self.slots, experts = prefill_pages(
            self.call.params,
            self.slots,
            self._put(tokens),
            self._put(mask),
            self._put(destinations),
            self._put(window_destinations) if layout.reach else None,
            arch=self.settings.arch,
            choices=self.settings.choices,
        )
        if experts is not None and self.call.purpose == TRAIN:
            self.prefilled.append((np.array([one.prompt for one in opened]), np.array(places), experts))

    def decode(self, turn: Turn) -> Chunk:
        self.engine.check()
        prompt_lengths, last_tokens, numbers, samples, begun = self.rows[:, turn.rows]
        plan = Plan(
            sources=turn.sources,
            first_tokens=last_tokens,
            numbers=numbers,
            samples=samples,
            prompt_lengths=prompt_lengths,
            begun=begun,
            sampled=turn.sampled,
            table=turn.table,
            destinations=turn.destinations,
            windows=turn.windows,
        )
        program = self.engine.programs.get(*self._lowering(turn.slots))
        seed, purpose = np.int32(self.settings.seed), np.int32(self.call.purpose)
        plan = jax.tree.map(self._put, plan)
        self.slots, chunk = program(self.call.params, self.slots, plan, self.call.sampling, seed, purpose)
        self._record_prompts()
        return chunk

    def _record_prompts(self) -> None:
        """Reads the experts of prompts that were prefilled, while the devices decode."""
        for prompts, places, experts in self.prefilled:
            fed = np.array([len(self.prompts[prompt]) - 1 for prompt in prompts])
            self.responses.add_prompts(prompts, fed, fetch(experts)[places])
        self.prefilled = []

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.settings.mesh))

    def _lowering(self, slots: int) -> tuple[tuple[SlotLayout, int], Callable[[], jax.stages.Lowered]]:
        settings, sampling, layout = self.settings, self.call.sampling, self.layout
        params, attend_pages = self.engine.param_shapes(self.call.params), self.engine.attend_pages
        return (layout, slots), lambda: lower_decode_slots(
            settings, params, sampling, layout, slots=slots, attend_pages=attend_pages
        )
