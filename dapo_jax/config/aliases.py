"""Host: option names of other trainers and earlier versions, translated to ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dapo_jax.errors import InputError

if TYPE_CHECKING:  # config/values.py imports this module
    from dapo_jax.config.sections import (
        AlgorithmConfig,
        Config,
        CustomRewardFunctionConfig,
        DataConfig,
        FilterGroupsConfig,
        RewardConfig,
    )


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


FORMER = ("rollout.engine",)  # options of earlier versions that no longer have an effect


def former_options(config: Any) -> tuple[str, ...]:
    """A line for each option in FORMER that `config`, without its aliases applied, has."""
    engine = config.rollout.engine
    text = f"rollout.engine={engine} has no effect: there is one engine now, which decodes in slots; leave it out"
    return () if engine is None else (text,)


def resolve_aliases(config: Config, chosen: Collection[str] = ()) -> Config:
    """`config` with every alias applied and reset to None. `freeze` calls it.

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
        chosen: keys set on the command line. Such an option contradicts an alias even at its default value, and a False
            among them drops the dependent aliases of the config file.

    Raises:
        InputError: an alias lacks the one that it depends on, or contradicts another or the option that it sets.
    """
    config = _without_dependants(config, chosen)
    algorithm, limit = config.algorithm, config.trainer.max_try_make_batch
    if algorithm.use_dynamic_sample and algorithm.online_filtering:
        raise InputError("algorithm.use_dynamic_sample and algorithm.online_filtering exclude each other: choose one")
    if not algorithm.use_dynamic_sample and algorithm.dynamic_sample_max_gen_batches is not None:
        raise InputError("algorithm.dynamic_sample_max_gen_batches needs algorithm.use_dynamic_sample=True")
    if not algorithm.online_filtering:
        given = [f"algorithm.{name}" for name in _ONLINE if getattr(algorithm, name) is not None]
        given += ["trainer.max_try_make_batch"] * (limit is not None)
        if given:
            raise InputError(f"{', '.join(given)} need algorithm.online_filtering=True")
    groups = algorithm.filter_groups
    if algorithm.use_dynamic_sample:
        groups = _changed(groups, "use_dynamic_sample=True", _dynamic_sample(algorithm), chosen)
    elif algorithm.online_filtering:
        groups = _changed(groups, "online_filtering=True", _online_filtering(algorithm, limit), chosen)
    elif algorithm.use_dynamic_sample is not None or algorithm.online_filtering is not None:
        off = "online_filtering=False" if algorithm.use_dynamic_sample is None else "use_dynamic_sample=False"
        groups = _changed(groups, off, {"enable": False}, chosen)
    return dataclasses.replace(
        config,
        data=_with_sizes(config.data, chosen),
        reward=_with_function(config.reward, config.custom_reward_function, chosen),
        custom_reward_function=dataclasses.replace(config.custom_reward_function, path=None, name=None),
        algorithm=dataclasses.replace(algorithm, filter_groups=groups, **dict.fromkeys(_ALGORITHM)),
        trainer=dataclasses.replace(config.trainer, max_try_make_batch=None),
        rollout=dataclasses.replace(config.rollout, engine=None),
    )


_ONLINE = ("filter_key", "filter_low", "filter_high")
_ALGORITHM = ("use_dynamic_sample", "dynamic_sample_max_gen_batches", "online_filtering", *_ONLINE)


def _without_dependants(config: Config, chosen: Collection[str]) -> Config:
    """`config` without the aliases of a switch that `chosen` turns off, unless they are chosen themselves."""
    algorithm, trainer = config.algorithm, config.trainer
    if algorithm.use_dynamic_sample is False and "algorithm.use_dynamic_sample" in chosen:
        if "algorithm.dynamic_sample_max_gen_batches" not in chosen:
            algorithm = dataclasses.replace(algorithm, dynamic_sample_max_gen_batches=None)
    if algorithm.online_filtering is False and "algorithm.online_filtering" in chosen:
        names = [name for name in _ONLINE if f"algorithm.{name}" not in chosen]
        algorithm = dataclasses.replace(algorithm, **dict.fromkeys(names))
        if "trainer.max_try_make_batch" not in chosen:
            trainer = dataclasses.replace(trainer, max_try_make_batch=None)
    return dataclasses.replace(config, algorithm=algorithm, trainer=trainer)


def _changed(
    groups: FilterGroupsConfig, alias: str, changes: dict[str, Any], chosen: Collection[str]
) -> FilterGroupsConfig:
    """`groups` with what an alias sets, unless that contradicts other options."""
    for name, value in changes.items():
        _check_agrees(groups, "algorithm.filter_groups", name, value, f"algorithm.{alias}", chosen)
    return dataclasses.replace(groups, **changes)


def _with_sizes(data: DataConfig, chosen: Collection[str]) -> DataConfig:
    sizes = {}
    for name, alias in (("train_batch_size", "rollout_batch_size"), ("gen_batch_size", "mini_rollout_batch_size")):
        size = getattr(data, alias)
        if size is not None:
            _check_agrees(data, "data", name, size, f"data.{alias}={size}", chosen)
            sizes[name] = size
    return dataclasses.replace(data, **sizes, rollout_batch_size=None, mini_rollout_batch_size=None)


def _with_function(reward: RewardConfig, custom: CustomRewardFunctionConfig, chosen: Collection[str]) -> RewardConfig:
    if not custom.path:
        if custom.name:
            raise InputError(
                f"custom_reward_function.name={custom.name} needs custom_reward_function.path: give the Python file "
                "that has the function"
            )
        return reward
    name = custom.name or "compute_score"
    package = "pkg://"
    if custom.path.startswith(package):
        function = f"{custom.path.removeprefix(package).strip('/').replace('/', '.')}.{name}"
    else:
        function = f"{custom.path.removeprefix('file://')}:{name}"
    _check_agrees(reward, "reward", "function", function, f"custom_reward_function.path={custom.path}", chosen)
    return dataclasses.replace(reward, function=function)


def _check_agrees(
    section: DataConfig | FilterGroupsConfig | RewardConfig,
    prefix: str,
    name: str,
    value: Any,
    alias: str,
    chosen: Collection[str],
) -> None:
    """Raises InputError if an option has neither the value that `alias` sets nor, unless `chosen`, its default."""
    found, key = getattr(section, name), f"{prefix}.{name}"
    if found != value and (key in chosen or found != getattr(type(section)(), name)):
        raise InputError(f"{alias} sets {key}={value}, but {found} was given: leave out one of them")


def _dynamic_sample(algorithm: AlgorithmConfig) -> dict[str, Any]:
    given = algorithm.dynamic_sample_max_gen_batches
    limit = 3 if given is None else given
    return {
        "enable": True,
        "metric": "seq_reward",
        "rule": "std",
        "max_num_gen_batches": limit,
        **({"on_limit": "partial"} if limit > 0 else {}),
        "on_exhausted": "partial",
        "on_empty": "train_unfiltered",
        "leftover": "discard",
    }


def _online_filtering(algorithm: AlgorithmConfig, limit: int | None) -> dict[str, Any]:
    given = {name: getattr(algorithm, name) for name in ("filter_low", "filter_high")}
    key = algorithm.filter_key or "overall"
    return {
        "enable": True,
        "metric": "score" if key == "overall" else key,
        "rule": "mean_range",
        "max_num_gen_batches": 20 if limit is None else limit,
        "on_limit": "error",
        "on_exhausted": "next_epoch",
        "leftover": "discard",
        **{name: value for name, value in given.items() if value is not None},
    }
