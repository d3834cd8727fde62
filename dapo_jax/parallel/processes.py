"""Host: the processes of a run: how they join, exchange values, and end together.

Every process runs the same loop. Decisions depend on replicated or gathered values, never on a clock or a race.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from dapo_jax.errors import InputError, say
from dapo_jax.parallel.cluster import Cluster, check_address, find_cluster, jax_client, waiting_for
from dapo_jax.parallel.endings import end_process

JOIN_TIMEOUT_S = 300  # how long processes wait for each other
QUIET_S = 10  # after which a process reports what it waits for
LONGEST_ACTION_S = 86400  # how long the processes of a host wait for their first one
SHORTEST = 1024  # bytes that a message between processes is padded to
CURE = (
    "Start every process; if they do not find each other, set trainer.coordinator=HOST:PORT (a port of process 0 that "
    "the others can reach), trainer.num_processes and trainer.process_id. trainer.num_processes=1 starts this process "
    "alone"
)
T = TypeVar("T")
_BARRIERS = itertools.count()  # numbers them: each barrier needs a name of its own
_WAITED = [0.0]  # seconds in `waiting`


class SharedFailure(RuntimeError):
    """A failure that all processes of a run raise at the same point, so that they can act on it together."""


class LastingFailure(SharedFailure):
    """A failure that the same command would meet again: its message says what to change first."""


@contextmanager
def joined_processes(
    *, coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int
) -> Iterator[None]:
    """Joins the processes of a run. If one fails, it tells the others why; if all fail, each tells its own reason.

    Enter it before JAX starts. TPU pods, Slurm, Open MPI and indexed Kubernetes jobs name their processes; if nothing
    names any, this process is alone. If some are missing after JOIN_TIMEOUT_S, this process ends with a message and
    exit code 2.

    Args:
        coordinator: host:port of process 0; "" = found by JAX.
        num_processes: 0 = found by JAX; 1 = this process is alone, whatever the environment says.
        process_id: -1 = found by JAX.
        heartbeat_timeout_s: seconds without a heartbeat after which a process counts as dead.

    Raises:
        InputError: only some of the three are given and the environment lacks the rest; the environment names
            processes that cannot be joined; the coordinator is not an address, or its port is taken; or the three are
            given after JAX has started.
    """
    if not _join(coordinator, num_processes, process_id, heartbeat_timeout_s):
        yield
        return
    try:
        yield
    except BaseException as error:
        end_process(error, heartbeat_timeout_s)
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this is the process that writes records and prints."""
    return jax.process_index() == 0


@contextmanager
def waiting() -> Iterator[None]:
    """Around what waits for devices or other processes: its seconds are no work of this process."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _WAITED[0] += time.perf_counter() - start


def waited() -> float:
    """Seconds that this process has waited for devices and other processes."""
    return _WAITED[0]


def gather(value: Any) -> list[Any]:
    """The `value` of each process, in the order of the processes. Values are plain JSON data.

    Every process must call it.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with waiting():
        lengths = multihost_utils.process_allgather(np.array(len(text))).reshape(-1)
        padded = np.pad(text, (0, _padded(int(lengths.max())) - len(text)))
        texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def _padded(length: int) -> int:
    """The next power of two, at least SHORTEST: JAX compiles a program for each length that is sent."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def first_per_host(action: Callable[[], T]) -> T:
    """What `action` returns: the first process of each host does it, and the others after all of those have.

    Every process must call it.
    """
    if jax.process_count() == 1:
        return action()
    hosts = gather(socket.gethostname())
    leads = hosts.index(hosts[jax.process_index()]) == jax.process_index()
    done = action() if leads else None
    if (client := jax_client()) is not None:  # a collective would time out while others work
        client.wait_at_barrier(f"dapo_jax/first_per_host/{next(_BARRIERS)}", 1000 * LONGEST_ACTION_S)
    gather(None)
    return cast(T, done) if leads else action()


def any_process(*values: bool) -> list[bool]:
    """For each of `values`, whether it is true in any process. Every process must call it."""
    with waiting():
        gathered = multihost_utils.process_allgather(np.array(values))
    return np.any(gathered.reshape(-1, len(values)), axis=0).tolist()


def settle(arrays: Any) -> None:
    """Waits for `arrays` on several CPU devices; does nothing elsewhere.

    On CPUs, collectives of programs that run at the same time can deadlock: each device's part of one holds a thread
    until all parts have begun, and there may be no thread left for the last.
    """
    if jax.device_count() > 1 and jax.default_backend() == "cpu":
        with waiting():
            jax.block_until_ready(arrays)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Raises InputError unless every process has the same values; it names the first that differs."""
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
    """Raises InputError unless all processes see a file that process 0 writes to `directory`."""
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
            "that all processes can reach: set trainer.checkpoint_dir to a shared directory or gs://..."
        )


def _join(coordinator: str, num_processes: int, process_id: int, heartbeat_timeout_s: int) -> bool:
    """Joins the processes, if there are others; returns whether it has."""
    if jax.distributed.is_initialized():
        return False  # the caller has joined them and will end them
    # JAX's preemption service would swallow SIGTERM, which must stop the process.
    jax.config.update("jax_enable_preemption_service", False)
    given = {"coordinator": bool(coordinator), "num_processes": num_processes > 0, "process_id": process_id >= 0}
    cluster = Cluster(num_processes or None, "") if any(given.values()) else find_cluster(os.environ)
    if cluster.num_processes == 1 and process_id <= 0:
        return False
    if coordinator:
        check_address(coordinator, listens=process_id == 0)
    # Even with all three given, JAX would query TPU and Kubernetes servers for nothing. But it needs Slurm and Open MPI
    # to tell which GPU belongs to this process.
    launched = "SLURM_STEP_NODELIST" in os.environ or "OMPI_MCA_orte_hnp_uri" in os.environ
    try:
        with _limited_wait(cluster):
            jax.distributed.initialize(
                coordinator or None,
                num_processes if given["num_processes"] else None,
                process_id if given["process_id"] else None,
                cluster_detection_method="deactivate" if all(given.values()) and not launched else None,
                initialization_timeout=JOIN_TIMEOUT_S + 30,  # JAX then aborts without saying what it waited for
                heartbeat_timeout_seconds=heartbeat_timeout_s,
            )
    except Exception as error:  # JAX's detection runs code for several clusters, which may raise anything
        nothing_found = "coordinator_address should be defined" in str(error)
        in_use = "must be called before" in str(error)  # a program calls the command after using JAX
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not any(given.values()):
            if in_use or nothing_found and cluster.num_processes is None:
                return False
            if nothing_found:
                reason = "JAX does not find them (on TPUs it needs the extra tpu)"
            raise InputError(_refusal(cluster, reason)) from error
        missing = [name for name, is_given in given.items() if not is_given]
        raise InputError(
            f"trainer.{', trainer.'.join(missing or given)} does not fit or cannot be detected here: give "
            "trainer.coordinator=HOST:PORT (of process 0), trainer.num_processes and trainer.process_id, or none of "
            f"them ({reason})"
        ) from error
    return True


def _refusal(cluster: Cluster, reason: str) -> str:
    """The message when processes do not find each other."""
    named = f"The environment names {cluster.num_processes or 'several'} processes: {cluster.evidence}. "
    return f"cannot join the other processes of this run: {reason}. {named if cluster.evidence else ''}{CURE}"


@contextmanager
def _limited_wait(cluster: Cluster) -> Iterator[None]:
    """Ends this process with a message if the body, JAX's search for the others, takes longer than JOIN_TIMEOUT_S.

    JAX itself would abort without a reason. A thread watches, because JAX does not return to Python meanwhile.
    """
    joined = threading.Event()

    def watch() -> None:
        if not joined.wait(QUIET_S):
            say(f"dapo_jax: waiting up to {JOIN_TIMEOUT_S} s: {waiting_for()}", file=sys.stderr)
        if not joined.wait(JOIN_TIMEOUT_S - QUIET_S):
            reason = f"after {JOIN_TIMEOUT_S} s, {waiting_for()}"
            say(f"dapo_jax: {_refusal(cluster, reason)}", file=sys.stderr)
            os._exit(2)  # the exit code for wrong input

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        joined.set()
