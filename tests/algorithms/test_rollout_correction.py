import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.rollout_correction import (
    CRITERIA,
    Band,
    importance_weights,
    mismatch_metrics,
    parse_threshold,
    probability_metrics,
    rejection_mask,
)

MASK = jnp.array([[True, True, True], [True, True, False], [False, False, False]])
DIFFERENCE = np.array([[0.0, 1.0, -1.0], [0.1, 0.2, np.nan], [np.nan] * 3])
ROLLOUT = jnp.full((3, 3), -2.0)
OLD = ROLLOUT + DIFFERENCE
OTHER = jnp.array([[-1.0, -0.5, -3.0], [-0.1, -2.0, -1.0], [-1.0] * 3])


def weights(kind, threshold, *, normalize=False):
    options = {"rollout_is": kind, "threshold": parse_threshold(threshold), "batch_normalize": normalize}
    found, metrics = importance_weights(OLD, ROLLOUT, MASK, **options)
    return found, {name: float(value) for name, value in metrics.items()}


def spread(name, values):
    return {f"{name}_{which}": getattr(np, which)(values) for which in ("mean", "max", "min", "std")}


def beyond(name, high, low):
    return {f"{name}_fraction_high": high, f"{name}_fraction_low": low}


close = functools.partial(pytest.approx, rel=1e-4, abs=1e-6)


def test_thresholds():
    assert parse_threshold("2.0") == Band(None, 2.0) and parse_threshold("0.5_2") == Band(0.5, 2.0)
    for bad in ("", "x", "0", "-1", "2_1", "1_2_3", "0_2"):
        with pytest.raises(ValueError, match=f"threshold '{bad}'"):
            parse_threshold(bad)


def test_token_weights_are_truncated_ratios():
    found, metrics = weights("token", "2.0")
    expected = [[1, 2, np.exp(-1)], [np.exp(0.1), np.exp(0.2), 0], [0, 0, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    real = np.array(expected)[np.asarray(MASK)]
    means = [real[:3].mean(), real[3:].mean()]  # of responses: the empty row is none
    expected = spread("rollout_is", real) | beyond("rollout_is_ratio", 1 / 5, 1 / 5)
    expected |= spread("rollout_is_seq", means) | beyond("rollout_is_seq", 0, 0)
    expected["rollout_is_eff_sample_size"] = real.mean() ** 2 / (real**2).mean()
    expected["rollout_is_seq_max_deviation"] = means[1] - 1
    assert metrics == close(expected)
    _, metrics = weights("token", "1.2")  # before truncation the first row's mean is 1.36
    assert metrics["rollout_is_seq_max"] <= 1.2 and metrics["rollout_is_seq_fraction_high"] == 0.5


def test_a_band_sets_what_is_outside_to_zero():
    found, metrics = weights("token", "0.5_2.0")
    np.testing.assert_allclose(found, [[1, 0, 0], [np.exp(0.1), np.exp(0.2), 0], [0, 0, 0]], rtol=1e-6)
    high, low = metrics["rollout_is_ratio_fraction_high"], metrics["rollout_is_ratio_fraction_low"]
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(high + low) == pytest.approx(2 / 5)
    assert metrics["rollout_is_min"] == 0
    found, metrics = weights("token", "1.5_2.0", normalize=True)  # no ratio is within
    assert not found.any() and metrics["rollout_is_oob_ratio"] == metrics["rollout_is_batch_norm_factor"] == 1


def test_sequence_weights_are_products():
    found, _ = weights("sequence", "5.0")
    np.testing.assert_allclose(found, [[1, 1, 1], [np.exp(0.3)] * 2 + [0], [0, 0, 0]], rtol=1e-6)


def test_shares_and_extremes_of_sequence_weights_are_over_responses_before_truncation():
    _, metrics = weights("sequence", "1.2")
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_seq_fraction_high"] == 0.5
    assert metrics["rollout_is_max"] == pytest.approx(np.exp(0.3)) and metrics["rollout_is_min"] == 1
    assert metrics["rollout_is_seq_max"] == pytest.approx(1.2)
    assert metrics["rollout_is_mean"] == pytest.approx((3 * 1 + 2 * 1.2) / 5)
    assert metrics["rollout_is_seq_mean"] == pytest.approx(1.1)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_normalised_weights_have_mean_one(kind):
    found, metrics = weights(kind, "2.0", normalize=True)
    found = np.asarray(found)
    if kind == "token":
        assert found[np.asarray(MASK)].mean() == pytest.approx(1.0)
    else:
        assert found[:2].max(axis=1).mean() == pytest.approx(1.0)
    unchanged = weights(kind, "2.0")[1]
    factor = unchanged["rollout_is_mean" if kind == "token" else "rollout_is_seq_mean"]
    assert metrics == unchanged | {"rollout_is_batch_norm_factor": factor} and factor != 1


def rejected(**criteria):
    kept, metrics = rejection_mask(
        OLD, ROLLOUT, MASK, criteria=tuple((name, parse_threshold(text)) for name, text in criteria.items())
    )
    return np.asarray(MASK & ~kept).tolist(), {name: float(value) for name, value in metrics.items()}


def test_k1_bounds_the_ratio_of_rollout_to_old():
    nothing, one_row = [False] * 3, [True, True, False]
    assert rejected(token_k1="2.0")[0] == [[False, True, True], nothing, nothing]
    assert rejected(token_k1="0.5_3.0")[0] == [[False, True, False], nothing, nothing]
    assert rejected(seq_sum_k1="1.2")[0] == [nothing, one_row, nothing]  # sums 0 and -0.3
    assert rejected(seq_mean_k1="1.2")[0] == [nothing, nothing, nothing]  # means 0 and -0.15


def test_k2_and_k3_have_an_upper_bound():
    nothing, all_three = [False] * 3, [True] * 3
    assert rejected(token_k2="0.4")[0] == [[False, True, True], nothing, nothing]
    assert rejected(token_k3="0.5")[0] == [[False, True, False], nothing, nothing]  # e - 2, 1 / e
    assert rejected(seq_max_k2="0.4")[0] == [all_three, nothing, nothing]
    assert rejected(seq_mean_k3="0.3")[0] == [all_three, nothing, nothing]


def test_all_criteria_must_hold():
    found, metrics = rejected(token_k3="0.5", seq_sum_k1="1.2")
    assert found == [[False, True, False], [True, True, False], [False] * 3]
    assert metrics["rollout_rs_token_k3_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    assert metrics["rollout_rs_token_k3_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_rs_seq_masked_fraction"] == 1, "both responses lose a token"


def masked(name, tokens, responses):
    return {f"{name}_masked_fraction": tokens, f"{name}_seq_masked_fraction": responses}


def test_statistics_of_a_criterion_on_tokens():
    metrics, name, values = rejected(token_k1="2.0")[1], "rollout_rs_token_k1", np.array([0, -1, 1, -0.1, -0.2])
    expected = spread(name, values) | beyond(name, 1 / 5, 1 / 5) | masked(name, 2 / 5, 1 / 2)
    expected |= spread(f"{name}_seq", [0, -0.15]) | beyond(f"{name}_seq", 0, 0) | masked("rollout_rs", 2 / 5, 1 / 2)
    expected |= {f"{name}_std": values.clip(-np.log(2), np.log(2)).std(), f"{name}_seq_max_deviation": 0.15}
    assert metrics == close(expected)


def test_statistics_of_a_criterion_on_responses():
    metrics, name, sums = rejected(seq_sum_k2="0.5")[1], "rollout_rs_seq_sum_k2", np.array([1.0, 0.025])
    expected = spread(name, sums) | beyond(name, 0.5, 0) | masked(name, 3 / 5, 1 / 2)
    expected |= spread(f"{name}_seq", sums) | beyond(f"{name}_seq", 0.5, 0) | masked("rollout_rs", 3 / 5, 1 / 2)
    of_tokens = np.repeat(sums, [3, 2])
    expected |= {f"{name}_mean": of_tokens.mean(), f"{name}_std": of_tokens.clip(0, 0.5).std()}
    assert metrics == close(expected | {f"{name}_seq_max_deviation": 1})


def test_a_row_without_a_token_is_in_no_statistic():
    reject = jax.jit(functools.partial(rejection_mask, criteria=tuple((name, Band(None, 1.5)) for name in CRITERIA)))
    arrays = OLD, ROLLOUT, MASK
    whole, without = (
        {name: float(value) for name, value in reject(*given)[1].items()}
        for given in (arrays, [array[:2] for array in arrays])
    )
    assert all(any(name in metric for metric in whole) for name in CRITERIA)
    assert whole == pytest.approx(without, nan_ok=False)


def test_equal_policies_reject_nothing():
    kept, _ = rejection_mask(ROLLOUT, ROLLOUT, MASK, criteria=tuple((name, Band(None, 1.001)) for name in CRITERIA))
    assert (kept == MASK).all()


def test_mismatch_metrics():
    metrics = mismatch_metrics(OLD, ROLLOUT, MASK)
    real = DIFFERENCE[np.asarray(MASK)]
    assert metrics["kl"] == pytest.approx(-real.mean(), abs=1e-6)
    assert metrics["k3_kl"] == pytest.approx((np.exp(real) - real - 1).mean(), rel=1e-5)
    assert metrics["logprob_abs_diff"] == pytest.approx(np.abs(real).mean(), rel=1e-5)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(np.abs(real).max(), rel=1e-5)
    assert metrics["logprob_outliers"] == pytest.approx((np.abs(real) > 0.05).mean()) != 0
    ratio = np.exp(real)
    assert metrics["eff_sample_size"] == pytest.approx(ratio.mean() ** 2 / (ratio**2).mean(), rel=1e-5)
    assert metrics["rollout_ppl"] == pytest.approx(np.exp(2), rel=1e-5)
    assert metrics["training_log_ppl"] == pytest.approx((2 + 1.85) / 2)
    assert metrics["log_ppl_diff"] == pytest.approx(-0.15 / 2) and metrics["log_ppl_abs_diff"] == pytest.approx(0.075)
    assert metrics["log_ppl_diff_max"] == pytest.approx(0, abs=1e-6)
    assert metrics["log_ppl_diff_min"] == pytest.approx(-0.15)
    assert metrics["ppl_ratio"] == pytest.approx((1 + np.exp(-0.15)) / 2)
    assert metrics["chi2_token"] == pytest.approx(np.exp(2 * real).mean() - 1, rel=1e-5)
    assert metrics["chi2_seq"] == pytest.approx((1 + np.exp(0.6)) / 2 - 1, rel=1e-5)


def test_probabilities_are_compared_as_numpy_does():
    training, rollout = (np.exp(np.asarray(logprobs))[np.asarray(MASK)] for logprobs in (OLD, OTHER))
    metrics = probability_metrics(OLD, OTHER, MASK)
    difference = np.abs(training - rollout)
    assert metrics["rollout_probs_diff_mean"] == pytest.approx(difference.mean(), rel=1e-5)
    assert metrics["rollout_probs_diff_max"] == pytest.approx(difference.max(), rel=1e-5)
    assert metrics["rollout_probs_diff_std"] == pytest.approx(difference.std(), rel=1e-5)
    correlation = np.corrcoef(training, rollout)[0, 1]
    assert metrics["rollout_actor_probs_pearson_corr"] == pytest.approx(correlation, rel=1e-5)
    assert probability_metrics(OLD, jnp.full_like(OLD, -2.0), MASK)["rollout_actor_probs_pearson_corr"] == 0


def test_policies_that_are_far_apart_have_finite_metrics():
    far = ROLLOUT.at[0, 0].add(-60.0)
    _, weighed = importance_weights(
        ROLLOUT, far, MASK, rollout_is="sequence", threshold=Band(0.5, 2.0), batch_normalize=True
    )
    _, rejecting = rejection_mask(ROLLOUT, far, MASK, criteria=(("token_k3", Band(None, 1.0)),))
    chi2 = mismatch_metrics(ROLLOUT, far, MASK)["chi2_token"]
    assert np.isfinite([*weighed.values(), *rejecting.values(), chi2]).all()


def test_where_no_token_is_left_to_judge_all_is_finite():
    """Overlong filtering may leave none."""
    arrays = ROLLOUT, ROLLOUT, jnp.zeros_like(MASK)
    found = [mismatch_metrics(*arrays), probability_metrics(*arrays)]
    found.append(rejection_mask(*arrays, criteria=tuple((name, Band(None, 2.0)) for name in CRITERIA))[1])
    for kind in ("token", "sequence"):
        options = {"rollout_is": kind, "threshold": Band(0.5, 2.0), "batch_normalize": True}
        found.append(importance_weights(*arrays, **options)[1])
    assert [name for metrics in found for name, value in metrics.items() if not np.isfinite(value)] == []
