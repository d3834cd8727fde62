"""Host: from responses to their rewards: verifiers, a reward model, the penalty on overlong responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from dapo_jax.config.sections import OverlongBufferConfig
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.processes import gather
from dapo_jax.rewards.scoring import ModelScorer, add_model_scores, add_rewards
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.worker_pool import VerifierPool


@dataclass(frozen=True)
class RewardPipeline:
    """What scores responses."""

    tokenizer: Tokenizer
    verifiers: Mapping[str, VerifierPool]  # by the name of their function
    function: str  # the one of the training problems
    scorer: ModelScorer | None  # with a reward model
    overlong_buffer: OverlongBufferConfig
    max_response_length: int  # tokens
    mesh: Mesh  # that samples
    stage: Stage
    check: Callable[[], None]  # is called while verdicts are awaited, and may raise

    def verify(
        self,
        prompts: PromptSet,
        rows: Sequence[int],
        num_samples: int,
        *,
        function: str | None = None,
        on_ended: Callable[[int], object] = lambda count: None,
    ) -> Verification:
        """Verdicts on `num_samples` responses to each row of `prompts`, to be asked for as the responses end.

        Args:
            function: judges them; None = the one of the training problems.
            on_ended: is called with the number of responses that have ended, each time that some have.
        """
        pool, sources = self.verifiers[function or self.function], [prompts.rows[row] for row in rows]
        return Verification(pool, self.tokenizer, sources, num_samples, check=self.check, on_ended=on_ended)

    def add_model_scores(
        self, experience: Experience, prompts: PromptSet, *, function: str | None = None
    ) -> Experience:
        """Mixes in the reward model's scores, if there is one. `function` has judged the responses."""
        if self.scorer is None:
            return experience
        verified = (function or self.function) != "none"
        return add_model_scores(experience, prompts, self.scorer, verified=verified)

    def shape(self, experience: Experience, prompts: PromptSet) -> Experience:
        """From verdicts to the reward `seq_reward` of each response (DAPO, equation 13): see `add_rewards`."""
        if self.scorer is not None:
            with self.stage("reward"):
                experience = self.add_model_scores(experience, prompts)
        with self.stage("shape"):
            return add_rewards(
                experience, self.overlong_buffer, max_response_length=self.max_response_length, mesh=self.mesh
            )

    def workers_replaced(self) -> int:
        """Verifier processes of all hosts that were replaced since the last call."""
        return sum(gather(sum(pool.take_replaced() for pool in self.verifiers.values())))
