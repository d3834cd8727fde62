"""Host: what an engine learns that decides its sizes: how long responses are, and how much memory is free."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.parallel.memory import free_bytes

LENGTHS = "lengths "  # precedes the number of a purpose in a checkpoint


class LengthHistory:
    """How long responses have been: an exponential average over all that were waited for together."""

    WEIGHT = 0.3  # of the newest

    def __init__(self, max_response_length: int) -> None:
        self._share = np.zeros(max_response_length + 1)  # of responses by length
        self._share[-1] = 1.0  # until some are known, nothing is assumed to end early
        self._known = False

    def add(self, lengths: np.ndarray) -> None:
        """The lengths of responses."""
        share = np.bincount(lengths, minlength=len(self._share)) / max(len(lengths), 1)
        weight = self.WEIGHT if self._known else 1.0
        self._share, self._known = (1 - weight) * self._share + weight * share, True

    def held(self) -> float:
        """Tokens that a slot is expected to hold when most are held, if slots begin together and then are refilled.

        A slot holds t tokens of its first response, while that goes on, else those of any response at any time.
        """
        lengths, total = np.arange(len(self._share)), self._share.sum()
        later = self._share @ (lengths * (lengths + 1) / 2) / max(self._share @ lengths, 1.0)
        goes_on = np.cumsum(self._share[::-1])[::-1] / total
        return float((goes_on * lengths + (1 - goes_on) * later).max())

    def evenness(self) -> float:
        """Mean length, over the length that one response in a hundred exceeds: 1 if all are equally long."""
        below = np.cumsum(self._share)
        return float(self._share @ np.arange(len(below)) / max(np.searchsorted(below, 0.99 * below[-1]), 1))

    def to_array(self) -> np.ndarray:
        """The history as one array, for a checkpoint."""
        return np.append(self._share, float(self._known))

    def restore(self, array: np.ndarray) -> None:
        """The inverse of `to_array`; a history with another max_response_length is ignored."""
        if len(array) == len(self._share) + 1:
            self._share, self._known = np.array(array[:-1], np.float64), bool(array[-1])


class LearntSizes:
    """Saved in a checkpoint, so that a resumed run has the same sizes."""

    def __init__(self, max_response_length: int, mesh: Mesh) -> None:
        self.max_response_length, self.mesh = max_response_length, mesh
        self._histories: dict[int, LengthHistory] = {}  # by purpose: evaluation may end sooner than training
        self._free_bytes: float | None = None  # on each device, before the first call

    def history(self, purpose: int) -> LengthHistory:
        """How long the responses of a purpose have been."""
        return self._histories.setdefault(purpose, LengthHistory(self.max_response_length))

    def free_memory(self) -> float:
        """Free bytes on each device before the first call."""
        if self._free_bytes is None:
            self._free_bytes = free_bytes(self.mesh)
        return self._free_bytes

    def state(self) -> dict[str, np.ndarray]:
        """All of it, as arrays for a checkpoint."""
        return {
            **{f"{LENGTHS}{purpose}": history.to_array() for purpose, history in self._histories.items()},
            "free_bytes": np.array(-1.0 if self._free_bytes is None else self._free_bytes),
            "devices": np.array(_checksum(self.mesh)),
        }

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`; the free memory of other devices is ignored."""
        for name, array in arrays.items():
            if name.startswith(LENGTHS):
                self.history(int(name.removeprefix(LENGTHS))).restore(np.asarray(array))
        free = float(arrays["free_bytes"])
        same = int(arrays.get("devices", -1)) == _checksum(self.mesh)
        self._free_bytes = free if same and free >= 0 else None


def _checksum(mesh: Mesh) -> int:
    """Equal for equally many devices of one kind, divided alike; the same on every process."""
    return zlib.crc32(f"{mesh.devices.flat[0].device_kind} {dict(mesh.shape)}".encode())
