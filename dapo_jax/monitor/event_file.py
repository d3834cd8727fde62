"""Host: a TensorBoard event file, written when it is told to.

tensorboardX's own SummaryWriter leaves that to a thread: a kill loses what is queued there although the step has its
checkpoint, and a full disk ends the thread, after which writing waits without end.
"""

import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]


class EventFile:
    """A new event file in `folder`; TensorBoard then hides what earlier files hold from `purge_step` on."""

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Files are named by second and host: the suffix keeps two starts apart.
        suffix = f".{len(list(folder.glob('events.*'))):04d}"
        self._writer: EventsWriter | None = EventsWriter(str(folder / "events"), suffix)
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self.flush()

    def add(self, summary: Any, step: int) -> None:
        """Adds what a function of tensorboardX.summary has made."""
        assert self._writer is not None
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Hands what was added to the system: a kill of this process no longer loses it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
