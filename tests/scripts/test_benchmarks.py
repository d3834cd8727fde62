"""The lengths of the benchmarks' responses: the same for all contenders, which all count the same tokens.

And how accurate bfloat16 is.
"""

import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

import benchmark_gated_delta
import benchmark_rollout
import benchmark_step
import benchmark_update
import bfloat16_numerics
import numpy as np
import peer_trainers
import pytest
import workload

from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import architecture_from_hf

LONG_TAIL = "lognormal:median=24,sigma=1,clip=128"
UNEVEN = "3,1,7,2,2,6,1,4"


def arguments(lengths: str, *, batch: int = 8) -> argparse.Namespace:
    return argparse.Namespace(shape="tiny", batch=batch, group=4, prompt_length=5, micro=8, lengths=lengths)


def test_benchmarked_lengths_have_a_long_tail_and_are_those_of_contenders_without_our_packages():
    lengths = workload.make_lengths(arguments(LONG_TAIL, batch=64))
    assert lengths.min() >= 1 and lengths.max() == 128
    assert np.median(lengths) == pytest.approx(24, abs=1) and 30 < lengths.mean() < 40
    logs = np.log(lengths.reshape(-1, 4))
    assert 0.25 < logs.var(axis=1, ddof=1).mean() / logs.var(ddof=1) < 0.75, "half of the variance is within prompts"
    longer = workload.make_lengths(arguments(benchmark_rollout.LONG_TAIL, batch=64))
    assert longer.min() >= 1 and longer.max() <= 256 and 256 / 8 < longer.mean() < 256 / 5
    assert (workload.make_lengths(arguments("64")) == 64).all()
    given = arguments(LONG_TAIL, batch=16)
    numbers = workload.as_numbers(LONG_TAIL, given)
    assert set(numbers) <= set("0123456789,")
    np.testing.assert_array_equal(workload.response_lengths(numbers, given), workload.make_lengths(given))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("3,4", "one for each of 8 responses"),
        ("0", "above 0"),
        (",", "above 0"),
        ("lognormal:median=24", "must have a sigma"),
        ("lognormal:median=24,sigma=1,prompt_median=9", "give --prompt-length"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        workload.make_lengths(arguments(lengths))


def test_only_real_tokens_count():
    """Of responses and of the operations that they need: longer ones make up for shorter ones."""
    given = [arguments(lengths) for lengths in (UNEVEN, "3,3,3,3,3,3,3,5")]
    arch = architecture_from_hf(peer_trainers.config_json("tiny"))
    assert [workload.num_tokens(args) for args in given] == [8 * 5 + 26] * 2
    assert len({benchmark_update.least_flops(arch, args) for args in given}) == 1
    assert [len(row) for row in workload.make_responses(given[0])] == [3, 1, 7, 2, 2, 6, 1, 4]


@pytest.mark.slow
def test_our_update_and_step_are_of_these_lengths():
    args = arguments(UNEVEN)
    ours = benchmark_step.OursStep(args, "float32", {"reward.num_workers": 1})
    try:
        updated, _ = benchmark_update.Ours.__call__(ours, "")
        assert ours.batch.mask.sum(axis=1).tolist() == [3, 1, 7, 2, 2, 6, 1, 4]
        stepped, _ = ours("")  # it compares the lengths that it has sampled
    finally:
        ours.stack.close()
    assert updated == stepped == ours.batch.prompt_mask.sum() * args.group + ours.batch.mask.sum()


def test_a_peer_ends_each_response_at_its_length():
    lengths = np.array([1, 3, 2])
    process, tokens = peer_trainers.end_at(lengths, 2), np.zeros((3, 2), int)
    for sampled in range(3):
        scores = process(tokens, np.ones((3, 5)))
        for row, length in enumerate(lengths):
            drawn = np.flatnonzero(scores[row] > -math.inf).tolist()
            assert drawn == ([peer_trainers.END] if sampled + 1 == length else [0, 2, 3, 4])
        tokens = np.pad(tokens, ((0, 0), (0, 1)))


def test_tunix_takes_no_step_of_uneven_lengths():
    with pytest.raises(NotImplementedError, match="no lengths per row"):
        benchmark_step.TunixStep(arguments(UNEVEN), "float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_models_of_the_numerics_have_every_kind_of_layer(name):
    arch, family = bfloat16_numerics.random_model(name)[0], FAMILIES[name]
    kinds = arch.layers
    assert {kind.window for kind in kinds} == {"all": {32}, "typed": {32, None}}.get(family.window, {None})
    assert {kind.rotary for kind in kinds} == ({True, False} if family.leaves_out_rotary or family.delta else {True})
    assert any(kind.delta for kind in kinds) == family.delta
    assert any(kind.experts for kind in kinds) == (family.experts is not None)


@pytest.mark.full
def test_the_numerics_of_bfloat16_are_a_table():
    """In a process of its own, where XLA keeps every rounding."""
    words = [sys.executable, bfloat16_numerics.__file__, "--families", "qwen2"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stderr
    row = re.search(r"\| qwen2 \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", done.stdout)
    assert row is not None, done.stdout
    found = dict(zip(re.findall(r"(?:k3|error), \w+", done.stdout), map(float, row.groups()), strict=False))
    assert 0 < found["k3, float32"] < 1e-4 and 0 < found["k3, bfloat16"] < 1e-4
    assert 0 < found["error, float32"] < found["error, bfloat16"] < 0.05


@pytest.mark.full
def test_a_layer_with_linear_attention_is_the_same_in_chunks_and_token_by_token(capsys):
    benchmark_gated_delta.main(["--tokens", "128", "--repeats", "1"])
    rows = re.findall(r"\| (forward.*?) \|.* (\S+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in rows] == ["forward", "forward and backward"]
    assert all(float(difference) < 1e-4 for _, difference in rows)
