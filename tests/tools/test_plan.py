"""The expected cost of dynamic sampling."""

import math

import numpy as np
import pytest

from dapo_jax.tools import plan


def test_a_group_is_mixed_unless_all_samples_agree_and_kept_if_it_has_one():
    np.testing.assert_allclose(plan.keep_probability(np.array([0.0, 0.5, 1.0]), 4), [0, 1 - 2 / 16, 0])
    np.testing.assert_array_equal(plan.keep_probability(np.array([0.0, 0.5, 1.0]), 1), 1)


def test_expected_rounds_are_those_of_a_simulation():
    found = plan.plan(0.3, target=20, gen_batch_size=16)
    kept = np.random.default_rng(0).binomial(16, 0.3, size=(4000, 30)).cumsum(axis=1)
    rounds = 1 + np.argmax(kept >= 20, axis=1)
    assert found.rounds == pytest.approx(np.mean(rounds), abs=0.05)
    assert np.mean(rounds <= found.limit) >= 0.998 and np.mean(rounds <= found.limit - 1) < 0.9995
    assert found.generated_per_trained == pytest.approx(found.rounds * 16 / 20)
    assert plan.plan(1.0, target=20, gen_batch_size=16).rounds == 2
    assert math.isinf(plan.plan(0.0, target=20, gen_batch_size=16).rounds)


def test_the_plan_is_printed_and_wrong_input_is_one_line(capsys):
    plan.main(["--accuracy", "0.5", "--n", "2", "--train-batch-size", "64"])
    out = capsys.readouterr().out
    assert "keep rate                      0.5000" in out and "2.00, if no kept group is lost" in out
    for wrong in ("--accuracies nowhere", "--accuracy 2", "--accuracy 0.5 --n 0"):
        with pytest.raises(SystemExit) as end:
            plan.main(wrong.split())
        assert end.value.code in (1, 2) and capsys.readouterr().err.count("\n") == 1
