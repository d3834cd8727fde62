"""Host: statistics of k samples of a problem, estimated from n: best, worst, majority vote, and pass@k.

The expectation is over k different samples, in closed form: it has no noise, and best@n is the best. `bootstrapped`
draws with replacement instead, as verl does, with verl's random numbers.
"""

import math
from collections.abc import Sequence

import numpy as np

_DRAWS = 1000  # verl's number
_SEED = 42  # and verl's seed

Answers = Sequence[str | None]


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
