"""Host: what some advantage estimators need besides rewards: prompts with a hint, rewards of greedy responses."""

import functools
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import hinted_prompts
from dapo_jax.learner.optimizer import Models
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rewards.lowest import Lowest, with_lowest
from dapo_jax.rewards.verification import total_failure
from dapo_jax.rollout.sampling import BASELINE, Sampling
from dapo_jax.run.parts import Run

NOTHING: Lowest = MappingProxyType({})


def estimator_inputs(
    run: Run, experience: Experience, models: Models, lowest: Lowest = NOTHING
) -> tuple[dict[str, Any], int]:
    """`hinted` and `baselines` of `make_batch`, each None unless the run's estimator needs it; tokens sampled for them.

    Args:
        lowest: numbers that the verifier has given.
    """
    estimator = named_estimator(run.config.algorithm.adv_estimator)
    baselines, tokens = None, 0
    if needs(estimator, "reward_baselines"):
        baselines, tokens = greedy_rewards(run, experience, models, lowest)
    hints = hinted(run, experience) if needs(estimator, "hint_logprobs") else None
    return {"hinted": hints, "baselines": baselines}, tokens


def hinted(run: Run, experience: Experience) -> list[list[int]]:
    """The prompts of the groups with their reference solutions, as token ids (CPO)."""
    rows = run.problems.train_set.rows
    return hinted_prompts([rows[row] for row in experience.rows], run.sampler.tokenizer, run.config.data)


def greedy_rewards(run: Run, experience: Experience, models: Models, lowest: Lowest) -> tuple[np.ndarray, int]:
    """The reward [Q, G] of the most likely response to each response's prompt (ReMax); NaN without a verdict on it.

    Also returns the tokens of these responses.

    Raises:
        RuntimeError: the verification of all of them failed.
    """
    prompts, sampling = run.problems.train_set, Sampling.create(0.0, 1.0, -1)
    verify = functools.partial(run.rewards.verify, prompts, num_samples=1)
    with jax.set_mesh(run.sampler.mesh):
        request = run.sampler.request(run.learner.networks.decode_weights(models.actor.params), 1, BASELINE, sampling)
        numbers = experience.numbers.tolist()
        row_of = dict(zip(numbers, experience.rows.tolist(), strict=True))  # a resume may have changed the order
        greedy = run.sampler.sample(request, prompts, numbers, verify, row_of.__getitem__)
        if failure := total_failure([greedy.outcomes], "the most likely responses", run.config.reward.max_error_share):
            raise SharedFailure(failure)
        shaped = run.rewards.shape(with_lowest(greedy, prompts, lowest), prompts)
    rewards = shaped.scores["seq_reward"].astype(np.float32)
    return np.repeat(rewards, experience.finished.shape[1], axis=1), greedy.num_tokens
