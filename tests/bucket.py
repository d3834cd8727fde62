"""A bucket of Google Cloud Storage that is a directory of this machine: its addresses as fsspec and Orbax see them."""

import sys
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils

ADDRESS = "gs://bucket"


class Bucket(LocalFileSystem):
    """As gcsfs: folders need not be made before what lies in them."""

    root = ""
    cachable = False

    protocol = "gcs"

    def __init__(self, **options) -> None:
        super().__init__(**options, auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path)
        return f"{cls.root}/{path.partition('://')[2]}".rstrip("/") if "://" in path else path

    def glob(self, path, **options):
        return [str(found).removeprefix(f"{self.root}/") for found in super().glob(path, **options)]


def make_bucket(root: Path, monkeypatch) -> Path:
    """The directory whose files are the objects of ADDRESS, for as long as the test runs."""
    monkeypatch.setattr(Bucket, "root", str(root))
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gcs", Bucket)
    assert fsspec.get_filesystem_class("gcs") is Bucket

    def kvstore(path: str) -> dict[str, str]:  # in place of TensorStore's driver for the real one
        return {"driver": "file", "path": Bucket._strip_protocol(path)}

    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", kvstore)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)
    folder = root / "bucket"
    folder.mkdir()
    return folder
