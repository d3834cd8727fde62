"""Host: which files of a data set's repository hold a split."""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json")  # those that data.train_files takes
_SPLITS = r"train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_WILD = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}  # as the library datasets reads them
_SHARD = r"-\d{5}-of-\d{5}\.\w+"
_NAMED = re.compile(rf"(^|[/._-])({_SPLITS})([/._-]|$)")


def split_files(files: Iterable[str], part: str, description: Mapping[str, Any]) -> list[str]:
    """The files of `part`, which is CONFIG/SPLIT, SPLIT or a file; empty if there are none.

    The `configs` of the data set's README decide; without any, the usual layouts: CONFIG/SPLIT-*.parquet,
    data/SPLIT.jsonl, CONFIG/SPLIT/0000.parquet, and so on. Where no file is named after a split, all are "train".

    Args:
        files: of the repository.
        description: the YAML at the top of its README.
    """
    files = sorted(name for name in files if PurePosixPath(name).suffix in SUFFIXES)
    if part in files:
        return [part]
    config, _, split = part.rpartition("/")
    declared = _declared(description)
    if declared:
        patterns = declared.get(config or _default(description, declared), {}).get(split, [])
        return [name for name in files if any(re.fullmatch(_regular(pattern), name) for pattern in patterns)]
    folders = [config] if config not in ("", "default") else ["data", "default", ""]
    for folder in folders:
        prefix = re.escape(f"{folder}/" if folder else "")
        # split-00000-of-00002.parquet, else split.parquet, split/0000.parquet; not split_sft-00000-of-00002.parquet
        for rest in (_SHARD, rf"(?![_.][\w.]*{_SHARD})([-_./][^/]*)?\.\w+"):
            if found := [name for name in files if re.fullmatch(prefix + re.escape(split) + rest, name)]:
                return found
    inside = [name for name in files if folders[0] in ("data", name.partition("/")[0]) and name.endswith(".parquet")]
    return inside if split == "train" and not any(map(_NAMED.search, inside)) else []


def known_splits(files: Iterable[str], description: Mapping[str, Any]) -> list[str]:
    """What `split_files` could be asked for instead: CONFIG/SPLIT, else files."""
    declared = [f"{config}/{split}" for config, splits in _declared(description).items() for split in splits]
    return declared or sorted(name for name in files if PurePosixPath(name).suffix in SUFFIXES)


def _declared(description: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The patterns of files by config and split."""
    found: dict[str, dict[str, list[str]]] = {}
    for config in _objects(description.get("configs")):
        splits = _splits(config.get("data_files"))
        folder = str(config.get("data_dir") or "").strip("/")
        prefix = f"{folder}/" if folder not in ("", ".") else ""
        if splits:
            found[str(config.get("config_name", "default"))] = {
                split: [prefix + pattern.removeprefix("./") for pattern in patterns]
                for split, patterns in splits.items()
            }
    return found


def _regular(pattern: str) -> str:
    """The regular expression of a pattern of files."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    return "".join(
        _WILD.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part)) for part in parts
    )


def _splits(data_files: Any) -> dict[str, list[str]]:
    """The patterns by split: those without a split are "train"."""
    if isinstance(data_files, Mapping):
        return {str(split): _texts(patterns) for split, patterns in data_files.items()}
    if objects := _objects(data_files):
        return {str(entry.get("split", "train")): _texts(entry.get("path")) for entry in objects}
    return {"train": _texts(data_files)} if _texts(data_files) else {}


def _default(description: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """The config that is meant if none is named: the one marked as such, or the only one."""
    marked = [str(one.get("config_name")) for one in _objects(description.get("configs")) if one.get("default")]
    return marked[0] if marked else next(iter(declared)) if len(declared) == 1 else "default"


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]
