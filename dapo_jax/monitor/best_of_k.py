"""Host: what n samples of one problem say of k of them: the best, the worst, the vote, and whether one is right.

What is expected of k of n samples is that of k different ones, in closed form: it has no noise, and best@n is the best.
`bootstrapped` draws them with replacement instead, as verl does, with verl's random numbers.
"""

import math
from collections.abc import Sequence

import numpy as np

_DRAWS = 1000  # verl's number
_SEED = 42  # and verl's seed

Answers = Sequence[str | None]


def subset_sizes(n: int) -> list[int]:
    """The k that are reported of n samples: 2, 4, 8 and so on below n, and n itself; none of a single sample."""
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def problem_statistics(
    values: np.ndarray, answers: Answers | None, sizes: Sequence[int], *, bootstrapped: bool = False
) -> dict[str, float]:
    """best@k, worst@k and, with answers, maj@k of the samples of a problem.

    In closed form maj@k is there for the largest k alone, as the vote of all samples. Bootstrapped, each has a
    `/bootstrap_std` too, the deviation over the draws.

    Args:
        values: [m] of one score; of m < k samples best@k and worst@k are those of all.
        answers: what each sample answers, None without votes. That there is no answer (None) is an answer too.
        sizes: the k.
    """
    found: dict[str, float] = {}
    for k in sizes:
        if bootstrapped:
            found |= _bootstrap(values, answers, k)
        else:
            found |= {f"best@{k}": expected_best(values, k), f"worst@{k}": -expected_best(-values, k)}
    if answers is not None and sizes and not bootstrapped:
        found[f"maj@{max(sizes)}"] = vote(values, answers, range(len(values)))
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
    """The value of the most frequent answer among the `chosen` samples: its first one's; of several, the first seen."""
    counts: dict[str | None, int] = {}
    first: dict[str | None, int] = {}
    for index in chosen:
        answer = answers[index]
        counts[answer] = counts.get(answer, 0) + 1
        first.setdefault(answer, int(index))
    return float(values[first[max(counts, key=lambda answer: counts[answer])]])
