"""A small mixture of experts with rollouts that record what its tokens chose."""

import functools
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from small_policy import engine_settings

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.transformer import prefill
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN, Sampling

MODEL = Path(__file__).parent / "models" / "data" / "qwen3_moe"  # 4 layers, 2 of 6 experts for a token
ARCH = read_architecture(MODEL)
PROMPTS = [[5, 6, 7, 30, 31], [8], [3, 4, 5, 6, 7, 8, 9], [11, 140], [20, 21, 22, 23], [12, 13, 14], [3, 3], [2, 40]]
NUMBERS = list(range(100, 108))
SAMPLES, LENGTH, PAD, EOS = 4, 14, 0, (2, 3, 17, 40, 77, 90, 120)


@functools.cache
def params():
    """NumPy arrays, layers stacked."""
    return jax.device_get(load_params(str(MODEL), ARCH, lambda weight, array: np.asarray(array)))


def engine(kind: str, mesh: Mesh, **changes) -> Engine:
    """With "pages" or "stretches"; few rows at once, so that slots are refilled."""
    own = {"arch": ARCH, "eos_ids": EOS, "pad_id": PAD, "max_response_length": LENGTH, "max_num_seqs": 16}
    settings = engine_settings(mesh, **{**own, "chunk_length": 4, "choices": ARCH.choices, **changes})
    return Engine(settings, {"pages": attend_gathered, "stretches": None}[kind])


def roll_out(used: Engine, *, purpose: int = TRAIN, num_samples: int = SAMPLES, **options) -> Rollout:
    """Responses to PROMPTS, unless `options` has others."""
    mesh = used.settings.mesh
    with jax.set_mesh(mesh):
        weights = jax.device_put(unstack_layers(params(), ARCH), replicated(mesh))
        asked = {"prompts": PROMPTS, "numbers": NUMBERS, **options}
        request = Request(weights, num_samples, purpose, Sampling.create(1.0, 1.0, -1))
        try:
            return used.generate(request=request, **asked)
        finally:
            used.close()


@functools.cache
def chosen_by_forward(tokens: tuple[int, ...], width: int = 24) -> np.ndarray:
    """The experts [tokens, l, k] of a sequence in one pass over it."""
    ids, mask = pad_prompts([list(tokens)], width, PAD)
    _, _, experts = _prefill(params(), ids, mask, ARCH)
    return np.asarray(experts)[0][mask[0]]


_prefill = jax.jit(prefill, static_argnames="arch")


def shifted(record: np.ndarray) -> np.ndarray:
    """Other experts than those of a record: the next ones."""
    return ((record + 1) % 6).astype(record.dtype)
