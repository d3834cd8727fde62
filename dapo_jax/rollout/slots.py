"""Host: the rollout engine that decodes in slots, which go to the next response as soon as one has ended.

slot_queue.py decides which row has which slot and pages, slot_walk.py when; here is what the devices do. None of this
changes a token: every draw has an address (sampling.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.sharding import batch_sharding, put
from dapo_jax.rollout.engine import OnFinished, StopRule
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.learnt_sizes import LearntSizes
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.slot_decoding import Chunk, Plan, empty_slots, prefill_pages
from dapo_jax.rollout.slot_programs import empty_shape, layout_of_slots, lower_decode_slots
from dapo_jax.rollout.slot_queue import Opened, SlotLayout, SlotQueue, Turn
from dapo_jax.rollout.slot_walk import SlotWalk


class SlotEngine:
    """A `RolloutEngine`.

    Args:
        attend_pages: attention to pages, of the mesh's platform.
        check: called before each chunk; may raise to end the sampling.
    """

    def __init__(
        self, settings: EngineSettings, attend_pages: AttendPages, check: Callable[[], None] = lambda: None
    ) -> None:
        self.settings, self.attend_pages, self.check = settings, attend_pages, check
        self.programs, self.learnt = Programs(settings.mesh), LearntSizes(settings)

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        limits: np.ndarray | None = None,
        stop: StopRule | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """As `RolloutEngine.generate`, whose parameters say what to sample and how; `limits` is for measurements.

        Args:
            limits: [Q * num_samples], most tokens of each response; None = max_response_length for all.
        """
        longest, num_rows = self.settings.max_response_length, len(prompts) * num_samples
        limits = np.full(num_rows, longest) if limits is None else np.minimum(limits, longest)
        responses = Responses(
            limits,
            max_length=longest,
            eos_ids=self.settings.eos_ids,
            pad_id=self.settings.pad_id,
            stop=stop,
            on_finished=on_finished,
        )
        history, lengths = self.learnt.history(purpose), np.array([len(prompt) for prompt in prompts])
        memory = self.learnt.memory_before_the_first_call()
        layout = layout_of_slots(self.settings, cache_dtype(params), lengths, num_samples, history, memory)
        gathers = self.attend_pages is attend_gathered
        walk = SlotWalk(self.settings.arch, SlotQueue(lengths, limits, layout), self.settings.lookahead, gathers)
        walk.run(_Call(self, params, prompts, numbers, purpose, sampling, layout), responses)
        rollout = responses.rollout()
        drawn = rollout.mask.sum(axis=1)
        history.add(drawn)
        needed = needed_work(self.settings.arch, lengths, drawn.reshape(-1, num_samples))
        return rollout.replace(work=work_of([walk.computed], needed))  # pyright: ignore[reportAttributeAccessIssue]

    def state(self) -> dict[str, np.ndarray]:
        """What the sizes of the next call depend on."""
        return self.learnt.state()

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.learnt.restore(arrays)

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()


@dataclass
class _Call:
    """The devices in one call of `generate`."""

    engine: SlotEngine
    params: Params
    prompts: Sequence[Sequence[int]]
    numbers: Sequence[int]
    purpose: int
    sampling: Sampling
    layout: SlotLayout

    def __post_init__(self) -> None:
        self.settings, self.mesh = self.engine.settings, self.engine.settings.mesh
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params)
        for slots in (self.layout.slots, self.layout.few_slots):
            self.engine.programs.prepare(*self._lowering(slots))
        self.slots = empty_slots(**empty_shape(self.settings, cache_dtype(self.params), self.layout))
        lengths = [len(prompt) for prompt in self.prompts]
        # -1, for a slot without a row, is the last of each
        self.prompt_lengths = np.array([*lengths, 1], np.int32)
        self.last_tokens = np.array([*(prompt[-1] for prompt in self.prompts), self.settings.pad_id], np.int32)
        self.addresses = np.array([*self.numbers, -1], np.int32)

    def prefill(self, opened: Sequence[Opened]) -> None:
        layout = self.layout
        prompts: list[Sequence[int]] = [[self.settings.pad_id]] * (layout.shards * layout.at_once)
        destinations = np.zeros((len(prompts), layout.width // layout.page_length), np.int32)
        used = [0] * layout.shards
        for one in opened:
            place = one.shard * layout.at_once + used[one.shard]
            used[one.shard] += 1
            prompts[place] = self.prompts[one.prompt][:-1]
            destinations[place, -len(one.pages) :] = one.pages
        tokens, mask = pad_prompts(prompts, layout.width, self.settings.pad_id)
        self.slots = prefill_pages(
            self.params,
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
        seed, purpose = np.int32(self.settings.seed), np.int32(self.purpose)
        self.slots, chunk = program(
            self.params, self.slots, jax.tree.map(self._put, plan), self.sampling, seed, purpose
        )
        return chunk

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.mesh))

    def _lowering(self, slots: int) -> tuple[tuple[SlotLayout, int], Callable[[], jax.stages.Lowered]]:
        settings, shapes, sampling, layout = self.settings, self.shapes, self.sampling, self.layout
        attend_pages = self.engine.attend_pages
        return (layout, slots), lambda: lower_decode_slots(
            settings, shapes, sampling, layout, slots=slots, attend_pages=attend_pages
        )
