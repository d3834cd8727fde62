import struct

import pytest

from dapo_jax.models.gguf_layout import check_layout

UINT8, UINT32, BOOL, STRING, ARRAY, FLOAT64 = 0, 4, 7, 8, 9, 12


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(name: str, *dimensions: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, 0, 0)


def header(fields: dict[str, tuple[int, bytes]], tensors: list[bytes], *, version: int = 3) -> bytes:
    parts = [text(name) + struct.pack("<I", kind) + value for name, (kind, value) in fields.items()]
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(parts + tensors)


FIELDS = {
    "number": (UINT32, struct.pack("<I", 7)),
    "text": (STRING, text("ü")),
    "texts": (ARRAY, array(STRING, 2, text("a") + text(""))),
    "flags": (ARRAY, array(BOOL, 3, b"\0\1\0")),
    "last": (FLOAT64, struct.pack("<d", 0.5)),
}
TENSORS = [tensor("a", 3, 4), tensor("b", 5)]


def check(tmp_path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    check_layout(tmp_path / "a.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_a_whole_header_passes_and_no_beginning_of_it_does(tmp_path, version):
    whole = header(FIELDS, TENSORS, version=version)
    check(tmp_path, whole)
    check(tmp_path, whole + bytes(100))
    for size in range(len(whole)):
        with pytest.raises(ValueError, match="bytes"):
            check(tmp_path, whole[:size])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header({"a": (ARRAY, array(UINT8, 2**40, b"1"))}, []), "an array of 1099511627776 elements"),
        (header({"a": (ARRAY, array(UINT32, 2**20, b"1"))}, []), "has 4194"),
        (header({"a": (ARRAY, array(STRING, 2**20, text("a")))}, []), "or more, it has"),
        (header({"a": (ARRAY, array(ARRAY, 1, array(UINT8, 1, b"1")))}, []), "elements of type 9"),
        (header({"a": (STRING, struct.pack("<Q", 2**63) + b"a")}, []), "or more, it has"),
        (header({"a": (13, b"")}, []), "a value of unknown type 13"),
        (header({}, [tensor("a", 1, 1, 1, 1, 1)]), "a tensor of 5 dimensions, at most 4"),
        (header({}, [], version=1), "GGUF version 1 must be one of"),
        (header({}, []).replace(b"GGUF", b"FUGG"), "must begin with b'GGUF'"),
        (b"", "too few for a GGUF header"),
    ],
)
def test_what_cannot_be_is_told(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        check(tmp_path, content)
