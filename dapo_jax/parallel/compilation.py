"""Host: compiled programs are kept from run to run."""

import os
from pathlib import Path

import jax


def keep_compiled(directory: str) -> None:
    """Keeps programs that took a second or more to compile in `directory`; "" keeps none.

    JAX_COMPILATION_CACHE_DIR, where it is set, comes first.
    """
    if directory and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
