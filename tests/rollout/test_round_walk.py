"""How much of the work of waves is needed, when responses are long-tailed."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from rollout.long_tail import GIB, MODELS, SEVEN, long_tailed, settings_of
from shapes import ARCH
from small_policy import engine_settings

from dapo_jax.models.flops import token_flops
from dapo_jax.parallel.mesh import AXES
from dapo_jax.rollout.needed_work import needed_work
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.shapes import LengthHistory


def walked(model, mesh, free, seed):
    settings = settings_of(model, mesh, chunk_length=32, smallest_rows=8)
    responses, prompts, history = long_tailed(seed)
    return walk_round(settings, np.dtype(np.float16), responses, prompts, history=history, free_bytes=free * GIB)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_decoding_a_long_tail_computes_little_more_than_is_needed(model, seed):
    """Computed over needed operations."""
    walk = walked(*MODELS[model], seed)
    assert 1 / walk.work["decode"].efficiency < {"7B v5e:8x8": 1.7, "32B v5p:4x4x8": 1.5}.get(model, 1.4)
    assert 1 / walk.work["prefill"].efficiency < 6  # all prompts have the width of the longest


def test_keys_and_values_fill_their_share_of_the_memory_and_few_prompts_are_prefilled_at_once():
    walk = walked(SEVEN, (16, 4), 11, 0)
    tokens = max((shape.rows * shape.window + shape.prompts * shape.width) / 16 for shape in walk.decodes)
    assert 0.5 * 0.85 * 11 * GIB < tokens * 2 * 28 * 128 * 2 <= 0.85 * 11 * GIB
    assert walk.layout.size > 16 * walk.layout.at_once and walk.layout.part_size <= 16 * walk.layout.at_once


def test_equal_lengths_that_fill_their_chunks_waste_only_keys():
    settings = engine_settings(AbstractMesh((1, 1, 1), AXES), max_response_length=65, chunk_length=8)
    lengths, prompts, history = np.full((4, 2), 65), np.full(4, 8), LengthHistory(65)
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
