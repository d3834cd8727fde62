"""Host: the rollout engine that decodes in slots, which go to the next response as soon as one has ended.

slot_queue.py decides which row has which slot and pages, slot_walk.py when; here is what the devices do. None of this
changes a token: every draw has an address (sampling.py).
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.parallel.sharding import batch_sharding, put
from dapo_jax.rollout.engine_base import Call, EngineBase
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.slot_decoding import Chunk, Plan, empty_slots, prefill_pages
from dapo_jax.rollout.slot_programs import empty_shape, layout_of_slots, lower_decode_slots
from dapo_jax.rollout.slot_queue import Opened, SlotLayout, SlotQueue, Turn
from dapo_jax.rollout.slot_walk import SlotWalk


class SlotEngine(EngineBase):
    """A `RolloutEngine`, see `EngineBase`.

    Args:
        attend_pages: attention to pages, of the mesh's platform.
    """

    def __init__(
        self, settings: EngineSettings, attend_pages: AttendPages, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(settings, check)
        self.attend_pages = attend_pages

    def _decode(self, call: Call, responses: Responses) -> list[Mapping[str, float]]:
        settings, lengths, dtype = self.settings, call.prompt_lengths, cache_dtype(call.params)
        history, memory = self.learnt.history(call.purpose), self.learnt.memory_before_the_first_call()
        layout = layout_of_slots(settings, dtype, lengths, call.num_samples, history, memory)
        queue, gathers = SlotQueue(lengths, responses.limits, layout), self.attend_pages is attend_gathered
        walk = SlotWalk(settings.arch, queue, settings.lookahead, gathers)
        walk.run(_Slots(self, call, layout), responses)
        history.add(responses.lengths(0, len(responses.limits)))
        return [walk.computed]


class _Slots:
    """All slots and pages on the devices, in one call of `generate`."""

    def __init__(self, engine: SlotEngine, call: Call, layout: SlotLayout) -> None:
        self.engine, self.settings, self.call, self.layout = engine, engine.settings, call, layout
        for slots in (layout.slots, layout.few_slots):
            engine.programs.prepare(*self._lowering(slots))
        self.slots = empty_slots(**empty_shape(self.settings, cache_dtype(call.params), layout))
        # -1, for a slot without a row, is the last of each
        self.prompt_lengths = np.array([*call.prompt_lengths, 1], np.int32)
        self.last_tokens = np.array([*(prompt[-1] for prompt in call.prompts), self.settings.pad_id], np.int32)
        self.addresses = np.array([*call.numbers, -1], np.int32)

    def prefill(self, opened: Sequence[Opened]) -> None:
        layout = self.layout
        prompts: list[Sequence[int]] = [[self.settings.pad_id]] * (layout.shards * layout.at_once)
        destinations = np.zeros((len(prompts), layout.width // layout.page_length), np.int32)
        used = [0] * layout.shards
        for one in opened:
            place = one.shard * layout.at_once + used[one.shard]
            used[one.shard] += 1
            prompts[place] = self.call.prompts[one.prompt][:-1]
            destinations[place, -len(one.pages) :] = one.pages
        tokens, mask = pad_prompts(prompts, layout.width, self.settings.pad_id)
        self.slots = prefill_pages(
            self.call.params,
            self.slots,
            self._put(tokens),
            self._put(mask),
            self._put(destinations),
            arch=self.settings.arch,
        )

    def decode(self, turn: Turn) -> Chunk:
        self.engine.check()
        prompt, sample = np.divmod(turn.rows, self.layout.num_samples)  # prompt -1 without a row
        plan = Plan(
            sources=turn.sources,
            first_tokens=self.last_tokens[prompt],
            numbers=self.addresses[prompt],
            samples=sample.astype(np.int32),
            prompt_lengths=self.prompt_lengths[prompt],
            sampled=turn.sampled,
            table=turn.table,
            destinations=turn.destinations,
        )
        program = self.engine.programs.get(*self._lowering(turn.slots))
        seed, purpose = np.int32(self.settings.seed), np.int32(self.call.purpose)
        plan = jax.tree.map(self._put, plan)
        self.slots, chunk = program(self.call.params, self.slots, plan, self.call.sampling, seed, purpose)
        return chunk

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.settings.mesh))

    def _lowering(self, slots: int) -> tuple[tuple[SlotLayout, int], Callable[[], jax.stages.Lowered]]:
        settings, sampling, layout = self.settings, self.call.sampling, self.layout
        params, attend_pages = self.engine.param_shapes(self.call.params), self.engine.attend_pages
        return (layout, slots), lambda: lower_decode_slots(
            settings, params, sampling, layout, slots=slots, attend_pages=attend_pages
        )
