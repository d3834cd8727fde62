"""Host: how many prompts a training step samples next, and when it stops: pure functions of what is known so far."""

import math

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig

Z = 3.09  # standard deviations: one case in 1000 is further below
SURE = 2.0  # standard deviations: 97 of 100 cases are not further below
MIN_KEEP_RATE = 1e-3  # assumed at least, so that a step that keeps nothing expects an end


def fixed_limit(options: FilterGroupsConfig) -> float:
    """Rounds that a step may have, whatever it sees."""
    return options.max_num_gen_batches if options.max_num_gen_batches > 0 else math.inf


def adaptive_limit(
    options: FilterGroupsConfig,
    *,
    before: float | None,
    evaluated: int,
    kept: int,
    missing: int,
    gen_batch_size: int,
    keep_rate: float,
) -> float:
    """Rounds that a step may have, from the share of groups that it has kept so far.

    After `adaptive_limit.min_rounds` rounds it is int(missing / (gen_batch_size * rate) + slack), where `missing`
    groups had to be found when the step began and the rate is (kept + 0.5) / (evaluated + 1). Later rounds can only
    lower it, to the same formula with the lower end of Wilson's interval (Z standard deviations) as the rate, so that
    chance alone does not. While no group has been kept, it is at most the rounds in which a tenth of the running
    `keep_rate` would have shown one in 999 of 1000 cases, plus slack.

    A limit that followed the rate up and down would recede as fast as rounds without kept groups come.

    Args:
        before: the limit after the previous round; None = this round is the first that sets it.
        keep_rate: of earlier steps.
    """
    bounds = []  # on the rounds needed
    if kept == 0:
        bounds.append(10 * math.log(1000) / (gen_batch_size * max(keep_rate, MIN_KEEP_RATE)))
    if before is None:
        before = fixed_limit(options)
        bounds.append(missing * (evaluated + 1) / (gen_batch_size * (kept + 0.5)))
    elif kept:
        bounds.append(missing / (gen_batch_size * _lower_end(kept, evaluated)))
    return min(before, int(min(bounds) + options.adaptive_limit.slack))


def _lower_end(kept: int, evaluated: int) -> float:
    """Of Wilson's interval for the share of which `kept` of `evaluated` is a sample (Wilson, 1927)."""
    share, spread = kept / evaluated, Z**2 / evaluated
    middle = share + spread / 2
    return (middle - math.sqrt(spread * share * (1 - share) + spread**2 / 4)) / (1 + spread)


def expected_rounds(missing: int, *, gen_batch_size: int, keep_rate: float) -> int:
    """Rounds that find `missing` groups if each prompt is kept at the running `keep_rate`."""
    return math.ceil(missing / (gen_batch_size * max(keep_rate, MIN_KEEP_RATE)))


def running_keep_rate(before: float, kept: np.ndarray, options: FilterGroupsConfig) -> float:
    """The running share of kept groups after a step that has evaluated groups; kept [Q] bool."""
    past = options.stream.keep_rate_ema
    return past * before + (1 - past) * float(np.mean(kept)) if len(kept) else before


def queued_prompts(missing: float, *, keep_rate: float) -> float:
    """Prompts that a queue should hold: so many that `missing` groups are kept in 97 of 100 cases.

    The last of them wait until slots are free, and are given up when they turn out not to be needed.
    """
    if missing <= 0:
        return 0.0
    rate = max(keep_rate, MIN_KEEP_RATE)
    # the larger root of: prompts * rate - SURE * (prompts * rate * (1 - rate))^(1/2) = missing
    spread = SURE * math.sqrt(rate * (1 - rate))
    root = (spread + math.sqrt(spread**2 + 4 * rate * missing)) / (2 * rate)
    return root**2


def block_size(target: int) -> int:
    """Prompts of a queue that are judged together: few, so that the first verdicts come early."""
    return max(target // 8, 1)


def wave_prompts(missing: float, *, in_flight: int, keep_rate: float, max_prompts: int, target: int) -> int:
    """Prompts to dispatch now, 0 if those in flight are expected to be enough.

    A wave has the largest of a few sizes that is not more than needed, so that few shapes are compiled; the next wave
    samples the rest with a better estimate. A need below the smallest size waits for verdicts.

    Args:
        missing: kept groups to aim at.
        max_prompts: of a wave.
    """
    needed = (missing - in_flight * keep_rate) / max(keep_rate, MIN_KEEP_RATE)
    smallest, *larger = wave_sizes(max_prompts, target)
    if missing <= 0 or needed <= 0 or (in_flight and needed < smallest):
        return 0
    return max([smallest, *(size for size in larger if size <= needed)])


def wave_sizes(max_prompts: int, target: int) -> list[int]:
    """The sizes that a wave may have, ascending: max_prompts, 3/4 of it, and halves down to an eighth of it or half
    the target, whichever is less."""
    sizes, size = {max_prompts, max(max_prompts * 3 // 4, 1)}, max_prompts
    while size > max(min(max_prompts // 8, target // 2), 1):
        size //= 2
        sizes.add(size)
    return sorted(sizes)
