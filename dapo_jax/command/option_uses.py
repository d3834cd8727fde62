"""Host: options that a run reads only with another setting. Changing one that nothing reads is an error.

READS of each section in config/sections.py says which. A value that asks for what happens anyway, such as a coefficient
of 0 for a term that is off, is allowed.
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import LOSS, named_estimator, named_loss
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.command.tasks import TaskOptions, given_function, held_out_options, parse_tasks
from dapo_jax.config.derived import gen_batch_size, keeps_some, uses_reference
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat, type_problems, with_values
from dapo_jax.errors import InputError
from dapo_jax.learner.trained_networks import trained
from dapo_jax.rewards.weighted import functions_of


@dataclass(frozen=True)
class Condition:
    """A setting with which options are read."""

    setting: str  # "... is not read without {setting}"
    holds: Callable[[Config], bool]


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
    return config.algorithm.filter_groups.enable or gen_batch_size(config.data) == config.data.train_batch_size


def _has_round_limit(config: Config) -> bool:
    groups = config.algorithm.filter_groups
    return groups.max_num_gen_batches > 0 or groups.adaptive_limit.enable


def _may_be_partial(config: Config) -> bool:
    groups = config.algorithm.filter_groups
    return "partial" in (groups.on_limit, groups.on_exhausted)


def _aggregates(start: str) -> Callable[[Config], bool]:
    return lambda config: any(one.options.loss_agg_mode.startswith(start) for one in trained(config).values())


def _reads_files(config: Config) -> bool:
    return config.data.task == "files" or any(task.files for task in _measured_sets(config))


def _tracks(config: Config) -> bool:
    return any(name == "wandb" or is_own(name) for name in config.trainer.logger)


MEASURED = "problems to evaluate on (data.val_files, num_heldout of a generated task, or evaluate.tasks)"
F, C = "algorithm.filter_groups", "algorithm.rollout_correction"
CONDITIONS = {  # those that READS names in capitals
    "ALIAS": Condition("dapo_jax.config.freeze, which carries out the names of other trainers", lambda config: False),
    "BEST": Condition(
        f"trainer.best_metric, or {MEASURED}", lambda config: bool(config.trainer.best_metric) or _measures(config)
    ),
    "FILES": Condition("data.task=files or evaluate.tasks", _reads_files),
    "FORMAT": Condition("the verifier format in reward.function or functions", _reads_verifier("format")),
    "JUDGE": Condition("the verifier judge in reward.function or functions", _reads_verifier("judge")),
    "KEPT": Condition("keep_pos_ratio or keep_neg_ratio below 1", lambda config: keeps_some(config.algorithm)),
    "LIMITED": Condition(f"a limit of rounds ({F}.max_num_gen_batches above 0, or adaptive_limit)", _has_round_limit),
    "MEASURED": Condition(MEASURED, _measures),
    "NORMALIZED": Condition(f"{C}.rollout_is=token or sequence, or actor.old_logprob=auto", _normalizes_weights),
    "PARTIAL": Condition(f"a partial step ({F}.on_limit=partial or on_exhausted=partial)", _may_be_partial),
    "REFERENCE": Condition(
        "actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
        lambda config: uses_reference(config.algorithm, config.actor),
    ),
    "ROUNDS": Condition(f"{F}.enable=True", _samples_in_rounds),
    "SAMPLED": Condition(
        "a temperature above 0", lambda config: any(s.temperature > 0 for s in _measured_sets(config))
    ),
    "SCALED": Condition("loss_agg_mode=seq-mean-token-sum-norm", _aggregates("seq-mean-token-sum-norm")),
    "SEQUENCES": Condition("a loss_agg_mode of sequences (seq-mean-...)", _aggregates("seq-")),
    "TRACKED": Condition("'wandb' or FILE.py:Class in trainer.logger", _tracks),
    "VERIFIED": Condition("a verifier (reward.function other than none)", _verifies),
}
IDLE = {  # values that ask for what happens without the setting
    "algorithm.kl_ctrl.kl_coef": 0,
    "actor.kl_loss_coef": 0,
    "trainer.test_freq": -1,
    "trainer.keep_best_ckpt": 0,
}


def _condition(text: str, prefix: str, key: str) -> Condition:
    """The condition that READS of a section calls `text`.

    Args:
        prefix: of the section's keys; an option without it is the section's own.
        key: the option that is read.
    """
    if text in CONDITIONS:
        return CONDITIONS[text]
    name, takes, parameter = text.partition(" takes")
    option, sign, values = name.partition("=")
    option, other, excluded = option.partition(" other than ")
    option = prefix + option if prefix + option in DEFAULTS else option
    get, default = operator.attrgetter(option), DEFAULTS[option]
    if takes:
        return _with_parameter(option, parameter.strip() or key.rpartition(".")[2])
    if other:
        return Condition(f"{option} other than {excluded}", lambda config: get(config) != excluded)
    if sign:
        return Condition(f"{option}={values}", lambda config: str(get(config)) in values.split(" or "))
    suffix = "=True" if isinstance(default, bool) else "" if isinstance(default, str) else " above 0"
    return Condition(option + suffix, lambda config: get(config) > 0 if suffix == " above 0" else bool(get(config)))


def _with_parameter(option: str, parameter: str) -> Condition:
    """That the loss or estimator at `option` has a parameter."""
    tables, named = ((LOSSES, SELECTIONS), named_loss) if option == LOSS else ((ESTIMATORS,), named_estimator)
    names = [name for name in tables[0] if any(name in table and needs(table[name], parameter) for table in tables)]

    def holds(config: Config) -> bool:
        name = operator.attrgetter(option)(config)
        return needs(named(name), parameter) if is_own(name) else name in names

    return Condition(f"{option}={' or '.join(names)}", holds)


def _reads(section: type, prefix: str = "") -> Iterator[tuple[str, Condition]]:
    """Each option that is not always read, with its conditions: those of outer sections first."""
    for text, names in getattr(section, "READS", {}).items():
        for name in names.split():
            keys = [key for key in DEFAULTS if f"{key}.".startswith(f"{prefix}{name}.")]
            assert keys, f"READS of {section.__name__} names {name}"
            yield from ((key, _condition(text, prefix, key)) for key in keys)
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _reads(typing.cast(type, kind), f"{prefix}{name}.")


_FOUND = list(_reads(Config))
READS = {  # of each option that is not always read: its conditions, of which the first that fails is reported
    key: conditions for key in DEFAULTS if (conditions := [one for name, one in _FOUND if name == key])
}
LOSS_OPTIONS = [key for key, conditions in READS.items() if any(one.setting.startswith(LOSS) for one in conditions)]


def unread(config: Config) -> dict[str, str]:
    """The options that differ from their defaults though nothing reads them, each with the setting that would.

    `config` must have no `type_problems`.
    """
    values, found = flat(config), {}
    for key, conditions in READS.items():
        if values[key] not in (DEFAULTS[key], IDLE.get(key)):
            failing = next((one for one in conditions if not one.holds(config)), None)
            found |= {key: failing.setting} if failing else {}
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
