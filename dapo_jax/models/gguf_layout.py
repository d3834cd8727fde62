"""Host: checks the counts and lengths in the header of a GGUF file, which readers trust."""

import mmap
import struct
from pathlib import Path

from dapo_jax.errors import InputError

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by the type of a value
STRING, ARRAY = 8, 9
MAX_ELEMENTS = 2**24  # of one array of metadata: a reader creates an object for each
MAX_DIMENSIONS = 4


def check_layout(path: Path) -> None:
    """Walks through the header of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ValueError: a length points past the end, or a type is unknown.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise InputError(f"{size} bytes are too few for a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()


class _Walk:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> None:
        if self._data[:4] != MAGIC:
            raise InputError(f"begins with {self._data[:4]!r}, must begin with {MAGIC!r}")
        self._skip(4)
        version = self._number("<I")
        if version not in VERSIONS:
            raise InputError(f"GGUF version {version} must be one of {VERSIONS}, little-endian")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        for _ in range(num_fields):
            self._skip(self._number("<Q"))
            self._value(self._number("<I"))
        for _ in range(num_tensors):
            self._skip(self._number("<Q"))
            dimensions = self._number("<I")
            if dimensions > MAX_DIMENSIONS:
                raise InputError(f"a tensor of {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed")
            self._skip(8 * dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind in SCALAR_BYTES:
            self._skip(SCALAR_BYTES[kind])
        elif kind == STRING:
            self._skip(self._number("<Q"))
        elif kind == ARRAY:
            element, count = self._number("<I"), self._number("<Q")
            if count > MAX_ELEMENTS or element == ARRAY:
                raise InputError(f"an array of {count} elements of type {element}, at most {MAX_ELEMENTS} are allowed")
            if element in SCALAR_BYTES:
                self._skip(count * SCALAR_BYTES[element])
            else:
                for _ in range(count):
                    self._value(element)
        else:
            raise InputError(f"a value of unknown type {kind}")

    def _number(self, form: str) -> int:
        at = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, at)[0]

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise InputError(f"the header says that the file has {self._at} bytes or more, it has {len(self._data)}")
