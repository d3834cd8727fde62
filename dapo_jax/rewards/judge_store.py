"""Host: the answers of a judge and what they cost, in an SQLite file of the work directory. It survives kills."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dapo_jax.config.sections import JudgeConfig
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_client import Reply

_NAME = "answers_{}.sqlite"  # of a process
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

_SPENT = "SELECT requests, input_tokens, output_tokens FROM spent"


def _read(path: Path, query: str, *values: Any) -> Any:
    """The first row that a query finds in another process' file; None if there is none, or it cannot be read now."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=_WAIT_S, uri=True)) as file:
            return file.execute(query, values).fetchone()
    except sqlite3.Error:
        return None


class JudgeStore:
    """Replies by key, and the limits of reward.judge. Processes may share the file; one thread at a time uses it."""

    def __init__(self, folder: Path, settings: JudgeConfig, process: int, num_processes: int) -> None:
        """
        Args:
            num_processes: of the run. Each has a file, and may use an equal share of what is left of the limits.

        Raises:
            InputError: the file cannot be opened.
        """
        self.path = path = folder / _NAME.format(process)
        self._settings, self._num_processes = settings, num_processes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT_S, check_same_thread=False)
            # Not WAL, which several hosts of a network file system cannot share: 1 ms more per request.
            self._file.execute("PRAGMA journal_mode=TRUNCATE")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"{path}, the answers of the judge, cannot be opened ({error}): free space, or remove the file to ask "
                "again"
            ) from error
        self.close = self._file.close
        others = {other: _read(other, _SPENT) for other in path.parent.glob(_NAME.format("*")) if other != path}
        used = {other: found for other, found in others.items() if found and any(found)}
        self._begun = self.spent()
        self._before = [sum(found) for found in zip(self._begun, *used.values(), strict=True)]
        have_asked = len(used) + any(self._begun)  # processes
        self._others = used if have_asked != num_processes else {}
        today = {folder / _NAME.format(number) for number in range(num_processes)}
        self._left = [used[other] for other in used if process == 0 and other not in today]

    def find(self, key: str) -> Reply | None:
        """The reply that was kept under `key`."""
        query = "SELECT text, complete, input_tokens, output_tokens FROM replies WHERE key = ?"
        found = self._run((query, (key,)))
        found = found or next(filter(None, (_read(other, query, key) for other in self._others)), None)
        return Reply(found[0], bool(found[1]), *found[2:]) if found else None

    def begin_request(self) -> None:
        """Counts an attempt. RuntimeError if this process has used its share of a limit."""
        shares = zip(self.spent(), self._begun, self._before, strict=True)  # of what was left when the run began
        requests, *tokens = (now - begun + before / self._num_processes for now, begun, before in shares)
        settings = self._settings
        of = f", a share of 1/{self._num_processes} of" if self._num_processes > 1 else ","
        limits = ("max_requests", settings.max_requests, requests), ("max_cost", settings.max_cost, self.cost(*tokens))
        for name, limit, value in limits:
            if limit and value >= limit / self._num_processes:
                raise RuntimeError(
                    f"the judge has used {value:g}{of} reward.judge.{name}={limit:g}: raise it, then rerun the same "
                    f"command to resume (answers are kept in {self.path})"
                )
        self._run(("UPDATE spent SET requests = requests + 1", ()))

    def keep(self, key: str, reply: Reply) -> None:
        """Keeps a reply and counts its tokens."""
        tokens = reply.input_tokens, reply.output_tokens
        row = (key, reply.text.encode("utf-8", "replace").decode(), reply.complete, *tokens)
        added = "UPDATE spent SET input_tokens = input_tokens + ?, output_tokens = output_tokens + ?"
        self._run(("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row), (added, tokens))

    def spent(self) -> tuple[int, int, int]:
        """Requests, their retries included, and their input and output tokens, of this process in all runs."""
        return self._run((_SPENT, ()))

    def total_cost(self) -> float:
        """Of all runs of the work directory, in the sum over processes."""
        requests, *tokens = map(sum, zip(self.spent(), *self._left, strict=True))
        return self.cost(*tokens)

    def cost(self, input_tokens: float, output_tokens: float) -> float:
        """By the prices of reward.judge."""
        prices = self._settings.price_per_million_input_tokens, self._settings.price_per_million_output_tokens
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6

    def _run(self, *statements: tuple[str, Sequence[Any]]) -> Any:
        """The first row that the last statement finds. All of them take effect, or none.

        RuntimeError if the file cannot be read or written, for example as the disk is full.
        """
        try:
            with self._file:
                return [self._file.execute(query, values).fetchone() for query, values in statements][-1]
        except sqlite3.Error as error:
            raise RuntimeError(
                f"{self.path}, the answers of the judge: {error}: free space, or remove the file if it is damaged, "
                "then rerun the same command to resume"
            ) from error
