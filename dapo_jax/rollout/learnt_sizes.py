"""Host: what an engine learns that decides its sizes: how long responses are, and how much memory is free."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.parallel.memory import free_bytes
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.shapes import LengthHistory

LENGTHS = "lengths "  # precedes the number of a purpose in a checkpoint


class LearntSizes:
    """Saved in a checkpoint, so that a resumed run has the same sizes."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._histories: dict[int, LengthHistory] = {}  # by purpose: evaluation may end sooner than training
        self._free_bytes: float | None = None  # on each device, before the first call

    def history(self, purpose: int) -> LengthHistory:
        """How long the responses of a purpose have been."""
        return self._histories.setdefault(purpose, LengthHistory(self.settings.max_response_length))

    def free_memory(self) -> float:
        """Free bytes on each device before the first call."""
        if self._free_bytes is None:
            self._free_bytes = free_bytes(self.settings.mesh)
        return self._free_bytes

    def state(self) -> dict[str, np.ndarray]:
        """All of it, as arrays for a checkpoint."""
        return {
            **{f"{LENGTHS}{purpose}": history.to_array() for purpose, history in self._histories.items()},
            "free_bytes": np.array(-1.0 if self._free_bytes is None else self._free_bytes),
            "devices": np.array(_checksum(self.settings.mesh)),
        }

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`; the free memory of other devices is ignored."""
        for name, array in arrays.items():
            if name.startswith(LENGTHS):
                self.history(int(name.removeprefix(LENGTHS))).restore(np.asarray(array))
        free = float(arrays["free_bytes"])
        same = int(arrays.get("devices", -1)) == _checksum(self.settings.mesh)
        self._free_bytes = free if same and free >= 0 else None


def _checksum(mesh: Mesh) -> int:
    """Equal for equally many devices of one kind, divided alike; the same on every process."""
    return zlib.crc32(f"{mesh.devices.flat[0].device_kind} {dict(mesh.shape)}".encode())
