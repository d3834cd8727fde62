"""Host: from accepted groups to the rows that the learner is given: rewards, advantages, masks, log-probabilities."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dapo_jax.algorithms.advantages import ESTIMATORS, keep_samples
from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.kl import kl_penalty
from dapo_jax.algorithms.rollout_correction import (
    importance_weights,
    mismatch_metrics,
    parse_threshold,
    probability_metrics,
    rejection_mask,
)
from dapo_jax.config.derived import keeps_some
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import hinted_prompts
from dapo_jax.learner.choices import uses_critic
from dapo_jax.learner.models import Models
from dapo_jax.learner.update import compute_logprobs, compute_values
from dapo_jax.monitor import statistics
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import fetch, put, put_rows, replicated
from dapo_jax.rewards.scoring import add_model_scores, add_rewards
from dapo_jax.rewards.shaping import place_rewards
from dapo_jax.rollout.sampling import BASELINE, SELECT, Sampling, position_noise
from dapo_jax.rollout.shapes import bucket, pad_prompts
from dapo_jax.run import Run
from dapo_jax.settings import micro_batches, rows_of_a_prompt

FALLBACK_THRESHOLD = "2.0"
Metrics = dict[str, float]
jitted_kl_penalty = jax.jit(kl_penalty, static_argnames="estimator")
jitted_keep_samples = jax.jit(
    keep_samples, static_argnames=("num_groups", "compute_new_adv", "norm_adv_by_std_in_grpo")
)
jitted_mismatch_metrics = jax.jit(mismatch_metrics)
jitted_probability_metrics = jax.jit(probability_metrics)
jitted_importance_weights = jax.jit(importance_weights, static_argnames=("rollout_is", "threshold", "batch_normalize"))
jitted_rejection_mask = jax.jit(rejection_mask, static_argnames="criteria")


def make_batch(
    run: Run, experience: Experience, models: Models, *, recompute: bool, kl_coef: float
) -> tuple[Batch, Metrics]:
    """The accepted groups as rows to train on, and rows of padding in the place of groups that a partial step lacks.

    Args:
        recompute: take old log-probabilities from the training forward pass instead of the sampler.
        kl_coef: of the KL divergence in the reward.
    """
    config, metrics = run.config, {"actor/recomputed_logprobs": float(recompute)}
    estimator = ESTIMATORS[config.algorithm.adv_estimator]
    with run.stage("batch"):
        batch = rows_of(run, experience, num_groups=config.data.train_batch_size)
    extra: dict[str, np.ndarray] = {}
    if recompute or needs(estimator, "entropy") or needs(estimator, "hint_logprobs"):
        with run.stage("old_log_prob"):
            extra["logprobs"], extra["entropy"] = policy_logprobs(run, models.actor.params, batch)
    if recompute:
        sampled, batch = batch.old_logprobs, dataclasses.replace(batch, old_logprobs=extra["logprobs"])
        batch, correction = correct_rollout(run, batch, sampled)
        metrics |= correction
    if needs(estimator, "hint_logprobs"):
        with run.stage("old_log_prob"):
            extra["hint_logprobs"] = hint_logprobs(run, experience, models, batch)
    if config.actor.use_kl_loss:
        with run.stage("ref"):
            batch = dataclasses.replace(batch, ref_logprobs=reference_logprobs(run, batch))
    if uses_critic(config):
        assert run.critic is not None and models.critic is not None
        with run.stage("values"):
            pieces = micro_batches(config, run.mesh, "critic")
            values = compute_values(run.critic, models.critic.params, batch, pieces, run.mesh, run.pace)
        batch, extra["values"] = dataclasses.replace(batch, values=values), values
    if needs(estimator, "reward_baselines"):
        extra["reward_baselines"] = rows_like(batch, greedy_rewards(run, experience, models))
    with run.stage("adv"):
        rewards = token_rewards(experience, batch, kl_coef)
        advantages, returns = estimate_advantages(run, rewards, batch, extra)
        metrics |= statistics.advantage_metrics("advantages", advantages[batch.mask])
        metrics |= statistics.advantage_metrics("returns", returns[batch.mask])
        batch = dataclasses.replace(batch, advantages=advantages)
        if uses_critic(config):
            batch = dataclasses.replace(batch, returns=returns)
            metrics |= statistics.advantage_metrics("values", batch.values[batch.mask])
            metrics["critic/vf_explained_var"] = statistics.explained_variance(
                batch.values[batch.mask], returns[batch.mask]
            )
        if keeps_some(config):
            batch, kept = keep_some(run, experience, batch)
            metrics |= kept
        if config.algorithm.overlong_filtering:
            finished = rows_like(batch, experience.finished)
            batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & finished[:, None])
            metrics["actor/overlong_filtered"] = float(np.mean(~experience.finished))
    if run.actor.select is not None:
        batch = dataclasses.replace(batch, noise=selection_noise(run, experience, batch))
    return batch, metrics


def rows_of(run: Run, experience: Experience, *, num_groups: int) -> Batch:
    """The responses as rows with what is known when they were sampled; advantages are 0.

    Args:
        num_groups: at least those of `experience`; rows of padding, with this group id, stand in for the others, so
            that every step has the same shapes.
    """
    given, num_samples = experience.finished.shape
    missing = num_groups - given
    longest = int(experience.mask.sum(axis=-1).max())
    length = min(bucket(longest), experience.mask.shape[-1])
    prompts, prompt_mask = _prompt_rows(run, experience.prompts + [[]] * missing, num_samples)

    def flat(array: np.ndarray) -> np.ndarray:
        return np.pad(array[..., :length], ((0, missing), (0, 0), (0, 0))).reshape(num_groups * num_samples, length)

    group_ids = np.pad(np.arange(given, dtype=np.int32), (0, missing), constant_values=num_groups)
    return Batch(
        prompts=prompts,
        prompt_mask=prompt_mask,
        responses=flat(experience.responses),
        mask=flat(experience.mask),
        loss_mask=flat(experience.policy_mask),
        group_ids=np.repeat(group_ids, num_samples),
        old_logprobs=flat(experience.logprobs),
        advantages=np.zeros((num_groups * num_samples, length), np.float32),
    )


def rows_like(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Values [Q, G] of responses by the rows of `batch` [B], 0 in those of padding."""
    return np.pad(values.reshape(-1), (0, len(batch.mask) - values.size))


def _prompt_rows(run: Run, prompts: list[list[int]], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded prompts, each as often as rows of its group fall into different shares."""
    width = bucket(max(len(prompt) for prompt in prompts))
    tokens, mask = pad_prompts(prompts, width, run.sampler.pad_id)
    copies = num_samples // rows_of_a_prompt(run.config, run.arch, run.mesh)
    return np.repeat(tokens, copies, axis=0), np.repeat(mask, copies, axis=0)


def policy_logprobs(run: Run, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies [B, R] by the training forward pass."""
    return compute_logprobs(run.actor, params, batch, micro_batches(run.config, run.mesh), run.mesh, run.pace)


def reference_logprobs(run: Run, batch: Batch) -> np.ndarray:
    """Log-probabilities [B, R] under the reference policy."""
    return policy_logprobs(run, run.reference, batch)[0]


def penalize_kl(run: Run, experience: Experience, kl_coef: float) -> Experience:
    """Adds the KL divergence of each token to the reference, and the score `seq_final_reward`: the reward less it.

    It is taken from the sampler's log-probabilities, which the group filter needs before anything is recomputed.
    """
    with run.stage("ref"):
        batch = rows_of(run, experience, num_groups=len(experience))
        arrays = put((batch.old_logprobs, reference_logprobs(run, batch)), replicated(run.mesh))
        kl = fetch(jitted_kl_penalty(*arrays, estimator=run.config.algorithm.kl_penalty))
    kl = np.where(batch.mask, kl, 0.0).reshape(*experience.finished.shape, -1)
    kl = np.pad(kl, ((0, 0), (0, 0), (0, experience.mask.shape[-1] - kl.shape[-1])))
    final = experience.scores["seq_reward"] - kl_coef * kl.sum(axis=-1)
    return dataclasses.replace(experience.with_scores(seq_final_reward=final), kl=kl)


def finish_rewards(run: Run, experience: Experience) -> Experience:
    """Adds the reward model's score if there is one, and the reward of each response to the training set."""
    if run.scorer is not None:
        with run.stage("reward"):
            experience = add_model_scores(experience, run.train_set, run.scorer, run.config)
    with run.stage("shape"):
        length = run.config.data.max_response_length
        buffer = run.config.reward.overlong_buffer
        return add_rewards(experience, buffer, max_response_length=length, mesh=run.rollout_mesh)


def final_rewards(experience: Experience) -> np.ndarray:
    """The reward [Q, G] of each response, after the KL divergence if it is in the reward."""
    return experience.scores.get("seq_final_reward", experience.scores["seq_reward"])


def sequence_kl(experience: Experience) -> float:
    """Mean over responses of the mean KL divergence of their tokens."""
    assert experience.kl is not None
    lengths = np.maximum(experience.mask.sum(axis=-1), 1)
    return float(np.mean(experience.kl.sum(axis=-1) / lengths))


def token_rewards(experience: Experience, batch: Batch, kl_coef: float) -> np.ndarray:
    """Reward [B, R] of each token: the response's at its last, less the KL divergence if there is one."""
    scores = rows_like(batch, experience.scores["seq_reward"]).astype(np.float32)
    rewards = np.asarray(place_rewards(scores, batch.mask))
    if experience.kl is not None:
        kl = experience.kl.reshape(-1, experience.kl.shape[-1])[:, : batch.mask.shape[1]]
        rewards = rewards - kl_coef * np.pad(kl, ((0, len(rewards) - len(kl)), (0, 0)))
    return rewards.astype(np.float32)


def estimate_advantages(
    run: Run, rewards: np.ndarray, batch: Batch, extra: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [B, R], computed on the mesh."""
    function, rows = ESTIMATORS[run.config.algorithm.adv_estimator], len(rewards)
    num_groups = run.config.data.train_batch_size
    missing = -rows % num_batch_shards(run.mesh)
    group_ids = np.pad(batch.group_ids, (0, missing), constant_values=num_groups)  # rows of padding
    arrays = put_rows((rewards, batch.mask, group_ids, chosen(function, extra)), run.mesh)
    options = {"num_groups": num_groups} if needs(function, "num_groups") else {}
    advantages, returns = fetch(run.estimator(*arrays[:3], **arrays[3], **options))
    return advantages[:rows], returns[:rows]


def keep_some(run: Run, experience: Experience, batch: Batch) -> tuple[Batch, Metrics]:
    """Advantages and loss mask after algorithm.keep_pos_ratio and keep_neg_ratio."""
    algorithm = run.config.algorithm
    scores = rows_like(batch, final_rewards(experience)).astype(np.float32)
    first = batch.advantages[:, 0]  # the same at all tokens of a response
    advantages, kept = fetch(
        jitted_keep_samples(
            *put((first, scores, batch.group_ids), replicated(run.mesh)),
            num_groups=run.config.data.train_batch_size,
            keep_pos_ratio=algorithm.keep_pos_ratio,
            keep_neg_ratio=algorithm.keep_neg_ratio,
            compute_new_adv=algorithm.compute_new_adv,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )
    )
    loss_mask = batch.loss_mask & kept[:, None]
    processed = np.where(batch.mask, advantages[:, None], 0.0).astype(np.float32)
    values = processed[loss_mask]
    metrics = statistics.advantage_metrics("advantages_processed", values)
    metrics["critic/advantages_processed/std"] = float(np.std(values)) if values.size else 0.0
    metrics["actor/kept_samples"] = float(np.mean(kept[: experience.finished.size]))
    return dataclasses.replace(batch, advantages=processed, loss_mask=loss_mask), metrics


def correct_rollout(run: Run, batch: Batch, sampled: np.ndarray) -> tuple[Batch, Metrics]:
    """Importance weights and rejection for a sampler that differs from the training pass, and their metrics.

    Once actor.old_logprob=auto has fallen back, the weights are those of tokens, truncated at FALLBACK_THRESHOLD.
    """
    settings = run.config.algorithm.rollout_correction
    if run.config.actor.old_logprob == "auto":
        settings = dataclasses.replace(settings, rollout_is="token", rollout_is_threshold=FALLBACK_THRESHOLD)
    arrays = put((batch.old_logprobs, sampled, batch.mask), replicated(run.mesh))
    metrics, probabilities = fetch((jitted_mismatch_metrics(*arrays), jitted_probability_metrics(*arrays)))
    if settings.rollout_is != "none":
        weights, found = fetch(
            jitted_importance_weights(
                *arrays,
                rollout_is=settings.rollout_is,
                threshold=parse_threshold(settings.rollout_is_threshold),
                batch_normalize=settings.rollout_is_batch_normalize,
            )
        )
        batch = dataclasses.replace(batch, importance_weights=weights)
        metrics |= found
    if settings.rollout_rs:
        bands = map(parse_threshold, settings.rollout_rs_threshold)
        criteria = tuple(zip(settings.rollout_rs, bands, strict=True))
        kept, found = fetch(jitted_rejection_mask(*arrays, criteria=criteria))
        batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & kept)
        metrics |= found
    named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    named |= {f"training/{name}": value for name, value in probabilities.items()}
    return batch, {name: float(value) for name, value in named.items()}


def hint_logprobs(run: Run, experience: Experience, models: Models, batch: Batch) -> np.ndarray:
    """Log-probabilities [B, R] of the same responses after prompts that hold the reference solution (CPO).

    The solution comes on top of data.max_prompt_length; nothing of a hinted prompt is cut.
    """
    rows = [run.train_set.rows[row] for row in experience.rows]
    prompts = hinted_prompts(
        rows,
        run.sampler.tokenizer,
        system_prompt=run.config.data.system_prompt,
        chat_template_kwargs=run.chat_template_kwargs,
    )
    missing = run.config.data.train_batch_size - len(experience)
    tokens, mask = _prompt_rows(run, prompts + [[]] * missing, experience.finished.shape[1])
    hinted = dataclasses.replace(batch, prompts=tokens, prompt_mask=mask)
    return policy_logprobs(run, models.actor.params, hinted)[0]


def greedy_rewards(run: Run, experience: Experience, models: Models) -> np.ndarray:
    """The reward [Q, G] of the most likely response to each response's prompt (ReMax)."""
    weights = run.decode_weights(models.actor.params)
    with jax.set_mesh(run.rollout_mesh):
        greedy = run.sampler.start(
            weights,
            run.train_set,
            experience.rows.tolist(),
            experience.numbers.tolist(),
            num_samples=1,
            purpose=BASELINE,
            sampling=Sampling.create(0.0, 1.0, -1),
            stage=run.stage,
        )
        rewards = finish_rewards(run, greedy()).scores["seq_reward"].astype(np.float32)
    return np.repeat(rewards, experience.finished.shape[1], axis=1)


def selection_noise(run: Run, experience: Experience, batch: Batch) -> np.ndarray:
    """Uniform draws [B, R] for losses that draw tokens, addressed by prompt number, sample and position.

    Every epoch over the batch has the same draws.
    """
    num_samples = experience.finished.shape[1]
    numbers = np.zeros(len(batch.mask) // num_samples, np.int32)
    numbers[: len(experience)] = experience.numbers
    numbers = put(numbers, replicated(run.mesh))
    return fetch(position_noise(run.config.seed, SELECT, numbers, num_samples, batch.mask.shape[1]))
