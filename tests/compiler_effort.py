"""The effort of compilers, which JAX has as a setting of the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

NAME = "jax_exec_time_optimization_effort"


@contextmanager
def effort(value: float) -> Iterator[None]:
    """With -1, a TPU's compiler tries fewer optimisations and takes less time, for some programs a third."""
    before = jax.config.values[NAME]
    jax.config.update(NAME, value)
    try:
        yield
    finally:
        jax.config.update(NAME, before)
