"""Host: what a config may ask for but rarely means: one line of warning each."""

from collections.abc import Iterator

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.tasks import given_function
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    RewardConfig,
    RolloutConfig,
)
from dapo_jax.dynamic_sampling.rounds import FINAL_REWARD
from dapo_jax.rewards.weighted import functions_of, is_weighted

HARDLY_EVER = {  # losses with bounds of another size: above which they are warned of, and what to set
    "gspo": (0.01, "clips, as a sequence's mean ratio stays near 1: set the paper's 3e-4 and 4e-4 (arXiv:2507.18071)"),
    "dppo_kl": (0.1, "stops a token, as they are nats of divergence: set both to about 0.05"),
}
NO_POLICY_STEP = "trainer.critic_warmup leaves no step that updates the policy"


def warnings(config: Config) -> list[str]:
    """What `config` asks for but rarely means. `validate` has found no problem with it."""
    actor, algorithm, trainer = config.actor, config.algorithm, config.trainer
    found = [*_of_sampling(config.rollout, config.evaluate), *_of_loss(actor, algorithm)]
    if trainer.critic_warmup >= trainer.total_training_steps > 0:
        found.append(NO_POLICY_STEP)
    if algorithm.filter_groups.enable:
        found += _of_filter(algorithm, config.rollout, actor)
        found += _of_filter_metric(algorithm, config.reward, config.data)
    return found


def _of_sampling(rollout: RolloutConfig, evaluate: EvaluateConfig) -> Iterator[str]:
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: training samples are drawn from a "
            "truncated distribution, but log-probabilities are those of the full one"
        )
    if rollout.min_response_length > 0:
        yield (
            f"rollout.min_response_length={rollout.min_response_length}: training samples are drawn from a "
            "distribution without an earlier end of sequence, but log-probabilities are those of the full one"
        )
    if evaluate.n == 1 and evaluate.temperature > 0:
        yield "evaluate.n=1 with temperature > 0 is a noisy measure: raise evaluate.n"
    if evaluate.n > 1 and evaluate.temperature == 0:
        yield f"evaluate.n={evaluate.n} with temperature=0: all samples of a problem are equal; n=1 is enough"


def _of_loss(actor: ActorConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Bounds and estimates with which a loss does not do what its paper says."""
    mode, estimator = actor.policy_loss.loss_mode, algorithm.adv_estimator
    low, high, of_mode = actor.clip_ratio_low, actor.clip_ratio_high, f"actor.policy_loss.loss_mode={mode}"
    if mode in ("gspo", "geo_mean", "sapo") and actor.loss_agg_mode != "seq-mean-token-mean":
        yield f"{of_mode} is defined with actor.loss_agg_mode=seq-mean-token-mean, not {actor.loss_agg_mode}"
    if mode == "cispo" and low < 1:
        yield (
            f"{of_mode} with actor.clip_ratio_low={low} raises weights below {1 - low:.3g} to it; the paper has no "
            "lower bound (arXiv:2506.13585): set actor.clip_ratio_low=1"
        )
    if mode in HARDLY_EVER and max(low, high) > HARDLY_EVER[mode][0]:
        yield f"{of_mode} with actor.clip_ratio_low={low}, clip_ratio_high={high} hardly ever {HARDLY_EVER[mode][1]}"
    by_token = estimator in ("gae", "optimal_token_baseline")
    by_token |= estimator == "cpo" and "seq" not in algorithm.cpo.wrap_method
    by_token |= estimator == "reinforce_plus_plus" and (algorithm.use_kl_in_reward or algorithm.gamma < 1)
    if mode == "geo_mean" and by_token:
        yield (
            f"{of_mode} averages the advantages of a response, so adv_estimator={estimator} cannot tell its tokens "
            "apart: set actor.policy_loss.loss_mode=gspo, or adv_estimator=grpo"
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        yield (
            f"actor.kl_loss_type={actor.kl_loss_type} has a gradient of 0 on average, so it does not hold the policy: "
            f"set actor.kl_loss_type={actor.kl_loss_type}+, which has the same value"
        )


def _of_filter(algorithm: AlgorithmConfig, rollout: RolloutConfig, actor: ActorConfig) -> Iterator[str]:
    groups, estimator = algorithm.filter_groups, algorithm.adv_estimator
    if rollout.n == 1:
        yield "rollout.n=1: a group of one sample is always kept, and its advantage is its reward"
    if estimator == "cpo":
        yield "algorithm.adv_estimator=cpo has its own contrast: the group filter is normally off with it"
    if not needs(named_estimator(estimator), "num_groups"):
        yield (
            f"algorithm.adv_estimator={estimator} compares no samples within a group: it also learns from groups that "
            "are all right or all wrong, which the group filter drops; the filter is normally off with it"
        )
    if groups.backfill == "stream" and groups.leftover != "requeue":
        yield (
            f"algorithm.filter_groups.leftover={groups.leftover} with backfill=stream: which groups are left over "
            "depends on the keep rate; only requeue gives the same batches for every schedule"
        )
    if groups.leftover == "carry" and actor.old_logprob == "recompute":
        yield (
            "algorithm.filter_groups.leftover=carry with actor.old_logprob=recompute: carried groups are treated as "
            "if the newer policy had sampled them"
        )


def _of_filter_metric(algorithm: AlgorithmConfig, reward: RewardConfig, data: DataConfig) -> Iterator[str]:
    """A metric with which groups pass that are all right or all wrong, or are dropped though they are mixed."""
    groups = algorithm.filter_groups
    shaped = groups.metric in ("seq_reward", *FINAL_REWARD)
    by_length = reward.length.form != "none" and (shaped or groups.metric == "length_reward")
    contains = ["the overlong penalty"] * (shaped and reward.overlong_buffer.enable)
    contains += ["the length reward"] * by_length
    contains += ["the KL divergence"] * (groups.metric in FINAL_REWARD and algorithm.use_kl_in_reward)
    if contains:
        yield (
            f"algorithm.filter_groups.metric={groups.metric} contains {' and '.join(contains)}, so groups whose "
            f"answers are all wrong{' or all right' * by_length} can pass the filter; the paper's metric is acc"
        )
    function = given_function(reward)
    if (groups.metric == "score" or shaped) and is_weighted(function) and len(functions_of(function)) > 1:
        yield (
            f"algorithm.filter_groups.metric={groups.metric} contains every part of reward.functions={function}, so a "
            "group whose answers are all wrong passes the filter as soon as a part such as format or length differs; "
            "acc is the first part's"
        )
    signed = ("math_dapo", "math_dapo_lenient", *["auto"] * (data.task == "files"))
    by_mean = groups.rule == "mean_range" and (groups.metric == "score" or shaped)
    if by_mean and groups.filter_low >= 0 and function in signed:
        yield (
            f"algorithm.filter_groups.rule=mean_range with metric={groups.metric}: a score of math_dapo is -1 or 1, "
            f"so filter_low={groups.filter_low} drops groups that are mostly wrong; acc is 0 or 1"
        )
