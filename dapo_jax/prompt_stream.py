"""Host: dynamic sampling as the config asks for it."""

from dapo_jax.config.derived import gen_batch_size
from dapo_jax.config.sections import Config
from dapo_jax.dynamic_sampling.accumulation import Policies, PromptSource
from dapo_jax.dynamic_sampling.group_filter import FilterRule
from dapo_jax.dynamic_sampling.schedule import History, Limits, Stream
from dapo_jax.monitor.filter_log import rule_words
from dapo_jax.run import Run


def filter_rule(config: Config) -> FilterRule:
    """Which groups are kept."""
    groups = config.algorithm.filter_groups
    return FilterRule(
        name=groups.rule,
        std_threshold=groups.std_threshold,
        filter_low=groups.filter_low,
        filter_high=groups.filter_high,
        keep_singletons=groups.keep_singletons,
    )


def policies(config: Config) -> Policies:
    """What a step does, and what it does at a limit."""
    groups = config.algorithm.filter_groups
    adaptive = groups.adaptive_limit
    at_once = config.rollout.max_num_seqs or gen_batch_size(config) * config.rollout.n
    most = max(at_once // config.rollout.n, 1)
    streams = groups.enable and groups.backfill == "stream"  # without a filter a round is all that a step needs
    return Policies(
        target=config.data.train_batch_size,
        gen_batch_size=gen_batch_size(config),
        limits=Limits(
            max_num_gen_batches=groups.max_num_gen_batches,
            adaptive_slack=adaptive.slack if adaptive.enable else None,
            adaptive_min_rounds=adaptive.min_rounds,
        ),
        on_limit=groups.on_limit,
        on_exhausted=groups.on_exhausted,
        on_empty=groups.on_empty,
        leftover=groups.leftover,
        leftover_max_staleness=groups.leftover_max_staleness,
        stream=Stream(slack=groups.stream.slack, max_prompts=most) if streams else None,
        keep_rate_ema=groups.stream.keep_rate_ema,
        metric=groups.metric if groups.enable else None,
        words=rule_words(
            groups.rule,
            std_threshold=groups.std_threshold,
            filter_low=groups.filter_low,
            filter_high=groups.filter_high,
        ),
    )


def prompt_source(run: Run) -> PromptSource:
    """The rows of the prompt numbers, without those that their history speaks against."""
    skip, seed = run.config.algorithm.filter_groups.skip_uniform, run.config.seed

    def skips(history: History, row: int, number: int) -> bool:
        return history.skips(row, number, seed=seed, floor=skip.floor, decay=skip.decay)

    return PromptSource(run.problems.order.row, len(run.problems.train_set), skips if skip.enable else None)
