"""Every option is read always, or only with a setting that READS says: one that nothing reads is refused.

Which options have which settings is in messages.yaml.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_problems import VALID, config_with, off_and_on, other_value, problems

from dapo_jax.algorithms.advantages import ESTIMATORS, cpo
from dapo_jax.algorithms.aggregation import MODES, token_weights
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.command.option_uses import NAMED, READS, switched_off, unread, without_switched_off
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config, FilterGroupsConfig
from dapo_jax.config.values import DEFAULTS, with_values
from dapo_jax.dynamic_sampling.group_filter import RULES, group_statistics, keep_groups

FILTER = "algorithm.filter_groups"
LOSS = "actor.policy_loss.loss_mode"
ALIASES = NAMED["ALIAS"]
SETTINGS: dict[str, list[str]] = {}
for name, conditions in READS.items():
    for one in conditions:
        SETTINGS.setdefault(one.setting, []).append(name)


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != ALIASES])
def test_an_option_is_refused_where_it_is_not_read_and_accepted_where_it_is(setting):
    off, on = off_and_on(setting)
    for key in SETTINGS[setting]:
        value, others = other_value(key), {}
        for other in READS[key]:
            if other.setting != setting:
                others |= off_and_on(other.setting)[1]
        assert problems({**others, **on, key: value}) == []
        found = problems({**others, **off, key: value})
        default = "null" if DEFAULTS[key] is None else repr(DEFAULTS[key])
        expected = f"{key}={value!r} is not read without {setting}: set that, or leave it at its default, {default}"
        assert expected in found
        rest = [line for line in found if line != expected]  # of others, which are not read for the same reason
        assert problems({**others, **off, key: DEFAULTS[key]}) == rest
        assert all("is not read without" in line for line in rest)


FUNCTIONS = {  # option -> the functions that may have other options as parameters, by its value
    "algorithm.adv_estimator": (ESTIMATORS,),
    LOSS: (LOSSES, SELECTIONS),
}


@pytest.mark.parametrize("key", FUNCTIONS)
def test_what_functions_have_as_parameters_is_read_with_them_alone(key):
    sections = ("algorithm", "algorithm.cpo", "actor", "actor.policy_loss")
    names = {option.rpartition(".")[2]: option for option in DEFAULTS if option.rpartition(".")[0] in sections}
    tables = FUNCTIONS[key]
    parameters = {
        mode: {name for table in tables if mode in table for name in inspect.signature(table[mode]).parameters}
        for mode in tables[0]
    }
    options = {names[name]: name for found in parameters.values() for name in found if name in names}
    assert len(options) >= 9
    for mode, found in parameters.items():
        for option, name in options.items():
            setting = unread(config_with({key: mode, option: other_value(option)})).get(option, "")
            if "algorithm.cpo.wrap_method" not in setting:  # of which the next test is
                assert bool(setting) == (name not in found), (mode, option)


@pytest.mark.parametrize("method", CPO_METHODS)
def test_each_method_of_cpo_reads_what_the_table_says(method):
    rewards = np.zeros((6, 4), np.float32)
    rewards[[0, 1, 2], -1] = 1.0  # the first group is all right, the second mixed, the third all wrong
    logprobs, hint_logprobs, entropy = np.random.default_rng(0).uniform(0.1, 4.0, (3, 6, 4)).astype(np.float32)
    options = {name: value for name, value in vars(Config().algorithm.cpo).items() if name != "wrap_method"}

    def advantages(**changes: float) -> jax.Array:
        found, *_ = cpo(
            jnp.asarray(rewards),
            jnp.ones((6, 4), bool),
            jnp.arange(6) // 2,
            num_groups=3,
            norm_adv_by_std_in_grpo=True,
            logprobs=jnp.asarray(-logprobs),
            hint_logprobs=jnp.asarray(-hint_logprobs),
            entropy=jnp.asarray(entropy),
            vocab_size=64,
            wrap_method=method,
            **{**options, **changes},
        )
        return found

    with_method = {"algorithm.adv_estimator": "cpo", "algorithm.cpo.wrap_method": method}
    read = {name for name in options if not unread(config_with(with_method | {f"algorithm.cpo.{name}": 0.7}))}
    variants = {"": {}, **{name: {name: value / 2} for name, value in options.items()}}
    found = jax.jit(lambda: {name: advantages(**changes) for name, changes in variants.items()})()
    assert {name for name in options if not np.array_equal(found[""], found[name])} == read


def test_each_rule_of_the_filter_reads_what_the_table_says():
    options = {"std_threshold": 0.1, "filter_low": 0.5, "filter_high": 0.96}
    variants = {(rule, option): {option: value} for rule in RULES for option, value in options.items()}

    @jax.jit
    def kept(values):
        statistics = group_statistics(values, jnp.arange(10) // 2, num_groups=5)
        return {
            (rule, option): (
                keep_groups(statistics, FilterGroupsConfig(rule=rule)),
                keep_groups(statistics, FilterGroupsConfig(rule=rule, **changes)),
            )
            for (rule, option), changes in variants.items()
        }

    found = kept(np.array([0.0, 0.0, 0.0, 1.0, 0.95, 1.0, 1.0, 1.0, 0.4, 0.5], np.float32))  # groups of two
    for (rule, option), (plain, changed) in found.items():
        config = with_values(Config(), {f"{FILTER}.rule": rule, f"{FILTER}.{option}": options[option]})
        assert (f"{FILTER}.{option}" in unread(config)) == np.array_equal(plain, changed), (rule, option)


def test_each_mean_of_the_loss_reads_what_the_table_says():
    options = {"actor.loss_scale_factor": 2.0, "actor.count_empty_sequences": True}

    @jax.jit
    def weights(mask):
        groups = jnp.zeros(2, jnp.int32)
        return {
            mode: {
                "": token_weights(mask, groups, mode),
                "actor.loss_scale_factor": token_weights(mask, groups, mode, scale_factor=2.0),
                "actor.count_empty_sequences": token_weights(mask, groups, mode, num_sequences=2),
            }
            for mode in MODES
        }

    for mode, found in weights(np.array([[True, True], [False, False]])).items():
        config = with_values(Config(), {"actor.loss_agg_mode": mode, **options})
        for key in options:
            assert (key in unread(config)) == np.array_equal(found[""], found[key]), (mode, key)


def test_an_alias_that_was_not_carried_out_is_refused():
    for key in SETTINGS[ALIASES]:
        assert unread(with_values(VALID, {key: 1})) == {key: ALIASES}
    with pytest.raises(ValueError, match="use_dynamic_sample=True is not read without dapo_jax.config.freeze"):
        validate(with_values(VALID, {"algorithm.use_dynamic_sample": True}))


def test_what_a_variation_switches_off_is_back_at_its_default_and_said():
    recipe = config_with({f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 2, "algorithm.lam": 0.9})
    off = with_values(recipe, {f"{FILTER}.enable": False, f"{FILTER}.metric": "score"})
    chosen = {f"{FILTER}.enable", f"{FILTER}.metric"}
    config, reset = without_switched_off(recipe, off, chosen), switched_off(recipe, off, chosen)
    groups = config.algorithm.filter_groups
    assert (groups.enable, groups.leftover, groups.leftover_max_staleness) == (False, "requeue", 1)
    assert reset == dict.fromkeys((f"{FILTER}.leftover", f"{FILTER}.leftover_max_staleness"), f"{FILTER}.enable=True")
    refused = unread(config)  # what was chosen with the variation, and what the recipe had set in vain
    assert set(refused) == {f"{FILTER}.metric", "algorithm.lam"}


def test_a_variation_that_switches_nothing_off_or_has_wrong_types_is_as_it_is():
    chosen = {"trainer.total_training_steps"}
    longer = with_values(VALID, {"trainer.total_training_steps": 7})
    assert without_switched_off(VALID, longer, chosen) is longer and switched_off(VALID, longer, chosen) == {}
    wrong = with_values(VALID, {"rollout.n": None, "algorithm.lam": 0.5})
    assert without_switched_off(VALID, wrong, ()) is wrong
