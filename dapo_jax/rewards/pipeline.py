"""Host: from responses to rewards: verifiers, which it also starts, reward model, overlong penalty."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from dapo_jax.config.sections import RewardConfig
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.processes import gather
from dapo_jax.rewards.judge import Judge, JudgedVerifiers
from dapo_jax.rewards.scoring import ModelScorer, add_model_scores, add_rewards
from dapo_jax.rewards.verdicts import Unverified, Verifiers
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.weighted import has_judge, without_judge
from dapo_jax.rewards.worker_pool import VerifierPool


@dataclass(frozen=True)
class RewardPipeline:
    """Scores responses."""

    tokenizer: Tokenizer
    verifiers: Mapping[str, Verifiers]  # by function name
    function: str  # for the training problems
    scorer: ModelScorer | None  # None without a reward model
    settings: RewardConfig
    max_response_length: int  # tokens
    mesh: Mesh  # of the sampler
    stage: Stage
    check: Callable[[], None]  # called while waiting for verdicts; may raise
    judge: Judge | None = None  # None if no function asks one

    def verify(
        self,
        prompts: PromptSet,
        rows: Sequence[int],
        num_samples: int,
        *,
        function: str | None = None,
        on_ended: Callable[[int], object] = lambda count: None,
    ) -> Verification:
        """Verdicts on `num_samples` responses to each row of `prompts`, requested as the responses end.

        Args:
            function: the reward function; None = the one for the training problems.
            on_ended: called with the number of responses that have just ended.
        """
        pool, sources = self.verifiers[function or self.function], [prompts.rows[row] for row in rows]
        return Verification(pool, self.tokenizer, sources, num_samples, check=self.check, on_ended=on_ended)

    def add_model_scores(self, experience: Experience, prompts: PromptSet) -> Experience:
        """Mixes in the reward model's scores, if there is one."""
        return experience if self.scorer is None else add_model_scores(experience, prompts, self.scorer)

    def shape(self, experience: Experience, prompts: PromptSet) -> Experience:
        """From verdicts to the reward `seq_reward` of each response (DAPO, equation 13): see `add_rewards`."""
        if self.scorer is not None:
            with self.stage("reward"):
                experience = self.add_model_scores(experience, prompts)
        with self.stage("shape"):
            return add_rewards(
                experience,
                self.settings.overlong_buffer,
                self.settings.length,
                max_response_length=self.max_response_length,
                mesh=self.mesh,
            )

    def judge_metrics(self) -> dict[str, float]:
        """What the judge was asked since the last call, and its cost so far, over all hosts; {} without one."""
        if self.judge is None:
            return {}
        counts = gather(self.judge.take_counts())
        return {f"reward/judge/{name}": sum(part[name] for part in counts) for name in counts[0]}

    def workers_replaced(self) -> int:
        """Verifier processes replaced since the last call, over all hosts."""
        return sum(gather(sum(pool.take_replaced() for pool in self.verifiers.values())))


@contextmanager
def open_verifiers(
    functions: Iterable[str], reward: RewardConfig, folder: Path
) -> Iterator[tuple[dict[str, Verifiers], Judge | None]]:
    """What verifies by each reward function, and the judge that they share, if one of them asks it.

    Args:
        folder: of the judge's answers.

    Raises:
        InputError: a verifier cannot work.
    """
    names = list(dict.fromkeys(functions))
    with ExitStack() as stack:
        judge = None
        if any(has_judge(name) for name in names):
            process, count = jax.process_index(), jax.process_count()
            judge = stack.enter_context(closing(Judge(reward.judge, folder, process=process, num_processes=count)))
        yield {name: stack.enter_context(_verifiers(name, reward, judge)) for name in names}, judge


def _verifiers(name: str, reward: RewardConfig, judge: Judge | None) -> Verifiers:
    """Worker processes for a reward function, and the judge."""
    if name == "none":
        return Unverified(name, reward.error_score)
    if judge is not None and has_judge(name):
        others = without_judge(name)
        rest = _verifiers(others, reward, None) if others else None
        return JudgedVerifiers(name, judge, rest, error_score=reward.error_score)
    return VerifierPool(
        name,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_limit_mb=reward.memory_limit_mb,
        error_score=reward.error_score,
        pattern=reward.format.pattern,
        env=reward.env,
        hidden_env=(reward.judge.api_key_env,),
    )
