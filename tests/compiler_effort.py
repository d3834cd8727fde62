"""The effort of compilers, which JAX has as a setting of the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def effort(value: float) -> Iterator[None]:
    """With -1, a TPU's compiler tries fewer optimisations and takes less time, for some programs a third."""
    name, setting = "jax_exec_time_optimization_effort", value
    if name not in jax.config.values:  # since JAX 0.11
        name, setting = "jax_optimization_level", "O1" if value < 0 else "UNKNOWN"
    before = jax.config.values[name]
    jax.config.update(name, setting)
    try:
        yield
    finally:
        jax.config.update(name, before)
