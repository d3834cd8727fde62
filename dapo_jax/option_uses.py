"""Host: which options a run reads only with another setting. One that is changed where nothing reads it is an error.

USES says it for every option that is not always read; tests/test_option_uses.py makes a new option be put in order.
A value that asks for what happens anyway, such as a coefficient of 0 for a term that is off, is no error.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flax import traverse_util

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.policy_loss import LOSSES, SELECTIONS
from dapo_jax.config import Config, CPOConfig, PolicyLossConfig, type_problems, uses_reference
from dapo_jax.task_sets import TaskOptions, held_out_options, parse_tasks

logger = logging.getLogger(__name__)


def flat(config: Config) -> dict[str, Any]:
    """Every option by its dotted key."""
    return traverse_util.flatten_dict(dataclasses.asdict(config), sep=".")


DEFAULTS = flat(Config())


@dataclass(frozen=True)
class Use:
    """Options that are read only with a setting."""

    keys: tuple[str, ...]
    setting: str  # for a message: "... is not read without {setting}"
    reads: Callable[[Config], bool]


def _use(options: str, setting: str, reads: Callable[[Config], bool]) -> Use:
    """A Use of the keys in `options`; "section." is all keys of a section, "section.one|two" are two of them."""
    keys: list[str] = []
    for option in options.split():
        section, _, names = option.rpartition(".")
        found = [key for key in DEFAULTS if key.startswith(option)] if not names else []
        keys += found or [f"{section}.{name}" for name in names.split("|")]
    return Use(tuple(keys), setting, reads)


def uses_critic(config: Config) -> bool:
    """Whether the advantage estimator needs a value function."""
    return _estimator_needs(config, "values")


def trained(config: Config) -> tuple[str, ...]:
    """The sections of the models that are trained."""
    return ("actor", "critic") if uses_critic(config) else ("actor",)


def keeps_some(config: Config) -> bool:
    """Whether some samples of a group are left out of training."""
    return min(config.algorithm.keep_pos_ratio, config.algorithm.keep_neg_ratio) < 1


def has_round_limit(config: Config) -> bool:
    """Whether the generation rounds of a step are bounded."""
    groups = config.algorithm.filter_groups
    return groups.max_num_gen_batches > 0 or groups.adaptive_limit.enable


def _may_be_partial(config: Config) -> bool:
    groups = config.algorithm.filter_groups
    return "partial" in (groups.on_limit, groups.on_exhausted)


def measured_sets(config: Config) -> list[TaskOptions]:
    """What the policy is measured on: the held-out problems, if there are any, and evaluate.tasks."""
    data = config.data
    held_out = {
        "files": bool(data.val_files),
        "arithmetic": data.arithmetic.num_heldout > 0,
        "reasoning_gym": data.reasoning_gym.num_heldout > 0,
    }
    try:
        tasks = parse_tasks(config)
    except ValueError:  # which validate reports; what the sets would read is not known
        tasks = [held_out_options(config)]
    return [held_out_options(config)] * held_out.get(data.task, True) + tasks


def _estimator_needs(config: Config, name: str) -> bool:
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    return estimator is not None and needs(estimator, name)


def _estimators(name: str) -> str:
    return "algorithm.adv_estimator=" + " or ".join(key for key in ESTIMATORS if needs(ESTIMATORS[key], name))


LOSS_OPTIONS = [field for field in dataclasses.fields(PolicyLossConfig) if field.name != "loss_mode"]


def _loss_needs(mode: str, name: str) -> bool:
    return any(needs(functions[mode], name) for functions in (LOSSES, SELECTIONS) if mode in functions)


def _loss_use(key: str) -> Use:
    """Of an option that only some policy losses have."""
    name = key.rpartition(".")[2]
    modes = " or ".join(mode for mode in LOSSES if _loss_needs(mode, name))
    return Use(
        (key,),
        f"actor.policy_loss.loss_mode={modes}",
        lambda config: _loss_needs(config.actor.policy_loss.loss_mode, name),
    )


CPO_READS = {  # by wrap_method, as algorithms/advantages.py's cpo
    "mi": ("mi_alpha",),
    "mi_clamp_unify_difficulty": ("cpo_lambda", "pos_alpha", "neg_alpha", "mi_alpha"),
    "negonly_mi3": ("cpo_lambda", "neg_alpha"),
    "seq_kl": ("kl_alpha",),
    "negonly_seq_kl": ("kl_alpha",),
}


def _cpo_use(name: str) -> Use:
    """Of an option that only some methods of CPO have."""
    methods = " or ".join(method for method, read in CPO_READS.items() if name in read)
    return Use(
        (f"algorithm.cpo.{name}",),
        f"algorithm.cpo.wrap_method={methods}",
        lambda config: name in CPO_READS.get(config.algorithm.cpo.wrap_method, ()),
    )


def _agg_modes(config: Config) -> set[str]:
    return {getattr(config, name).loss_agg_mode for name in trained(config)}


def _measures(config: Config) -> bool:
    return bool(measured_sets(config))


def _verifies(config: Config) -> bool:
    functions = {config.reward.function, *(task.reward_function for task in measured_sets(config))}
    return functions != {"none"}


MEASURED = "problems to evaluate on (data.val_files, num_heldout of a generated task, or evaluate.tasks)"
VERIFIED = "a verifier (reward.function other than none)"
G, C = "algorithm.filter_groups", "algorithm.rollout_correction"

# Of several that name a key the first that fails is reported: the outer one comes first.
USES = (
    _use(
        "data.rollout_batch_size|mini_rollout_batch_size trainer.max_try_make_batch "
        "algorithm.use_dynamic_sample|dynamic_sample_max_gen_batches|online_filtering "
        "algorithm.filter_key|filter_low|filter_high",
        "dapo_jax.config.freeze, which carries out the names of other trainers",
        lambda config: False,
    ),
    _use("data.train_files|val_files", "data.task=files", lambda config: config.data.task == "files"),
    _use(
        "data.prompt_key",
        "data.task=files or evaluate.tasks",
        lambda config: config.data.task == "files" or any(task.files for task in measured_sets(config)),
    ),
    _use("data.arithmetic.", "data.task=arithmetic", lambda config: config.data.task == "arithmetic"),
    _use("data.reasoning_gym.", "data.task=reasoning_gym", lambda config: config.data.task == "reasoning_gym"),
    _use(
        "data.truncation",
        "data.filter_overlong_prompts=False",
        lambda config: not config.data.filter_overlong_prompts,
    ),
    _use(
        "model.remat_policy",
        "model.enable_gradient_checkpointing=True",
        lambda config: config.model.enable_gradient_checkpointing,
    ),
    _use("model.lora.alpha|target_modules", "model.lora.rank above 0", lambda config: config.model.lora.rank > 0),
    _use("model.random.", "model.path=random", lambda config: config.model.path == "random"),
    _use("rollout.kv_memory_share", "rollout.max_num_seqs=0", lambda config: config.rollout.max_num_seqs == 0),
    _use("reward.error_score", VERIFIED, _verifies),
    _use(
        "reward.model.weight|function_weight|micro_batch_size_per_device|max_length",
        "reward.model.path",
        lambda config: bool(config.reward.model.path),
    ),
    _use("reward.model.function_weight", VERIFIED, _verifies),
    _use(
        "reward.overlong_buffer.len|penalty_factor",
        "reward.overlong_buffer.enable=True",
        lambda config: config.reward.overlong_buffer.enable,
    ),
    _use(
        "algorithm.norm_adv_by_std_in_grpo",
        _estimators("norm_adv_by_std_in_grpo"),
        lambda config: _estimator_needs(config, "norm_adv_by_std_in_grpo"),
    ),
    _use("algorithm.gamma", _estimators("gamma"), lambda config: _estimator_needs(config, "gamma")),
    _use("algorithm.lam", _estimators("lam"), lambda config: _estimator_needs(config, "lam")),
    _use(
        "algorithm.keep_pos_ratio|keep_neg_ratio",
        "algorithm.adv_estimator=grpo or dapo",
        lambda config: config.algorithm.adv_estimator in ("grpo", "dapo"),
    ),
    _use("algorithm.compute_new_adv", "keep_pos_ratio or keep_neg_ratio below 1", keeps_some),
    _use(
        "algorithm.kl_penalty algorithm.kl_ctrl.type|horizon|target_kl",
        "algorithm.use_kl_in_reward=True",
        lambda config: config.algorithm.use_kl_in_reward,
    ),
    _use(
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.use_kl_in_reward=True",
        lambda config: config.algorithm.use_kl_in_reward or config.algorithm.kl_ctrl.kl_coef == 0,
    ),
    _use(
        "algorithm.kl_ctrl.horizon|target_kl",
        "algorithm.kl_ctrl.type=adaptive",
        lambda config: config.algorithm.kl_ctrl.type == "adaptive",
    ),
    _use(
        f"{C}.rollout_is_threshold",
        f"{C}.rollout_is=token or sequence",
        lambda config: config.algorithm.rollout_correction.rollout_is != "none",
    ),
    _use(
        f"{C}.rollout_is_batch_normalize",
        f"{C}.rollout_is=token or sequence, or actor.old_logprob=auto",
        lambda config: config.algorithm.rollout_correction.rollout_is != "none" or config.actor.old_logprob == "auto",
    ),
    _use("algorithm.cpo.", _estimators("wrap_method"), lambda config: _estimator_needs(config, "wrap_method")),
    *(_cpo_use(field.name) for field in dataclasses.fields(CPOConfig) if field.name != "wrap_method"),
    _use(
        f"{G}.metric|rule|std_threshold|filter_low|filter_high|keep_singletons|max_num_gen_batches|on_limit|on_empty "
        f"{G}.leftover|leftover_max_staleness|backfill {G}.adaptive_limit. {G}.stream. {G}.skip_uniform.",
        f"{G}.enable=True",
        lambda config: config.algorithm.filter_groups.enable,
    ),
    _use(f"{G}.std_threshold", f"{G}.rule=std", lambda config: config.algorithm.filter_groups.rule == "std"),
    _use(
        f"{G}.filter_low|filter_high",
        f"{G}.rule=mean_range",
        lambda config: config.algorithm.filter_groups.rule == "mean_range",
    ),
    _use(f"{G}.keep_singletons", "rollout.n=1", lambda config: config.rollout.n == 1),
    _use(
        f"{G}.adaptive_limit.slack|min_rounds",
        f"{G}.adaptive_limit.enable=True",
        lambda config: config.algorithm.filter_groups.adaptive_limit.enable,
    ),
    _use(f"{G}.on_limit", f"a limit of rounds ({G}.max_num_gen_batches above 0, or adaptive_limit)", has_round_limit),
    _use(
        f"{G}.on_empty",
        f"a partial step ({G}.on_limit=partial or on_exhausted=partial)",
        _may_be_partial,
    ),
    _use(
        f"{G}.leftover_max_staleness",
        f"{G}.leftover=carry",
        lambda config: config.algorithm.filter_groups.leftover == "carry",
    ),
    _use(f"{G}.stream.", f"{G}.backfill=stream", lambda config: config.algorithm.filter_groups.backfill == "stream"),
    _use(
        f"{G}.skip_uniform.floor|decay",
        f"{G}.skip_uniform.enable=True",
        lambda config: config.algorithm.filter_groups.skip_uniform.enable,
    ),
    _use(
        "actor.ppo_micro_batch_size_per_device critic.ppo_micro_batch_size_per_device",
        "actor.use_dynamic_bsz=False",
        lambda config: not config.actor.use_dynamic_bsz,
    ),
    _use(
        "actor.ppo_max_token_len_per_device",
        "actor.use_dynamic_bsz=True",
        lambda config: config.actor.use_dynamic_bsz,
    ),
    *(_loss_use(f"actor.{name}") for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")),
    *(_loss_use(f"actor.policy_loss.{field.name}") for field in LOSS_OPTIONS),
    _use(
        "actor.loss_scale_factor",
        "loss_agg_mode=seq-mean-token-sum-norm",
        lambda config: "seq-mean-token-sum-norm" in _agg_modes(config),
    ),
    _use(
        "actor.count_empty_sequences",
        "a loss_agg_mode of sequences (seq-mean-...)",
        lambda config: any(mode.startswith("seq-") for mode in _agg_modes(config)),
    ),
    _use(
        "actor.kl_loss_coef",
        "actor.use_kl_loss=True",
        lambda config: config.actor.use_kl_loss or config.actor.kl_loss_coef == 0,
    ),
    _use("actor.kl_loss_type", "actor.use_kl_loss=True", lambda config: config.actor.use_kl_loss),
    _use("reference.path", "actor.use_kl_loss=True or algorithm.use_kl_in_reward=True", uses_reference),
    _use("critic. trainer.critic_warmup", _estimators("values"), uses_critic),
    _use(
        "actor.optim.min_lr_ratio",
        "actor.optim.lr_scheduler_type=cosine",
        lambda config: config.actor.optim.lr_scheduler_type == "cosine",
    ),
    _use(
        "critic.optim.min_lr_ratio",
        "critic.optim.lr_scheduler_type=cosine",
        lambda config: config.critic.optim.lr_scheduler_type == "cosine",
    ),
    _use("trainer.test_freq", MEASURED, lambda config: _measures(config) or config.trainer.test_freq == -1),
    _use(
        "trainer.keep_best_ckpt",
        f"trainer.best_metric, or {MEASURED}",
        lambda config: bool(config.trainer.best_metric) or _measures(config) or config.trainer.keep_best_ckpt == 0,
    ),
    _use(
        "trainer.best_metric_mode",
        f"trainer.best_metric, or {MEASURED}",
        lambda config: bool(config.trainer.best_metric) or _measures(config),
    ),
    _use("trainer.rollout_devices", "trainer.rollout_ahead=1", lambda config: config.trainer.rollout_ahead == 1),
    _use("trainer.stop_patience_s", "trainer.rollout_ahead=0", lambda config: config.trainer.rollout_ahead == 0),
    _use("monitor.alarms.heldout_drop monitor.detailed_stats", MEASURED, _measures),
    _use("evaluate.n|temperature|top_p|top_k|max_prompts|batch_size|bootstrap", MEASURED, _measures),
    _use(
        "evaluate.top_p|top_k",
        "a temperature above 0",
        lambda config: any(task.temperature > 0 for task in measured_sets(config)),
    ),
)


def unread(config: Config) -> dict[str, str]:
    """The options that differ from their defaults though nothing reads them, each with the setting that would.

    `config` must have no `config.type_problems`.
    """
    values, found = flat(config), {}
    for use in USES:
        changed = [key for key in use.keys if values[key] != DEFAULTS[key] and key not in found]
        if changed and not use.reads(config):
            found |= dict.fromkeys(changed, use.setting)
    return found


def _default(key: str) -> str:
    return "null" if DEFAULTS[key] is None else repr(DEFAULTS[key])


def unread_problems(config: Config) -> list[str]:
    """One line for each of `unread`, and for each bound of a rejection criterion that has none such."""
    values = flat(config)
    problems = [
        f"{key}={values[key]!r} is not read without {setting}: set that, or leave it at its default, {_default(key)}"
        for key, setting in unread(config).items()
    ]
    correction = config.algorithm.rollout_correction
    for name, threshold in zip(correction.rollout_rs, correction.rollout_rs_threshold, strict=False):
        low, separator, high = threshold.partition("_")
        if separator and not name.endswith("_k1"):
            problems.append(
                f"{C}.rollout_rs_threshold={correction.rollout_rs_threshold}: {name} has no lower bound, and {low} is "
                f"not read: give {high!r}"
            )
    return problems


def without_switched_off(base: Config, config: Config, chosen: Collection[str]) -> Config:
    """`config`, a variation of `base`, with what the variation switches off back at its default.

    So a recipe is varied by one option, and the options that it sets for a feature need not be unset with it. What
    `base` sets in vain and what was `chosen` stays as it is, for `validate` to refuse. Each change is logged.

    Args:
        chosen: keys that were given with the variation.
    """
    if type_problems(config) or type_problems(base):
        return config
    stays = {*chosen, *unread(base)}
    off = {key: setting for key, setting in unread(config).items() if key not in stays}
    for key, setting in off.items():
        logger.warning("%s is not read without %s: it is back at its default, %s", key, setting, _default(key))
    return with_values(config, {key: DEFAULTS[key] for key in off}) if off else config


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """A config, or a section of it, with values by their dotted keys."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in {key.partition(".")[0] for key in values.keys() - own.keys()}:
        inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = with_values(getattr(section, name), inner)
    return dataclasses.replace(section, **own)
