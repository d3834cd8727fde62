"""Host: the processes of a run: how they find each other, exchange values, and end together.

Every process runs the same loop. Decisions rest on values that are replicated or gathered here, never on a clock or a
race.
"""

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from dapo_jax.errors import InputError
from dapo_jax.parallel.cluster import Cluster, check_address, find_cluster, jax_client, waiting_for

JOIN_TIMEOUT_S = 300  # how long processes wait for each other
QUIET_S = 10  # after which a process reports what it waits for
FAILURE = "dapo_jax/failure"  # key in JAX's key-value store where the first process that fails says why
LOST = "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED"  # how errors of a lost connection begin
SHORTEST = 1024  # bytes that a message between processes is padded to
CURE = (
    "Start every process, with trainer.coordinator=HOST:PORT (a port of process 0 that the others reach), "
    "trainer.num_processes and trainer.process_id if they do not find each other; trainer.num_processes=1 starts this "
    "process alone"
)


class SharedFailure(RuntimeError):
    """A failure that all processes of a run meet at the same point, and handle together."""


@contextmanager
def joined_processes(
    *, coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int
) -> Iterator[None]:
    """Joins the processes of a run; if one fails, it ends at once and the others learn why.

    Enter it before using JAX. TPU pods, Slurm, Open MPI and indexed Kubernetes jobs name the processes themselves; if
    nothing names several, this process is alone. If some are missing after JOIN_TIMEOUT_S, this process ends with a
    message and exit code 2.

    Args:
        coordinator: host:port of process 0; "": JAX finds it.
        num_processes: 0: JAX finds it; 1: this process is alone, whatever the environment says.
        process_id: -1: JAX finds it.
        heartbeat_timeout_s: how long a process may be silent before it counts as dead.

    Raises:
        ValueError: only some of the three are given, and the environment lacks the rest; it names processes that cannot
            be joined; the coordinator is no address, or its port is in use; or the three are given after JAX started.
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
    """Whether this is process 0, which writes records and prints."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """The `value` of each process, in the order of the processes. It is plain data, as in JSON.

    Every process must call it.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(text))).reshape(-1)
    padded = np.pad(text, (0, _padded(int(lengths.max())) - len(text)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def _padded(length: int) -> int:
    """The next power of two, at least SHORTEST: JAX compiles and keeps a program for each length."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def any_process(*values: bool) -> list[bool]:
    """Whether each of `values` is true in some process. Every process must call it."""
    gathered = multihost_utils.process_allgather(np.array(values))
    return np.any(gathered.reshape(-1, len(values)), axis=0).tolist()


def settle(arrays: Any) -> None:
    """Waits for `arrays` with several processes on CPUs; elsewhere does nothing.

    There, collectives of programs that run at the same time can deadlock.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(arrays)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the first value that differs, unless every process gives the same values."""
    found = gather(dict(values))
    for name in found[0]:
        shown = [of_process.get(name) for of_process in found]
        other = next((process for process, value in enumerate(shown) if value != shown[0]), None)
        if other is not None:
            raise InputError(
                f"{name} must be the same in all processes: it is {shown[0]!r} in process 0 and {shown[other]!r} in "
                f"process {other}: start every process with the same command and files"
            )


def check_shared(directory: str) -> None:
    """Raises ValueError unless all processes see a file that process 0 writes into `directory`."""
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
        raise InputError(
            f"process {seen.index(False)} does not see what process 0 writes to {directory}: checkpoints need a place "
            "that all processes reach: set trainer.checkpoint_dir (a shared directory, or gs://...)"
        )


def _join(coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int) -> bool:
    """Joins the other processes; False if this process is alone."""
    if jax.distributed.is_initialized():
        return False  # by the caller, which ends them too
    # JAX's preemption service would swallow SIGTERM, which must end the process.
    jax.config.update("jax_enable_preemption_service", False)
    given = {"coordinator": bool(coordinator), "num_processes": num_processes > 0, "process_id": process_id >= 0}
    cluster = Cluster(num_processes or None, "") if any(given.values()) else find_cluster(os.environ)
    if cluster.num_processes == 1 and process_id <= 0:
        return False
    if coordinator:
        check_address(coordinator, listens=process_id == 0)
    # With all three given, JAX would still ask TPU and Kubernetes servers, for nothing. Slurm and Open MPI say which
    # GPU belongs to this process.
    launched = "SLURM_STEP_NODELIST" in os.environ or "OMPI_MCA_orte_hnp_uri" in os.environ
    try:
        with _limited_wait(cluster):
            jax.distributed.initialize(
                coordinator or None,
                num_processes if given["num_processes"] else None,
                process_id if given["process_id"] else None,
                cluster_detection_method="deactivate" if all(given.values()) and not launched else None,
                initialization_timeout=JOIN_TIMEOUT_S + 30,  # JAX aborts then, without saying what it waited for
                heartbeat_timeout_seconds=heartbeat_timeout_s,
            )
    except Exception as error:  # the search runs code for several clusters, which may raise anything
        nothing_found = "coordinator_address should be defined" in str(error)
        in_use = "must be called before" in str(error)  # the command was called by a program that uses JAX
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not any(given.values()):
            if in_use or nothing_found and cluster.num_processes is None:
                return False
            if nothing_found:
                reason = "JAX does not find them (on TPUs it needs the extra tpu)"
            raise InputError(_refusal(cluster, reason)) from error
        missing = [name for name, is_given in given.items() if not is_given]
        raise InputError(
            f"trainer.{', trainer.'.join(missing or given)} does not fit or cannot be found out here: give "
            "trainer.coordinator=HOST:PORT (of process 0), trainer.num_processes and trainer.process_id, or none of "
            f"them ({reason})"
        ) from error
    return True


def _refusal(cluster: Cluster, reason: str) -> str:
    """The message for processes that do not find each other."""
    named = f"The environment names {cluster.num_processes or 'several'} processes: {cluster.evidence}. "
    return f"cannot join the other processes of this run: {reason}. {named if cluster.evidence else ''}{CURE}"


@contextmanager
def _limited_wait(cluster: Cluster) -> Iterator[None]:
    """Ends this process with a message once the body, JAX's search for the others, has run for JOIN_TIMEOUT_S.

    JAX itself would abort the process. A thread watches, because JAX does not return to Python meanwhile.
    """
    joined = threading.Event()

    def watch() -> None:
        if not joined.wait(QUIET_S):
            print(f"dapo_jax: waiting up to {JOIN_TIMEOUT_S} s: {waiting_for()}", file=sys.stderr, flush=True)
        if not joined.wait(JOIN_TIMEOUT_S - QUIET_S):
            reason = f"after {JOIN_TIMEOUT_S} s, {waiting_for()}"
            print(f"dapo_jax: {_refusal(cluster, reason)}", file=sys.stderr, flush=True)
            os._exit(2)  # like a command with wrong input

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def is_jax_failure(error: BaseException | None) -> bool:
    """Whether JAX could not run a program. Fetching from one that lost its connection raises ValueError."""
    if isinstance(error, ValueError):
        return re.match(rf"({LOST}): ", str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def _end_at_once(error: BaseException, heartbeat_timeout_s: int) -> None:
    """Ends this process without waiting for the others, which would wait for this one.

    A SystemExit has been reported, and has the underlying error as its cause.
    """
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    failure = None
    if is_jax_failure(cause) and "RESOURCE_EXHAUSTED" not in str(cause):  # most often because another process ended
        print(
            f"dapo_jax: process {jax.process_index()} cannot continue: {str(cause).partition(chr(10))[0]}\n"
            "dapo_jax: most often another process has ended: its message, or JAX's, is below",
            file=sys.stderr,
            flush=True,
        )
        failure = _failure_of_another(1.5 * heartbeat_timeout_s)
    if failure is not None:
        print(f"dapo_jax: {failure}", file=sys.stderr, flush=True)
    elif cause is not None:
        _tell_others(cause)
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


def _tell_others(cause: BaseException) -> None:
    """Reports to the other processes that this one failed, unless another did before."""
    client = jax_client()
    if client is None:
        return
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    with suppress(jax.errors.JaxRuntimeError):  # another failed before, or process 0 has ended
        client.key_value_set(FAILURE, f"process {jax.process_index()} has failed: {reason}")


def _failure_of_another(limit_s: float) -> str | None:
    """What the first process that failed reported to the others; None if none did.

    A process that was killed reports nothing. JAX's service notices it within `limit_s`, and ends this process with a
    message that names it.
    """
    client = jax_client()
    if client is None:
        time.sleep(limit_s)
        return None
    try:
        return client.blocking_key_value_get(FAILURE, int(1000 * limit_s))
    except jax.errors.JaxRuntimeError:
        return None
