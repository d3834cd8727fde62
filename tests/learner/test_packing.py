"""How much work packing saves on responses of long-tailed lengths; test_micro_batches has what bins hold."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from small_policy import plain_batch

from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.packing import EIGHTHS, plan_passes
from dapo_jax.models.attention import XLA
from dapo_jax.models.flops import token_flops
from dapo_jax.models.fused_attention import CUDNN, SPLASH, TRITON
from dapo_jax.models.hf_architecture import read_architecture

SAMPLES = 16
CONFIGS = Path(__file__).parents[2] / "configs"


def lengths(prompts, *, median, clip, sigma=1.0, of_prompt=200, seed=0):
    """Tokens of prompts [Q] and of their responses [Q * SAMPLES]: half of the variance is a prompt's own."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(prompts, 1)) + rng.normal(size=(prompts, SAMPLES))
    responses = np.exp(np.log(median) + sigma * np.sqrt(0.5) * drawn)
    own = np.exp(np.log(of_prompt) + 0.5 * rng.normal(size=prompts))
    return np.clip(own, 1, 2048).astype(int), np.clip(responses, 1, clip).astype(int).reshape(-1)


def plan(sizes, *, shards, tokens, attention, pair_cost=1e-4, walks=False):
    given = (tuple(lengths.tolist()) for lengths in sizes)
    options = {"num_shards": shards, "max_tokens": tokens, "attention": attention, "pair_cost": pair_cost}
    return plan_passes(*given, **options, walks=walks)


def ratio(batches, *, shards, tokens, attention, flops):
    """Computed over needed operations."""
    split = MicroBatches(shards, max_tokens_per_device=tokens, attention=attention, flops=flops)
    found = [(split.needed(batch), sum(map(split.computed, split.split(batch)))) for batch in map(batch_of, batches)]
    needed, computed = np.sum(found, axis=0)
    return computed / needed


def batch_of(sizes):
    """A batch of sequences of these lengths."""
    prompts, responses = sizes
    prompt_mask = np.arange(prompts.max()) >= prompts.max() - prompts[:, None]
    return plain_batch(prompt_mask, np.arange(responses.max()) < responses[:, None])


def flops_of(name):
    return token_flops(read_architecture(CONFIGS / "shapes" / name))


@pytest.mark.short("2-triton")
@pytest.mark.parametrize(
    ("seeds", "attention"),
    [(2, TRITON), (8, SPLASH), (8, TRITON), (8, CUDNN)],
    ids=["2-triton", "splash", "triton", "cudnn"],
)
def test_long_tails_take_little_more_than_the_needed_work(seeds, attention):
    """Mini-batches of 32 prompts of DAPO's 7B recipe with responses of up to 20k tokens, on 16 devices."""
    batches = [lengths(32, median=3000, clip=20480, seed=seed) for seed in range(seeds)]
    assert ratio(batches, shards=16, tokens=22528, attention=attention, flops=flops_of("Qwen2.5-Math-7B")) < 1.10


@pytest.mark.parametrize(
    ("attention", "most"), [(SPLASH, 1.20), (TRITON, 1.10), (XLA, 1.28)], ids=["splash", "triton", "xla"]
)
def test_short_responses_share_their_prompts(attention, most):
    """GSM8K's lengths with a model of 0.5B."""
    batches = [lengths(32, median=200, sigma=0.6, clip=1024, of_prompt=120, seed=seed) for seed in range(4)]
    assert ratio(batches, shards=1, tokens=16384, attention=attention, flops=flops_of("Qwen2.5-0.5B")) < most


def test_bins_that_a_recurrence_walks_along_are_narrow():
    """A pass takes a step of small kernels for each chunk of a bin: eight times fewer, for little more work."""
    split = MicroBatches(1, max_tokens_per_device=16384, attention=TRITON, flops=flops_of("Qwen3.5-0.8B"))
    batch, of_split = batch_of(lengths(32, median=200, sigma=0.6, clip=512, of_prompt=120)), {}
    for walks in (False, True):
        one = dataclasses.replace(split, walks=walks)
        computed = sum(map(one.computed, one.split(batch)))
        of_split[walks] = computed / one.needed(batch), sum(found.width for found in one.passes(batch))
    assert of_split[True][0] < 1.2 and 8 * of_split[True][1] < of_split[False][1]
    sizes = lengths(32, median=3000, clip=20480)  # the longest fills a pass
    options = {"shards": 16, "tokens": 22528, "attention": TRITON}
    assert plan(sizes, **options, walks=True) == plan(sizes, **options)


def shapes_of(seeds, *, of, **options):
    """The distinct shapes of the passes over batches of these lengths."""
    plans = [plan(lengths(**of, seed=seed), **options) for seed in range(seeds)]
    return {(one.width, len(one.bins)) for passes in plans for one in passes}


def test_few_shapes_are_compiled():
    long = {"prompts": 32, "median": 3000, "clip": 20480}
    assert len(shapes_of(30, of=long, shards=16, tokens=22528, attention=SPLASH)) <= EIGHTHS
    short = {"prompts": 8, "median": 24, "clip": 128, "of_prompt": 40}
    assert len(shapes_of(30, of=short, shards=1, tokens=2048, attention=XLA)) <= 16


def test_passes_are_evenly_large():
    for seed in range(10):
        sizes = lengths(8, median=24, clip=128, of_prompt=40, seed=seed)
        numbers = [len(one.bins) for one in plan(sizes, shards=1, tokens=2048, attention=XLA)]
        assert 2 * min(numbers) >= max(numbers)
