"""Host: episodes in worker processes, with limits of time and memory.

An episode belongs to one process, which holds it between its turns. If that process dies, is too slow, or the
environment fails, the episode is played once more in a fresh one, from its seed and the policy's turns: what it said
before it must say again.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from dapo_jax.config.derived import environment_classes
from dapo_jax.config.sections import EnvironmentConfig
from dapo_jax.data.experience import OWN_SCORES
from dapo_jax.data.row_schema import plain
from dapo_jax.environments.protocol import Description, Fault, Reply
from dapo_jax.environments.worker import names_in
from dapo_jax.errors import InputError
from dapo_jax.monitor.environment import without_secrets
from dapo_jax.rewards.messages import MAX_NUMBER, MAX_NUMBERS, MalformedAnswer
from dapo_jax.rewards.session import pickles
from dapo_jax.rewards.worker_pool import Worker

WORKER = "dapo_jax.environments.worker"
MOST = 64 << 20  # bytes of an answer: all that an episode has said
ATTEMPTS = 2


@dataclass
class Play:
    """An episode, and what was said in it."""

    number: int
    seed: int
    row: Mapping[str, Any]
    name: str = ""  # of its environment
    actions: list[str] = field(default_factory=list)  # the policy's turns
    replies: list[Reply] = field(default_factory=list)  # to the start, and to each of them


class _Slot:
    """One worker process and the thread that speaks with it."""

    def __init__(self, index: int) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"environment-{index}")
        self.worker: Worker | None = None
        self.held: set[int] = set()  # episodes that the process has
        self.ended: list[int] = []  # those of them that it may drop


class EnvironmentPool:
    """Plays episodes.

    Args:
        tool_format: of FORMATS in tool_formats.py.
        env: secret environment variables that the processes get.

    Raises:
        InputError: the environment cannot be loaded, or has none of the forms.
    """

    def __init__(self, settings: EnvironmentConfig, tool_format: str, *, env: Collection[str] = ()) -> None:
        self._settings = settings
        classes = environment_classes(settings.path)
        specification = {"classes": classes, "tools": settings.tools, "arguments": _arguments(settings, classes)}
        self._specification = json.dumps({**specification, "tool_format": tool_format})
        names = names_in(specification)
        self._what = " and ".join(f"{option}={name!r}" for option, name in names)
        self._pickles = [part for option, name in names for part in pickles(name, option)]
        # The order of sets of text follows a process's hashes: with one seed, an episode that is played again is equal
        self._variables = {**without_secrets(os.environ, env, ()), "PYTHONHASHSEED": "0"}
        self._counting, self._counts, self._number, self._closed = threading.Lock(), Counter[str](), 0, False
        self._slots = [_Slot(index) for index in range(settings.num_workers)]
        try:
            starts = [slot.thread.submit(self._worker, slot) for slot in self._slots]
            starts[0].result().wait_until_ready()
            self.descriptions: dict[str, Description] = self._slots[0].thread.submit(self._describe).result()
        except BaseException:
            self.close()
            raise

    def begin(self, seed: int, row: Mapping[str, Any], name: str = "") -> tuple[Play, Future[Reply]]:
        """Starts an episode of the environment with this name; the reply to its start."""
        with self._counting:
            number, self._number = self._number, self._number + 1
        play = Play(number, seed, row, name)
        return play, self._ask(play)

    def step(self, play: Play, text: str) -> Future[Reply]:
        """The reply to a turn of the policy. It raises `Fault` if the environment has failed."""
        play.actions.append(text)
        return self._ask(play)

    def finish(self, play: Play) -> Future[Reply]:
        """The reward that the tool form gives to an episode that has ended."""
        return self._ask(play, finish=True)

    def end(self, play: Play) -> None:
        """The episode is no longer needed."""
        self._slot(play).ended.append(play.number)

    def take_counts(self) -> dict[str, float]:
        """Calls, seconds of them (sum and longest), timeouts, retries and faults since the last call."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        names = ("calls", "seconds", "longest", "timeouts", "retries", "faults")
        return {name: float(counts[name]) for name in names}

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        for slot in self._slots:
            slot.thread.shutdown(wait=False, cancel_futures=True)
        for slot in self._slots:
            if (worker := slot.worker) is not None:
                worker.kill()
        for slot in self._slots:
            slot.thread.shutdown()
            if slot.worker is not None:
                slot.worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _slot(self, play: Play) -> _Slot:
        return self._slots[play.number % len(self._slots)]

    def _ask(self, play: Play, *, finish: bool = False) -> Future[Reply]:
        slot = self._slot(play)
        return slot.thread.submit(self._played, slot, play, tuple(play.actions), finish)

    def _played(self, slot: _Slot, play: Play, actions: Sequence[str], finish: bool) -> Reply:
        """In the slot's thread: the newest reply of an episode."""
        began, error = time.monotonic(), ""
        try:
            for attempt in range(ATTEMPTS):
                self._count(retries=min(attempt, 1))
                try:
                    reply = self._asked(slot, play, actions, finish)
                    if not finish:
                        play.replies.append(reply)
                    return reply
                except Fault as fault:
                    error = str(fault)
                    self._replace(slot)
            self._count(faults=1)
            raise Fault(error)
        finally:
            seconds = time.monotonic() - began
            self._count(calls=1, seconds=seconds)
            with self._counting:
                self._counts["longest"] = max(self._counts["longest"], seconds)  # pyright: ignore[reportArgumentType]

    def _asked(self, slot: _Slot, play: Play, actions: Sequence[str], finish: bool) -> Reply:
        known = len(play.replies)
        calls = 1 if play.number in slot.held else known + 1
        request = {
            "episode": play.number,
            "name": play.name,
            "seed": play.seed,
            "row": play.row,
            "actions": actions,
            "finish": finish,
        }
        found = self._exchanged(slot, request, calls)
        if not isinstance(found, dict) or "error" in found:
            raise Fault(str(found["error"]) if isinstance(found, dict) else "sent an invalid answer")
        replies = [_reply(one) for one in found.get("replies", [])]
        if len(replies) not in (1, known + 1):
            raise Fault("sent an invalid answer")
        if replies[:-1] and replies[:-1] != play.replies:
            raise Fault(
                f"{self._what} says something else when its turns are repeated with the same seed: let it draw from "
                "the seed alone"
            )
        names = {name for reply in replies for name in reply.numbers}
        if taken := sorted(name for name in names if name in OWN_SCORES or "/" in name):
            raise Fault(f"{self._what}: the info of step must not have {', '.join(taken)}, of the run alone: rename it")
        slot.held.add(play.number)
        return replies[-1]

    def _exchanged(self, slot: _Slot, request: Mapping[str, Any], calls: int) -> Any:
        """The process's answer, within the time of so many calls."""
        seconds = self._settings.timeout_s
        try:
            worker = self._worker(slot)
            worker.wait_until_ready()
            ended, slot.ended = slot.ended, []
            slot.held.difference_update(ended)
            message = json.dumps({**request, "ended": ended}, default=plain).encode()
            return json.loads(worker.ask(message, seconds * calls, limit=MOST))
        except TimeoutError as error:
            self._count(timeouts=1)
            raise Fault(f"{self._what} has not answered within environment.timeout_s={seconds:g}") from error
        except MalformedAnswer as error:
            raise Fault(f"the process of {self._what} {error}") from error
        except (EOFError, OSError) as error:
            if slot.worker is None:
                raise Fault(f"no process of {self._what} could be started ({error})") from error
            raise Fault(f"the process of {self._what} died (exit code {slot.worker.stop()})") from error
        except InputError as error:
            raise Fault(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise Fault(f"the process of {self._what} sent an invalid answer") from error

    def _describe(self) -> dict[str, Description]:
        found = self._exchanged(self._slots[0], {"episode": None}, 1)
        return {name: Description(list(one["tools"]), bool(one["rewards"])) for name, one in found.items()}

    def _worker(self, slot: _Slot) -> Worker:
        """The slot's process, a new one if it has none."""
        if slot.worker is None:
            if self._closed:
                raise Fault("the environments are closed")
            arguments = str(self._settings.memory_limit_mb), self._specification
            slot.worker = Worker(WORKER, arguments, self._variables, self._pickles, self._what)
        return slot.worker

    def _replace(self, slot: _Slot) -> None:
        """Ends the slot's process; its episodes are played again when they go on."""
        if slot.worker is not None:
            slot.worker.stop()
        slot.worker = None
        slot.held.clear()

    def _count(self, **counts: float) -> None:
        with self._counting:
            self._counts.update(counts)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _arguments(settings: EnvironmentConfig, names: Collection[str]) -> dict[str, Any]:
    """The arguments of each constructor, by the names of the environments."""
    try:
        given = json.loads(settings.arguments)
    except ValueError as error:
        given = error
    several = "" not in names
    found = ({name: {} for name in names} | given) if several and isinstance(given, dict) else {"": given}
    if found.keys() != {*names} or not all(isinstance(one, dict) for one in found.values()):
        of = f"such objects by the names {', '.join(names)}" if several else "the constructor's arguments"
        raise InputError(
            f"environment.arguments={settings.arguments} must be a JSON object of {of}, not {given}: correct it"
        )
    return found


def _reply(found: Any) -> Reply:
    """The reply in an untrusted message. Fault if it is none."""
    try:
        reply = Reply(**found)
        numbers = [*reply.numbers.values(), *([] if reply.reward is None else [reply.reward])]
        valid = (
            all(
                one.keys() <= {"role", "name", "content"} and all(isinstance(text, str) for text in one.values())
                for one in reply.messages
            )
            and len(numbers) <= MAX_NUMBERS + 1
            and all(isinstance(number, float) and abs(number) <= MAX_NUMBER for number in numbers)
            and isinstance(reply.done, bool)
            and isinstance(reply.ends, bool)
            and all(isinstance(count, int) for count in (reply.calls, reply.invalid))
        )
    except (TypeError, AttributeError):
        valid = False
    if not valid:
        raise Fault("sent an invalid answer")
    return reply  # pyright: ignore[reportPossiblyUnboundVariable]
