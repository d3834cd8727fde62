import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.monitor.statistics import (
    evaluation_metrics,
    expected_best,
    pass_at,
    problem_statistics,
    subset_sizes,
    vote,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "validation_metrics.json").read_text())
VALUES = np.array([0.3, 1.0, -0.5, 0.3, 0.7])


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_the_bootstrap_is_verls(case):
    columns, found = {name: np.array(values) for name, values in case["inputs"].items()}, {}
    for source in set(columns["data_sources"]):
        rows = columns["data_sources"] == source
        problems = len(set(columns["uids"][rows]))
        acc, reward, pred = (columns[name][rows].reshape(problems, -1) for name in ("acc", "reward", "pred"))
        found |= evaluation_metrics(source, {"acc": acc, "reward": reward}, pred.tolist(), bootstrapped=True)
    ours = {name: re.sub("/std$", "/bootstrap_std", name.removesuffix("/mean")) for name in case["expected"]}
    assert {name: found.pop(our) for name, our in ours.items()} == pytest.approx(case["expected"], rel=1e-12)
    assert all(re.search("pass@|std@1$", name) for name in found), "what verl does not report"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_expected_best_is_the_mean_over_all_subsets(k):
    best = [max(chosen) for chosen in itertools.combinations(VALUES, k)]
    worst = [min(chosen) for chosen in itertools.combinations(VALUES, k)]
    found = problem_statistics(VALUES, None, [k])
    assert found == {f"best@{k}": pytest.approx(np.mean(best)), f"worst@{k}": pytest.approx(np.mean(worst))}


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (8, 3, 4), (6, 2, 6), (6, 2, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, right, k):
    samples = np.array([1.0] * right + [0.0] * (n - right))
    share = np.mean([any(chosen) for chosen in itertools.combinations(samples, k)])
    assert pass_at(n, right, k) == pytest.approx(share)
    assert expected_best(samples, k) == pytest.approx(share), "best@k of right and wrong is pass@k"


def test_k_may_be_large_and_larger_than_the_number_of_samples():
    assert expected_best(VALUES[:2], 4) == 1.0 and pass_at(2, 1, 4) == 1.0
    assert pass_at(32, 1, 32) == 1.0 and pass_at(32, 1, 1) == pytest.approx(1 / 32)
    assert pass_at(200, 1, 100) == pytest.approx(0.5)


def test_subset_sizes_are_powers_of_two_and_all():
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize(
    ("answers", "chosen", "value"),
    [
        (["a", "b", "b", "a"], range(4), 0.0),
        (["a", "b", "b", "c"], range(4), 1.0),
        ([None, "b", None, "c"], range(4), 0.0),  # no answer is an answer
        (["a", "b", "b", "a"], [3, 1, 2], 1.0),
    ],
)
def test_the_vote_is_the_most_frequent_answer_and_the_first_of_several(answers, chosen, value):
    assert vote(np.array([0.0, 1.0, 0.5, 0.25]), answers, chosen) == value
