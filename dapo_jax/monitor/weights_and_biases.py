"""Host: a run's curves, histograms and responses in Weights & Biases (pip install 'dapo_jax[wandb]')."""

import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.errors import InputError

logger = logging.getLogger(__name__)

_RUN = "wandb.json"  # in the work directory: {"id": of the run, "last_step": that has been logged}


def check_installed() -> None:
    """Raises ValueError, with the cure, if the package wandb is not installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # without one: a folder named wandb, such as the package leaves behind
        raise InputError(
            "trainer.logger has 'wandb', whose package is not installed: pip install 'dapo_jax[wandb]', or leave it out"
        )


class WeightsAndBiases:
    """What `TensorBoard` shows, as a run of Weights & Biases. WANDB_MODE=offline keeps it in `workdir/wandb`.

    A run that is resumed goes on under its id, and steps that it does again are not logged again. What cannot be sent
    later is warned of once and ends no training.

    Args:
        first_step: the first that this start may write; 0 for a run that begins, which gets a new id.

    Raises:
        ValueError: the package is not installed, or no run of it can begin, for example without a login.
    """

    def __init__(self, workdir: Path, *, project: str, name: str, first_step: int) -> None:
        check_installed()
        import wandb  # pyright: ignore[reportMissingImports]

        self._file = workdir / _RUN
        self._wandb = wandb
        known = json.loads(self._file.read_text()) if first_step and self._file.exists() else {}
        self._last_step = known.get("last_step", -1)
        self._failed = False
        try:
            self._run = wandb.init(
                project=project, name=name, id=known.get("id"), resume="allow" if known else None, dir=str(workdir)
            )
        except Exception as error:  # its errors have no class in common but this one
            raise InputError(
                f"trainer.logger has 'wandb', which cannot begin a run ({type(error).__name__}: {error}): run "
                "`wandb login`, set WANDB_MODE=offline, or leave it out"
            ) from error
        self._write_file()

    def add_config(self, config: Mapping[str, Any], results: Sequence[str]) -> None:
        """The options by dotted key, as they are now; `results` are in the table of runs by themselves."""
        with self._warns():
            self._run.config.update(dict(config), allow_val_change=True)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve, by the metric's name. It ends the step."""
        with self._warns():
            self._log(step, dict(values), commit=True)
        if step > self._last_step:
            self._last_step = step
            self._write_file()

    def add_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Histograms made by `tensorboard.histogram` or `counted`, by name."""
        found = {}
        with self._warns():
            for name, parts in histograms.items():
                if parts:
                    low, high = parts["edges"]
                    edges = np.linspace(low, high, len(parts["counts"]) + 1)
                    found[name] = self._wandb.Histogram(np_histogram=(np.array(parts["counts"]), edges))
            self._log(step, found, commit=False)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Responses as a table."""
        columns = list(dict.fromkeys(name for sample in samples for name in sample))
        rows = [[sample.get(name) for name in columns] for sample in samples]
        with self._warns():
            self._log(step, {"samples": self._wandb.Table(columns=columns, data=rows)}, commit=False)

    def close(self) -> None:
        """Ends the run and waits until it is sent; a second call does nothing."""
        with self._warns():
            self._run.finish()

    @contextmanager
    def _warns(self) -> Iterator[None]:
        """Makes a failure of Weights & Biases a warning, the first time."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "Weights & Biases fails (%s: %s): what it cannot take is left out there, metrics.jsonl has it all",
                    type(error).__name__,
                    error,
                )
            self._failed = True

    def _log(self, step: int, values: dict[str, Any], *, commit: bool) -> None:
        if step > self._last_step:
            self._run.log(values, step=step, commit=commit)

    def _write_file(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"id": self._run.id, "last_step": self._last_step}))
        os.replace(temporary, self._file)
