"""Host: options that a run reads only with another setting. Changing one that nothing reads is an error.

USES lists them; a test fails for an option that is neither listed nor always read. A value that asks for what happens
anyway, such as a coefficient of 0 for a term that is off, is allowed.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import ESTIMATOR, LOSS, named_estimator, named_loss
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.rollout_correction import WEIGHTS
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.derived import gen_batch_size, keeps_some, uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat, type_problems, with_values
from dapo_jax.errors import InputError
from dapo_jax.learner.choices import trained
from dapo_jax.own_functions import is_own
from dapo_jax.problems import NO_FUNCTIONS, TaskOptions, given_function, held_out_options, parse_tasks
from dapo_jax.rewards.weighted import functions_of

PUT_BACK: ContextVar[tuple[str, ...]] = ContextVar("PUT_BACK", default=())  # `put_back` of this command's config


@dataclass(frozen=True)
class Use:
    """Options that are read only with some setting."""

    keys: tuple[str, ...]
    setting: str  # "... is not read without {setting}"
    reads: Callable[[Config], bool]
    idle: Any = None  # a value that asks for what happens without the setting


def _use(options: str, setting: str, reads: Callable[[Config], bool], *, idle: Any = None) -> Use:
    """A Use of the keys in `options`: "section." means all keys of a section, "section.one|two" two of them."""
    keys: list[str] = []
    for option in options.split():
        section, _, names = option.rpartition(".")
        keys += [f"{section}.{name}" for name in names.split("|")] if names else _section(section)
    return Use(tuple(keys), setting, reads, idle)


def _with(options: str, key: str, *values: Any, idle: Any = None) -> Use:
    """A Use of options that are read if `key` has one of `values`."""
    setting = f"{key}={' or '.join(map(str, values))}"
    return _use(options, setting, lambda config: operator.attrgetter(key)(config) in values, idle=idle)


def _section(name: str) -> list[str]:
    return [key for key in DEFAULTS if key.startswith(f"{name}.")]


def _measured_sets(config: Config) -> list[TaskOptions]:
    """What the policy is evaluated on: the held-out problems, if any, and evaluate.tasks."""
    data = config.data
    held_out = {
        "files": bool(data.val_files),
        "arithmetic": data.arithmetic.num_heldout > 0,
        "reasoning_gym": data.reasoning_gym.num_heldout > 0,
    }
    try:
        tasks = parse_tasks(config)
    except ValueError:  # validate reports it; nobody knows what the sets would read
        tasks = [held_out_options(config)]
    return [held_out_options(config)] * held_out.get(data.task, True) + tasks


def _measures(config: Config) -> bool:
    return bool(_measured_sets(config))


def _chooses_best(config: Config) -> bool:
    return bool(config.trainer.best_metric) or _measures(config)


def _reward_functions(config: Config) -> set[str]:
    """Those of training and held-out problems."""
    return {given_function(config), *(task.reward_function for task in _measured_sets(config))}


def _verifies(config: Config) -> bool:
    return _reward_functions(config) != {"none"}


def verifiers_of(config: Config) -> set[str]:
    """The verifiers that score training and held-out problems. InputError if reward.functions cannot be read."""
    return {name for function in _reward_functions(config) for name in functions_of(function)}


def _reads_verifier(name: str) -> Callable[[Config], bool]:
    def reads(config: Config) -> bool:
        try:
            return name in verifiers_of(config)
        except InputError:  # validate reports it; nobody knows what the functions would read
            return True

    return reads


def _normalizes_weights(config: Config) -> bool:
    return config.algorithm.rollout_correction.rollout_is != "none" or config.actor.old_logprob == "auto"


def _samples_in_rounds(config: Config) -> bool:
    """Whether gen_batch_size matters. Without the filter a round is the batch; giving that size is allowed."""
    return config.algorithm.filter_groups.enable or gen_batch_size(config) == config.data.train_batch_size


def _has_round_limit(config: Config) -> bool:
    groups = config.algorithm.filter_groups
    return groups.max_num_gen_batches > 0 or groups.adaptive_limit.enable


def _may_be_partial(config: Config) -> bool:
    groups = config.algorithm.filter_groups
    return "partial" in (groups.on_limit, groups.on_exhausted)


def _aggregates(config: Config, start: str) -> bool:
    return any(getattr(config, name).loss_agg_mode.startswith(start) for name in trained(config))


def _with_parameter(options: str, key: str, parameter: str, *tables: Mapping[str, Callable[..., Any]]) -> Use:
    """A Use of options that are read if the loss or estimator at `key` has a parameter; one of two tables counts."""
    names = [name for name in tables[0] if any(name in table and needs(table[name], parameter) for table in tables)]

    def reads(config: Config) -> bool:
        name = operator.attrgetter(key)(config)
        return (
            needs((named_loss if key == LOSS else named_estimator)(name), parameter) if is_own(name) else name in names
        )

    return _use(options, f"{key}={' or '.join(names)}", reads)


CPO_READS = {  # by wrap_method, as in cpo of algorithms/advantages.py
    "mi": ("mi_alpha",),
    "mi_clamp_unify_difficulty": ("cpo_lambda", "pos_alpha", "neg_alpha", "mi_alpha"),
    "negonly_mi3": ("cpo_lambda", "neg_alpha"),
    "seq_kl": ("kl_alpha",),
    "negonly_seq_kl": ("kl_alpha",),
}
LOSS_OPTIONS = (
    *("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio_c"),
    *(key for key in _section("actor.policy_loss") if not key.endswith("loss_mode")),
)
MEASURED = "problems to evaluate on (data.val_files, num_heldout of a generated task, or evaluate.tasks)"
VERIFIED = "a verifier (reward.function other than none)"
F, C = "algorithm.filter_groups", "algorithm.rollout_correction"
D = "algorithm.distillation"

# If several list a key, the first that fails is reported, so the outer ones come first.
USES = (
    _use(
        "data.rollout_batch_size|mini_rollout_batch_size trainer.max_try_make_batch "
        "algorithm.use_dynamic_sample|dynamic_sample_max_gen_batches|online_filtering "
        "algorithm.filter_key|filter_low|filter_high custom_reward_function. rollout.engine",
        "dapo_jax.config.freeze, which carries out the names of other trainers",
        lambda config: False,
    ),
    _with("reward.function", "reward.functions", NO_FUNCTIONS),
    _with("data.train_files|val_files|mixture", "data.task", "files"),
    _use(
        "data.prompt_key|prompt_template|answer_key",
        "data.task=files or evaluate.tasks",
        lambda config: config.data.task == "files" or any(task.files for task in _measured_sets(config)),
    ),
    _with("data.arithmetic.", "data.task", "arithmetic"),
    _with("data.reasoning_gym.", "data.task", "reasoning_gym"),
    _with("data.curriculum.floor|decay", "data.curriculum.enable", True),
    _with("data.truncation", "data.filter_overlong_prompts", False),
    _with("model.remat_policy", "model.enable_gradient_checkpointing", True),
    _use("model.lora.alpha|target_modules", "model.lora.rank above 0", lambda config: config.model.lora.rank > 0),
    _with("model.random.", "model.path", "random"),
    _use("reward.error_score|max_error_share|env", VERIFIED, _verifies),
    _use(
        "reward.model.weight|function_weight|micro_batch_size_per_device|max_length",
        "reward.model.path",
        lambda config: bool(config.reward.model.path),
    ),
    _use("reward.model.function_weight", VERIFIED, _verifies),
    _use("reward.format.pattern", "the verifier format in reward.function or functions", _reads_verifier("format")),
    _use("reward.judge.", "the verifier judge in reward.function or functions", _reads_verifier("judge")),
    _use(
        "reward.length.weight",
        "reward.length.form other than none",
        lambda config: config.reward.length.form != "none",
    ),
    _with("reward.length.right_short|right_long|wrong_short|wrong_long|at_limit", "reward.length.form", "cosine"),
    _with("reward.overlong_buffer.len|penalty_factor|log", "reward.overlong_buffer.enable", True),
    *(
        _with_parameter(f"algorithm.{name}", ESTIMATOR, name, ESTIMATORS)
        for name in ("norm_adv_by_std_in_grpo", "gamma", "lam")
    ),
    _with_parameter("algorithm.gdpo_reward_keys|gdpo_reward_weights", ESTIMATOR, "reward_parts", ESTIMATORS),
    _with("algorithm.keep_pos_ratio|keep_neg_ratio", ESTIMATOR, "grpo", "dapo"),
    _use(
        "algorithm.compute_new_adv",
        "keep_pos_ratio or keep_neg_ratio below 1",
        lambda config: keeps_some(config.algorithm),
    ),
    _with("algorithm.kl_penalty algorithm.kl_ctrl.type|horizon|target_kl", "algorithm.use_kl_in_reward", True),
    _with("algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward", True, idle=0),
    _with("algorithm.kl_ctrl.horizon|target_kl", "algorithm.kl_ctrl.type", "adaptive"),
    _with(f"{C}.rollout_is_threshold", f"{C}.rollout_is", *WEIGHTS),
    _use(
        f"{C}.rollout_is_batch_normalize",
        f"{C}.rollout_is=token or sequence, or actor.old_logprob=auto",
        _normalizes_weights,
    ),
    _with_parameter("algorithm.cpo.", ESTIMATOR, "wrap_method", ESTIMATORS),
    *(
        _with(key, "algorithm.cpo.wrap_method", *(method for method, read in CPO_READS.items() if key.endswith(read)))
        for key in _section("algorithm.cpo")
        if not key.endswith("wrap_method")
    ),
    _with(
        f"{F}.metric|rule|std_threshold|filter_low|filter_high|keep_singletons|max_num_gen_batches|on_limit|on_empty "
        f"{F}.leftover|leftover_max_staleness|backfill {F}.adaptive_limit. {F}.stream. {F}.skip_uniform. "
        "monitor.filter_log",
        f"{F}.enable",
        True,
    ),
    _with(f"{F}.on_limit|on_exhausted|on_empty", "rollout.segment_length", 0),
    _use("data.gen_batch_size", f"{F}.enable=True", _samples_in_rounds),
    _with(f"{F}.std_threshold", f"{F}.rule", "std"),
    _with(f"{F}.filter_low|filter_high", f"{F}.rule", "mean_range"),
    _with(f"{F}.keep_singletons", "rollout.n", 1),
    _with(f"{F}.adaptive_limit.slack|min_rounds", f"{F}.adaptive_limit.enable", True),
    _use(f"{F}.on_limit", f"a limit of rounds ({F}.max_num_gen_batches above 0, or adaptive_limit)", _has_round_limit),
    _use(f"{F}.on_empty", f"a partial step ({F}.on_limit=partial or on_exhausted=partial)", _may_be_partial),
    _with(f"{F}.leftover_max_staleness", f"{F}.leftover", "carry"),
    _with(f"{F}.stream.slack", f"{F}.backfill", "stream"),
    _with(f"{F}.skip_uniform.floor|decay", f"{F}.skip_uniform.enable", True),
    _with("actor.ppo_max_token_len_per_device", "actor.use_dynamic_bsz", True),
    _with(
        "actor.ppo_micro_batch_size_per_device critic.ppo_micro_batch_size_per_device",
        "actor.ppo_max_token_len_per_device",
        None,
    ),
    *(_with_parameter(key, LOSS, key.rpartition(".")[2], LOSSES, SELECTIONS) for key in LOSS_OPTIONS),
    _use(
        "actor.loss_scale_factor",
        "loss_agg_mode=seq-mean-token-sum-norm",
        lambda config: _aggregates(config, "seq-mean-token-sum-norm"),
    ),
    _use(
        "actor.count_empty_sequences",
        "a loss_agg_mode of sequences (seq-mean-...)",
        lambda config: _aggregates(config, "seq-"),
    ),
    _with("actor.kl_loss_coef", "actor.use_kl_loss", True, idle=0),
    _with("actor.kl_loss_type", "actor.use_kl_loss", True),
    _use("reference.path", "actor.use_kl_loss=True or algorithm.use_kl_in_reward=True", uses_reference),
    _use(
        f"{D}.weight|use_task_rewards|form|temperature",
        f"{D}.path",
        lambda config: bool(config.algorithm.distillation.path),
    ),
    _with(f"{D}.top_k", f"{D}.form", "top_k"),
    _with_parameter("critic. trainer.critic_warmup", ESTIMATOR, "values", ESTIMATORS),
    _with("actor.optim.min_lr_ratio", "actor.optim.lr_scheduler_type", "cosine"),
    _with("critic.optim.min_lr_ratio", "critic.optim.lr_scheduler_type", "cosine"),
    _use("trainer.test_freq", MEASURED, _measures, idle=-1),
    _use("trainer.keep_best_ckpt", f"trainer.best_metric, or {MEASURED}", _chooses_best, idle=0),
    _use("trainer.best_metric_mode", f"trainer.best_metric, or {MEASURED}", _chooses_best),
    _use(
        "trainer.project_name|experiment_name",
        "'wandb' or FILE.py:Class in trainer.logger",
        lambda config: any(name == "wandb" or is_own(name) for name in config.trainer.logger),
    ),
    _with("trainer.rollout_devices", "trainer.rollout_ahead", 1),
    _with("trainer.stop_patience_s", "trainer.rollout_ahead", 0),
    _use(
        "monitor.watchdog_ends", "monitor.watchdog_minutes above 0", lambda config: config.monitor.watchdog_minutes > 0
    ),
    _use("monitor.alarms.heldout_drop monitor.detailed_stats", MEASURED, _measures),
    _use("evaluate.n|temperature|top_p|top_k|max_prompts|batch_size|bootstrap", MEASURED, _measures),
    _use(
        "evaluate.top_p|top_k",
        "a temperature above 0",
        lambda config: any(task.temperature > 0 for task in _measured_sets(config)),
    ),
)


def unread(config: Config) -> dict[str, str]:
    """The options that differ from their defaults though nothing reads them, each with the setting that would.

    `config` must have no `type_problems`.
    """
    values, found = flat(config), {}
    for use in USES:
        changed = [key for key in use.keys if values[key] not in (DEFAULTS[key], use.idle) and key not in found]
        if changed and not use.reads(config):
            found |= dict.fromkeys(changed, use.setting)
    return found


def _default(key: str) -> str:
    return "null" if DEFAULTS[key] is None else repr(DEFAULTS[key])


def unread_problems(config: Config) -> list[str]:
    """One line for each option in `unread`, and for each lower bound given to a criterion that has none."""
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
                f"{C}.rollout_rs_threshold={correction.rollout_rs_threshold}: {name} has no lower bound, so {low} is "
                f"not read: give {high!r}"
            )
    return problems


def without_switched_off(base: Config, config: Config, chosen: Collection[str]) -> Config:
    """`config`, a variation of `base`, with the options that the variation switches off reset to their defaults.

    So one option is enough to vary a recipe: the options of a feature need not be unset when it is switched off.
    Options that `base` leaves unread and `chosen` ones stay, for `validate` to refuse. `put_back` lists the changes.

    Args:
        chosen: keys that the variation sets.
    """
    off = _switched_off(base, config, chosen)
    return with_values(config, {key: DEFAULTS[key] for key in off}) if off else config


def put_back(base: Config, config: Config, chosen: Collection[str]) -> tuple[str, ...]:
    """A line for each option that `without_switched_off` resets."""
    return tuple(
        f"{key} is not read without {setting}: it is back at its default, {_default(key)}"
        for key, setting in _switched_off(base, config, chosen).items()
    )


def _switched_off(base: Config, config: Config, chosen: Collection[str]) -> dict[str, str]:
    if type_problems(config) or type_problems(base):
        return {}
    try:
        stays = {*chosen, *unread(base)}
        return {key: setting for key, setting in unread(config).items() if key not in stays}
    except InputError:  # a loss or an estimator of your own does not load: validate reports it
        return {}
