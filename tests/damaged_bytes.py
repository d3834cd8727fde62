"""Bytes that are no file of a format, or nearly one, for the tests of the readers."""

import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dapo_jax.errors import InputError

ROOM = 2**30  # bytes that a reader may take: the files have some thousands
SIZES = [0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]  # which headers may claim


def fuzz(max_examples: int) -> settings:
    """The same examples in every run, and none is kept."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=max_examples, derandomize=True, database=None, deadline=None, suppress_health_check=checks
    )


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, *, header: int | None = None) -> bytes:
    """`whole` cut off, with some bytes or numbers changed, or with a part missing or doubled; or any bytes.

    Args:
        header: most changes lie in so many first bytes; None: anywhere.
    """
    kind = draw(st.sampled_from(["any", "cut", "changed", "changed", "changed", "moved"]))
    if kind == "any":
        return draw(st.sampled_from([b"", whole[:4], whole[:8], whole[:24]])) + draw(st.binary(max_size=200))
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    places = st.integers(0, len(whole) - 1)
    if header is not None:
        places = st.integers(0, min(header, len(whole)) - 1) | places
    if kind == "moved":
        start, stop, to = sorted(draw(st.tuples(places, places, places)))
        return draw(st.sampled_from([whole[:start] + whole[stop:], whole[:to] + whole[start:stop] + whole[to:]]))
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(places)
        new = draw(
            st.binary(min_size=1, max_size=4)
            | st.sampled_from(SIZES).map(lambda size: struct.pack("<Q", size))
            | st.sampled_from(SIZES).map(lambda size: struct.pack("<I", size % 2**32))
        )
        data[at : at + len(new)] = new
    return bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5) | st.just("x" * 50),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@contextmanager
def read_or_refused(path: Path | None = None) -> Iterator[None]:
    """Lets an InputError that names `path` pass, and no other error."""
    try:
        yield
    except InputError as error:
        assert path is None or str(path) in str(error), repr(error)


@contextmanager
def little_memory() -> Iterator[None]:
    """Lets this process take ROOM more bytes than it has, so that a reader that believes a header fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open(f"/proc/{os.getpid()}/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
