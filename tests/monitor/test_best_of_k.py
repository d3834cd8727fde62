import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.monitor.best_of_k import (
    expected_best,
    pass_at,
    problem_statistics,
    subset_sizes,
    vote,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "validation_metrics.json").read_text())
VALUES = np.array([0.3, 1.0, -0.5, 0.3, 0.7])


def verl_metrics(data_sources, uids, acc, reward, pred):
    """What verl reports of these samples, by the statistics of each problem."""
    problems: dict = {}
    for row, key in enumerate(zip(data_sources, uids, strict=True)):
        problems.setdefault(key, []).append(row)
    found: dict = {}
    for (source, _), rows in problems.items():
        for name, column in (("acc", acc), ("reward", reward)):
            values, n = np.array(column)[rows], len(rows)
            answers = [pred[row] for row in rows]
            metrics = problem_statistics(values, answers, subset_sizes(n), bootstrapped=True)
            renamed = {
                key.replace("/bootstrap_std", "/std") if key.endswith("_std") else f"{key}/mean": value
                for key, value in metrics.items()
            }
            renamed[f"mean@{n}"] = np.mean(values)
            if n > 1:
                renamed[f"std@{n}"] = np.std(values)
            for key, value in renamed.items():
                found.setdefault(f"{source}/{name}/{key}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_the_bootstrap_is_verls(case):
    assert verl_metrics(**case["inputs"]) == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_expected_best_is_the_mean_over_all_subsets(k):
    best = [max(chosen) for chosen in itertools.combinations(VALUES, k)]
    worst = [min(chosen) for chosen in itertools.combinations(VALUES, k)]
    found = problem_statistics(VALUES, None, [k])
    assert found == {f"best@{k}": pytest.approx(np.mean(best)), f"worst@{k}": pytest.approx(np.mean(worst))}


def test_of_fewer_samples_than_k_the_best_is_that_of_all():
    assert expected_best(VALUES[:2], 4) == 1.0 and pass_at(2, 1, 4) == 1.0


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (8, 3, 4), (6, 2, 6), (6, 2, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, right, k):
    samples = np.array([1.0] * right + [0.0] * (n - right))
    share = np.mean([any(chosen) for chosen in itertools.combinations(samples, k)])
    assert pass_at(n, right, k) == pytest.approx(share)
    assert expected_best(samples, k) == pytest.approx(share), "best@k of right and wrong is pass@k"


def test_pass_at_k_of_thirty_two_samples():
    assert pass_at(32, 1, 32) == 1.0 and pass_at(32, 1, 1) == pytest.approx(1 / 32)
    assert pass_at(200, 1, 100) == pytest.approx(0.5)


def test_subset_sizes_are_powers_of_two_and_all():
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_the_vote_is_the_most_frequent_answer_and_the_first_of_several():
    values = np.array([0.0, 1.0, 0.5, 0.25])
    assert vote(values, ["a", "b", "b", "a"], range(4)) == 0.0
    assert vote(values, ["a", "b", "b", "c"], range(4)) == 1.0
    assert vote(values, [None, "b", None, "c"], range(4)) == 0.0, "no answer is an answer"
    assert vote(values, ["a", "b", "b", "a"], [3, 1, 2]) == 1.0
