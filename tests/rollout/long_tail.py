"""Large models on meshes without devices, and response lengths with a long tail."""

from pathlib import Path

import numpy as np
from jax.sharding import AbstractMesh
from small_policy import engine_settings

from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.parallel.mesh import AXES
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.shapes import LengthHistory

LIMIT, GIB, SEVEN = 20480, 2.0**30, "Qwen2.5-7B"
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
MODELS = {  # model, mesh, GiB that are free on each device
    "7B v5p:2x2x4": (SEVEN, (4, 4), 86),
    "7B v5e:8x8": (SEVEN, (16, 4), 11),
    "7B h100:8": (SEVEN, (2, 4), 57),
    "32B v5p:4x4x8": ("Qwen2.5-32B", (16, 8), 84),
}


def long_tailed(seed: int) -> tuple[np.ndarray, np.ndarray, LengthHistory]:
    """[512, 16] response lengths, lognormal, half of the variance between prompts; [512] prompt lengths; history."""
    rng = np.random.default_rng(seed)
    normal = np.sqrt(0.5) * (rng.normal(size=(512, 1)) + rng.normal(size=(512, 16)))
    prompts = np.exp(np.log(200) + 0.4 * rng.normal(size=512))
    responses, history = np.clip(3000 * np.exp(normal), 1, LIMIT).astype(int), LengthHistory(LIMIT)
    history.add(responses.reshape(-1))
    return responses, np.clip(prompts, 16, 2048).astype(int), history


def settings_of(model: str, mesh: tuple[int, int], **changes) -> EngineSettings:
    sizes = {"max_prompt_length": 2048, "max_response_length": LIMIT, "chunk_length": 64, "max_num_seqs": 0}
    sizes |= {"arch": read_architecture(SHAPES / model), "lookahead": 1, "memory_share": 0.85}
    return engine_settings(AbstractMesh((1, *mesh), AXES), **{**sizes, **changes})
