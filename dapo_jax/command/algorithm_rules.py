"""Host: what relates the options of the algorithm, the filter and the order of prompts to each other.

In all rules `function` is what scores responses, see `given_function`.
"""

from collections.abc import Callable, Collection, Iterator

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.group_relative import Estimates
from dapo_jax.algorithms.rollout_correction import CRITERIA, parse_threshold
from dapo_jax.command.option_uses import C, F
from dapo_jax.config.derived import further_rewards, gen_batch_size, keeps_some
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    FilterGroupsConfig,
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from dapo_jax.dynamic_sampling.rounds import FINAL_REWARD
from dapo_jax.rewards.weighted import is_weighted

Estimator = Callable[..., Estimates]


def loss_problems(actor: ActorConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    if actor.use_kl_loss and not actor.kl_loss_coef > 0:
        yield f"actor.kl_loss_coef={actor.kl_loss_coef} must be greater than 0 with use_kl_loss=True"
    top_entropy, distillation = algorithm.top_entropy_quantile, algorithm.distillation
    averaged = [f"algorithm.top_entropy_quantile={top_entropy}"] * (top_entropy < 1)
    averaged += ["algorithm.distillation.form=sampled"] * (distillation.path != "" and distillation.form == "sampled")
    if actor.policy_loss.loss_mode == "geo_mean" and averaged:
        yield (
            "actor.policy_loss.loss_mode=geo_mean averages the advantages of a response, so "
            f"{' and '.join(averaged)} cannot tell its tokens apart: choose another loss, such as gspo"
        )


def estimator_problems(
    algorithm: AlgorithmConfig, estimator: Estimator, rollout: RolloutConfig, function: str
) -> Iterator[str]:
    if algorithm.adv_estimator == "grpo_passk" and rollout.n < 2:
        yield f"algorithm.adv_estimator=grpo_passk needs rollout.n of at least 2, not {rollout.n}"
    if function == "none" and needs(estimator, "accuracy"):
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} reads the verifier's acc, and reward.function is none: "
            "give one, or choose grpo"
        )


def reward_parts_problems(
    algorithm: AlgorithmConfig, reward: RewardConfig, function: str, numbers: Collection[str] | None
) -> Iterator[str]:
    """The rewards of an estimator of several (GDPO): all that the config asks for, or those named; none is left out.

    Args:
        numbers: see `measured_numbers`.
    """
    keys, weights, further = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, further_rewards(reward)
    of_estimator, of_keys = f"adv_estimator={algorithm.adv_estimator}", f"algorithm.gdpo_reward_keys={keys}"
    if not keys and not is_weighted(function):
        yield (
            f"algorithm.{of_estimator} needs several rewards: give them in reward.functions, or name numbers that "
            "your reward function returns in algorithm.gdpo_reward_keys"
        )
    sums = {"seq_reward": {*further}, "score": {"reward_model"}}
    named = {*keys}.union(*(parts for name, parts in sums.items() if name in keys))
    if keys and (left_out := [name for name in further if name not in named]):
        yield f"{of_keys} leaves out {', '.join(left_out)}, which the config asks for: name each too, or switch it off"
    if numbers is not None and (unknown := [key for key in keys if key not in numbers]):
        yield f"{of_keys} has {', '.join(unknown)}, which no response has: choose among {', '.join(numbers)}"
    if algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward=True subtracts the KL divergence from the sum of the rewards, which "
            f"{of_estimator} does not read: set it to False, and actor.use_kl_loss=True"
        )
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights={weights} must have a weight for each of gdpo_reward_keys={keys}: "
            "give as many, or none"
        )


def distillation_problems(algorithm: AlgorithmConfig, estimator: Estimator) -> Iterator[str]:
    """What would follow rewards that are not trained on."""
    found = {
        "filter_groups.enable=False": algorithm.filter_groups.enable,
        "use_kl_in_reward=False": algorithm.use_kl_in_reward,
        "keep_pos_ratio=1 and keep_neg_ratio=1": keeps_some(algorithm),
        "adv_estimator=grpo": any(needs(estimator, name) for name in ("values", "hint_logprobs", "reward_baselines")),
    }
    if wrong := [cure for cure, is_wrong in found.items() if is_wrong]:
        yield (
            "algorithm.distillation.use_task_rewards=False trains on the teacher alone, so nothing may depend on the "
            f"reward: set algorithm.{', algorithm.'.join(wrong)}, or use_task_rewards=True"
        )


def correction_problems(correction: RolloutCorrectionConfig, actor: ActorConfig) -> Iterator[str]:
    criteria, thresholds = correction.rollout_rs, correction.rollout_rs_threshold
    if (correction.rollout_is != "none" or criteria) and actor.old_logprob != "recompute":
        yield (
            f"{C} compares the sampler with the training pass: set actor.old_logprob=recompute, not {actor.old_logprob}"
        )
    if len(criteria) != len(thresholds):
        yield f"{C}.rollout_rs={criteria} needs as many rollout_rs_threshold, not {thresholds}"
    for criterion in criteria:
        if criterion not in CRITERIA:
            yield f"{C}.rollout_rs={criterion!r} must be one of {', '.join(CRITERIA)}"
    for threshold in (correction.rollout_is_threshold, *thresholds):
        try:
            parse_threshold(threshold)
        except ValueError as error:
            yield f"{C}: {error}"
    for criterion, threshold in zip(criteria, thresholds, strict=False):
        low, separator, high = threshold.partition("_")
        if separator and not criterion.endswith("_k1"):
            yield (
                f"{C}.rollout_rs_threshold={thresholds}: {criterion} has no lower bound, so {low} is not read: give "
                f"{high!r}"
            )


def filter_problems(algorithm: AlgorithmConfig, data: DataConfig, function: str) -> Iterator[str]:
    groups = algorithm.filter_groups
    if function == "none" and groups.enable and groups.metric == "acc":
        yield f"{F}.metric=acc is the verifier's, and reward.function is none: choose score, or set {F}.enable=False"
    if not groups.filter_low < groups.filter_high:
        yield f"{F}.filter_low={groups.filter_low} must be less than filter_high={groups.filter_high}"
    if groups.enable and groups.rule == "mixed" and groups.metric in FINAL_REWARD and algorithm.use_kl_in_reward:
        yield (
            f"{F}.rule=mixed asks which rewards are above 0, and with metric={groups.metric} and "
            "algorithm.use_kl_in_reward=True rounding decides that of a reward of 0 less its KL divergence: choose "
            "metric=seq_reward, or rule=std"
        )
    target, rounds, size = data.train_batch_size, groups.max_num_gen_batches, gen_batch_size(data)
    must_be_full = groups.enable and groups.on_limit == "error" and groups.on_exhausted != "partial"
    if must_be_full and 0 < rounds * size < target:
        yield (
            f"data.train_batch_size={target} groups cannot be kept of the {rounds} x {size} = {rounds * size} prompts "
            f"that {F}.max_num_gen_batches={rounds} rounds of data.gen_batch_size={size} sample: raise one of them, "
            f"or set {F}.on_limit=partial"
        )


def curriculum_problems(groups: FilterGroupsConfig, rollout: RolloutConfig, function: str) -> Iterator[str]:
    """What does not go with data.curriculum."""
    on = "data.curriculum.enable=True"
    if rollout.n < 2:
        yield f"{on} needs groups that can be mixed, not rollout.n={rollout.n}: set 2 or more"
    if function == "none":
        yield f"{on} needs the verifier's acc, and reward.function is none: give one, or set it to False"
    if groups.enable and groups.skip_uniform.enable:
        yield (
            f"{on} and {F}.skip_uniform.enable=True both leave out prompts by their past groups: set one of them to "
            "False"
        )
