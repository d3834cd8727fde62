"""Host: the batches that a run keeps, as NumPy files that `dapo-jax replay` compares with a step computed again.

A file holds the rows that the learner was given, by the names of `Batch`: tokens, masks, old log-probabilities,
advantages. Names that begin with GROUPS are those that a checkpoint has of the groups: scores, log-probabilities when
the tokens were sampled, numbers of the prompts.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "batches"
ALARM = "alarm"
GROUPS = "groups/"
MOST_BATCHES = 10  # in a folder, of those that no number names

Arrays = Callable[[], dict[str, np.ndarray]]


def chosen_steps(choice: str) -> set[int] | None:
    """The steps that a trainer.keep_batches names; none for alarm; None if it is something else."""
    parts = choice.split(",") if choice not in ("", ALARM) else []
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        return None
    return {int(part) for part in parts}


class KeptBatches:
    """Writes the batches of the chosen steps into the folder `batches` of a run.

    Args:
        choice: steps with commas between them; or alarm, for the first ten steps with an alarm/* of 1; or nothing.
        resume_step: batches of later steps, which the run repeats, are dropped.
    """

    def __init__(self, workdir: Path, choice: str, *, resume_step: int = -1) -> None:
        self._folder, self._with_alarm = workdir / FOLDER, choice == ALARM
        for step in steps_kept(workdir):
            if step > resume_step:
                batch_file(self._folder, step).unlink()
        self._steps = chosen_steps(choice) or set[int]()
        self._held: tuple[int, Arrays] | None = None

    def hold(self, step: int, arrays: Arrays) -> None:
        """The batch of a step, until its metrics say whether it is kept."""
        self._held = (step, arrays) if self._with_alarm or step in self._steps else None

    def keep(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the batch that is held for `step`, if its metrics are a reason to."""
        held, self._held = self._held, None
        if held is None or held[0] != step:
            return
        if step in self._steps:
            write_batch(self._folder, step, held[1]())
        elif any(name.startswith("alarm/") and value for name, value in metrics.items()):
            write_batch(self._folder, step, held[1](), at_most=MOST_BATCHES)


def batch_file(folder: Path, step: int) -> Path:
    """The file of a step's batch."""
    return folder / f"step_{step:06d}.npz"


def steps_kept(workdir: Path) -> list[int]:
    """The steps of which a run has kept the batch."""
    return sorted(int(path.stem.removeprefix("step_")) for path in (workdir / FOLDER).glob("step_*.npz"))


def write_batch(folder: Path, step: int, arrays: Mapping[str, np.ndarray], *, at_most: int | None = None) -> None:
    """Writes a batch whole or not at all; with `at_most` files in the folder already, only over that of the step."""
    folder.mkdir(exist_ok=True)
    path = batch_file(folder, step)
    if at_most is None or path.exists() or len(list(folder.glob("*.npz"))) < at_most:
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(temporary, path)


def read_batch(workdir: Path, step: int) -> dict[str, np.ndarray] | None:
    """The arrays of a step's batch that a run has kept; None if it has none."""
    path = batch_file(workdir / FOLDER, step)
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
