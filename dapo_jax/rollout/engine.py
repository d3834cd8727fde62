"""Host: what a sampler needs of an engine that generates responses: waves.py or slots.py.

The tokens of a response depend on the weights, its prompt and the address of its draws (sampling.py), never on the
engine: a batch size, a device layout or another engine changes the speed alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.work import Work
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.sampling import Sampling

# (tokens of a response, how many of them an earlier call has seen) -> how many tokens to keep; None = it continues.
StopRule = Callable[[list[int], int], int | None]
# (rows of the responses that have just ended, all responses so far)
OnFinished = Callable[[np.ndarray, Rollout], None]


@dataclass(frozen=True)
class Begun:
    """Responses to continue, one to each of Q prompts."""

    samples: np.ndarray  # [Q], which sample of its prompt each is: with the prompt's number the address of its draws
    responses: Rollout  # Q rows: the tokens drawn so far, and their log-probabilities


@dataclass(frozen=True)
class GivenUp:
    """What a generation began and nobody waited for."""

    responses: int = 0  # with a token at least
    tokens: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)  # computed for them, by stage; none of it was needed


class Generation(Protocol):
    """Sampling under way. Prompts are added in order, and waited for in the same order."""

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> Callable[[], Rollout]:
        """Begins the responses to Q prompts; the result waits until all of them have ended.

        Responses are NumPy arrays; row b answers prompt b // num_samples. `work` counts what the engine has computed
        since the last prompts were waited for, and what these responses needed (needed_work.py).

        Args:
            prompts: token ids of each prompt.
            numbers: [Q] address of each prompt's draws; with the purpose, the sample and the position it fixes the
                noise.
            begun: responses to continue instead of new ones; num_samples must be 1.
            limits: [Q * num_samples] most tokens of each response, with those begun; None = max_response_length.
            on_finished: called with responses as they end, while others are still being decoded.
        """
        ...

    def close(self) -> GivenUp:
        """Gives up all that has not been waited for."""
        ...


class RolloutEngine(Protocol):
    """Samples responses, under `jax.set_mesh` of the mesh that it was built for."""

    overlaps: bool  # prompts added later are decoded while earlier ones are waited for

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
        """Begins a generation of `num_samples` responses to each prompt.

        Args:
            params: decoding weights (learner/decode_weights.py), with the same shapes and dtypes in every call.
            purpose: training, evaluation, ... (sampling.py).
            prompt_lengths: [N] tokens of prompts like those that will be added, of which none is longer.
            num_prompts: that will be added, about. Sizes follow from both.
            max_tokens: most to draw for a response; None = max_response_length.
            stop: ends a response at a stop string.
        """
        ...

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
        """A whole generation for prompts that are all known: `open`, `add` and `close`."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """What the engine has learnt and needs after a restart, for a checkpoint."""
        ...

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        ...

    def close(self) -> None:
        """Stops work in the background."""
        ...
