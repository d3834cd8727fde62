"""Host: which run a work directory and its checkpoints belong to, and whether all processes are of one run."""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from dapo_jax import __version__
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.own_functions import code_of
from dapo_jax.config.places import is_address, place_of
from dapo_jax.errors import InputError
from dapo_jax.monitor.recipe import read_config
from dapo_jax.monitor.records import METRICS, read_rows
from dapo_jax.parallel.processes import check_agreement, check_shared, gather, is_first
from dapo_jax.run.checkpoint import saved_steps

RUN_ID = "run_id"  # file of a work directory


class RunId(NamedTuple):
    """A run."""

    id: str  # made once for a work directory, and saved in its checkpoints
    workdir: str  # where that is now: an absolute path or an address


def find_run_id(folder: str, directory: str, workdir: str) -> RunId:
    """The run in `workdir`; a new id if it has none. Every process must call it; process 0, which has the records,
    decides.

    Args:
        folder: the workdir, or its copy on this machine if it is an address.
        directory: of the run's checkpoints.

    Raises:
        InputError: the checkpoints are those of another run, or the run's own are elsewhere.
    """
    workdir = str(place_of(workdir))

    def decided() -> tuple[str, str]:
        try:
            return _run_id(folder, directory, workdir), ""
        except (InputError, RuntimeError) as error:
            return "", str(error)
        except OSError as error:
            fix = "choose another by trainer.checkpoint_dir or workdir"
            return "", f"the checkpoint directory {directory} cannot be used ({error}): {fix}"

    found, problem = gather(decided() if is_first() else None)[0]
    if problem:
        raise InputError(problem)
    return RunId(found, workdir)


def write_run_id(workdir: str, found: RunId) -> None:
    """Records the id in the work directory."""
    (place_of(workdir) / RUN_ID).write_text(found.id + "\n")


def recorded_id(workdir: str) -> str:
    """The id in a work directory; "" if there is none."""
    try:
        return (place_of(workdir) / RUN_ID).read_text().strip()
    except (OSError, ValueError):
        return ""


def _run_id(folder: str, directory: str, workdir: str) -> str:
    """The id of the run in `workdir`, or in its copy `folder` on this machine, with checkpoints in `directory`."""
    own, recorded = recorded_id(folder), read_config(folder)
    before = checkpoint_dir(recorded.workdir, recorded.trainer) if recorded else ""
    if not (steps := saved_steps(directory)):
        if before and before != directory and saved_steps(before):
            raise InputError(
                f"workdir={folder} has its checkpoints in {before}, and trainer.checkpoint_dir now says "
                f"{directory}: move them there, or start in a new workdir with trainer.resume_from_path={before}"
            )
        if (begun := _num_saves(folder)) > 1:  # the first of them was complete when the second began
            raise InputError(
                f"workdir={folder} has records of {begun} checkpoints, and {directory} has none of them: mount or "
                "restore it, or start in a new workdir, as a run from the beginning would replace the records"
            )
        return own or uuid.uuid4().hex
    other = saved_by(directory, steps[-1])
    inside = directory.startswith(f"{workdir}/")
    if own and other.id:
        belongs = own == other.id and (inside or not _is_copy(workdir, other))
    elif other.id:  # the workdir is new, or has been lost
        belongs = inside or other.workdir == workdir
    else:  # saved by an earlier version
        belongs = inside or bool(own) or before == directory
    if not belongs:
        whose, there = (f"the run in {other.workdir}", other.workdir) if other.id else ("another run", "that run's")
        raise InputError(
            f"trainer.checkpoint_dir={directory} holds checkpoints of {whose}, not of workdir={workdir}: set "
            f"workdir={there} to continue that run, or trainer.resume_from_path={directory} and a "
            "trainer.checkpoint_dir of its own to start a new run from them"
        )
    return own or other.id or uuid.uuid4().hex


def _num_saves(folder: str) -> int:
    """How many checkpoints had been begun before a row of metrics.jsonl."""
    path = Path(folder) / METRICS
    return sum("timing_s/save_checkpoint" in row for row in read_rows(path)) if path.is_file() else 0


def _is_copy(workdir: str, run: RunId) -> bool:
    """Whether `workdir` is a copy of the one of `run`, rather than that one under another name or moved."""
    if workdir == run.workdir or recorded_id(run.workdir) != run.id:
        return False
    return is_address(workdir + run.workdir) or not os.path.samefile(workdir, run.workdir)


def saved_by(directory: epath.PathLike, step: int) -> RunId:
    """The run that saved a checkpoint; "" if an earlier version did, or it is damaged."""
    try:
        record = json.loads((epath.Path(directory) / str(step) / "progress" / "metadata").read_text())
        return RunId(str(record.get("run", "")), str(record.get("workdir", "")))
    except (OSError, ValueError, AttributeError, RecursionError):
        return RunId("", "")


def check_processes(options: Mapping[str, Any], functions: Mapping[str, str], directory: str) -> None:
    """Raises InputError unless all processes have the same options and code, and reach the `directory` of checkpoints.

    Args:
        functions: the names of functions of your own, by option.
    """
    if jax.process_count() == 1:
        return
    own = {"workdir", "trainer.process_id"}
    common = {name: json.loads(json.dumps(value, default=str)) for name, value in options.items() if name not in own}
    common |= {f"the code of {key}": hashlib.sha256(code_of(name)).hexdigest()[:16] for key, name in functions.items()}
    versions = f"{__version__}, {jax.__version__}"
    check_agreement(common | {"the version of dapo_jax and jax": versions, "the directory of checkpoints": directory})
    check_shared(directory)
