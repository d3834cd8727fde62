"""What TensorBoard would read from a folder of event files."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from dapo_jax.monitor.tensorboard import EVENTS


def events_of(folder: Path) -> Iterator[Any]:
    """All events, in TensorBoard's order; a record is length, crc, bytes, crc."""
    for path in sorted(folder.glob(EVENTS)):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def values_of(folder: Path) -> Iterator[tuple[int, Any]]:
    """(step, value) of all events."""
    return ((event.step, value) for event in events_of(folder) for value in event.summary.value)
