"""Host: the answers of a judge and what they cost, in an SQLite file of the work directory. It survives kills."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_client import Reply

_WAIT_S = 60.0  # for another process, such as an evaluation, that writes
_TABLES = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, text TEXT NOT NULL, complete INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS spent (
    id INTEGER PRIMARY KEY CHECK (id = 0), requests INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0, 0);
"""


class Spent(NamedTuple):
    """What all runs and evaluations of the work directory have asked for."""

    requests: int  # attempts included
    input_tokens: int
    output_tokens: int


class JudgeStore:
    """Replies by key. Threads and processes may share the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            # Not WAL, which several hosts of a network file system cannot share: 1 ms more per request.
            self._file.execute("PRAGMA journal_mode=TRUNCATE")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_TABLES)
            self.spent()
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"{path}, the answers of the judge, cannot be opened ({error}): free space, or remove the file to ask "
                "again"
            ) from error

    def find(self, key: str) -> Reply | None:
        """The reply that was kept under `key`."""
        with self._locked():
            query = "SELECT text, complete, input_tokens, output_tokens FROM replies WHERE key = ?"
            found = self._file.execute(query, (key,)).fetchone()
        return Reply(found[0], bool(found[1]), found[2], found[3]) if found else None

    def begin_request(self) -> None:
        """Counts an attempt."""
        with self._locked():
            self._file.execute("UPDATE spent SET requests = requests + 1")

    def keep(self, key: str, reply: Reply) -> None:
        """Keeps a reply and counts its tokens."""
        tokens = reply.input_tokens, reply.output_tokens
        with self._locked():
            self._file.execute("BEGIN IMMEDIATE")
            row = (key, reply.text.encode("utf-8", "replace").decode(), reply.complete, *tokens)
            self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row)
            added = "UPDATE spent SET input_tokens = input_tokens + ?, output_tokens = output_tokens + ?"
            self._file.execute(added, tokens)
            self._file.execute("COMMIT")

    def spent(self) -> Spent:
        """What was asked for so far."""
        with self._locked():
            query = "SELECT requests, input_tokens, output_tokens FROM spent"
            return Spent(*self._file.execute(query).fetchone())

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The file for one thread at a time. RuntimeError if it cannot be read or written, for example a full disk."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                if self._file.in_transaction:
                    self._file.rollback()
                raise RuntimeError(
                    f"{self.path}, the answers of the judge: {error}: free space, or remove the file if it is damaged, "
                    "then rerun the same command to resume"
                ) from error
