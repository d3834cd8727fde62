"""Host: progress bars for slow work, on a terminal (stderr) or in a notebook. Files and pipes get none."""

import sys
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from dapo_jax.config.sections import MonitorConfig, TrainerConfig
from dapo_jax.parallel.processes import is_first

WIDTH = 120  # columns of the longest line


def surroundings() -> str:
    """Who reads stderr: a person at a "terminal", one in a "notebook" (Jupyter, Colab, Kaggle), or a "log"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if "ZMQInteractiveShell" in (one.__name__ for one in type(shell).__mro__):  # Colab's shell inherits from it
        return "notebook"
    return "terminal" if sys.stderr.isatty() else "log"


def shows_progress(trainer: TrainerConfig, monitor: MonitorConfig) -> bool:
    """Whether this process shows progress, if a person looks."""
    return is_first() and "console" in trainer.logger and monitor.console in ("steps", "detailed")


def person_bar(*, shown: bool, **options: Any) -> "tqdm[Any]":
    """tqdm's bar with these options, where a person looks: a widget or a line of text in notebooks.

    Args:
        shown: False hides it everywhere.
    """
    place = surroundings() if shown else "log"
    if place == "notebook" and find_spec("ipywidgets"):
        from tqdm.notebook import tqdm as widget

        return widget(**options)
    if place == "notebook":  # which does not move its cursor up: all bars share the line after those of the steps
        return tqdm(file=sys.stdout, position=0, ncols=WIDTH, **options)
    return tqdm(dynamic_ncols=True, disable=place == "log", **options)


def bar(action: str, *, total: int, unit: str, shown: bool) -> "tqdm[Any]":
    """A bar that counts to `total`, by `update`; a context manager. Bytes (unit "B") and large numbers are scaled.

    It leaves nothing behind.

    Args:
        action: what is being done, as a participle.
        shown: False hides the bar; True shows it if a person looks.
    """
    return person_bar(shown=shown, total=total, desc=action, unit=unit, unit_scale=unit == "B", leave=False)
