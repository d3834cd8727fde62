"""Host: what messages say about a path that is no prompt file."""

import re
from collections.abc import Iterable
from pathlib import Path

from etils import epath

from dapo_jax.data.published import FILES

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CONVERSIONS = {
    ".arrow": "convert it by datasets.Dataset.from_file(path).to_parquet(...)",
    ".gz": "unpack it",
    ".zst": "unpack it",
    ".zip": "unpack it",
    ".xlsx": "save it as CSV",
}


def wrong_path(path: Path | epath.Path, suffixes: Iterable[str]) -> str:
    """What is wrong with a path that is no file, or does not end in one of `suffixes`, and the fix."""
    suffixes = list(suffixes)
    if path.is_dir():
        files = {suffix: sorted(file.name for file in path.iterdir() if file.suffix == suffix) for suffix in suffixes}
        found = next((names for names in files.values() if names), [])
        if not any(file.suffix == ".arrow" for file in path.iterdir()) or files.get(".parquet"):
            there = f"name its files, {', '.join(found[:5])}" if found else f"it has no {' or '.join(suffixes)} files"
            return f"is a directory: {there}"
        return "is a directory of the library datasets: convert it by datasets.load_from_disk(path).to_parquet(...)"
    name = str(path)
    if _HUB_NAME.fullmatch(name) and path.suffix not in (*suffixes, *_CONVERSIONS) and not path.parent.exists():
        cure = f"name a split of it, hf://{name}/SPLIT or hf://{name}/CONFIG/SPLIT (pip install 'dapo_jax[hub]')"
        if found := [one for one, files in FILES.items() if any(f"/{name}/" in split for split in files.values())]:
            cure += f", or the files that `dapo-jax data {found[0]}` writes"
        return (
            f"does not exist; if {name} is a data set of the Hugging Face hub, {cure} in data.train_files or "
            "data.val_files"
        )
    if path.suffix not in suffixes and (path.suffix or path.exists()):
        cure = _CONVERSIONS.get(path.suffix, "convert it")
        return f"ends in {path.suffix!r}, must end in one of {', '.join(suffixes)}: {cure}"
    if made := [one for one, files in FILES.items() if any(name.endswith(f"/{file}") for file in files)]:
        return f"does not exist: `dapo-jax data {made[0]}` writes it to data/, or correct the path"
    return f"{'is not a file' if path.exists() else 'does not exist'}: correct the path or prepare the data"
