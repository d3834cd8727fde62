"""The equations of a traced program."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def equations(jaxpr: Any, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Each equation, those of inner programs too, and whether a loop runs it."""
    for one in jaxpr.eqns:
        yield one, inside
        for inner in jaxprs_in_params(one.params):
            yield from equations(inner, inside or one.primitive.name == "scan")
