"""Host: formulas of the metrics on groups, lengths, times and evaluations; of k samples of a problem from n.

Of k samples, the expectation is over k different ones, in closed form: it has no noise, and best@n is the best.
`bootstrapped` draws with replacement instead, as verl does, with verl's random numbers.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

OPERATORS = {  # Trinity-RFT's names, in its order, for the stages between sampling and training
    "0_RewardShaping": "shape",
    "1_GroupFilter": "filter",
    "2_BatchAssembly": "batch",
    "3_GroupAdvantage": "adv",
}
HELD_OUT = re.compile(r"eval/(.+)/acc/mean@(\d+)")  # a held-out accuracy: its task set, its samples per problem
LENGTH_PERCENTILES = (10, 25, 50, 75, 90, 99)
MIN_COMPARED = 16  # answers that a meaningful correlation needs
# verl's names, where it has them
TRAINING_STAGES = ("old_log_prob", "ref", "values", "adv", "teacher", "update_critic", "update_actor")
# With trainer.rollout_ahead: of the next batch; of what is left of the update once that is sampled
AHEAD_STAGES = ("gen", "update_critic", "update_actor")

_DRAWS = 1000  # verl's number
_SEED = 42  # and verl's seed
Answers = Sequence[str | None]


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """`name`/mean, /max and /min of all values."""
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def score_metrics(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`rollout/{score}/{mean,max,min}` over the means of the groups; scores [Q, G], NaN for a missing score."""
    metrics = {}
    for name, groups in _measured(scores).items():
        metrics |= spread(f"rollout/{name}", np.array([np.mean(group) for group in groups]))
    return metrics


def length_metrics(name: str, lengths: np.ndarray, limit: int, whole: np.ndarray | None = None) -> dict[str, float]:
    """`name`_length/{mean,max,min,clip_ratio}: tokens, and the share of rows at the length limit.

    Args:
        whole: lengths with what an environment wrote, which the limit bounds; None = the same.
    """
    clipped = (lengths if whole is None else whole) >= limit
    return {**spread(f"{name}_length", lengths), f"{name}_length/clip_ratio": float(np.mean(clipped))}


def length_percentiles(name: str, lengths: np.ndarray) -> dict[str, float]:
    """`name`_length/p50 and so on: tokens, linear between neighbours."""
    found = np.percentile(lengths, LENGTH_PERCENTILES)
    return {f"{name}_length/p{percent}": float(value) for percent, value in zip(LENGTH_PERCENTILES, found, strict=True)}


def share_within_prompts(lengths: np.ndarray) -> float:
    """The share of the variance of log-lengths that lies within a prompt's responses: 0 to 1.

    It is estimated by a one-way analysis of variance. 1 if there is nothing to compare: one prompt, one sample, or
    equal lengths.

    Args:
        lengths: [Q, G] tokens, NaN = not to be counted.
    """
    counts = np.sum(~np.isnan(lengths), axis=1)
    logs, counts = np.log(np.maximum(lengths[counts > 1], 1)), counts[counts > 1]
    if len(counts) < 2:
        return 1.0
    within = float(np.mean(np.nanvar(logs, axis=1, ddof=1)))
    between = max(float(np.var(np.nanmean(logs, axis=1), ddof=1)) - within * float(np.mean(1 / counts)), 0.0)
    return within / (within + between) if within + between > 0 else 1.0


def length_correlation(scores: np.ndarray, lengths: np.ndarray, right: np.ndarray, known: np.ndarray) -> float:
    """Pearson correlation of score and length among equally right answers to a prompt: -1 to 1.

    A verifier's score hardly varies among them; a score that rewards length varies with it. So an answer counts only if
    its group has at least three different scores for its verdict (partial credit gives two). The result is 0 for fewer
    than MIN_COMPARED such answers.

    Args:
        scores: [Q, G].
        lengths: [Q, G] tokens.
        right: [Q, G] bool, the verdict.
        known: [Q, G] bool, False if the verification failed.
    """
    cells = (2 * np.arange(len(scores))[:, None] + right)[known]
    scores, lengths = scores[known], lengths[known]
    different, _ = np.unique(np.stack([cells, scores]), axis=1)
    compared = np.bincount(different.astype(int), minlength=2 * len(known))[cells] >= 3
    cells, scores, lengths = cells[compared], scores[compared], lengths[compared]
    if len(cells) < MIN_COMPARED:
        return 0.0
    scores, lengths = (
        values - (np.bincount(cells, values) / np.maximum(np.bincount(cells), 1))[cells] for values in (scores, lengths)
    )
    scale = np.sqrt(np.sum(scores**2) * np.sum(lengths**2))
    return float(np.clip(np.sum(scores * lengths) / scale, -1, 1)) if scale > 0 else 0.0


def advantage_metrics(name: str, values: np.ndarray) -> dict[str, float]:
    """`critic/{name}/{mean,max,min}` over tokens; 0 if there are none."""
    return spread(f"critic/{name}", values if values.size else np.zeros(1))


def group_reward_metrics(rewards: np.ndarray) -> dict[str, float]:
    """`experience_pipeline/group_advantages/reward_{mean,std}/{mean,max,min}` over groups; rewards [Q, G] or NaN."""
    prefix, known = "experience_pipeline/group_advantages", [group[~np.isnan(group)] for group in rewards]
    means, deviations = np.array([group.mean() for group in known]), np.array([group.std() for group in known])
    return spread(f"{prefix}/reward_mean", means) | spread(f"{prefix}/reward_std", deviations)


def balance_metrics(lengths: np.ndarray, of_devices: np.ndarray) -> dict[str, float]:
    """`global_seqlen/`: tokens of each of S device shares, prompts included.

    Args:
        lengths: [B] tokens of each sequence. min, max and mean are over S slices of consecutive ones.
        of_devices: [S] tokens that each share actually gets: balanced_min and balanced_max.
    """
    slices = np.array([part.sum() for part in np.array_split(lengths, len(of_devices))])
    return {
        "global_seqlen/min": float(slices.min()),
        "global_seqlen/max": float(slices.max()),
        "global_seqlen/minmax_diff": float(slices.max() - slices.min()),
        "global_seqlen/balanced_min": float(of_devices.min()),
        "global_seqlen/balanced_max": float(of_devices.max()),
        "global_seqlen/mean": float(lengths.sum() / len(of_devices)),
    }


def time_metrics(metrics: Mapping[str, float], *, ahead: bool = False) -> dict[str, float]:
    """`timing_per_token_ms/` and `time/`, from a step's `timing_s/` and its numbers of tokens.

    A training stage is divided by the tokens of the batch, prompts included; sampling by all sampled tokens, dropped
    groups included (verl: by the responses of the batch). With the KL divergence in the reward, `ref` is of all sampled
    groups, whose prompts are not counted: it is left out.

    Args:
        ahead: the next batch is sampled during the update: its times are left out, they are not those of this batch.
    """
    seconds = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    trained, generated = metrics.get("perf/total_num_tokens"), metrics.get("dynamic_sampling/generated_tokens")
    tokens = {"gen": generated, **{stage: trained for stage in TRAINING_STAGES}}
    unknown = AHEAD_STAGES if ahead else ()
    if "actor/reward_kl_penalty" in metrics:
        unknown = *unknown, "ref"
    found = {
        f"timing_per_token_ms/{stage}": 1000 * seconds[stage] / count
        for stage, count in tokens.items()
        if stage in seconds and count and stage not in unknown
    }
    sums = {
        "time/eval": ("testing",),
        "time/save_checkpoint": ("save_checkpoint",),
        "time/wait_explore_step": ("gen", "reward"),
        **{f"time/experience_pipeline/operator/{name}": (stage,) for name, stage in OPERATORS.items()},
        "time/experience_pipeline/write": ("write",),
        "time/experience_pipeline/total": (*OPERATORS.values(), "write"),
        "time/train_step": () if ahead else TRAINING_STAGES,
    }
    for name, stages in sums.items():
        if there := [seconds[stage] for stage in stages if stage in seconds]:
            found[name] = sum(there)
    return found


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one no better than a constant.

    As in verl, with sample variances and 1e-5 in the denominator.
    """
    if returns.size < 2:
        return 0.0
    return float(1 - np.var(returns - values, ddof=1) / (np.var(returns, ddof=1) + 1e-5))


def evaluation_metrics(
    prefix: str,
    scores: Mapping[str, np.ndarray],
    answers: Sequence[Answers] | None = None,
    *,
    n: int | None = None,
    bootstrapped: bool = False,
    detailed: bool = False,
) -> dict[str, float]:
    """`prefix`/{score}/{mean@n,std@n,best@k,worst@k,maj@k,pass@k}: means over problems.

    n is the number of samples per problem; k is 2, 4, 8 and so on up to n, and 1 for pass@k. Only `acc` has pass@k: a
    sample is right if its acc is 1. Standard deviations are the population's, within a problem.

    Args:
        scores: [Q, m] each, m >= n; NaN for a sample without the score. Problems without any score are left out.
        n: the number in the names; None = m. A problem whose row is repeated has more samples.
        answers: [Q][n] of the same samples; None without votes.
        bootstrapped: draw with replacement, as in verl.
        detailed: add /mean, /max, /min and /std over problems to each.
    """
    metrics = {}
    for name, values in scores.items():
        measured = ~np.isnan(values)
        problems = [
            _problem(name, row[known], _chosen(answers, index, known), n or row.size, bootstrapped=bootstrapped)
            for index, (row, known) in enumerate(zip(values, measured, strict=True))
            if known.any()
        ]
        for statistic in problems[0] if problems else ():
            over_problems = np.array([problem[statistic] for problem in problems])
            full = f"{prefix}/{name}/{statistic}"
            metrics[full] = float(np.mean(over_problems))
            if detailed and not statistic.endswith("/bootstrap_std"):
                metrics |= spread(full, over_problems) | {f"{full}/std": float(np.std(over_problems))}
    return metrics


def _problem(name: str, values: np.ndarray, answers: Answers | None, n: int, *, bootstrapped: bool) -> dict[str, float]:
    sizes = subset_sizes(n)
    found = {f"mean@{n}": float(np.mean(values)), f"std@{n}": float(np.std(values))}
    found |= problem_statistics(values, answers, sizes, bootstrapped=bootstrapped)
    if name == "acc":
        right = int(np.sum(values >= 1))
        found |= {f"pass@{k}": pass_at(len(values), right, k) for k in (1, *sizes)}
    return found


def _chosen(answers: Sequence[Answers] | None, problem: int, known: np.ndarray) -> Answers | None:
    """The answers of a problem's samples that have the score; None if no problem has an answer."""
    if answers is None or all(answer is None for row in answers for answer in row):
        return None
    return [answer for answer, there in zip(answers[problem], known, strict=True) if there]


def _measured(scores: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Each score's values by group, without NaN. Groups and scores without values are left out."""
    groups = {name: [group[~np.isnan(group)] for group in values] for name, values in scores.items()}
    return {name: [group for group in found if group.size] for name, found in groups.items() if any(map(len, found))}


def subset_sizes(n: int) -> list[int]:
    """The values of k to report for n samples: the powers of two from 2 to below n, and n; none for one sample."""
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def problem_statistics(
    values: np.ndarray, answers: Answers | None, sizes: Sequence[int], *, bootstrapped: bool = False
) -> dict[str, float]:
    """best@k, worst@k and, with answers, maj@k of a problem's samples.

    In closed form, maj@k exists only for the largest k, as the vote of the first k samples. Bootstrapped statistics
    also have a `/bootstrap_std`, the standard deviation over the draws.

    Args:
        values: [m] of one score. If m < k, best@k and worst@k are over all samples.
        answers: the answer of each sample; None to leave out votes. A missing answer (None) counts as an answer.
        sizes: the values of k.
    """
    found: dict[str, float] = {}
    for k in sizes:
        if bootstrapped:
            found |= _bootstrap(values, answers, k)
        else:
            found |= {f"best@{k}": expected_best(values, k), f"worst@{k}": -expected_best(-values, k)}
    if answers is not None and sizes and not bootstrapped:
        found[f"maj@{max(sizes)}"] = vote(values, answers, range(min(len(values), max(sizes))))
    return found


def _bootstrap(values: np.ndarray, answers: Answers | None, k: int) -> dict[str, float]:
    drawn = np.random.RandomState(_SEED).choice(len(values), size=(_DRAWS, k), replace=True)
    results = {"best": values[drawn].max(axis=1), "worst": values[drawn].min(axis=1)}
    if answers is not None:
        results["maj"] = np.array([vote(values, answers, chosen) for chosen in drawn])
    found = {}
    for name, values_of_draws in results.items():
        found[f"{name}@{k}"] = float(np.mean(values_of_draws))
        found[f"{name}@{k}/bootstrap_std"] = float(np.std(values_of_draws))
    return found


def expected_best(values: np.ndarray, k: int) -> float:
    """The expected maximum of k of the values [n], drawn without replacement: sum_i C(i-1, k-1) / C(n, k) x_(i)."""
    n = len(values)
    k = min(k, n)
    weights = [math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)]
    return float(np.sort(values) @ np.array(weights))


def pass_at(n: int, right: int, k: int) -> float:
    """The probability that one of k of n samples is right, 1 - C(n - right, k) / C(n, k) (arXiv:2107.03374, eq. 1)."""
    k = min(k, n)
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def vote(values: np.ndarray, answers: Answers, chosen: Sequence[int] | np.ndarray) -> float:
    """The value of the most frequent answer among the `chosen` samples, from its first sample; ties: first seen."""
    counts: dict[str | None, int] = {}
    first: dict[str | None, int] = {}
    for index in chosen:
        answer = answers[index]
        counts[answer] = counts.get(answer, 0) + 1
        first.setdefault(answer, int(index))
    return float(values[first[max(counts, key=lambda answer: counts[answer])]])
