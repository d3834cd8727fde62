"""Launchers and the container file: linted, and run against commands that stand in for gcloud and Slurm."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
LAUNCH = SCRIPTS / "launch"
TOOLS = Path(sys.executable).parent
NAMES = ["host-0", "host-1"]
PAGE = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/pods.md").read_text(), re.M | re.S)

# Stands in for `gcloud compute tpus tpu-vm`: a worker is a folder, its shell a bash whose home is that folder.
GCLOUD = """
import json, os, shutil, subprocess, sys
from pathlib import Path

root = Path(__file__).parents[1]
with open(root / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
flags = dict(argument[2:].split("=", 1) for argument in sys.argv if argument.startswith("--"))
homes = sorted(root.glob("host-*"))
for home in homes if flags["worker"] == "all" else [homes[int(flags["worker"])]]:
    if sys.argv[4] == "scp":
        shutil.copy(sys.argv[5], home)
    else:
        path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "HOME": str(home), "HOSTNAME": home.name, "PATH": path}
        subprocess.run(["bash", "-c", flags["command"]], cwd=home, env=env, check=True)
"""

# Stands in for the Python of a worker: prints its arguments, one a line, and runs until SIGTERM.
TRAINING = """
[[ -e ~/deaf ]] && trap '' TERM || trap 'echo checkpoint written; exit 0' TERM
printf '<%s>\\n' "$@"
while :; do sleep 0.05; done
"""


def script(path: Path, text: str, interpreter: str = "/usr/bin/env bash") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)


class Pod:
    """Two workers and the launcher that talks to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.homes = [root / name for name in NAMES]
        script(root / "bin/gcloud", GCLOUD, sys.executable)
        for home in self.homes:
            script(home / "dapo_jax/venv/bin/python", TRAINING)
            script(home / "bin/python3", 'echo "$PWD $*" >>~/python3.log')
            (home / "dapo_jax/source").mkdir()

    def launch(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {"TPU_NAME": "slice", "ZONE": "zone-a", **variables}
        command = ["bash", str(LAUNCH / "launch_tpu_vm.sh"), *arguments]
        env = {**os.environ, "PATH": path, **variables}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    def calls(self) -> list[list[str]]:
        file = self.root / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pids(self) -> list[int]:
        return [int((home / "dapo_jax/train.pid").read_text()) for home in self.homes]

    def output(self) -> list[str]:
        return [(home / "dapo_jax/train.out").read_text() for home in self.homes]


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    for file in tmp_path.glob("host-*/dapo_jax/train.pid"):
        if runs(pid := int(file.read_text())):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether a stand-in for training has this number and has not ended."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.exists() and b"dapo_jax.train" in file.read_bytes()


def block(name: str) -> str:
    """The commands of docs/pods.md that speak of `name`."""
    [found] = [block for block in PAGE if name in block]
    return found


def shell(commands: str, folder: Path, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs commands in `folder` as someone would type them, with the commands of `tools` before others."""
    env = {name: value for name, value in os.environ.items() if name not in ("TPU_NAME", "ZONE", "PROJECT")}
    env |= {"PATH": f"{tools}{os.pathsep}{env['PATH']}", **variables}
    command = ["bash", "-euc", commands]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def test_every_shell_script_passes_shellcheck():
    files = [str(path.relative_to(ROOT)) for pattern in ("*.sh", "*.sbatch") for path in sorted(SCRIPTS.rglob(pattern))]
    assert {"scripts/launch/launch_tpu_vm.sh", "scripts/launch/slurm_gpu.sbatch"} <= set(files)
    command = [str(TOOLS / "shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", *files, ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkout_is_installed_on_every_worker(pod):
    done = pod.launch("install", PROJECT="research", TMPDIR=str(pod.root))
    assert done.returncode == 0, done.stderr
    copy, unpack, install = pod.calls()
    assert [call[:4] for call in (copy, unpack, install)] == [
        ["compute", "tpus", "tpu-vm", verb] for verb in ("scp", "ssh", "ssh")
    ]
    assert all({"--worker=all", "--zone=zone-a", "--project=research"} <= set(call) for call in pod.calls())
    assert copy[5] == "slice:" and unpack[4] == install[4] == "slice"
    for home in pod.homes:
        assert (home / "dapo_jax/source/dapo_jax/train.py").read_bytes() == (ROOT / "dapo_jax/train.py").read_bytes()
        assert not list(home.glob("*.tar.gz"))
        calls = (home / "python3.log").read_text().splitlines()
        assert [call.split(" ")[0] for call in calls] == [str(home / "dapo_jax")] * 3
        assert calls[-1].endswith(" -m uv pip install --quiet --python venv/bin/python --editable ./source[tpu,gcs]")
    assert not list(pod.root.glob("tmp*"))


def test_a_repository_is_installed_at_a_revision_and_again_at_another(pod):
    repository = pod.root / "repository"

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, "-C", str(repository), *arguments], check=True, capture_output=True)

    repository.mkdir()
    git("init", "--initial-branch=main")
    for tag in ("first", "second"):
        (repository / "setup.py").write_text(tag)
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)
    kept = pod.homes[0] / "dapo_jax/source/runs/metrics.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    for arguments, text in ((("first",), "first"), ((), "second")):
        done = pod.launch("install", str(repository), *arguments)
        assert done.returncode == 0, done.stderr
        assert [(home / "dapo_jax/source/setup.py").read_text() for home in pod.homes] == [text, text]
    assert kept.exists()


def test_training_starts_once_on_every_worker_and_stops_at_sigterm(pod):
    options = ["--config", "configs/tiny.py", "--config.data.train_files=('a b.parquet',)", "--config.workdir=/x/$y"]
    started = pod.launch("run", *options)
    assert started.returncode == 0, started.stderr
    first = pod.pids()
    assert len(set(first)) == 2 and all(map(runs, first))
    assert started.stdout.splitlines() == [
        f"{name}: started process {pid}" for name, pid in zip(NAMES, first, strict=True)
    ]
    expected = "".join(f"<{argument}>\n" for argument in ["-m", "dapo_jax.train", *options])
    wait_until(lambda: pod.output() == [expected] * 2)

    again = pod.launch("run", *options)
    assert again.returncode != 0 and "is already training" in again.stderr and pod.pids() == first

    logs = pod.launch("logs").stdout.splitlines()
    assert logs == [f"{name}: {line}" for name in NAMES for line in expected.splitlines()]

    stopped = pod.launch("stop")
    assert stopped.stdout.splitlines() == [
        f"{name}: stopped process {pid}" for name, pid in zip(NAMES, first, strict=True)
    ]
    assert not any(map(runs, first)) and all(text.endswith("checkpoint written\n") for text in pod.output())
    assert pod.launch("stop").stdout.splitlines() == [f"{name}: no process is training" for name in NAMES]

    assert pod.launch("run", *options).returncode == 0
    assert not set(first) & set(pod.pids()) and all(map(runs, pod.pids()))
    assert all(text.startswith(expected + "checkpoint written\n") for text in pod.output())


def test_training_that_does_not_stop_is_killed(pod):
    (pod.homes[1] / "deaf").touch()
    script(pod.homes[1] / "bin/sleep", "")  # there time passes at once
    assert pod.launch("run").returncode == 0
    pids = pod.pids()
    wait_until(lambda: all(pod.output()))
    stopped = pod.launch("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[0] == f"host-0: stopped process {pids[0]}"
    assert stopped.stdout.splitlines()[1].startswith(f"host-1: killed process {pids[1]}")
    wait_until(lambda: not runs(pids[1]))


def test_another_process_with_the_number_of_an_earlier_one_is_left_alone(pod):
    with subprocess.Popen(["sleep", "60"]) as other:
        for home in pod.homes:
            (home / "dapo_jax/train.pid").write_text(str(other.pid))
        assert pod.launch("stop").stdout.splitlines() == [f"{name}: no process is training" for name in NAMES]
        assert other.poll() is None
        other.kill()


def test_one_worker_is_followed_and_commands_are_run_as_given(pod):
    script(pod.homes[1] / "bin/tail", 'printf "<%s>" "$@"')
    assert pod.launch("logs", "1").stdout == "<-n><100><-F><train.out>"
    assert "--worker=1" in pod.calls()[-1]
    assert pod.launch("exec", 'echo "$HOSTNAME in $HOME"').stdout.splitlines() == [
        f"{home.name} in {home}" for home in pod.homes
    ]


def test_the_way_to_a_tpu_vm_is_as_the_page_says(pod):
    script(pod.root / "bin/ssh-add", 'echo "$@"')
    for home in pod.homes:
        script(home / "bin/sudo", 'echo "$@" >>~/sudo.log')
    done = shell(block("launch_tpu_vm.sh"), ROOT, pod.root / "bin", TMPDIR=str(pod.root))
    assert done.returncode == 0, done.stderr
    for home in pod.homes:
        assert (home / "sudo.log").read_text().splitlines()[1:] == ["mkdir -p /shared", "mount 10.0.0.2:/share /shared"]
        assert [f"{home.name}: {what} process" in done.stdout for what in ("started", "stopped")] == [True, True]
    assert all("--zone=europe-west4-b" in call and "my-slice" in str(call) for call in pod.calls())
    assert not any(map(runs, pod.pids()))


@pytest.mark.parametrize("arguments", [(), ("start",), ("exec",)])
def test_a_command_it_does_not_know_touches_no_worker(pod, arguments):
    done = pod.launch(*arguments)
    assert done.returncode == 2 and "launch_tpu_vm.sh install" in done.stderr and pod.calls() == []


def test_a_tpu_must_be_named(pod):
    assert pod.launch("logs", TPU_NAME="").returncode == pod.launch("logs", ZONE="").returncode == 2
    assert pod.calls() == []


@pytest.fixture
def cluster(tmp_path):
    """A folder with commands that stand in for Slurm's; the step runs until scancel, or ends with `status` at once."""
    for name in ("scontrol", "scancel", "srun"):
        script(tmp_path / name, f'printf "{name}"  >>"$CALLS"; printf " <%s>" "$@" >>"$CALLS"; echo >>"$CALLS"\n')
    with open(tmp_path / "scancel", "a") as file:
        file.write('touch "$CALLS.cancelled"\n')
    with open(tmp_path / "srun", "a") as file:
        file.write('[[ -n "${STATUS:-}" ]] && exit "$STATUS"\n')
        file.write(
            'until [[ -e "$CALLS.cancelled" ]]; do sleep 0.05; done\nsleep 0.2\necho step over >>"$CALLS"\nexit 143\n'
        )
    return tmp_path


def submit(cluster: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    env = {**os.environ, "CALLS": str(cluster / "calls"), "PATH": f"{cluster}{os.pathsep}{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "8", "PYTHON": "python3", **variables}
    return subprocess.Popen(["bash", str(LAUNCH / "slurm_gpu.sbatch"), *arguments], env=env)


STEP = "srun <--kill-on-bad-exit=1> <--label> <--cpus-per-task=8> <python3> <-m> <dapo_jax.train>"


@pytest.mark.parametrize("status", [0, 3])
def test_a_slurm_job_is_one_step_and_ends_as_it_ends(cluster, status):
    assert submit(cluster, "--config", "a b", STATUS=str(status)).wait(LIMIT_S) == status
    assert (cluster / "calls").read_text() == f"{STEP} <--config> <a b>\n"


def test_a_slurm_job_out_of_time_stops_training_and_is_requeued(cluster):
    job, calls = submit(cluster), cluster / "calls"
    wait_until(calls.exists)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT_S) == 0
    assert [line.rstrip(" <>") for line in calls.read_text().splitlines()] == [
        STEP.rstrip(" <>"),
        "scancel <--signal=TERM> <42",
        "step over",
        "scontrol <requeue> <42",
    ]


def test_a_slurm_job_without_an_environment_is_refused(cluster):
    assert submit(cluster, PYTHON="no-such-python").wait(LIMIT_S) == 2
    assert not (cluster / "calls").exists()


def test_the_way_to_slurm_is_as_the_page_says(cluster):
    (cluster / "scripts").symlink_to(SCRIPTS)
    script(cluster / "python3.12", "mkdir -p $3/bin; cp $0 $3/bin/python; cp $(dirname $0)/pip $3/bin")
    script(cluster / "pip", 'echo "pip $*" >>"$CALLS"')
    script(cluster / "sbatch", 'echo "sbatch $1" >>"$CALLS"; shift; exec bash "$@"')
    done = shell(block("sbatch"), cluster, cluster, CALLS=str(cluster / "calls"), STATUS="0", SLURM_CPUS_PER_TASK="8")
    assert done.returncode == 0, done.stderr
    install, submitted, step = (cluster / "calls").read_text().splitlines()
    assert install == "pip install -e .[cuda12]" and '"cuda12": [' in (ROOT / "setup.py").read_text()
    assert submitted == "sbatch --nodes=2"
    options = "<--config> <configs/dapo_qwen2.5_7b_math.py> <--config.workdir=/shared/runs/math> <--config.mesh.fsdp=4>"
    assert step == f"{STEP.replace('python3', '.venv/bin/python')} {options}"


def test_slurm_is_asked_for_a_process_per_gpu_that_sees_all_gpus():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (LAUNCH / "slurm_gpu.sbatch").read_text(), re.M))
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}" and "gpus-per-task" not in options
    assert options["signal"] == "B:USR1@120" and "requeue" in options and options["open-mode"] == "append"


def test_the_jobset_has_a_pod_per_host_of_its_slice_and_restarts_whole():
    jobset = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    [job] = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert job["replicas"] == 1 and spec["backoffLimit"] == 0 and spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    topology = [int(size) for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")]
    chips = topology[0] * topology[1] * topology[2]
    assert "cloud.google.com/gke-tpu-accelerator" in pod["nodeSelector"] and pod["restartPolicy"] == "Never"
    assert spec["parallelism"] == spec["completions"] == chips / container["resources"]["limits"]["google.com/tpu"]

    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"] and "persistentVolumeClaim" in volume
    options = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert (ROOT / options["config"]).exists() and options["config.workdir"].startswith(mount["mountPath"])


def test_the_way_to_gke_is_as_the_page_says(tmp_path):
    for tool in ("docker", "kubectl"):
        script(tmp_path / tool, f'echo "{tool} $*" >>"$CALLS"')
    assert shell(block("kubectl"), ROOT, tmp_path, CALLS=str(tmp_path / "calls")).returncode == 0
    build, push, apply = (tmp_path / "calls").read_text().splitlines()
    manifest = yaml.safe_load((ROOT / apply.removeprefix("kubectl apply -f ")).read_text())
    [job] = manifest["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    assert build == f"docker build --build-arg EXTRA=tpu -t {container['image']} ."
    assert push == f"docker push {container['image']}"


def test_the_container_file_passes_hadolint():
    done = subprocess.run([str(TOOLS / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_holds_files_that_exist_and_does_not_run_as_root():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    sources = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in sources)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert sent[0] == "*"
    assert all({f"!{name}", f"!{name.split('/')[0]}"} & set(sent) for name in sources)
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000"
    [extra] = [line.removeprefix("ARG EXTRA=") for line in lines if line.startswith("ARG EXTRA=")]
    setup = (ROOT / "setup.py").read_text()
    assert f'"{extra}": [' in setup and '"gcs": [' in setup and any('".[$EXTRA,gcs]"' in line for line in lines)
