import json

import numpy as np
import pytest

from dapo_jax.config.sections import DataConfig
from dapo_jax.errors import InputError
from dapo_jax.monitor.statistics import length_metrics, length_percentiles, share_within_prompts
from dapo_jax.preflight.lengths import all_longest, parse_lengths

DATA = DataConfig(max_prompt_length=2048, max_response_length=20480)
TAILED = "lognormal:median=3000,sigma=1,clip=20480,within=0.5"


def sampled(text, data=DATA, prompts=512, samples=16):
    return parse_lengths(text, data).sample(prompts, samples)


def test_the_quantiles_are_those_of_the_distribution():
    responses, prompts = sampled(TAILED + ",prompt_median=300,prompt_sigma=0.4")
    assert responses.shape == (512, 16) and prompts.shape == (512,) and responses.dtype == prompts.dtype == np.int64
    assert np.median(responses) == pytest.approx(3000, rel=1e-3) and np.median(prompts) == pytest.approx(300, rel=1e-2)
    assert np.percentile(responses, [15.866, 84.134]) == pytest.approx(3000 * np.exp([-1, 1]), rel=2e-3)
    assert responses.max() == 20480 and np.mean(responses == 20480) == pytest.approx(0.0274, abs=1e-3)
    assert responses.mean() == pytest.approx(4623.6, abs=1)  # E[min(X, 20480)] by its formula
    assert np.percentile(prompts, 84.134) == pytest.approx(300 * np.exp(0.4), rel=1e-2)


@pytest.mark.parametrize("within", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_the_variance_lies_within_prompts(within):
    responses, _ = sampled(f"lognormal:median=3000,sigma=1,clip=20480,within={within}")
    assert share_within_prompts(responses) == pytest.approx(within, abs=0.04)


def test_a_sample_is_the_same_in_every_call_and_keeps_the_quantiles():
    for one, other in zip(sampled(TAILED), sampled(TAILED), strict=True):
        np.testing.assert_array_equal(one, other)
    apart, together = (sampled(f"lognormal:median=3000,sigma=1,within={within}")[0] for within in (0.1, 0.9))
    np.testing.assert_array_equal(np.sort(apart, axis=None), np.sort(together, axis=None))
    assert not np.array_equal(apart, together)


def test_limits_of_the_config_are_defaults():
    data = DataConfig(max_prompt_length=100, max_response_length=1000)
    responses, prompts = sampled("lognormal:median=900,sigma=2", data)
    assert responses.max() == 1000 and prompts.max() == 100 and responses.min() >= 1
    assert parse_lengths("lognormal:median=900,sigma=2", data).text == (
        "lognormal:median=900,sigma=2,clip=1000,within=0.5,prompt_median=100,prompt_sigma=0.5"
    )


def test_the_longest_case_is_a_distribution():
    text = "lognormal:median=1e9,sigma=0,prompt_median=2048,prompt_sigma=0"
    for lengths in (all_longest(DATA), parse_lengths(text, DATA)):
        responses, prompts = lengths.sample(3, 2)
        np.testing.assert_array_equal(responses, np.full((3, 2), 20480))
        np.testing.assert_array_equal(prompts, np.full(3, 2048))


OF_THREE = "lognormal:median=3,sigma=1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform:1,2", r"--lengths=uniform:1,2 must be lognormal:median=3000,.* or the path of a run's metrics.jsonl"),
        ("lognormal:median=3000", "must have a sigma: write it like lognormal:"),
        (f"{OF_THREE},mean=4", "'mean=4' must be NAME=NUMBER with a name of median, sigma, clip"),
        ("lognormal:median=long,sigma=1", "'median=long' must be a number"),
        ("lognormal:median=0,sigma=1", "median=0 must be at least 1: give it in tokens"),
        ("lognormal:median=3,sigma=-1", "sigma=-1 must be between 0 and 10: give the standard deviation of the logar"),
        ("lognormal:median=3,sigma=nan", "sigma=nan must be between 0 and 10"),
        (f"{OF_THREE},within=2", "within=2 must be between 0 and 1: give a share of the variance"),
        (f"{OF_THREE},clip=30000", "clip=30000 must be between 1 and 20480: leave it out, or raise data"),
        (f"{OF_THREE},prompt_median=4000", "prompt_median=4000 must be between 1 and 2048: lower it, or"),
        ("nowhere/metrics.jsonl", "--lengths=nowhere/metrics.jsonl does not exist: give the metrics.jsonl of a run"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_lengths(text, DATA)


def recorded(responses, prompts, data):
    """A row of metrics.jsonl."""
    return {
        **length_metrics("response", responses, data.max_response_length),
        **length_percentiles("response", responses),
        "response_length/within_prompts": share_within_prompts(responses),
        **length_metrics("prompt", prompts, data.max_prompt_length),
        **length_percentiles("prompt", prompts),
        "experience_pipeline/experience_count": responses.size,
        "sample/task_count": len(prompts),
    }


def test_the_lengths_of_a_run_are_found_again(tmp_path):
    responses, prompts = sampled(TAILED)
    rows = [{"step": 0}, {"step": 1, **recorded(responses, prompts, DATA)}, {"step": 2, "response_length/mean": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, found_prompts = sampled(f"{tmp_path}/metrics.jsonl")
    assert found.mean() == pytest.approx(responses.mean(), rel=2e-3)
    assert np.square(found).mean() == pytest.approx(np.square(responses).mean(), rel=3e-3)
    assert found.max() == 20480 and np.mean(found == 20480) == pytest.approx(np.mean(responses == 20480), abs=1e-3)
    assert found_prompts.mean() == pytest.approx(prompts.mean(), rel=5e-3)
    assert share_within_prompts(found) == pytest.approx(share_within_prompts(responses), abs=0.05)
    shorter, _ = sampled(f"{tmp_path}/metrics.jsonl", DataConfig(max_prompt_length=2048, max_response_length=4096))
    assert shorter.max() == 4096


def test_quantiles_ascend_where_steps_differ(tmp_path):
    """Half of the steps are cut off for three responses in ten, the others for none; their means cross."""
    short, long = np.linspace(100, 800, 100).astype(int).reshape(10, 10), np.linspace(300, 1400, 100).reshape(10, 10)
    data = DataConfig(max_prompt_length=64, max_response_length=1024)
    rows = [recorded(np.minimum(x, 1024).astype(int), np.full(10, 30), data) for x in (short, long)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, **row}) + "\n" for row in rows))
    found = parse_lengths(f"{tmp_path}/metrics.jsonl", data).response(np.linspace(0.01, 0.99, 99))
    assert (np.diff(found) >= 0).all() and found[-1] == pytest.approx(912)  # the mean of 800 and 1024


def test_a_run_without_the_quantiles_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "response_length/mean": 7}\n')
    with pytest.raises(InputError, match="has no row with response_length/p10 and the other lengths: give the file of"):
        parse_lengths(f"{tmp_path}/metrics.jsonl", DATA)


def test_a_share_within_prompts_of_nothing_to_compare_is_one():
    for lengths in (np.ones((1, 4)), np.ones((4, 1)), np.full((3, 2), 7)):
        assert share_within_prompts(lengths) == 1
    assert share_within_prompts(np.repeat([[3], [5]], 4, axis=1)) == 0
