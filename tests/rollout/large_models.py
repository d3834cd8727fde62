"""Large models on meshes without devices, and the sizes of their queues."""

from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh
from small_policy import engine_settings

from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.paged_attention_gpu import attend
from dapo_jax.rollout.layout import EngineSettings, Layout
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.sizes import choose_layout

LIMIT, GIB, SEVEN = 20480, 2.0**30, "Qwen2.5-7B"
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def settings_of(model: str, mesh: tuple[int, int], **changes) -> EngineSettings:
    sizes = {"max_prompt_length": 2048, "max_response_length": LIMIT, "chunk_length": 0, "max_num_seqs": 0}
    sizes |= {"arch": read_architecture(SHAPES / model), "lookahead": 1, "memory_share": 0.85}
    return engine_settings(AbstractMesh((1, *mesh), ("data", "fsdp", "tensor")), **{**sizes, **changes})


def layout_of(
    settings, prompts, num_samples=16, history=None, free=0.0, dtype: Any = np.float16, attend=attend, **sizes
) -> Layout:
    """That of pages, with so many free GiB on each device."""
    history = history or LengthHistory(settings.max_response_length)
    return choose_layout(settings, attend, np.dtype(dtype), prompts, num_samples, history, free * GIB, **sizes)
