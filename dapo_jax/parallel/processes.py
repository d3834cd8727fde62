"""Host: the processes of a run: how they find each other, what they tell each other, and how they end together.

Every process runs the same loop. What they decide on is replicated or gathered here, never a clock or a race.
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

JOIN_TIMEOUT_S = 300  # processes wait so long for each other
QUIET_S = 10  # after which a process says whom it waits for
FAILURE = "dapo_jax/failure"  # where the first process that fails tells the others, in JAX's key-value store
LOST = "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED"  # how errors of a lost connection begin
SHORTEST = 1024  # bytes that a message between processes is padded to
CURE = (
    "Start every process, with trainer.coordinator=HOST:PORT (a port of process 0 that the others reach), "
    "trainer.num_processes and trainer.process_id if they do not find each other; trainer.num_processes=1 starts this "
    "process alone"
)


class SharedFailure(RuntimeError):
    """A failure that all processes of a run meet at the same point: what they do then, they do together."""


@contextmanager
def joined_processes(
    *, coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int
) -> Iterator[None]:
    """The processes of a run find each other; if one fails, it ends at once and the others learn of it.

    To be entered before JAX is used. TPU pods, Slurm, Open MPI and indexed jobs of Kubernetes say themselves which
    processes there are; where nothing says that there are several, this process is alone. Where some are missing after
    JOIN_TIMEOUT_S, this process ends with a message and exit code 2.

    Args:
        coordinator: host:port of process 0; "" = found by JAX.
        num_processes: 0 = found by JAX; 1 = this process is alone, whatever the environment says.
        process_id: -1 = found by JAX.
        heartbeat_timeout_s: without a sign of life after which a process counts as dead.

    Raises:
        ValueError: only some of the three are given, and nothing else says the rest; the environment names processes
            that cannot be joined; the coordinator is no address, or its port is taken; or the three are given and JAX
            is in use already.
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
    padded = np.pad(text, (0, _padded(int(lengths.max())) - len(text)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def _padded(length: int) -> int:
    """The next power of two from SHORTEST: JAX compiles for each length that is sent, and keeps the program."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def any_process(*values: bool) -> list[bool]:
    """Whether each of `values` is true in some process. Every process must call it."""
    gathered = multihost_utils.process_allgather(np.array(values))
    return np.any(gathered.reshape(-1, len(values)), axis=0).tolist()


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
            raise InputError(
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
        raise InputError(
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
    cluster = Cluster(num_processes or None, "") if any(given.values()) else find_cluster(os.environ)
    if cluster.num_processes == 1 and process_id <= 0:
        return False
    if coordinator:
        check_address(coordinator, listens=process_id == 0)
    # With all of it given, JAX would still ask TPU and Kubernetes servers, for nothing. Slurm and Open MPI say which
    # GPU is this process's.
    launched = "SLURM_STEP_NODELIST" in os.environ or "OMPI_MCA_orte_hnp_uri" in os.environ
    try:
        with _limited_wait(cluster):
            jax.distributed.initialize(
                coordinator or None,
                num_processes if given["num_processes"] else None,
                process_id if given["process_id"] else None,
                cluster_detection_method="deactivate" if all(given.values()) and not launched else None,
                initialization_timeout=JOIN_TIMEOUT_S + 30,  # JAX aborts then, without saying whom it waited for
                heartbeat_timeout_seconds=heartbeat_timeout_s,
            )
    except Exception as error:  # the search runs code of several clusters, which raises anything
        nothing_found = "coordinator_address should be defined" in str(error)
        in_use = "must be called before" in str(error)  # a command that a program calls, not a process of its own
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

    JAX itself would abort it. A thread does so, because JAX does not return to Python before.
    """
    joined = threading.Event()

    def watch() -> None:
        if not joined.wait(QUIET_S):
            print(f"dapo_jax: waiting up to {JOIN_TIMEOUT_S} s: {waiting_for()}", file=sys.stderr, flush=True)
        if not joined.wait(JOIN_TIMEOUT_S - QUIET_S):
            reason = f"after {JOIN_TIMEOUT_S} s, {waiting_for()}"
            print(f"dapo_jax: {_refusal(cluster, reason)}", file=sys.stderr, flush=True)
            os._exit(2)  # as a command does whose input is wrong

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def is_jax_failure(error: BaseException | None) -> bool:
    """Whether JAX could not run a program. What is fetched from one whose connection is lost raises ValueError."""
    if isinstance(error, ValueError):
        return re.match(rf"({LOST}): ", str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def _end_at_once(error: BaseException, heartbeat_timeout_s: int) -> None:
    """Ends this process without waiting for the others, which would wait for this one.

    A SystemExit has told its reason, and carries the error behind it as its cause.
    """
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    failure = None
    if is_jax_failure(cause) and "RESOURCE_EXHAUSTED" not in str(cause):  # most often another process has ended
        print(
            f"dapo_jax: process {jax.process_index()} cannot go on: {str(cause).partition(chr(10))[0]}\n"
            "dapo_jax: most often another process has ended: what it has told, or JAX has noticed, is below",
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
    """Tells the other processes that this one fails, unless another has."""
    client = jax_client()
    if client is None:
        return
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    with suppress(jax.errors.JaxRuntimeError):  # another has failed before, or process 0 has ended
        client.key_value_set(FAILURE, f"process {jax.process_index()} has failed: {reason}")


def _failure_of_another(limit_s: float) -> str | None:
    """What the first process that failed has told the others; None if none has.

    One that was killed tells nothing. JAX's service notices it within `limit_s`, and ends this process with a message
    that names it.
    """
    client = jax_client()
    if client is None:
        time.sleep(limit_s)
        return None
    try:
        return client.blocking_key_value_get(FAILURE, int(1000 * limit_s))
    except jax.errors.JaxRuntimeError:
        return None
