"""Host: how programs are compiled, and that they are kept from run to run."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax

# XLA's options by platform, for passes over the layers: weights are gathered and gradients scattered while a layer
# computes. Sources: JAX, "GPU performance tips" (the first), NVIDIA JAX-Toolbox, "Tips for High-Performance LLMs with
# JAX and XLA" (both). XLA:TPU overlaps by default.
OVERLAP: Mapping[str, Mapping[str, bool]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # two layers in a turn, so that they overlap too
    }
}

CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's; where it is set, it comes first


def keep_compiled(directory: str) -> None:
    """Keeps programs that took a second or more to compile in `directory`, or where CACHE says; "" keeps none."""
    if directory and CACHE not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
