"""Host: sends a run's curves, histograms and responses to Weights & Biases (pip install 'dapo_jax[wandb]')."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.errors import InputError

_RUN = "wandb.json"  # in the work directory: {"id": of the run, "last_step": the last one logged}


def check_installed() -> None:
    """Raises InputError if the package wandb is not installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # no origin: a mere folder named wandb, which the package leaves behind
        raise InputError(
            "trainer.logger has 'wandb', but the package is missing: pip install 'dapo_jax[wandb]', or leave it out"
        )


class WeightsAndBiases:
    """The same as `TensorBoard`, as a Weights & Biases run. WANDB_MODE=offline keeps it in `workdir/wandb`.

    A resumed run keeps its id, and repeated steps are not logged again.

    Args:
        first_step: the first step that this start may write; 0 for a new run, which gets a new id.

    Raises:
        InputError: the package is not installed, or it cannot start a run, for example without a login.
    """

    def __init__(self, workdir: Path, *, project: str, name: str, first_step: int) -> None:
        check_installed()
        import wandb  # pyright: ignore[reportMissingImports]

        self._file = workdir / _RUN
        self._wandb = wandb
        known = json.loads(self._file.read_text()) if first_step and self._file.exists() else {}
        self._last_step = known.get("last_step", -1)
        try:
            self._run = wandb.init(
                project=project, name=name, id=known.get("id"), resume="allow" if known else None, dir=str(workdir)
            )
        except Exception as error:  # wandb's errors share no other class
            raise InputError(
                f"trainer.logger has 'wandb', which cannot start a run ({type(error).__name__}: {error}): run "
                "`wandb login`, set WANDB_MODE=offline, or leave it out"
            ) from error
        self._write_file()

    def add_config(self, config: Mapping[str, Any], results: Sequence[str]) -> None:
        """Sets the options by dotted key. The table of runs shows `results` without help."""
        self._run.config.update(dict(config), allow_val_change=True)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each metric's curve. This ends the step."""
        self._log(step, dict(values), commit=True)
        if step > self._last_step:
            self._last_step = step
            self._write_file()

    def add_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds histograms made by `tensorboard.histogram` or `counted`, by name."""
        found = {}
        for name, parts in histograms.items():
            if parts:
                low, high = parts["edges"]
                edges = np.linspace(low, high, len(parts["counts"]) + 1)
                found[name] = self._wandb.Histogram(np_histogram=(np.array(parts["counts"]), edges))
        self._log(step, found, commit=False)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds responses as a table."""
        columns: list[Any] = list(dict.fromkeys(name for sample in samples for name in sample))
        rows = [[sample.get(name) for name in columns] for sample in samples]
        self._log(step, {"samples": self._wandb.Table(columns=columns, data=rows)}, commit=False)

    def close(self) -> None:
        """Ends the run and waits until everything is sent. A second call does nothing."""
        self._run.finish()

    def _log(self, step: int, values: dict[str, Any], *, commit: bool) -> None:
        if step > self._last_step:
            self._run.log(values, step=step, commit=commit)

    def _write_file(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"id": self._run.id, "last_step": self._last_step}))
        os.replace(temporary, self._file)
