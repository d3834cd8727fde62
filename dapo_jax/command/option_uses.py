"""Host: options that a run reads only with another setting. Changing one that nothing reads is an error.

READS of each section in config/sections.py says which. A value that asks for what happens anyway, such as a coefficient
of 0 for a term that is off, is allowed.
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import LOSS, named_estimator, named_loss
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.command.tasks import measured_sets, verifiers_of
from dapo_jax.config.derived import gen_batch_size, keeps_some, plays_episodes, uses_reference
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat, type_problems, with_values
from dapo_jax.errors import InputError
from dapo_jax.learner.trained_networks import trained

F, C = "algorithm.filter_groups", "algorithm.rollout_correction"
MEASURED = "problems to evaluate on (data.val_files, num_heldout of a generated task, or evaluate.tasks)"
NAMED = {  # conditions that READS names in capitals, in words
    "ALIAS": "dapo_jax.config.freeze, which carries out the names of other trainers",
    "BEST": f"trainer.best_metric, or {MEASURED}",
    "CONSOLE": "'console' in trainer.logger",
    "ENVIRONMENT": "environment.path or environment.tools",
    "FILES": "data.task=files or evaluate.tasks",
    "FORMAT": "the verifier format in reward.function or functions",
    "JUDGE": "the verifier judge in reward.function or functions",
    "KEPT": "keep_pos_ratio or keep_neg_ratio below 1",
    "LIMITED": f"a limit of rounds ({F}.max_num_gen_batches above 0, or adaptive_limit)",
    "MEASURED": MEASURED,
    "NORMALIZED": f"{C}.rollout_is=token or sequence, or actor.old_logprob=auto",
    "PARTIAL": f"a partial step ({F}.on_limit=partial or on_exhausted=partial)",
    "REFERENCE": "actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
    "ROUNDS": f"{F}.enable=True",
    "SAMPLED": "a temperature above 0",
    "SCALED": "loss_agg_mode=seq-mean-token-sum-norm",
    "SEQUENCES": "a loss_agg_mode of sequences (seq-mean-...)",
    "TRACKED": "'wandb' or FILE.py:Class in trainer.logger",
    "VERIFIED": "a verifier (reward.function other than none)",
}
IDLE = {  # values that ask for what happens without the setting
    "algorithm.kl_ctrl.kl_coef": 0,
    "actor.kl_loss_coef": 0,
    "trainer.test_freq": -1,
    "trainer.keep_best_ckpt": 0,
    "monitor.console": "quiet",
}


@dataclass(frozen=True)
class Condition:
    """A setting with which options are read."""

    setting: str  # "... is not read without {setting}"
    holds: Callable[[Mapping[str, Any]], bool]  # of every option by its key, and of `_named`


def _named(config: Config) -> dict[str, bool]:
    """Whether each condition of NAMED holds; those of functions that cannot be read do."""
    data, algorithm, actor, trainer = config.data, config.algorithm, config.actor, config.trainer
    groups, sets = algorithm.filter_groups, measured_sets(data, config.evaluate, config.reward)
    verifiers = verifiers_of(config.reward, sets)
    try:
        modes = [network.options.loss_agg_mode for network in trained(config).values()]
    except InputError:  # an estimator of your own does not load: validate reports it
        modes = [actor.loss_agg_mode]
    return {
        "ALIAS": False,
        "BEST": bool(trainer.best_metric or sets),
        "CONSOLE": "console" in trainer.logger,
        "ENVIRONMENT": plays_episodes(config.environment),
        "FILES": data.task == "files" or any(task.files for task in sets),
        "FORMAT": verifiers is None or "format" in verifiers,
        "JUDGE": verifiers is None or "judge" in verifiers,
        "KEPT": keeps_some(algorithm),
        "LIMITED": groups.max_num_gen_batches > 0 or groups.adaptive_limit.enable,
        "MEASURED": bool(sets),
        "NORMALIZED": algorithm.rollout_correction.rollout_is != "none" or actor.old_logprob == "auto",
        "PARTIAL": "partial" in (groups.on_limit, groups.on_exhausted),
        "REFERENCE": uses_reference(algorithm, actor),
        "ROUNDS": groups.enable or gen_batch_size(data) == data.train_batch_size,  # without it a round is the batch
        "SAMPLED": any(task.temperature > 0 for task in sets),
        "SCALED": "seq-mean-token-sum-norm" in modes,
        "SEQUENCES": any(mode.startswith("seq-") for mode in modes),
        "TRACKED": any(name == "wandb" or is_own(name) for name in trainer.logger),
        "VERIFIED": verifiers != {"none"},
    }


def _condition(text: str, prefix: str, key: str) -> Condition:
    """The condition that READS of a section calls `text`.

    Args:
        prefix: of the section's keys; an option without it is the section's own.
        key: the option that is read.
    """
    if text in NAMED:
        return Condition(NAMED[text], operator.itemgetter(text))
    name, takes, parameter = text.partition(" takes")
    option, sign, values = name.partition("=")
    option, other, excluded = option.partition(" other than ")
    option = prefix + option if prefix + option in DEFAULTS else option
    default = DEFAULTS[option]
    if takes:
        return _with_parameter(option, parameter.strip() or key.rpartition(".")[2])
    if other:
        return Condition(f"{option} other than {excluded}", lambda known: known[option] != excluded)
    if sign:
        return Condition(f"{option}={values}", lambda known: str(known[option]) in values.split(" or "))
    suffix = "=True" if isinstance(default, bool) else "" if isinstance(default, str) else " above 0"
    return Condition(option + suffix, lambda known: known[option] > 0 if suffix == " above 0" else bool(known[option]))


def _with_parameter(option: str, parameter: str) -> Condition:
    """That the loss or estimator at `option` has a parameter."""
    tables, named = ((LOSSES, SELECTIONS), named_loss) if option == LOSS else ((ESTIMATORS,), named_estimator)
    names = [name for name in tables[0] if any(name in table and needs(table[name], parameter) for table in tables)]

    def holds(known: Mapping[str, Any]) -> bool:
        name = known[option]
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
    known = values | _named(config)
    for key, conditions in READS.items():
        if values[key] not in (DEFAULTS[key], IDLE.get(key)):
            failing = next((one for one in conditions if not one.holds(known)), None)
            found |= {key: failing.setting} if failing else {}
    return found


def default_text(key: str) -> str:
    return "null" if DEFAULTS[key] is None else repr(DEFAULTS[key])


def without_switched_off(base: Config, config: Config, chosen: Collection[str]) -> Config:
    """`config`, a variation of `base`, with the options that the variation switches off reset to their defaults.

    So one option is enough to vary a recipe: the options of a feature need not be unset when it is switched off.
    Options that `base` leaves unread and `chosen` ones stay, for `validate` to refuse.

    Args:
        chosen: keys that the variation sets.
    """
    off = switched_off(base, config, chosen)
    return with_values(config, {key: DEFAULTS[key] for key in off}) if off else config


def switched_off(base: Config, config: Config, chosen: Collection[str]) -> dict[str, str]:
    """The options that `without_switched_off` resets, each with the setting that would read it."""
    if type_problems(config) or type_problems(base):
        return {}
    try:
        stays = {*chosen, *unread(base)}
        return {key: setting for key, setting in unread(config).items() if key not in stays}
    except InputError:  # a loss or an estimator of your own does not load: validate reports it
        return {}
