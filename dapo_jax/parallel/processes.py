"""Host: the processes of a run: how they find each other, what they tell each other, and how they end together.

Every process runs the same loop. What they decide on is replicated or gathered here, never a clock or a race.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils


class SharedFailure(RuntimeError):
    """A failure that all processes of a run meet at the same point: what they do then, they do together."""


@contextmanager
def joined_processes(
    *, coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int
) -> Iterator[None]:
    """The processes of a run find each other; if one fails, it ends at once and the others learn of it.

    To be entered before JAX is used. TPU pods, Slurm and Open MPI say themselves which processes there are; where
    nothing does, this process is alone.

    Args:
        coordinator: host:port of process 0; "" = found by JAX.
        num_processes: 0 = found by JAX.
        process_id: -1 = found by JAX.
        heartbeat_timeout_s: without a sign of life after which a process counts as dead.

    Raises:
        ValueError: only some of the three are given, and nothing else says the rest; JAX has found processes but not
            how to reach them; or the three are given and JAX is in use already.
    """
    if not _join(coordinator, num_processes, process_id, heartbeat_timeout_s):
        yield
        return
    try:
        yield
    except BaseException as error:
        _end_at_once(error, heartbeat_timeout_s)
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this is the process that writes records and speaks."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """What each process gives here, in the order of the processes. `value` is plain data as JSON has it.

    Every process must call it.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(text))).reshape(-1)
    padded = np.pad(text, (0, int(lengths.max()) - len(text)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def any_process(value: bool) -> bool:
    """Whether `value` is true in some process. Every process must call it."""
    return bool(np.any(multihost_utils.process_allgather(np.array(value))))


def settle(arrays: Any) -> None:
    """On CPUs of several processes, waits for `arrays`; elsewhere does nothing.

    There, collectives of several programs that run at once can wait for each other without end.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(arrays)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Raises ValueError unless every process gives the same values; it names the first that differs."""
    found = gather(dict(values))
    for name in found[0]:
        shown = [of_process.get(name) for of_process in found]
        other = next((process for process, value in enumerate(shown) if value != shown[0]), None)
        if other is not None:
            raise ValueError(
                f"{name} must be the same in all processes: it is {shown[0]!r} in process 0 and {shown[other]!r} in "
                f"process {other}: start every process with the same command and files"
            )


def check_shared(directory: str) -> None:
    """Raises ValueError unless a file that process 0 writes into `directory` is there for all processes."""
    if jax.process_count() == 1:
        return
    token = epath.Path(directory) / f"shared_{gather(time.time_ns())[0]}"
    if is_first():
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text("")
    gather(None)
    seen = gather(token.exists())
    if is_first():
        token.unlink()
    if not all(seen):
        raise ValueError(
            f"process {seen.index(False)} does not see what process 0 writes to {directory}: checkpoints need a place "
            "that all processes reach: set trainer.checkpoint_dir (a shared directory, or gs://...)"
        )


def _join(coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int) -> bool:
    """Whether there are processes to join; then they have."""
    if jax.distributed.is_initialized():
        return False  # by the caller, who ends them too
    # JAX's service for preemptions would take SIGTERM and do nothing: the signal has to end the process.
    jax.config.update("jax_enable_preemption_service", False)
    given = {"coordinator": bool(coordinator), "num_processes": num_processes > 0, "process_id": process_id >= 0}
    try:
        jax.distributed.initialize(
            coordinator or None,
            num_processes if given["num_processes"] else None,
            process_id if given["process_id"] else None,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
        )
    except (ValueError, RuntimeError) as error:
        nothing_found = "coordinator_address should be defined" in str(error)
        in_use = "must be called before" in str(error)  # a command that a program calls, not a process of its own
        if not any(given.values()) and (nothing_found or in_use):
            return False
        missing = [name for name, is_given in given.items() if not is_given]
        raise ValueError(
            f"trainer.{', trainer.'.join(missing or given)} does not fit or cannot be found out here: give "
            "trainer.coordinator=HOST:PORT (of process 0), trainer.num_processes and trainer.process_id, or none of "
            f"them ({error})"
        ) from error
    return True


def _end_at_once(error: BaseException, heartbeat_timeout_s: int) -> None:
    """Ends this process without waiting for the others, which would wait for this one.

    A SystemExit has told its reason, and carries the error behind it as its cause.
    """
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    if isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(cause):
        # Most often another process has ended. JAX's service knows which within the time below, and ends this one
        # with that message.
        print(
            f"dapo_jax: process {jax.process_index()} cannot go on: {str(cause).partition(chr(10))[0]}\n"
            "dapo_jax: most often another process has ended: JAX says below which",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        time.sleep(1.5 * heartbeat_timeout_s)
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        code = 1
    elif isinstance(error.code, str):
        print(f"{error.code} (process {jax.process_index()})", file=sys.stderr)
        code = 1
    else:
        code = error.code or 0
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
