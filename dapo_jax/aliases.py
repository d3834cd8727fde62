"""Host: the option names of other trainers, turned into ours."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dapo_jax.errors import InputError

if TYPE_CHECKING:  # config.freeze imports this module
    from dapo_jax.config import AlgorithmConfig, Config, FilterGroupsConfig


def resolve_aliases(config: Config) -> Config:
    """`config` with every alias carried out and set back to None. `config.freeze` calls it.

    - data.rollout_batch_size, data.mini_rollout_batch_size (EasyR1): train_batch_size, gen_batch_size.
    - algorithm.use_dynamic_sample, dynamic_sample_max_gen_batches: the filter by the spread of seq_reward; at the limit
      (3 rounds unless given) and at the end of an epoch a step trains on what it has, on unfiltered groups if it has
      none; surplus groups are dropped.
    - algorithm.online_filtering, filter_key, filter_low, filter_high, trainer.max_try_make_batch (EasyR1): the filter
      by the mean of a metric; the limit (20 rounds unless given) is an error, surplus groups are dropped. Unlike there,
      one round that keeps nothing is no error.
    - True turns the filter on; False turns it off, unless the other of the two is True.

    Raises:
        ValueError: an alias without the one that it belongs to, or one that contradicts another or an option of
            algorithm.filter_groups.
    """
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
        groups = _changed(groups, "use_dynamic_sample", _dynamic_sample(algorithm))
    elif algorithm.online_filtering:
        groups = _changed(groups, "online_filtering", _online_filtering(algorithm, limit))
    elif algorithm.use_dynamic_sample is not None or algorithm.online_filtering is not None:
        groups = dataclasses.replace(groups, enable=False)
    data = config.data
    sizes = {"train_batch_size": data.rollout_batch_size, "gen_batch_size": data.mini_rollout_batch_size}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, **sizes, rollout_batch_size=None, mini_rollout_batch_size=None),
        algorithm=dataclasses.replace(algorithm, filter_groups=groups, **dict.fromkeys(_ALGORITHM)),
        trainer=dataclasses.replace(config.trainer, max_try_make_batch=None),
    )


_ONLINE = ("filter_key", "filter_low", "filter_high")
_ALGORITHM = ("use_dynamic_sample", "dynamic_sample_max_gen_batches", "online_filtering", *_ONLINE)


def _changed(groups: FilterGroupsConfig, alias: str, changes: dict[str, Any]) -> FilterGroupsConfig:
    """`groups` with what an alias sets, unless something else was chosen there."""
    default = type(groups)()
    for name, value in changes.items():
        chosen = getattr(groups, name)
        if chosen not in (getattr(default, name), value):
            raise InputError(
                f"algorithm.{alias}=True sets algorithm.filter_groups.{name}={value}, and {chosen} was chosen: "
                f"leave out one of them, or use the options of algorithm.filter_groups without algorithm.{alias}"
            )
    return dataclasses.replace(groups, enable=True, **changes)


def _dynamic_sample(algorithm: AlgorithmConfig) -> dict[str, Any]:
    given = algorithm.dynamic_sample_max_gen_batches
    limit = 3 if given is None else given
    return {
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
        "metric": "score" if key == "overall" else key,
        "rule": "mean_range",
        "max_num_gen_batches": 20 if limit is None else limit,
        "on_limit": "error",
        "on_exhausted": "next_epoch",
        "leftover": "discard",
        **{name: value for name, value in given.items() if value is not None},
    }
