"""Every checkpoint samples greedily as transformers does, in waves and in slots, on one device and on eight."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from models.write_references import NEW, prompts
from shapes import mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.learner.decode_weights import build_decode_weights
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.parallel.sharding import TRAIN_RULES, place_weight
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.waves import WaveEngine

DATA = Path(__file__).parents[1] / "models" / "data"
NAMES = sorted(path.name for path in DATA.iterdir())
EVERY_WAY = ("gemma3", "qwen3_moe")  # the others in waves on one device, and in slots on eight
ONE = (1, 1, 1)
ENGINES = {"waves": WaveEngine, "slots": lambda settings: SlotEngine(settings, attend_gathered)}


def sampled(name, engine, mesh, num_samples):
    """Responses [Q * num_samples, NEW] to prompts of 40, 3 and 21 tokens. Windows are of 16 tokens, chunks of 8."""
    arch = read_model_architecture(DATA / name)
    params = load_params(DATA / name, arch, place_weight(mesh, TRAIN_RULES))
    given = prompts(arch.vocab_size)
    settings = {"arch": arch, "eos_ids": (arch.vocab_size,), "pad_id": 0, "max_prompt_length": 40, "chunk_length": 8}
    with jax.set_mesh(mesh):
        weights = build_decode_weights(arch, np.dtype("float32"), mesh)(params)
        built = ENGINES[engine](engine_settings(mesh, max_response_length=NEW, **settings))
        try:
            return built.generate(
                weights,
                given,
                range(len(given)),
                num_samples=num_samples,
                purpose=TRAIN,
                sampling=Sampling.create(0.0, 1.0, -1),
            )
        finally:
            built.close()


CASES = [
    pytest.param(name, engine, shape, id=f"{name}-{engine}-{shape}")
    for name, engine, shape in itertools.product(NAMES, ENGINES, (ONE, (2, 2, 2)))
    if name in EVERY_WAY or (engine == "waves") == (shape == ONE)
]


@pytest.mark.short("qwen3_moe-waves-(1, 1, 1)", "gemma3-slots-(2, 2, 2)")
@pytest.mark.parametrize(("name", "engine", "shape"), CASES)
def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(name, engine, shape):
    mesh, num_samples = (one_device_mesh(), 1) if shape == ONE else (mesh_of(shape), 2)
    found, golden = sampled(name, engine, mesh, num_samples), np.load(DATA / name / "transformers.npz")
    expected, logprobs = (golden[key].repeat(num_samples, axis=0) for key in ("responses", "logprobs"))
    np.testing.assert_array_equal(found.responses, expected)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=1e-4)
