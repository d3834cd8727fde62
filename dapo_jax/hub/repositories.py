"""Host: the commit of a model or a split on the Hugging Face hub, and its files on this machine."""

from fnmatch import fnmatchcase
from pathlib import Path

from etils import epath

from dapo_jax.config.places import is_address, local_model, place_of
from dapo_jax.errors import InputError
from dapo_jax.hub.client import Unreachable, commit_of, description, downloaded, files_of
from dapo_jax.hub.names import CONVERTED, DATA_FORM, HubName, data_name, model_name
from dapo_jax.hub.smollm2 import fetch_smollm2, is_smollm2
from dapo_jax.hub.splits import known_splits, split_files

DESCRIPTION = (  # the files of a model, besides its weights, that the run and the export read
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "chat_template*", "*processor_config.json", "model.safetensors.index.json"),
)


def pinned_name(name: HubName) -> HubName:
    """The name with its commit. A split that the repository does not hold is looked for among the hub's Parquet copies.

    Raises:
        InputError: the hub has no such thing, does not answer, or refuses access.
    """
    if name.commit:
        return name
    found = name.at(commit_of(name))
    if name.kind == "model":
        _check_model(found)
        return found
    if _split(found):
        return found
    if not name.revision:
        try:
            converted = name.at("", CONVERTED)
            converted = converted.at(commit_of(converted))
            if _split(converted):
                return converted
        except Unreachable:
            raise
        except InputError:  # the hub has no such branch
            pass
    known = known_splits(files_of(found), description(found))
    raise InputError(
        f"{name.request()} must be {DATA_FORM}, and {name.repository} has no split {name.part}: choose one of "
        f"{', '.join(known[:10]) or 'another data set, since this one has no Parquet or JSON Lines files'}"
    )


def model_at(path: str, *, weights: bool) -> Path:
    """The model directory that `path` names, on this machine: a path, a copy of gs:// or of the hub, or SmolLM2.

    Args:
        weights: False = only what describes the model is needed.

    Raises:
        InputError: see `local_model`, `pinned_name` and `fetch_smollm2`.
    """
    if is_smollm2(path):
        return fetch_smollm2()
    name = model_name(path)
    return local_model(path) if name is None else fetch_model(name, weights=weights)


def fetch_model(name: HubName, *, weights: bool = True, shown: bool = False) -> Path:
    """The directory of a model on the hub, downloaded if it is not in the cache."""
    name = pinned_name(name)
    files = files_of(name)
    wanted = [file for file in files if any(fnmatchcase(file, pattern) for pattern in DESCRIPTION)]
    wanted = [file for file in wanted if "/" not in file]
    return downloaded(name, [*wanted, *(_weight_files(files) if weights else [])], shown=shown)


def data_files(path: str, *, shown: bool = False) -> list[epath.Path | Path]:
    """The files that an entry of data.train_files names: the path or address itself, or those of a split on the hub.

    Raises:
        InputError: see `place_of` and `pinned_name`.
    """
    if (name := data_name(path)) is not None:
        return [*fetch_split(name, shown=shown)]
    return [place_of(path) if is_address(path) else Path(path)]


def fetch_split(name: HubName, *, shown: bool = False) -> list[Path]:
    """The files of a split on the hub, downloaded if they are not in the cache."""
    name = pinned_name(name)
    files = _split(name)
    folder = downloaded(name, files, shown=shown)
    return [folder / file for file in files]


def _split(name: HubName) -> list[str]:
    return split_files(files_of(name), name.part, description(name))


def _weight_files(files: dict[str, int]) -> list[str]:
    """One file, or the shards of the index."""
    single = "model.safetensors"
    shards = "model-*.safetensors", "model.safetensors-*.safetensors"  # the second are Qwen3.5's
    return [single] if single in files else [file for file in files if any(fnmatchcase(file, one) for one in shards)]


def _check_model(name: HubName) -> None:
    """Raises InputError unless the repository holds a model that can be read."""
    files = files_of(name)
    if "config.json" not in files or not _weight_files(files):
        raise InputError(
            f"{name.request()} must hold config.json and the weights as safetensors, and does not: choose another"
        )
