"""Host: how programs are compiled, and that they are kept from run to run."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax

# By platform, for passes over the layers: the weights of the next layer are gathered, and the gradients of the last one
# scattered, while a layer computes. Sources: NVIDIA JAX-Toolbox, "Tips for High-Performance LLMs with JAX and XLA" (all
# four), and JAX, "GPU performance tips" (the first). XLA:TPU does the same unless told otherwise.
OVERLAP: Mapping[str, Mapping[str, bool]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # or each turn would wait for the transfers of the last
    }
}

CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's; where it is set, it comes first


def keep_compiled(directory: str) -> None:
    """Keeps programs that took a second or more to compile in `directory`, or where CACHE says; "" keeps none."""
    if directory and CACHE not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
