"""Host: progress bars on a terminal (stderr) for slow work. They leave nothing behind; files and pipes get none."""

from typing import Any

from tqdm import tqdm

from dapo_jax.config.sections import Config
from dapo_jax.monitor.console import Console
from dapo_jax.parallel.processes import is_first


def shows_progress(config: Config) -> bool:
    """Whether this process shows progress, if stderr is a terminal."""
    return is_first() and "console" in config.trainer.logger and config.monitor.console in ("steps", "detailed")


def bar(action: str, *, total: int, unit: str, shown: bool) -> "tqdm[Any]":
    """A bar that counts to `total`, by `update`; a context manager. Bytes (unit "B") and large numbers are scaled.

    Args:
        action: what is being done, as a participle.
        shown: False hides the bar; True shows it if stderr is a terminal.
    """
    return tqdm(
        total=total,
        desc=action,
        unit=unit,
        unit_scale=unit == "B",
        leave=False,
        dynamic_ncols=True,
        disable=None if shown else True,
    )


class RoundsShown:
    """Shows on the console how many rounds a step has sampled and how many groups it has kept."""

    def __init__(self, console: Console, *, target: int, carried: int) -> None:
        self._console, self._target, self._kept, self._rounds = console, target, carried, 0

    def begin(self) -> None:
        """A round begins."""
        self._rounds += 1
        self._show()

    def end(self, kept: int) -> None:
        """A round ends with `kept` groups kept."""
        self._kept += kept
        self._show()

    def _show(self) -> None:
        self._console.detail(f"round {self._rounds}, {min(self._kept, self._target)} of {self._target} groups kept")
