"""How much of the work of waves is needed, when responses are long-tailed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from shapes import ARCH
from small_policy import engine_settings

from dapo_jax.models.flops import token_flops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.parallel.mesh import AXES
from dapo_jax.rollout.needed_work import needed_work
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.shapes import LengthHistory

LIMIT = 20480
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
GIB = 2.0**30


def long_tailed(seed):
    """[512, 16] response lengths, lognormal, half of the variance between prompts; [512] prompt lengths."""
    rng = np.random.default_rng(seed)
    normal = np.sqrt(0.5) * (rng.normal(size=(512, 1)) + rng.normal(size=(512, 16)))
    prompts = np.exp(np.log(200) + 0.4 * rng.normal(size=512))
    return np.clip(3000 * np.exp(normal), 1, LIMIT).astype(int), np.clip(prompts, 16, 2048).astype(int)


def walked(model, mesh, free, seed, **changes):
    settings = engine_settings(
        AbstractMesh((1, *mesh), AXES),
        arch=read_architecture(SHAPES / model),
        max_prompt_length=2048,
        max_response_length=LIMIT,
        chunk_length=32,
        smallest_rows=8,
        lookahead=1,
        **{"max_num_seqs": 0, "memory_share": 0.85, **changes},
    )
    responses, prompts = long_tailed(seed)
    history = LengthHistory(LIMIT)
    history.add(responses.reshape(-1))
    return walk_round(settings, np.dtype(np.float16), responses, prompts, history=history, free_bytes=free * GIB)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("model", "mesh", "free", "bar"),
    [
        pytest.param("Qwen2.5-7B", (4, 4), 86, 1.4, id="7B v5p:2x2x4"),
        pytest.param("Qwen2.5-7B", (16, 4), 11, 1.7, id="7B v5e:8x8"),
        pytest.param("Qwen2.5-7B", (2, 4), 57, 1.4, id="7B h100:8"),
        pytest.param("Qwen2.5-32B", (16, 8), 84, 1.5, id="32B v5p:4x4x8"),
    ],
)
def test_decoding_a_long_tail_computes_little_more_than_is_needed(model, mesh, free, bar, seed):
    """free: GiB on each device; bar: computed over needed operations."""
    walk = walked(model, mesh, free, seed)
    assert 1 / walk.work["decode"].efficiency < bar
    assert 1 / walk.work["prefill"].efficiency < 6  # all prompts have the width of the longest


def test_keys_and_values_stay_in_their_share_of_the_memory():
    walk = walked("Qwen2.5-7B", (16, 4), 11, 0)
    tokens = max((shape.rows * shape.window + shape.prompts * shape.width) / 16 for shape in walk.decodes)
    assert 0.5 * 0.85 * 11 * GIB < tokens * 2 * 28 * 128 * 2 <= 0.85 * 11 * GIB


def test_a_wave_has_more_prompts_than_are_prefilled_at_once():
    layout = walked("Qwen2.5-7B", (16, 4), 11, 0).layout
    assert layout.size > 16 * layout.at_once and layout.part_size <= 16 * layout.at_once


def test_equal_lengths_that_fill_their_chunks_waste_only_keys():
    settings = engine_settings(
        AbstractMesh((1, 1, 1), AXES), arch=ARCH, max_response_length=65, chunk_length=8, lookahead=0
    )
    lengths, prompts = np.full((4, 2), 65), np.full(4, 8)
    history = LengthHistory(65)
    walk = walk_round(settings, np.dtype(np.float32), lengths, prompts, history=history, free_bytes=0.0)
    assert walk.decodes == {(8, 4, 8, 64): 8} and walk.waves == walk.prefills == 1 and not walk.resizes
    flops = token_flops(ARCH)
    assert walk.work["decode"].computed == 8 * 64 * (flops.layers + flops.head + 72 * flops.pair)
    assert walk.work["prefill"].computed == 4 * 8 * (flops.layers + 8 * flops.pair)


def test_needed_work_by_hand():
    arch = dataclasses.replace(ARCH, num_layers=3)
    flops = token_flops(arch)
    needed = needed_work(arch, np.array([2, 5]), np.array([[1, 3], [2, 1]]))
    keys = (2 + 1) + (2 + 2) + (5 + 1)  # of the second and third token of one response, the second of another
    assert needed["decode"] == 3 * (flops.layers + flops.head) + keys * flops.pair
    assert needed["prefill"] == 7 * flops.layers + (1 + 2 + 15) * flops.pair
