"""Law: a single host starts alone in any environment; a cluster that cannot be joined is refused with a fix."""

import http.server
import os
import socket
import subprocess
import threading

import jax
import pytest
from forked import CLUSTERS

from dapo_jax.parallel import cluster
from dapo_jax.parallel.cluster import check_address, find_cluster, waiting_for
from dapo_jax.parallel.processes import joined_processes

NOTHING = {"TPU_SKIP_MDS_QUERY": "1"}  # as set by importing JAX without a TPU
NOTHING_FOUND = ValueError("coordinator_address should be defined.")


def slurm(tasks: int, nodes: str) -> dict[str, str]:
    names = {"JOB_ID": 7, "STEP_NODELIST": nodes, "NTASKS": tasks, "PROCID": 0, "LOCALID": 0}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def open_mpi(size: int) -> dict[str, str]:
    names = {"COMM_WORLD_SIZE": size, "COMM_WORLD_RANK": 0, "COMM_WORLD_LOCAL_RANK": 0}
    names |= {"MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
    return {f"OMPI_{name}": str(value) for name, value in names.items()}


KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ON_GKE = {"TPU_WORKER_HOSTNAMES": "job-0-0.service", "MEGASCALE_NUM_SLICES": "1", "JOB_COMPLETION_INDEX": "0", **IN_POD}
ALONE = {
    "kaggle": KAGGLE,
    "colab": {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    "tpu_without_names": {"TPU_PROCESS_ADDRESSES": ""},
    "gke_host": ON_GKE,
    "slurm_task": slurm(1, "node7"),
    "open_mpi_process": open_mpi(1),
    "notebook_in_a_pod": IN_POD,
}
HOSTS = {"TPU_WORKER_HOSTNAMES": "a.svc,b.svc", "TPU_WORKER_ID": "1"}
SEVERAL = {
    "slurm": (slurm(4, "node[1-2]"), "4 processes: SLURM_NTASKS=4, SLURM_PROCID=0, SLURM_STEP_NODELIST=node[1-2]"),
    "open_mpi": (open_mpi(2), "2 processes: OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=0, OMPI_MCA_orte_hnp_uri=153"),
    "gke_hosts": (HOSTS, "2 processes: TPU_WORKER_HOSTNAMES=a.svc,b.svc, TPU_WORKER_ID=1"),
    "processes_of_a_host": ({**KAGGLE, "TPU_PROCESS_ADDRESSES": "h:8476,h:8477"}, "=h:8476,h:8477, TPU_WORKER_ID=0"),
    "slices": ({**KAGGLE, "MEGASCALE_NUM_SLICES": "3"}, "3 processes: TPU_PROCESS_ADDRESSES=local, TPU_WORKER_ID=0, M"),
}


def set_environment(monkeypatch, values):
    for name in list(os.environ):
        if name.startswith(CLUSTERS):
            monkeypatch.delenv(name)
    for name, value in {**NOTHING, **values}.items():
        monkeypatch.setenv(name, value)


def join(monkeypatch, environment, outcome=None, *, coordinator="", num_processes=0, process_id=-1):
    """The arguments of jax.distributed.initialize, or None if it is not called; `outcome`: what it raises."""
    calls = []

    def initialize(*arguments, **named):
        calls.append((*arguments, named))
        if outcome is not None:
            raise outcome

    set_environment(monkeypatch, environment)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    with joined_processes(**given, heartbeat_timeout_s=10):
        return calls[0] if calls else None


@pytest.mark.parametrize("name", ALONE)
def test_one_host_is_alone_and_nobody_is_asked(monkeypatch, name):
    assert join(monkeypatch, ALONE[name], ConnectionError("metadata.google.internal")) is None


def test_where_nothing_is_found_this_process_is_alone(monkeypatch):
    in_pods = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}  # perhaps one of several runs
    in_shell = {name: value for name, value in slurm(4, "").items() if name != "SLURM_STEP_NODELIST"}
    for environment in ({}, in_pods, in_shell):
        assert join(monkeypatch, environment, NOTHING_FOUND) is not None
    assert join(monkeypatch, {}, RuntimeError("jax.distributed.initialize() must be called before any JAX calls"))


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("http://metadata.google.internal: Max retries exceeded"),
        RuntimeError("Failed to recognize coordinator address node1\nand more"),
        KeyError("OMPI_COMM_WORLD_RANK"),
        FileNotFoundError(2, "No such file or directory", "scontrol"),
        subprocess.CalledProcessError(1, "scontrol"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cluster_that_cannot_be_joined_is_refused(monkeypatch, name, error):
    environment, evidence = SEVERAL[name]
    with pytest.raises(ValueError) as refused:
        join(monkeypatch, environment, error)
    message = str(refused.value)
    assert f"{type(error).__name__}: {str(error).splitlines()[0]}. The environment names " in message
    assert evidence in message and "trainer.coordinator=HOST:PORT" in message and "\n" not in message
    assert "trainer.num_processes=1 starts this process alone" in message


def test_a_cluster_that_jax_does_not_see_is_refused(monkeypatch):
    for environment, evidence in SEVERAL.values():
        with pytest.raises(ValueError, match="JAX does not find them") as refused:
            join(monkeypatch, environment, NOTHING_FOUND)
        assert evidence in str(refused.value)
    with pytest.raises(ValueError, match="names several processes: JAX_COORDINATOR_ADDRESS=host:1"):
        environment = {"JAX_COORDINATOR_ADDRESS": "host:1"}
        join(monkeypatch, environment, ValueError("Number of processes must be defined."))
    with pytest.raises(ValueError, match="Kubernetes API Error: 403.*names several processes: JOB_COMPLETION_INDEX=0"):
        environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
        join(monkeypatch, environment, RuntimeError("Kubernetes API Error: 403 - Forbidden"))


def test_one_process_starts_alone_on_request(monkeypatch):
    for environment, _ in SEVERAL.values():
        for given in ({}, {"process_id": 0, "coordinator": "h:1"}):
            assert join(monkeypatch, environment, ConnectionError(), num_processes=1, **given) is None
    with pytest.raises(ValueError, match=r"trainer\.coordinator does not fit.*process_id < num_processes"):
        error = ValueError("process_id and num_processes must be nonnegative, with process_id < num_processes.")
        join(monkeypatch, {}, error, num_processes=1, process_id=1)


def test_no_server_is_asked_for_what_is_given(monkeypatch):
    given = {"coordinator": "host:1234", "num_processes": 2, "process_id": 1}
    address, number, process, named = join(monkeypatch, {}, **given)
    assert (address, number, process) == ("host:1234", 2, 1) and named["cluster_detection_method"] == "deactivate"
    for environment in (slurm(2, "node[1-2]"), open_mpi(2)):  # they name this process's GPU
        assert join(monkeypatch, environment, **given)[-1]["cluster_detection_method"] is None
    assert join(monkeypatch, {}, coordinator="host:1234")[-1]["cluster_detection_method"] is None
    assert join(monkeypatch, slurm(2, "node[1-2]"))[:3] == (None, None, None)


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server with these attributes; `failures`: requests on which it hangs up."""
    attributes, failures = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if failures:
                failures.pop()
                return
            key = self.path.rpartition("/")[2]
            found = key in attributes and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(attributes[key].encode() if found else b"not found")

        def log_message(self, *_):
            pass

    monkeypatch.setattr(cluster, "METADATA_PAUSE_S", 0)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        set_environment(monkeypatch, {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"})
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
        yield attributes, failures
        server.shutdown()


def test_the_metadata_server_tells_the_hosts_of_a_tpu_vm(metadata):
    attributes, failures = metadata
    assert find_cluster(os.environ) == (None, "")
    attributes["worker-network-endpoints"] = "unknown:unknown:10.0.0.2"
    assert find_cluster(os.environ).num_processes == 1
    attributes["tpu-env"] = "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nTYPE: 'V3'"
    assert find_cluster(os.environ).num_processes == 2
    assert find_cluster({**os.environ, "MEGASCALE_NUM_SLICES": "1"}).num_processes == 1
    attributes["worker-network-endpoints"] = "10.0.0.2,10.0.0.3"
    failures += [1, 2]
    found = find_cluster(os.environ)
    assert found.num_processes == 4 and not failures
    assert "worker-network-endpoints=10.0.0.2,10.0.0.3 and MEGASCALE_NUM_SLICES=2" in found.evidence
    assert find_cluster({**os.environ, **NOTHING}) == (None, "")


def test_a_tpu_host_without_a_metadata_server_starts_alone_and_says_so(metadata, capfd):
    _, failures = metadata
    failures += [1] * cluster.METADATA_TRIES
    assert find_cluster(os.environ) == (1, "") and not failures
    error = capfd.readouterr().err
    assert error.startswith("dapo_jax: no metadata server answers at 127.0.0.1:") and "starts alone" in error
    assert find_cluster({**os.environ, **KAGGLE}).num_processes == 1 and not capfd.readouterr().err


def test_hosts_in_a_file_are_left_to_jax():
    assert find_cluster({"TPU_PROCESS_ADDRESSES_PATH": "file", **KAGGLE}) == (None, "TPU_PROCESS_ADDRESSES_PATH=file")


@pytest.mark.parametrize("address", ["localhost", "1234", "host:", "host:x", "host:0", "host:65536", "host:-1"])
def test_an_address_without_a_port_is_refused(monkeypatch, address):
    with pytest.raises(ValueError, match=f"trainer.coordinator='{address}' must be HOST:PORT"):
        join(monkeypatch, {}, coordinator=address, num_processes=2, process_id=1)


def test_a_port_that_is_taken_is_refused_to_the_process_that_listens(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        given = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2}
        assert join(monkeypatch, {}, process_id=1, **given)
        with pytest.raises(ValueError, match=f"listens on port {port}: choose another port"):
            join(monkeypatch, {}, process_id=0, **given)
    check_address(f"[::1]:{port}", listens=True)


def test_what_a_process_waits_for_has_the_address(monkeypatch):
    from jax._src import distributed

    state = distributed.State()
    monkeypatch.setattr(distributed, "global_state", state)
    assert waiting_for() == "JAX looks for process 0"
    with socket.create_server(("127.0.0.1", 0)) as server:
        state.coordinator_address = f"127.0.0.1:{server.getsockname()[1]}"
        assert waiting_for() == f"process 0 waits at {state.coordinator_address} for the others"
        state.process_id = 2
        assert waiting_for() == f"process 2 reaches process 0 at {state.coordinator_address} and waits for the others"
    assert waiting_for().startswith(f"process 2 does not reach process 0 at {state.coordinator_address} (")
    for other in (object(), None):  # JAX has moved it
        monkeypatch.setattr(distributed, "global_state", other)
        assert waiting_for() == "JAX looks for process 0"
    monkeypatch.delattr(distributed, "global_state")
    assert waiting_for() == "JAX looks for process 0"
