"""Host: what both engines have in common: what a generation samples, what the sizes have learnt, and the programs."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import bucket
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.engine import Begun, Generation, OnFinished, StopRule
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.expert_records import ExpertRecords
from dapo_jax.rollout.learnt_sizes import LearntSizes
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.sampling import TRAIN, Sampling


@dataclass(frozen=True)
class Call:
    """The arguments of `RolloutEngine.open`."""

    params: Params
    num_samples: int
    purpose: int
    sampling: Sampling
    prompt_lengths: np.ndarray  # [N] tokens
    num_prompts: int
    max_tokens: int | None
    stop: StopRule | None


@dataclass(frozen=True)
class Block:
    """Q prompts that were added together, and their B responses."""

    prompts: Sequence[Sequence[int]]  # [Q], each with what its response has begun with
    numbers: np.ndarray  # [B] prompt number, ...
    samples: np.ndarray  # [B] and sample: the address of each response's draws
    responses: Responses

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[Q] tokens."""
        return np.array([len(prompt) for prompt in self.prompts])


class EngineBase(abc.ABC):
    """A `RolloutEngine` but for the decoding.

    Args:
        check: called before each chunk; may raise to end the sampling.
    """

    overlaps = False

    def __init__(self, settings: EngineSettings, check: Callable[[], None] = lambda: None) -> None:
        self.settings, self.check = settings, check
        self.programs, self.learnt = Programs(settings.mesh), LearntSizes(settings)
        self._param_shapes: Params | None = None

    def open(
        self,
        params: Params,
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        prompt_lengths: np.ndarray,
        num_prompts: int,
        max_tokens: int | None = None,
        stop: StopRule | None = None,
    ) -> Generation:
        """As `RolloutEngine.open`."""
        return self._open(Call(params, num_samples, purpose, sampling, prompt_lengths, num_prompts, max_tokens, stop))

    @abc.abstractmethod
    def _open(self, call: Call) -> Generation:
        """Begins a generation, which adds the lengths of its responses to what is learnt."""

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        stop: StopRule | None = None,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """As `RolloutEngine.generate`."""
        count, longer = len(prompts), 0
        if begun is not None:  # of any number: few sizes, so that few programs are compiled
            count, longer = bucket(count), begun.responses.mask.sum(axis=1)
        generation = self.open(
            params,
            num_samples=num_samples,
            purpose=purpose,
            sampling=sampling,
            prompt_lengths=np.array([len(prompt) for prompt in prompts]) + longer,
            num_prompts=count,
            max_tokens=None if limits is None else int(np.max(limits - longer)),
            stop=stop,
        )
        rollout = generation.add(prompts, numbers, begun=begun, limits=limits, on_finished=on_finished)()
        generation.close()
        return rollout

    def block(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        begun: Begun | None,
        limits: np.ndarray | None,
        on_finished: OnFinished | None,
    ) -> Block:
        """What `Generation.add` is given."""
        settings, num_rows = self.settings, len(prompts) * call.num_samples
        longest = settings.max_response_length
        responses = Responses(
            np.full(num_rows, longest) if limits is None else np.minimum(limits, longest),
            max_length=longest,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
            begun=None if begun is None else begun.responses,
            stop=call.stop,
            on_finished=on_finished,
        )
        samples, lengths = np.tile(np.arange(call.num_samples), len(prompts)), [len(prompt) for prompt in prompts]
        if settings.choices is not None and call.purpose == TRAIN:
            known = None if begun is None else begun.responses.experts
            responses.records = ExpertRecords(settings.choices, lengths, responses.begun, known)
        if begun is not None:
            assert call.num_samples == 1
            samples = begun.samples
            prompts = [[*prompt, *response] for prompt, response in zip(prompts, responses.begun_tokens(), strict=True)]
        rows = np.repeat(np.asarray(numbers, np.int32), call.num_samples)
        return Block(prompts, rows, samples.astype(np.int32), responses)

    def finished(self, block: Block, computed: Sequence[Mapping[str, float]]) -> Rollout:
        """The responses of a block that have all ended; `computed` is what each part of its work has."""
        drawn = block.responses.drawn().reshape(len(block.prompts), -1)
        work = work_of(computed, needed_work(self.settings.arch, block.prompt_lengths, drawn))
        rollout = dataclasses.replace(block.responses.rollout(), work=work)
        records = block.responses.records
        if records is None:
            return rollout
        prompts = None if block.responses.begun.any() else records.prompts
        return dataclasses.replace(rollout, experts=records.responses, prompt_experts=prompts)

    def state(self) -> dict[str, np.ndarray]:
        """What the sizes of the next call depend on."""
        return self.learnt.state()

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.learnt.restore(arrays)

    def param_shapes(self, params: Params) -> Params:
        """Shapes and shardings of the decoding weights, which are the same in every call."""
        shapes = self._param_shapes
        if shapes is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            self._param_shapes = shapes
        return shapes

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()
