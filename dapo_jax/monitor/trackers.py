"""Host: what a tracker is, trackers of your own by name, and a guard so that no failure of one stops a run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from dapo_jax.config.own_functions import load_named
from dapo_jax.errors import InputError

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where a run's records go besides its work directory. Process 0 calls it, in the order of the steps."""

    def add_config(self, config: Mapping[str, Any], results: Sequence[str]) -> None:
        """Once, at each start: the options by dotted key, and the names of the metrics to compare runs by."""
        ...

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some responses of a step with their scores."""
        ...

    def add_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """By name: `edges` (lowest, highest) and `counts` of equal bins; {} where there is nothing to count."""
        ...

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Every finite metric of a step. This ends the step."""
        ...

    def close(self) -> None:
        """The end; may be called twice."""
        ...


def guarded(tracker: Any, name: str) -> Tracker:
    """The tracker, but its first failure is a warning, and later ones are silent: it never stops a run."""
    return cast("Tracker", _Guarded(tracker, name))


class _Guarded:
    def __init__(self, tracker: Any, name: str) -> None:
        self._tracker, self._name, self._failed = tracker, name, False

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            try:
                getattr(self._tracker, method)(*given)
            except Exception as error:  # a tracker can raise anything
                if not self._failed:
                    logger.warning(
                        "%s fails (%s: %s): some data will be missing there; metrics.jsonl is complete",
                        self._name,
                        type(error).__name__,
                        error,
                    )
                self._failed = True

        return call


def own_tracker(name: str) -> Callable[..., Tracker]:
    """The class of a tracker of your own. InputError if there is none."""
    found = load_named("trainer.logger", name, kind="class")
    if not isinstance(found, type):
        raise InputError(f"trainer.logger has {name!r}, which is no class: name a class")
    return cast("Callable[..., Tracker]", found)


def start_own(name: str, workdir: Path, *, project: str, run: str, first_step: int) -> Tracker:
    """A tracker of your own, guarded. InputError if it does not start."""
    tracker = own_tracker(name)
    try:
        return guarded(tracker(workdir, project=project, name=run, first_step=first_step), name)
    except Exception as error:  # as in _Guarded
        raise InputError(
            f"trainer.logger has {name!r}, which does not start ({type(error).__name__}: {error}): correct it, or "
            "leave it out"
        ) from error
