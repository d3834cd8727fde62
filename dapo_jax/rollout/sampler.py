"""Host: verified responses to rows of a prompt set."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.data.experience import Experience, check_score_names
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.monitor.timers import Stage
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.worker_pool import Verdict
from dapo_jax.rollout.engine import RolloutEngine
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.stops import stop_rule


@dataclass(frozen=True)
class Sampler:
    """Samples responses: an engine on a mesh, between prompts and verified responses."""

    tokenizer: Tokenizer
    engine: RolloutEngine
    mesh: Mesh
    stop: tuple[str, ...]  # a response ends with the first of these strings
    stage: Stage

    def sample(
        self,
        weights: Any,
        prompts: PromptSet,
        rows: Sequence[int],
        numbers: Sequence[int],
        *,
        purpose: int,
        sampling: Sampling,
        verification: Verification,
        version: int = 0,
    ) -> Callable[[], Experience]:
        """Decodes the responses that `verification` expects; the returned function waits for their verdicts.

        Args:
            weights: of the policy, for decoding.
            rows: of `prompts`, the same as those of `verification`.
            numbers: address of each row's random draws, with `purpose`.
            version: training steps that the policy has seen.
        """
        tokens, num_samples = [prompts.tokens[row] for row in rows], verification.num_samples
        with self.stage("gen"):
            rollout = self.engine.generate(
                weights,
                tokens,
                numbers,
                num_samples=num_samples,
                purpose=purpose,
                sampling=sampling,
                stop=stop_rule(self.tokenizer, self.stop) if self.stop else None,
                on_finished=verification.begin,
            )

        def grouped(array: Any) -> np.ndarray:
            return np.asarray(array).reshape(len(tokens), num_samples, *np.shape(array)[1:])

        def grouped_list(values: Sequence[Any]) -> list[list[Any]]:
            return [list(values[i : i + num_samples]) for i in range(0, len(values), num_samples)]

        def finish() -> Experience:
            with self.stage("reward"):
                verdicts = verification.wait()
            errors = Counter(verdict.error for verdict in verdicts if verdict.error is not None)
            return Experience(
                numbers=np.array(numbers, np.int64),
                rows=np.array(rows, np.int64),
                prompts=tokens,
                responses=grouped(rollout.responses),
                mask=grouped(rollout.mask),
                logprobs=grouped(rollout.logprobs),
                finished=grouped(rollout.finished),
                texts=grouped_list(verification.texts),
                scores={name: grouped(values) for name, values in _scores(verdicts).items()},
                versions=np.full(len(tokens), version, np.int64),
                failed=grouped([verdict.error is not None for verdict in verdicts]),
                by_policy=None if rollout.by_policy is None else grouped(rollout.by_policy),
                answers=grouped_list([verdict.pred for verdict in verdicts]),
                error=max(errors, key=lambda error: errors[error], default=""),
                work=rollout.work,
            )

        return finish

    def state(self) -> dict[str, Any]:
        """What the engine has learnt about lengths and memory, as arrays for a checkpoint."""
        return self.engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.engine.restore(state)


def _scores(verdicts: Sequence[Verdict]) -> dict[str, np.ndarray]:
    """The numbers [B] of the verdicts by name, NaN where a verdict has none."""
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.numbers)
    check_score_names(names)
    return {name: np.array([verdict.numbers.get(name, np.nan) for verdict in verdicts], np.float64) for name in names}
