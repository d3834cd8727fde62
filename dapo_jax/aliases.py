"""Host: the option names of other trainers, turned into ours."""

import dataclasses
from typing import Any

from dapo_jax.config import AlgorithmConfig, Config, FilterGroupsConfig


def resolve_aliases(config: Config) -> Config:
    """`config` with every alias carried out and set back to None.

    - data.rollout_batch_size, data.mini_rollout_batch_size (EasyR1): train_batch_size, gen_batch_size.
    - algorithm.use_dynamic_sample, dynamic_sample_max_gen_batches: the filter by the spread of seq_reward; at the limit
      (3 rounds unless given) and at the end of an epoch a step trains on what it has, on unfiltered groups if it has
      none; surplus groups are dropped.
    - algorithm.online_filtering, filter_key, filter_low, filter_high, trainer.max_try_make_batch (EasyR1): the filter
      by the mean of a metric; the limit (20 rounds unless given) is an error, surplus groups are dropped. Unlike there,
      one round that keeps nothing is no error.

    Raises:
        ValueError: an alias without the one that it belongs to, or two that contradict each other.
    """
    algorithm = config.algorithm
    if algorithm.use_dynamic_sample and algorithm.online_filtering:
        raise ValueError("algorithm.use_dynamic_sample and algorithm.online_filtering exclude each other: choose one")
    groups = algorithm.filter_groups
    if algorithm.use_dynamic_sample is not None:
        groups = _dynamic_sample(algorithm)
    elif algorithm.dynamic_sample_max_gen_batches is not None:
        raise ValueError("algorithm.dynamic_sample_max_gen_batches needs algorithm.use_dynamic_sample=True")
    if algorithm.online_filtering is not None:
        groups = _online_filtering(config)
    else:
        given = [f"algorithm.{name}" for name in _ONLINE if getattr(algorithm, name) is not None]
        given += ["trainer.max_try_make_batch"] * (config.trainer.max_try_make_batch is not None)
        if given:
            raise ValueError(f"{', '.join(given)} need algorithm.online_filtering=True")
    data = config.data
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            train_batch_size=data.rollout_batch_size or data.train_batch_size,
            gen_batch_size=data.mini_rollout_batch_size or data.gen_batch_size,
            rollout_batch_size=None,
            mini_rollout_batch_size=None,
        ),
        algorithm=dataclasses.replace(algorithm, filter_groups=groups, **dict.fromkeys(_ALGORITHM)),
        trainer=dataclasses.replace(config.trainer, max_try_make_batch=None),
    )


_ONLINE = ("filter_key", "filter_low", "filter_high")
_ALGORITHM = ("use_dynamic_sample", "dynamic_sample_max_gen_batches", "online_filtering", *_ONLINE)


def _dynamic_sample(algorithm: AlgorithmConfig) -> FilterGroupsConfig:
    limit = algorithm.dynamic_sample_max_gen_batches
    return dataclasses.replace(
        algorithm.filter_groups,
        enable=bool(algorithm.use_dynamic_sample),
        metric="seq_reward",
        rule="std",
        max_num_gen_batches=3 if limit is None else limit,
        on_limit="partial",
        on_exhausted="partial",
        on_empty="train_unfiltered",
        leftover="discard",
    )


def _online_filtering(config: Config) -> FilterGroupsConfig:
    algorithm, limit = config.algorithm, config.trainer.max_try_make_batch
    changes: dict[str, Any] = {
        name: getattr(algorithm, name) for name in ("filter_low", "filter_high") if getattr(algorithm, name) is not None
    }
    key = algorithm.filter_key or "overall"
    return dataclasses.replace(
        algorithm.filter_groups,
        enable=bool(algorithm.online_filtering),
        metric="score" if key == "overall" else key,
        rule="mean_range",
        max_num_gen_batches=20 if limit is None else limit,
        on_limit="error",
        on_exhausted="next_epoch",
        leftover="discard",
        **changes,
    )
