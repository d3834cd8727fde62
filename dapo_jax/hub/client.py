"""Host: asks the Hugging Face hub for commits and files, and downloads files into its cache on this machine.

The lists of files of commits, which never change, are kept in ~/.cache/dapo_jax/hub: a pinned name whose files are in
the cache needs no network.
"""

import errno
import glob
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dapo_jax.config import places
from dapo_jax.errors import InputError
from dapo_jax.hub.names import HubName
from dapo_jax.monitor.bars import surroundings

TIMEOUT_S = 20  # for an answer of the hub
CALLED = {"model": "model", "dataset": "data set"}

logger = logging.getLogger(__name__)


class Unreachable(InputError):
    """The hub does not answer."""


def commit_of(name: HubName) -> str:
    """The commit of the name's revision now; where the hub does not answer, the one in the cache, with a warning.

    Raises:
        InputError: no such repository or revision, no access, or neither an answer nor a copy.
    """
    revision, record = name.revision or "main", _record(name)
    try:
        commit, files = _ask(name, revision)
    except Unreachable as error:
        ref = _cache(name) / "refs" / revision
        commit = record["revisions"].get(revision) or (ref.read_text().strip() if ref.is_file() else "")
        if not commit or not (commit in record["commits"] or _snapshot(name.at(commit)).is_dir()):
            raise
        logger.warning("%s: the copy of commit %s is used", error, commit)
        return commit
    record["revisions"][revision], record["commits"][commit] = commit, files
    _write_record(name, record)
    return commit


def files_of(name: HubName) -> dict[str, int]:
    """Every file of a pinned repository, with its size in bytes. Where the hub does not answer: those in the cache."""
    record = _record(name)
    if name.commit not in record["commits"]:
        try:
            record["commits"][name.commit] = _ask(name, name.commit)[1]
        except Unreachable:
            folder = _snapshot(name)
            found = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            if not found:
                raise
            return found
        _write_record(name, record)
    return record["commits"][name.commit]


def downloaded(name: HubName, files: Collection[str], *, shown: bool) -> Path:
    """The folder of a pinned repository in the cache, with `files`, of which those that are missing are downloaded.

    Args:
        shown: show progress bars, if a person looks.

    Raises:
        InputError: no access, no answer, or no space.
    """
    folder, sizes = _snapshot(name), files_of(name)
    missing = [file for file in files if not (folder / file).exists()]
    if not missing:
        return folder
    from huggingface_hub import snapshot_download

    needed = sum(sizes.get(file, 0) for file in missing)
    _check_space(name, needed)
    wanted = [glob.escape(file) for file in missing]
    try:
        with _bars(shown):
            snapshot_download(name.repository, repo_type=name.kind, revision=name.commit, allow_patterns=wanted)
    except Exception as error:  # the library's own, those of its HTTP client and the system's have no common class
        raise _refusal(name, error) from error
    if absent := [file for file in missing if not (folder / file).exists()]:  # versions before 2 call that a success
        _ask(name, name.commit)
        raise RuntimeError(f"{name.request()} was downloaded without {', '.join(absent[:5])}: rerun the same command")
    logger.info("downloaded %s of %s (%.1f MB) to %s", ", ".join(missing[:10]), name.repository, needed / 1e6, folder)
    return folder


def description(name: HubName) -> dict[str, Any]:
    """The YAML at the top of a repository's README; {} without one."""
    if "README.md" not in files_of(name):
        return {}
    from huggingface_hub import metadata_load

    try:
        return metadata_load(downloaded(name, ["README.md"], shown=False) / "README.md") or {}
    except InputError:
        raise
    except Exception:  # YAML's own errors; whoever wrote the data set can repair it, the files are found by their names
        logger.warning("the description of %s, README.md, is damaged: its files are found by their names", name)
        return {}


def by_hand(name: HubName) -> str:
    """The command that downloads a name where there is a network."""
    kind = "" if name.kind == "model" else " --repo-type dataset"
    revision = f" --revision {name.commit or name.revision}" if name.commit or name.revision else ""
    part = f" {name.part}" if name.kind == "model" and name.part else ""
    folder = f"{'models' if name.kind == 'model' else 'data'}/{name.repository.partition('/')[2]}"
    return f"hf download {name.repository}{part}{kind}{revision} --local-dir {folder}"


def _ask(name: HubName, revision: str) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and its files with their sizes."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().repo_info(
            name.repository, repo_type=name.kind, revision=revision, files_metadata=True, timeout=TIMEOUT_S
        )
    except Exception as error:  # as in `downloaded`
        raise _refusal(name, error) from error
    assert info.sha is not None
    found = {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or ()}
    return info.sha, {file: size for file, size in found.items() if is_inside(file)}


def is_inside(file: str) -> bool:
    """Whether the name of a file, joined to the folder of its repository, stays in it. A hostile hub may say others."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _refusal(name: HubName, error: Exception) -> Exception:
    """The error for the user."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, InputError | PermissionError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 0)
    log_in = "log in by `hf auth login` or set HF_TOKEN"
    page = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
    if isinstance(error, errors.GatedRepoError):
        return InputError(f"{name.request()} is gated: accept its terms at {page}, then {log_in}")
    if isinstance(error, errors.RevisionNotFoundError):
        given = name.commit or name.revision or "main"
        return InputError(f"{name.request()} must name a branch, tag or commit, and {page} has no {given}: correct it")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return InputError(
            f"{name.request()} must be a path on this machine or a {CALLED[name.kind]} of the Hugging Face hub, and is "
            f"neither there nor at {page}: correct the name or, if it is private, {log_in}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(name, str(error), Path(constants.HF_HUB_CACHE))
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if constants.HF_HUB_OFFLINE:
        reason, cure = "HF_HUB_OFFLINE is set", "unset it"
    else:
        cure = "check the network, then rerun the same command to continue"
    return Unreachable(
        f"{name.request()} does not exist on this machine, and the Hugging Face hub at {constants.ENDPOINT} cannot be "
        f"reached ({reason}): {cure}; or, on a machine with a network, run `{by_hand(name)}`, copy the directory "
        "and give its path"
    )


def _check_space(name: HubName, needed: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if needed > (free := shutil.disk_usage(there).free):
        raise _no_space(name, f"it needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free", place)


def _no_space(name: HubName, reason: str, place: Path) -> InputError:
    return InputError(
        f"{name.request()} does not fit into {place} ({reason}): make room, or set HF_HOME to a larger disk"
    )


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Hides the library's bars unless they are to be shown and a person looks."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hides = not (shown and surroundings() != "log") and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def _cache(name: HubName) -> Path:
    """The repository's folder in huggingface_hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{name.kind}s--{name.repository.replace('/', '--')}"


def _snapshot(name: HubName) -> Path:
    return _cache(name) / "snapshots" / name.commit


def _record_file(name: HubName) -> Path:
    return places.expanded(places.CACHE) / "hub" / f"{name.kind}s--{name.repository.replace('/', '--')}.json"


def _record(name: HubName) -> dict[str, dict[str, Any]]:
    """What the hub has said of a repository: `revisions` and their commits, `commits` and their files."""
    try:
        record = json.loads(_record_file(name).read_text(encoding="utf-8"))
        return {"revisions": dict(record["revisions"]), "commits": dict(record["commits"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"revisions": {}, "commits": {}}


def _write_record(name: HubName, record: dict[str, dict[str, Any]]) -> None:
    path = _record_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(record), encoding="utf-8")
    os.replace(part, path)
