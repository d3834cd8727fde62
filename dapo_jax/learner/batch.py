"""Host: from accepted groups to the rows that the learner is given: rewards, advantages, masks, log-probabilities."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.kl import ROUNDING, kl_penalty
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.algorithms.rollout_correction import (
    importance_weights,
    mismatch_metrics,
    parse_threshold,
    probability_metrics,
    rejection_mask,
)
from dapo_jax.config.derived import keeps_some
from dapo_jax.config.sections import AlgorithmConfig
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Experience
from dapo_jax.errors import InputError
from dapo_jax.learner.distillation import ask_teacher
from dapo_jax.learner.learner import Batching, Learner
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.router_replay import choosing_experts
from dapo_jax.learner.rows import known_or_0, padded_prompts, rows_like, rows_of, without_unknown
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.trained_networks import FOR_ESTIMATORS, needs_statistics
from dapo_jax.learner.trained_tokens import keep_some, only_high_entropy, selection_noise
from dapo_jax.learner.update import compute_statistics, compute_values
from dapo_jax.monitor import statistics
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import fetch, put, put_rows, replicated
from dapo_jax.rewards.shaping import place_rewards

FALLBACK_THRESHOLD = "2.0"
Metrics = dict[str, float]
jitted_kl_penalty = jax.jit(kl_penalty, static_argnames="estimator")
jitted_mismatch_metrics = jax.jit(mismatch_metrics)
jitted_probability_metrics = jax.jit(probability_metrics)
jitted_importance_weights = jax.jit(importance_weights, static_argnames=("rollout_is", "threshold", "batch_normalize"))
jitted_rejection_mask = jax.jit(rejection_mask, static_argnames="criteria")


def make_batch(
    learner: Learner,
    experience: Experience,
    models: Models,
    *,
    recompute: bool,
    kl_coef: float,
    hinted: list[list[int]] | None = None,
    baselines: np.ndarray | None = None,
) -> tuple[Batch, Metrics]:
    """The accepted groups as rows to train on, and padded with empty rows if the step is partial.

    A row without a verdict on its response, or on the one that it is compared with, is padding too.

    Args:
        recompute: take old log-probabilities from the training forward pass instead of the sampler.
        kl_coef: of the KL divergence in the reward.
        hinted: prompts [Q] that hold the reference solution, for an estimator that needs their log-probabilities.
        baselines: [Q, G] rewards of the most likely responses, for an estimator that needs them; NaN = not known.
    """
    batching, networks = learner.batching, learner.networks
    known = experience.known if baselines is None else experience.known & ~np.isnan(baselines)
    with learner.monitor.stage("batch"):
        batch = without_unknown(rows_of(experience, num_groups=batching.num_groups, pad_id=batching.pad_id), known)
    if batching.algorithm.overlong_filtering:  # first: what follows selects among the tokens that are trained on
        finished = rows_like(batch, experience.finished)
        batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & finished[:, None])
    batch, extra, metrics = add_forward_passes(learner, batch, models, recompute=recompute, hinted=hinted)
    if baselines is not None:
        extra["reward_baselines"] = rows_like(batch, np.where(known, baselines, np.float32(0)))
    extra |= verdicts_of_rows(batching.algorithm, experience, batch)
    with learner.monitor.stage("adv"):
        batch, found = add_advantages(batching, experience, batch, extra, kl_coef=kl_coef)
    if batching.algorithm.overlong_filtering:
        found["actor/overlong_filtered"] = float(np.mean(~experience.finished[experience.known]))
    if networks.teacher is not None:
        batch, distilled = ask_teacher(learner, networks.teacher, batch, models.actor.params)
        found |= distilled
    if batching.algorithm.top_entropy_quantile < 1:
        batch, chosen_tokens = only_high_entropy(batch, extra["entropy"], batching.algorithm.top_entropy_quantile)
        found |= chosen_tokens
    if networks.actor.select is not None:
        batch = dataclasses.replace(batch, noise=selection_noise(batching, experience, batch))
    return batch, metrics | found


def with_those_of_batch(of_update: Metrics, of_batch: Mapping[str, float]) -> Metrics:
    """The metrics of a batch and of the updates on it.

    Where both compare the sampler and the training pass, the batch's count: if log-probabilities were recomputed, the
    first optimizer step has compared the training pass with itself.
    """
    found = {**of_update, **of_batch}
    if found["actor/recomputed_logprobs"]:
        found.pop("rollout_corr/first_clipfrac", None)
    return found


def add_forward_passes(
    learner: Learner, batch: Batch, models: Models, *, recompute: bool, hinted: list[list[int]] | None
) -> tuple[Batch, dict[str, np.ndarray], Metrics]:
    """Adds what forward passes find: old and reference log-probabilities, values, weights of the rollout correction.

    The second result holds the arrays [B, R] that advantage estimators may need, by the name of their parameter.
    """
    batching, networks, stage = learner.batching, learner.networks, learner.monitor.stage
    metrics = {"actor/recomputed_logprobs": float(recompute)}
    extra: dict[str, Any] = {}
    if recompute or needs_statistics(batching.algorithm):
        with stage("old_log_prob"):
            found = policy_statistics(learner, models.actor.params, batch)
            extra = {name: getattr(found, name) for name in FOR_ESTIMATORS}
    if recompute:
        sampled, batch = batch.old_logprobs, dataclasses.replace(batch, old_logprobs=extra["logprobs"])
        if batching.actor.off_policy_mask_threshold is not None:
            batch = dataclasses.replace(batch, sampled_logprobs=sampled)
        batch, correction = correct_rollout(batching, batch, sampled)
        extra["importance_weights"] = batch.importance_weights
        metrics |= correction
    if hinted is not None:
        with stage("old_log_prob"):
            extra["hint_logprobs"] = hint_logprobs(learner, models.actor.params, batch, hinted)
    if batching.actor.use_kl_loss:
        with stage("ref"):
            batch = dataclasses.replace(batch, ref_logprobs=reference_logprobs(learner, batch))
    if networks.critic is not None:
        assert models.critic is not None
        with stage("values"):
            params, pieces = models.critic.params, batching.micro_batches["critic"]
            values = compute_values(networks.critic, params, batch, pieces, batching.mesh, learner.pace)
        batch, extra["values"] = dataclasses.replace(batch, values=values), values
    return batch, extra, metrics


def add_advantages(
    batching: Batching, experience: Experience, batch: Batch, extra: dict[str, np.ndarray], *, kl_coef: float
) -> tuple[Batch, Metrics]:
    """Adds advantages (DAPO, equation 9), returns for a critic, and the mask of samples that are kept.

    Args:
        extra: arrays [B, R] that estimators may need, by the name of their parameter.
        kl_coef: of the KL divergence in the reward.
    """
    rewards, mask = token_rewards(batching, experience, batch, kl_coef), batch.policy_mask
    advantages, returns = estimate_advantages(batching, rewards, batch, extra)
    metrics = statistics.advantage_metrics("advantages", advantages[mask])
    metrics |= statistics.advantage_metrics("returns", returns[mask])
    batch = dataclasses.replace(batch, advantages=advantages)
    if batch.values is not None:
        batch, values = dataclasses.replace(batch, returns=returns), batch.values[mask]
        metrics |= statistics.advantage_metrics("values", values)
        metrics["critic/vf_explained_var"] = statistics.explained_variance(values, returns[mask])
    if keeps_some(batching.algorithm):
        batch, kept = keep_some(batching, experience, batch)
        metrics |= kept
    return batch, metrics


def policy_statistics(learner: Learner, params: Any, batch: Batch) -> TokenStatistics:
    """Statistics [B, R] of each token by the training forward pass."""
    networks, pieces = learner.networks, learner.batching.micro_batches["actor"]
    return compute_statistics(networks.actor, params, batch, pieces, learner.mesh, learner.pace)


def reference_logprobs(learner: Learner, batch: Batch) -> np.ndarray:
    """Log-probabilities [B, R] under the reference policy."""
    return policy_statistics(learner, learner.networks.reference, choosing_experts(batch)).logprobs


def penalize_kl(learner: Learner, experience: Experience, kl_coef: float) -> Experience:
    """Adds the KL divergence of each token to the reference, and the score `seq_final_reward`: the reward less it.

    It is taken from the sampler's log-probabilities, which the group filter needs before anything is recomputed. A
    filter or an order by this score depends on no engine, mesh or micro-batch: it leaves out what rounding can make.
    """
    with learner.monitor.stage("ref"):
        batch = rows_of(experience, num_groups=len(experience), pad_id=learner.batching.pad_id)
        arrays = put((batch.old_logprobs, reference_logprobs(learner, batch)), replicated(learner.mesh))
        kl = fetch(jitted_kl_penalty(*arrays, estimator=learner.batching.algorithm.kl_penalty))
    kl = np.where(batch.policy_mask, kl, 0.0).reshape(*experience.finished.shape, -1)
    kl = np.pad(kl, ((0, 0), (0, 0), (0, experience.mask.shape[-1] - kl.shape[-1])))
    return less_divergence(dataclasses.replace(experience, kl=kl), learner.batching.rounding, kl_coef)


def less_divergence(experience: Experience, rounding: float, kl_coef: float) -> Experience:
    """With the score `seq_final_reward` by this coefficient."""
    rewards = experience.scores["seq_reward"] - kl_coef * experience.divergence(ROUNDING, rounding)
    return experience.with_scores(seq_final_reward=rewards)


def token_rewards(batching: Batching, experience: Experience, batch: Batch, kl_coef: float) -> np.ndarray:
    """Reward [B, R] of each token: the response's at the policy's last, less the KL divergence if there is one.

    An estimator that compares responses sees no divergence where a group differs by its rounding alone.
    """
    scores = rows_like(batch, known_or_0(experience, experience.scores["seq_reward"])).astype(np.float32)
    rewards = np.asarray(place_rewards(scores, batch.policy_mask))
    if experience.kl is not None:
        kl = experience.kl
        if needs(named_estimator(batching.algorithm.adv_estimator), "num_groups"):
            kl = np.where(experience.differs_by_rounding(batching.rounding)[:, None, None], np.float32(0), kl)
        kl = kl.reshape(-1, kl.shape[-1])[:, : batch.mask.shape[1]]
        rewards = rewards - kl_coef * np.pad(kl, ((0, len(rewards) - len(kl)), (0, 0)))
    return rewards.astype(np.float32)


def estimate_advantages(
    batching: Batching, rewards: np.ndarray, batch: Batch, extra: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [B, R], computed on the mesh."""
    function, rows = named_estimator(batching.algorithm.adv_estimator), len(rewards)
    num_groups = batching.num_groups
    missing = -rows % num_batch_shards(batching.mesh)
    group_ids = np.pad(batch.group_ids, (0, missing), constant_values=num_groups)  # rows of padding
    arrays = put_rows((rewards, batch.policy_mask, group_ids, chosen(function, extra)), batching.mesh)
    options = {"num_groups": num_groups} if needs(function, "num_groups") else {}
    advantages, returns = fetch(batching.estimator(*arrays[:3], **arrays[3], **options))
    return advantages[:rows], returns[:rows]


def verdicts_of_rows(algorithm: AlgorithmConfig, experience: Experience, batch: Batch) -> dict[str, np.ndarray]:
    """What the estimator needs of the verdicts besides the reward: `accuracy` [B], `reward_parts` [B, K].

    A part that the verifier has not given to a response counts as 0.

    Raises:
        InputError: no reward has a name in algorithm.gdpo_reward_keys.
    """
    estimator, found = named_estimator(algorithm.adv_estimator), {}
    if needs(estimator, "accuracy"):
        found["accuracy"] = rows_like(batch, known_or_0(experience, experience.scores["acc"])).astype(np.float32)
    if needs(estimator, "reward_parts"):
        if missing := set(algorithm.gdpo_reward_keys) - set(experience.scores):
            raise InputError(
                f"algorithm.gdpo_reward_keys has {', '.join(sorted(missing))}, which the verifier does not return: it "
                f"must be among {', '.join(sorted(experience.scores))}; correct it (or give back the function that has "
                "judged the groups of the checkpoint)"
            )
        parts = [rows_like(batch, np.nan_to_num(experience.scores[key])) for key in algorithm.gdpo_reward_keys]
        found["reward_parts"] = np.stack(parts, axis=-1).astype(np.float32)
    return found


def correct_rollout(batching: Batching, batch: Batch, sampled: np.ndarray) -> tuple[Batch, Metrics]:
    """Importance weights and rejection for a sampler that differs from the training pass, and their metrics.

    Once actor.old_logprob=auto has fallen back, the weights are those of tokens, truncated at FALLBACK_THRESHOLD.
    """
    settings = batching.algorithm.rollout_correction
    if batching.actor.old_logprob == "auto":
        settings = dataclasses.replace(settings, rollout_is="token", rollout_is_threshold=FALLBACK_THRESHOLD)
    arrays = put((batch.old_logprobs, sampled, batch.policy_mask), replicated(batching.mesh))
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
        trained = put(batch.loss_mask, replicated(batching.mesh))
        kept, found = fetch(jitted_rejection_mask(*arrays[:2], trained, criteria=criteria))
        batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & kept)
        metrics |= found
    named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    named |= {f"training/{name}": value for name, value in probabilities.items()}
    return batch, {name: float(value) for name, value in named.items()}


def hint_logprobs(learner: Learner, params: Any, batch: Batch, hinted: list[list[int]]) -> np.ndarray:
    """Log-probabilities [B, R] of the same responses after prompts that hold the reference solution (CPO).

    The solution comes on top of data.max_prompt_length; a hinted prompt is never cut.
    """
    batching = learner.batching
    tokens, mask = padded_prompts(hinted + [[]] * (batching.num_groups - len(hinted)), batching.pad_id)
    hinted_batch = dataclasses.replace(choosing_experts(batch), prompts=tokens, prompt_mask=mask)
    return policy_statistics(learner, params, hinted_batch).logprobs
