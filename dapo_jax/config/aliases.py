"""Host: option names of other trainers and earlier versions, translated to ours."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dapo_jax.errors import InputError

# What other trainers call an option, with what to write here; {} is the value.
FROM_MEMORY = {
    **dict.fromkeys(("lr", "learning_rate"), "actor.optim.lr={}"),
    **dict.fromkeys(("num_generations", "n", "group_size"), "rollout.n={}"),
    **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_tokens"), "data.max_response_length={}"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "data.train_batch_size={}"),
    **dict.fromkeys(("model", "model_name_or_path"), "model.path={}"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps"), "trainer.total_training_steps={}"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "trainer.total_epochs={}"),
    **dict.fromkeys(("lora_r", "lora_rank"), "model.lora.rank={}"),
    "lora_alpha": "model.lora.alpha={}",
    "beta": "actor.use_kl_loss=true actor.kl_loss_coef={} (or algorithm.use_kl_in_reward)",
    "epsilon": "actor.clip_ratio_low={}",
    "epsilon_high": "actor.clip_ratio_high={}",
    "temperature": "rollout.temperature={}",
    "top_p": "rollout.top_p={}",
    "warmup_steps": "actor.optim.lr_warmup_steps={}",
    "weight_decay": "actor.optim.weight_decay={}",
    "gradient_checkpointing": "model.enable_gradient_checkpointing={}",
    "save_steps": "trainer.save_freq={}",
    "eval_steps": "trainer.test_freq={}",
    "output_dir": "workdir={}",
    "report_to": "trainer.logger=('{}',)",
}


def former_options(config: Any) -> tuple[str, ...]:
    """A line for each option in FORMER that `config`, without its aliases applied, has."""
    engine = config.rollout.engine
    text = f"rollout.engine={engine} has no effect: there is one engine now, which decodes in slots; leave it out"
    return () if engine is None else (text,)


DYNAMIC, ONLINE, LIMIT = "algorithm.use_dynamic_sample", "algorithm.online_filtering", "trainer.max_try_make_batch"
DEPENDANTS = {  # switch -> the aliases that need it
    DYNAMIC: ("algorithm.dynamic_sample_max_gen_batches",),
    ONLINE: ("algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high", LIMIT),
}
SIZES = {"data.rollout_batch_size": "data.train_batch_size", "data.mini_rollout_batch_size": "data.gen_batch_size"}
FUNCTION = "custom_reward_function.path", "custom_reward_function.name"
ALIASES = (*DEPENDANTS, *(key for keys in DEPENDANTS.values() for key in keys), *SIZES, *FUNCTION, "rollout.engine")
DYNAMIC_SETS = {
    "enable": True,
    "metric": "seq_reward",
    "rule": "std",
    "max_num_gen_batches": 3,
    "on_limit": "partial",
    "on_exhausted": "partial",
    "on_empty": "train_unfiltered",
    "leftover": "discard",
}
ONLINE_SETS = {
    "enable": True,
    "metric": "score",
    "rule": "mean_range",
    "max_num_gen_batches": 20,
    "on_limit": "error",
    "on_exhausted": "next_epoch",
    "leftover": "discard",
}


def alias_changes(
    values: Mapping[str, Any], defaults: Mapping[str, Any], chosen: Collection[str] = ()
) -> dict[str, Any]:
    """What applies every alias and resets it to None, by dotted key. `freeze` makes these changes.

    - data.rollout_batch_size, data.mini_rollout_batch_size (EasyR1): train_batch_size, gen_batch_size.
    - algorithm.use_dynamic_sample, dynamic_sample_max_gen_batches: filter by the spread of seq_reward. At the limit
      (3 rounds unless given) and at the end of an epoch, a step trains on the groups it has, or on unfiltered groups
      if it has none. Surplus groups are dropped.
    - algorithm.online_filtering, filter_key, filter_low, filter_high, trainer.max_try_make_batch (EasyR1): filter by
      the mean of a metric. Reaching the limit (20 rounds unless given) is an error; surplus groups are dropped. Unlike
      in EasyR1, a round that keeps nothing is not an error.
    - custom_reward_function.path, name (verl): reward.function="PATH:NAME"; name is compute_score unless given.
    - True turns the filter on; False turns it off, unless the other of the two is True.
    - rollout.engine (of earlier versions) has no effect.

    Args:
        values, defaults: of every option, by dotted key.
        chosen: keys set on the command line. Such an option contradicts an alias even at its default value, and a False
            among them drops the dependent aliases of the config file.

    Raises:
        InputError: an alias lacks the one that it depends on, or contradicts another or the option that it sets.
    """
    given = {key: value for key in ALIASES if (value := values[key]) is not None}
    for switch, keys in DEPENDANTS.items():
        if given.get(switch) is False and switch in chosen:
            given = {key: value for key, value in given.items() if key not in keys or key in chosen}
    _check_switches(given)
    changes: dict[str, Any] = dict.fromkeys(ALIASES)
    for alias, key, value in _settings(given):
        found = values[key]
        if found != value and (key in chosen or found != defaults[key]):
            raise InputError(f"{alias} sets {key}={value}, but {found} was given: leave out one of them")
        changes[key] = value
    return changes


def _check_switches(given: Mapping[str, Any]) -> None:
    """Raises InputError if both switches are on, or an alias lacks its own."""
    if given.get(DYNAMIC) and given.get(ONLINE):
        raise InputError(f"{DYNAMIC} and {ONLINE} exclude each other: choose one")
    for switch, keys in DEPENDANTS.items():
        alone = [key for key in keys if key in given]
        if alone and not given.get(switch):
            raise InputError(f"{', '.join(alone)} {'needs' if len(keys) == 1 else 'need'} {switch}=True")


def _settings(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """What each alias sets: the alias with its value, the option, the option's value."""
    switches = [switch for switch in DEPENDANTS if switch in given]
    switch = next((one for one in switches if given[one]), switches[0] if switches else "")
    for name, value in _of_filter(switch, given).items():
        yield f"{switch}={given[switch]}", f"algorithm.filter_groups.{name}", value
    for alias in filter(given.__contains__, SIZES):
        yield f"{alias}={given[alias]}", SIZES[alias], given[alias]
    path, name = (given.get(key) for key in FUNCTION)
    if path:
        yield f"{FUNCTION[0]}={path}", "reward.function", _function(path, name or "compute_score")
    elif name:
        raise InputError(f"{FUNCTION[1]}={name} needs {FUNCTION[0]}: give the Python file that has the function")


def _of_filter(switch: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a switch sets in algorithm.filter_groups."""
    if not given.get(switch):
        return {"enable": False} if switch else {}
    if switch == DYNAMIC:
        limit = given.get(DEPENDANTS[DYNAMIC][0], DYNAMIC_SETS["max_num_gen_batches"])
        sets = {**DYNAMIC_SETS, "max_num_gen_batches": limit}
        return sets if limit > 0 else {name: value for name, value in sets.items() if name != "on_limit"}
    key, low, high, limit = (given.get(alias) for alias in DEPENDANTS[ONLINE])
    named = {
        "metric": None if key in ("overall", "") else key,
        "max_num_gen_batches": limit,
        "filter_low": low,
        "filter_high": high,
    }
    return ONLINE_SETS | {name: value for name, value in named.items() if value is not None}


def _function(path: str, name: str) -> str:
    """verl's path of a file, or pkg://package/module, with the function's name."""
    if path.startswith("pkg://"):
        return f"{path.removeprefix('pkg://').strip('/').replace('/', '.')}.{name}"
    return f"{path.removeprefix('file://')}:{name}"
