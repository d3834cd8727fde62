"""Host: what a sampler needs of an engine that generates responses: waves.py or slots.py.

The tokens of a response depend on the weights, its prompt and the address of its draws (sampling.py), never on the
engine: a batch size, a device layout or another engine changes the speed alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.sampling import Sampling

# (tokens of a response, how many of them an earlier call has seen) -> how many tokens to keep; None = it continues.
StopRule = Callable[[list[int], int], int | None]
# (rows of the responses that have just ended, all responses so far)
OnFinished = Callable[[np.ndarray, Rollout], None]


class RolloutEngine(Protocol):
    """Samples responses, under `jax.set_mesh` of the mesh that it was built for."""

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
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """`num_samples` responses to each of Q prompts, as NumPy arrays; row b answers prompt b // num_samples.

        `work` of the result counts what the engine has computed, and what the responses needed (needed_work.py).

        Args:
            params: decoding weights (learner/decode_weights.py), with the same shapes and dtypes in every call.
            prompts: token ids of each prompt.
            numbers: [Q] address of each prompt's draws; with `purpose`, the sample and the position it fixes the noise.
            purpose: training, evaluation, ... (sampling.py).
            stop: ends a response at a stop string.
            on_finished: called with responses as they end, while others are still being decoded.
        """
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
