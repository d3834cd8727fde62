"""Host: what both engines have in common: what a call samples, what the sizes have learnt, and the programs."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.engine import OnFinished, StopRule
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.learnt_sizes import LearntSizes
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.sampling import Sampling


@dataclass(frozen=True)
class Call:
    """What one call of `generate` samples, and how."""

    params: Params
    prompts: Sequence[Sequence[int]]  # [Q]
    numbers: Sequence[int]  # [Q]
    num_samples: int
    purpose: int
    sampling: Sampling

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[Q] tokens."""
        return np.array([len(prompt) for prompt in self.prompts])


class EngineBase(abc.ABC):
    """A `RolloutEngine` but for the decoding.

    Args:
        check: called before each chunk; may raise to end the sampling.
    """

    def __init__(self, settings: EngineSettings, check: Callable[[], None] = lambda: None) -> None:
        self.settings, self.check = settings, check
        self.programs, self.learnt = Programs(settings.mesh), LearntSizes(settings)
        self._param_shapes: Params | None = None

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
        settings, num_rows = self.settings, len(prompts) * num_samples
        longest = settings.max_response_length
        responses = Responses(
            np.full(num_rows, longest) if limits is None else np.minimum(limits, longest),
            max_length=longest,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
            stop=stop,
            on_finished=on_finished,
        )
        call = Call(params, prompts, numbers, num_samples, purpose, sampling)
        computed = self._decode(call, responses)
        rollout = responses.rollout()
        needed = needed_work(settings.arch, call.prompt_lengths, rollout.mask.sum(axis=1).reshape(-1, num_samples))
        return rollout.replace(work=work_of(computed, needed))  # pyright: ignore[reportAttributeAccessIssue]

    @abc.abstractmethod
    def _decode(self, call: Call, responses: Responses) -> list[Mapping[str, float]]:
        """Samples all responses, and adds their lengths to what is learnt; returns what it has computed, by stage."""

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
