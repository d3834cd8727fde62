"""Law: a single host starts alone in any environment; a cluster that cannot be joined is refused with a fix."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from ports import free_port
from waiting import LIMIT_S

from dapo_jax.parallel import cluster
from dapo_jax.parallel.cluster import check_address, find_cluster, waiting_for
from dapo_jax.parallel.processes import joined_processes

try:
    from requests.exceptions import ConnectionError as NoServer
    from requests.exceptions import ReadTimeout as SlowServer
except ImportError:
    NoServer, SlowServer = OSError, TimeoutError

ROOT = Path(__file__).parents[2]
NAMES = ("OMPI_", "SLURM_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "JAX_COORDINATOR", "GCE_")
NOTHING = {"TPU_SKIP_MDS_QUERY": "1"}  # as set by importing JAX without a TPU
NOTHING_FOUND = ValueError("coordinator_address should be defined.")


def slurm(tasks: int, nodes: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }


def open_mpi(size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    }


KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
ALONE = {
    "kaggle": KAGGLE,
    "colab": {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    "tpu_without_names": {"TPU_PROCESS_ADDRESSES": ""},
    "gke_host": {
        "TPU_WORKER_HOSTNAMES": "job-0-0.service",
        "MEGASCALE_NUM_SLICES": "1",
        "KUBERNETES_SERVICE_HOST": "x",
        "JOB_COMPLETION_INDEX": "0",
    },
    "slurm_task": slurm(1, "node7"),
    "open_mpi_process": open_mpi(1),
    "notebook_in_a_pod": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
}
SEVERAL = {
    "slurm": (slurm(4, "node[1-2]"), "4 processes: SLURM_NTASKS=4, SLURM_PROCID=0, SLURM_STEP_NODELIST=node[1-2]"),
    "open_mpi": (open_mpi(2), "2 processes: OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=0, OMPI_MCA_orte_hnp_uri=153"),
    "gke_hosts": (
        {"TPU_WORKER_HOSTNAMES": "a.svc,b.svc", "TPU_WORKER_ID": "1"},
        "2 processes: TPU_WORKER_HOSTNAMES=a.svc,b.svc, TPU_WORKER_ID=1",
    ),
    "processes_of_a_host": ({**KAGGLE, "TPU_PROCESS_ADDRESSES": "h:8476,h:8477"}, "=h:8476,h:8477, TPU_WORKER_ID=0"),
    "slices": ({**KAGGLE, "MEGASCALE_NUM_SLICES": "3"}, "3 processes: TPU_PROCESS_ADDRESSES=local, TPU_WORKER_ID=0, M"),
}


def set_environment(monkeypatch, values):
    for name in list(os.environ):
        if name.startswith(NAMES):
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
    with joined_processes(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id, heartbeat_timeout_s=10
    ):
        return calls[0] if calls else None


@pytest.mark.parametrize("name", ALONE)
def test_one_host_is_alone_and_nobody_is_asked(monkeypatch, name):
    assert join(monkeypatch, ALONE[name], NoServer("metadata.google.internal")) is None


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
        NoServer("http://metadata.google.internal: Max retries exceeded"),
        SlowServer("Read timed out."),
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
    for environment in (environment for environment, _ in SEVERAL.values()):
        assert join(monkeypatch, environment, NoServer(), num_processes=1) is None
        assert join(monkeypatch, environment, NoServer(), num_processes=1, process_id=0, coordinator="h:1") is None
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


# In separate processes, with JAX itself.


def start(code: str, environment: dict[str, str]) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*running: subprocess.Popen) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each process."""
    try:
        return [(process.returncode, *texts) for process in running for texts in [process.communicate(timeout=LIMIT_S)]]
    finally:
        for process in running:
            process.kill()


def command(
    body="print('processes', jax.process_count())",
    *,
    quiet_s: float = 100,
    limit_s: int = 200,
    together_s: int = 100,
    **options,
):
    """A command that prints the number of processes or runs other code, with these limits and trainer options."""
    arguments = ["command", "--config", "configs/tiny.py"]
    arguments += [f"--config.trainer.{name}={value}" for name, value in options.items()]
    return (
        "import time\nimport jax\nfrom dapo_jax.command.command_line import command\n"
        "from dapo_jax.errors import InputError\nfrom dapo_jax.parallel import endings, processes\n"
        f"processes.QUIET_S, processes.JOIN_TIMEOUT_S, endings.TOGETHER_S = {quiet_s}, {limit_s}, {together_s}\n"
        f"with command({arguments}):\n    {body}"
    )


def test_on_kaggles_tpu_machine_a_command_starts_alone():
    # JAX_FORCE_TPU_INIT makes JAX treat this host as a TPU machine. It queries a metadata server that does not exist.
    environment = {**KAGGLE, "JAX_FORCE_TPU_INIT": "1", "GCE_METADATA_IP": f"127.0.0.1:{free_port()}"}
    [(_, _, unguarded), (code, output, errors)] = finish(
        start("import jax\njax.distributed.initialize()", environment), start(command(), environment)
    )
    assert "ConnectionError" in unguarded or "requests" in unguarded, unguarded
    assert (code, output, errors) == (0, "processes 1\n", "")


# Processes wait for each other only as long as JAX needs to find the address of process 0.
AT_ONCE = """
import threading, time, types
from dapo_jax.parallel import processes

class Joined(threading.Event):
    def wait(self, timeout=None):
        while processes.waiting_for() == "JAX looks for process 0":
            time.sleep(0.05)
        return False

processes.threading = types.SimpleNamespace(Event=Joined, Thread=threading.Thread)
"""


def test_processes_that_do_not_find_each_other_end_with_the_addresses():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    given = [{"coordinator": address, "num_processes": 2, "process_id": i} for i, address in enumerate(addresses)]
    port = free_port()
    by_slurm = {**slurm(2, "localhost"), "SLURM_PROCID": "1", "JAX_COORDINATOR_PORT": str(port)}
    running = [start(AT_ONCE + command(limit_s=2, **values), {}) for values in given]
    ended = finish(*running, start(AT_ONCE + command(limit_s=2), by_slurm))
    waits = (
        f"process 0 waits at {addresses[0]} for the others",
        f"process 1 does not reach process 0 at {addresses[1]} (",
        f"process 1 does not reach process 0 at localhost:{port} (",
    )
    for (code, output, errors), wait in zip(ended, waits, strict=True):
        assert code == 2 and output == "", errors
        first, last = errors.splitlines()
        assert first.startswith(f"dapo_jax: waiting up to 2 s: {wait}")
        assert last.startswith(f"dapo_jax: cannot join the other processes of this run: after 2 s, {wait}")
        assert last.endswith("trainer.num_processes=1 starts this process alone")
    assert "2 processes: SLURM_NTASKS=2, SLURM_PROCID=1, SLURM_STEP_NODELIST=localhost" in ended[2][2]


def test_tasks_of_slurm_join():
    environment = {**slurm(2, "localhost"), "JAX_COORDINATOR_PORT": str(free_port())}
    ended = finish(*(start(command(), {**environment, "SLURM_PROCID": str(i)}) for i in range(2)))
    assert [(code, output.splitlines()[-1]) for code, output, _ in ended] == [(0, "processes 2")] * 2, ended


def test_one_that_fails_is_named_by_the_others():
    """On one CPU, fetching from a failed gather raises ValueError, which is not wrong input."""
    environment = {"JAX_NUM_CPU_DEVICES": "1"}
    given = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    gathers = "[processes.gather('x' * length) for length in (1, 5000, 1)]"
    fails = "processes.gather('x'); 1 / 0"
    running = [
        start(command(body, together_s=1, process_id=process, **given), environment)
        for process, body in enumerate((gathers, fails))
    ]
    (code, _, errors), (other_code, _, other_errors) = finish(*running)
    assert (code, other_code) == (1, 1) and "ZeroDivisionError" in other_errors, errors + other_errors
    assert "JAX cannot continue: " in errors and "this is a bug" not in errors
    assert errors.splitlines()[-1] == "dapo_jax: process 1 has failed: division by zero"


def test_when_all_fail_each_tells_its_reason():
    """If process 0 ended first, JAX would abort the other, whichever is slower."""
    for slower in (0, 1):
        given = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
        fails = "raise InputError('no such file')"
        bodies = [f"processes.gather(1); time.sleep({2 * (process == slower)}); {fails}" for process in (0, 1)]
        running = [start(command(body, process_id=process, **given), {}) for process, body in enumerate(bodies)]
        for process, (code, _, errors) in enumerate(finish(*running)):
            assert (code, errors.splitlines()[-1:]) == (2, [f"dapo_jax: no such file (process {process})"]), errors
