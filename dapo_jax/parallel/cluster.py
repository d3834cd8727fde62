"""Host: finds the other processes of a run from the environment, and checks whether they answer.

JAX looks for Open MPI, Slurm, TPUs and Kubernetes and takes the first that it finds. `find_cluster` looks first,
because JAX treats a cluster of one process like any other, and queries servers that a single host may not have.
"""

import errno
import http.client
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.errors import InputError, say

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # set by srun
METADATA_TRIES, METADATA_TIMEOUT_S, METADATA_PAUSE_S = 3, 5, 1
REACH_TIMEOUT_S = 5


class Cluster(NamedTuple):
    """The processes of a run according to the environment."""

    num_processes: int | None  # 1 = this process is alone; None = unknown here, JAX may know
    evidence: str  # the source, as NAME=value; "" = none


def find_cluster(environment: Mapping[str, str]) -> Cluster:
    """The first kind of cluster that the environment names, in JAX's order.

    Without TPU_SKIP_MDS_QUERY and names of TPU hosts, this queries Google's metadata server.

    Args:
        environment: `os.environ` after importing JAX, which sets TPU_SKIP_MDS_QUERY if there is no TPU.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _cluster(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri")
    if all(name in environment for name in SLURM):
        return _cluster(environment, "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST")
    if "TPU_PROCESS_ADDRESSES_PATH" in environment:  # a file, read by JAX 0.12
        return Cluster(None, _evidence(environment, "TPU_PROCESS_ADDRESSES_PATH"))
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if name in environment:  # "local" or "localhost" on one host
            count = len(environment[name].split(",")) * (_number(environment.get("MEGASCALE_NUM_SLICES", "1")) or 1)
            return Cluster(count, _evidence(environment, name, "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES"))
    if "TPU_SKIP_MDS_QUERY" not in environment and (cluster := _tpu_vm(environment)):
        return cluster
    if "KUBERNETES_SERVICE_HOST" in environment:
        # JAX can join only the pods of an indexed job.
        indexed = "JOB_COMPLETION_INDEX" in environment
        return Cluster(None if indexed else 1, _evidence(environment, "JOB_COMPLETION_INDEX"))
    return Cluster(None, _evidence(environment, "JAX_COORDINATOR_ADDRESS"))


def check_address(coordinator: str, *, listens: bool) -> None:
    """Raises InputError unless the address is HOST:PORT and, on process 0, the port is free.

    JAX crashes if the port is taken, and two runs that share a port end each other.

    Args:
        coordinator: the address of process 0.
        listens: whether this is process 0.
    """
    port = _number(coordinator.rpartition(":")[2])
    if ":" not in coordinator or port is None or not 0 < port < 2**16:
        raise InputError(f"trainer.coordinator={coordinator!r} must be HOST:PORT, an address of process 0: correct it")
    if not listens:
        return
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just released counts as free
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"trainer.coordinator={coordinator!r}: another program on this host listens on port {port}: choose "
                    "another port for all processes, or end that program"
                ) from error


def waiting_for() -> str:
    """What this process is waiting for while JAX joins the processes, with the address of process 0."""
    state = _jax_state()
    address = getattr(state, "coordinator_address", None)
    process = getattr(state, "process_id", 0)
    if not address:
        return "JAX looks for process 0"
    if process == 0:
        return f"process 0 waits at {address} for the others"
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S):
            return f"process {process} reaches process 0 at {address} and waits for the others"
    except (OSError, ValueError) as error:
        return f"process {process} does not reach process 0 at {address} ({error})"


def jax_client() -> Any:
    """JAX's client for the coordination service on process 0; None without one."""
    return getattr(_jax_state(), "client", None)


def _jax_state() -> Any:
    """JAX's record of the processes, which has no public name; None if it has moved."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return global_state


def _tpu_vm(environment: Mapping[str, str]) -> Cluster | None:
    """The hosts of a Cloud TPU VM according to its metadata server; None if it has no TPU."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    try:
        workers = _metadata(server, "worker-network-endpoints")
        if workers is None:
            return None
        slices = environment.get("MEGASCALE_NUM_SLICES")
        if slices is None:
            found = re.search(r"^\s*MEGASCALE_NUM_SLICES\s*:\s*'?(\d+)", _metadata(server, "tpu-env") or "", re.M)
            slices = found[1] if found else "1"
    except (OSError, http.client.HTTPException) as error:
        say(
            f"dapo_jax: no metadata server answers at {server} ({error}), so this process starts alone; if the run has "
            "more processes, set trainer.coordinator, trainer.num_processes and trainer.process_id",
            file=sys.stderr,
        )
        return Cluster(1, "")
    evidence = f"worker-network-endpoints={workers} and MEGASCALE_NUM_SLICES={slices} of the metadata server {server}"
    return Cluster(len(workers.split(",")) * (_number(slices) or 1), evidence)


def _metadata(server: str, key: str) -> str | None:
    """An attribute of this virtual machine; None if it does not exist.

    Raises:
        OSError, HTTPException: the server does not answer.
    """
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for tries in range(1, METADATA_TRIES + 1):
        try:
            with direct.open(request, timeout=METADATA_TIMEOUT_S) as response:
                return response.read().decode()
        except urllib.error.HTTPError:
            return None
        except (OSError, http.client.HTTPException):
            if tries == METADATA_TRIES:
                raise
            time.sleep(METADATA_PAUSE_S)


def _cluster(environment: Mapping[str, str], count: str, *others: str) -> Cluster:
    return Cluster(_number(environment[count]), _evidence(environment, count, *others))


def _evidence(environment: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in names if name in environment)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
