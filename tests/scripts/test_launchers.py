"""Launchers and the container file: linted, and run against commands that stand in for gcloud and Slurm."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts.stand_ins import call, calls_of, stand_in, start
from waiting import LIMIT_S, wait_until

from dapo_jax.command.command_line import read_config
from dapo_jax.data.published import FILES

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
LAUNCH = SCRIPTS / "launch"
JOBSET = LAUNCH / "gke_jobset.yaml"
TOOLS = Path(sys.executable).parent
NAMES = ["host-0", "host-1"]
PAGE = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/scaling.md").read_text(), re.M | re.S)

# Stands in for `gcloud compute tpus tpu-vm`: a worker is a folder, its shell a bash whose home is that folder.
GCLOUD = """
for argument; do
  case $argument in
    --command=*) command=${argument#*=} ;;
    --worker=*) worker=${argument#*=} ;;
  esac
done
for home in "${CALLS%/bin/calls}"/host-${worker/all/*}; do
  if [[ $4 == scp ]]; then
    cp "$5" "$home"
  else
    (cd "$home" && HOME=$home HOSTNAME=${home##*/} PATH="$home/bin:$PATH" bash -c "$command") || exit
  fi
done
"""

# Stands in for the Python of a worker: prints its arguments, one a line, and runs until SIGTERM.
TRAINING = """
[[ -e ~/deaf ]] && trap '' TERM || trap 'echo checkpoint written; exit 0' TERM
printf '<%s>\\n' "$@"
while :; do sleep 0.05; done
"""


class Pod:
    """Two workers and the launcher that talks to them."""

    def __init__(self, root: Path) -> None:
        self.tools, self.homes = root / "bin", [root / name for name in NAMES]
        stand_in(self.tools / "gcloud", GCLOUD)
        for home in self.homes:
            stand_in(home / "dapo_jax/venv/bin/python", TRAINING)
            stand_in(home / "bin/python3", 'echo "$PWD $*" >>~/python3.log')
            (home / "dapo_jax/source").mkdir()

    def launch(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"TPU_NAME": "slice", "ZONE": "zone-a", **variables}
        return call(LAUNCH / "launch_tpu_vm.sh", *arguments, folder=ROOT, tools=self.tools, **variables)

    def texts(self, name: str) -> list[str]:
        return [(home / "dapo_jax" / name).read_text() for home in self.homes]

    def pids(self) -> list[int]:
        return list(map(int, self.texts("train.pid")))


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
    """The commands of docs/scaling.md that speak of `name`."""
    [found] = [block for block in PAGE if name in block]
    return found


def said(what: str, pids: list[int]) -> list[str]:
    return [f"{name}: {what} process {pid}" for name, pid in zip(NAMES, pids, strict=True)]


def test_every_shell_script_passes_shellcheck():
    files = [str(path.relative_to(ROOT)) for pattern in ("*.sh", "*.sbatch") for path in sorted(SCRIPTS.rglob(pattern))]
    assert {"scripts/launch/launch_tpu_vm.sh", "scripts/launch/slurm_gpu.sbatch"} <= set(files)
    command = [str(TOOLS / "shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", *files, ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_way_to_a_tpu_vm_is_as_the_page_says(pod, tmp_path):
    """From a small checkout, of which workers get what git tracks, what is new, and nothing that git ignores."""
    stand_in(pod.tools / "ssh-add")
    for home in pod.homes:
        stand_in(home / "bin/sudo", 'echo "$@" >>~/sudo.log')
    checkout, temporary = tmp_path / "checkout", tmp_path / "temporary"
    for name, text in {"tracked.py": "1", "new.py": "2", "build/large": "3", ".gitignore": "build"}.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    (checkout / "scripts").symlink_to(SCRIPTS)
    temporary.mkdir()
    subprocess.run("git init --quiet && git add tracked.py", cwd=checkout, shell=True, check=True)
    variables = {"TMPDIR": str(temporary), "PROJECT": "research"}
    done = call("-euc", block("launch_tpu_vm.sh"), folder=checkout, tools=pod.tools, **variables)
    assert done.returncode == 0, done.stderr
    for home in pod.homes:
        sent = {path.name for path in (home / "dapo_jax/source").iterdir()}
        assert sent == {"tracked.py", "new.py", ".gitignore", "scripts", "data"}  # a link to /shared
        assert not list(home.glob("*.tar.gz"))
        assert (home / "sudo.log").read_text().splitlines()[1:] == ["mkdir -p /shared", "mount 10.0.0.2:/share /shared"]
        calls = (home / "python3.log").read_text().splitlines()
        assert [one.split(" ")[0] for one in calls] == [str(home / "dapo_jax")] * 3
        assert calls[-1].endswith(" -m uv pip install --quiet --python venv/bin/python --editable ./source[tpu,gcs]")
    assert set(said("started", pod.pids()) + said("stopped", pod.pids())) <= set(done.stdout.splitlines())
    assert not any(map(runs, pod.pids())) and not list(temporary.iterdir())
    calls = "\n".join(calls_of(pod.tools)).split("gcloud <compute> <tpus> <tpu-vm> ")[1:]
    assert [one.split()[0] for one in calls] == ["<ssh>", "<scp>", *["<ssh>"] * 6]
    flags = ["my-slice", "<--worker=all>", "<--zone=europe-west4-b>", "<--project=research>"]
    assert all(flag in one for flag in flags for one in calls)


def test_a_repository_is_installed_at_a_revision_and_again_at_another(pod, tmp_path):
    repository = tmp_path / "repository"
    commit = "git -c user.name=n -c user.email=e commit --quiet -m text && git tag"
    commands = [f"echo {tag} >setup.py; git add . && {commit} {tag}" for tag in ("first", "second")]
    repository.mkdir()
    subprocess.run("; ".join(["git init --quiet", *commands]), cwd=repository, shell=True, check=True)
    kept = pod.homes[0] / "dapo_jax/source/runs/metrics.jsonl"
    kept.parent.mkdir()
    kept.write_text("{}")
    for arguments, text in ((("first",), "first\n"), ((), "second\n")):
        done = pod.launch("install", str(repository), *arguments)
        assert done.returncode == 0, done.stderr
        assert pod.texts("source/setup.py") == [text, text]
    assert kept.exists()


def test_training_starts_once_on_every_worker_and_stops_at_sigterm(pod):
    options = ["--config", "configs/tiny.py", "--config.data.train_files=('a b.parquet',)", "--config.workdir=/x/$y"]
    started, first = pod.launch("run", *options), pod.pids()
    assert len(set(first)) == 2, started.stderr
    wait_until(lambda: all(map(runs, first)))  # each is a shell before it is the training
    assert started.stdout.splitlines() == said("started", first)
    expected = "".join(f"<{argument}>\n" for argument in ["-m", "dapo_jax.train", *options])
    wait_until(lambda: pod.texts("train.out") == [expected] * 2)

    again = pod.launch("run", *options)
    assert again.returncode != 0 and "is already training" in again.stderr and pod.pids() == first

    logs = pod.launch("logs").stdout.splitlines()
    assert logs == [f"{name}: {line}" for name in NAMES for line in expected.splitlines()]
    stand_in(pod.homes[1] / "bin/tail", 'printf "<%s>" "$@"')
    assert pod.launch("logs", "1").stdout == "<-n><100><-F><train.out>", "one worker is followed"

    assert pod.launch("stop").stdout.splitlines() == said("stopped", first)
    assert not any(map(runs, first)) and all(text.endswith("checkpoint written\n") for text in pod.texts("train.out"))
    with subprocess.Popen(["sleep", "60"]) as other:  # which has got the number of the first process since
        for home in pod.homes:
            (home / "dapo_jax/train.pid").write_text(str(other.pid))
        assert pod.launch("stop").stdout.splitlines() == [f"{name}: no process is training" for name in NAMES]
        assert other.poll() is None
        other.kill()

    assert pod.launch("run", *options).returncode == 0
    assert not set(first) & set(pod.pids())
    wait_until(lambda: all(map(runs, pod.pids())))
    assert all(text.startswith(expected + "checkpoint written\n") for text in pod.texts("train.out"))


def test_commands_are_run_as_given_and_training_that_does_not_stop_is_killed(pod):
    where = [f"{home.name} in {home}" for home in pod.homes]
    assert pod.launch("exec", 'echo "$HOSTNAME in $HOME"').stdout.splitlines() == where
    (pod.homes[1] / "deaf").touch()
    stand_in(pod.homes[1] / "bin/sleep")  # there time passes at once
    assert pod.launch("run").returncode == 0
    pids = pod.pids()
    wait_until(lambda: all(pod.texts("train.out")))
    first, second = pod.launch("stop", "20").stdout.splitlines()
    assert [first, second.partition(", which ran for 20 s")[0]] == [
        f"host-0: stopped process {pids[0]}",
        f"host-1: killed process {pids[1]}",
    ]
    wait_until(lambda: not runs(pids[1]))


def test_without_a_known_command_and_a_tpu_no_worker_is_touched(pod):
    wrong = [pod.launch(), pod.launch("start"), pod.launch("exec"), pod.launch("logs", TPU_NAME="")]
    for done in [*wrong, pod.launch("logs", ZONE="")]:
        assert done.returncode == 2 and "launch_tpu_vm.sh install" in done.stderr
    assert calls_of(pod.tools) == []


@pytest.fixture
def cluster(tmp_path):
    """A folder with commands that stand in for Slurm's; the step runs until scancel, or ends with `status` at once."""
    stand_in(tmp_path / "scontrol")
    stand_in(tmp_path / "scancel", 'touch "$CALLS.cancelled"')
    until = 'until [[ -e "$CALLS.cancelled" ]]; do sleep 0.05; done; sleep 0.2; echo step over >>"$CALLS"; exit 143'
    stand_in(tmp_path / "srun", f'[[ -n "${{STATUS:-}}" ]] && exit "$STATUS"; {until}')
    return tmp_path


JOB = {"SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "8"}
STEP = "srun <--kill-on-bad-exit=1> <--label> <--cpus-per-task=8> <python3> <-m> <dapo_jax.train>"


def test_a_slurm_job_is_one_step_and_ends_as_it_ends(cluster):
    def submit(**variables):
        options = LAUNCH / "slurm_gpu.sbatch", "--config", "a b"
        return call(*options, folder=cluster, tools=cluster, **JOB, **variables).returncode

    assert submit(PYTHON="no-such-python") == 2 and calls_of(cluster) == []
    assert submit(PYTHON="python3", STATUS="3") == 3 and calls_of(cluster) == [f"{STEP} <--config> <a b>"]


def test_a_slurm_job_out_of_time_stops_training_and_is_requeued(cluster):
    job = start(LAUNCH / "slurm_gpu.sbatch", folder=cluster, tools=cluster, PYTHON="python3", **JOB)
    wait_until((cluster / "calls").exists)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=LIMIT_S)
    stopped = ["scancel <--signal=TERM> <42>", "step over", "scontrol <requeue> <42>"]
    assert job.returncode == 0 and calls_of(cluster) == [STEP, *stopped]


def test_the_way_to_slurm_is_as_the_page_says(cluster):
    (cluster / "scripts").symlink_to(SCRIPTS)
    stand_in(cluster / "python3.12", "mkdir -p $3/bin; cp $0 $3/bin/python; cp ${0%/*}/{pip,dapo-jax} $3/bin")
    stand_in(cluster / "pip")
    stand_in(cluster / "dapo-jax")
    stand_in(cluster / "sbatch", 'shift; exec bash "$@"')
    done = call("-euc", block("sbatch"), folder=cluster, tools=cluster, STATUS="0", **JOB)
    assert done.returncode == 0, done.stderr
    _, install, data, _, submitted, step = calls_of(cluster)
    assert install == "pip <install> <-e> <.[cuda13]>"
    assert data == "dapo-jax <data> <dapo-math-17k>"
    assert submitted.startswith("sbatch <--nodes=2> ")
    options = "<--config> <configs/dapo_qwen2.5_7b_math.py> <--config.workdir=/shared/runs/math> <--config.mesh.fsdp=4>"
    assert step == f"{STEP.replace('python3', '.venv/bin/python')} {options}"


def test_the_way_on_one_node_is_as_the_page_says(tmp_path):
    """Each command is found where the page has installed it, and takes what those before it have made."""
    page = (ROOT / "docs/one_node.md").read_text()
    config = read_config(["train", "--config", "dapo_qwen2.5_7b_math"])
    make = "mkdir -p $3/bin; : >$3/bin/activate; for one in pip vllm; do cp ${0%/*}/stand-in $3/bin/$one; done"
    for tool in ("stand-in", "nvidia-smi", "pip", "hf", "dapo-jax", "ssh", "curl"):
        stand_in(tmp_path / tool)
    stand_in(tmp_path / "python3.12", make)
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S))
    done = call("-euc", commands.replace(" &\n", "\n"), folder=tmp_path, tools=tmp_path)  # calls in their order
    assert done.returncode == 0, done.stderr
    calls = [" ".join(re.findall("<(.*?)>", one)) for one in calls_of(tmp_path)]
    assert f"download {config.model.path}" in calls
    made = {f"data/{file}" for one in calls if one.startswith("data ") for file in FILES[one.split()[1]]}
    assert made == {*config.data.train_files, *config.data.val_files}
    used = [re.search(r"--config (\S+)", one)[1] for one in calls if "--config " in one]
    assert used == ["dapo_qwen2.5_7b_math", "gsm8k", "dapo_qwen2.5_7b_math", "dapo_qwen2.5_7b_math"]
    [model] = [one.split()[-1] for one in calls if one.startswith("export ")]
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert f'serve {model} --hf-overrides {{"max_position_embeddings": {longest}}}' in calls
    assert f'"model": "{model}"' in calls[-1] and f'from_pretrained("{model}"' in page
    [forecast] = re.findall(r"^    (It fits: .*)$", page, re.M)
    assert forecast in (ROOT / "docs/results/preflight.md").read_text()


def test_slurm_is_asked_for_a_process_per_gpu_that_sees_all_gpus():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (LAUNCH / "slurm_gpu.sbatch").read_text(), re.M))
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}" and "gpus-per-task" not in options
    assert options["signal"] == "B:USR1@120" and "requeue" in options and options["open-mode"] == "append"


def test_the_jobset_has_a_pod_per_host_of_its_slice_and_restarts_whole():
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    [job] = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert job["replicas"] == 1 and spec["backoffLimit"] == 0 and spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert "cloud.google.com/gke-tpu-accelerator" in pod["nodeSelector"] and pod["restartPolicy"] == "Never"
    assert spec["parallelism"] == spec["completions"] == chips / container["resources"]["limits"]["google.com/tpu"]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"] and "persistentVolumeClaim" in volume
    options = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert (ROOT / options["config"]).exists() and options["config.workdir"].startswith(mount["mountPath"])


def test_the_way_to_gke_is_as_the_page_says(tmp_path):
    for tool in ("docker", "kubectl"):
        stand_in(tmp_path / tool)
    assert call("-euc", block("kubectl"), folder=ROOT, tools=tmp_path).returncode == 0
    [image] = re.findall(r"^ +image: (\S+)", JOBSET.read_text(), re.M)
    build = f"docker <build> <--build-arg> <EXTRA=tpu> <-t> <{image}> <.>"
    apply = f"kubectl <apply> <-f> <{JOBSET.relative_to(ROOT)}>"
    assert calls_of(tmp_path) == [build, f"docker <push> <{image}>", apply]


def test_the_container_is_linted_holds_files_that_exist_and_does_not_run_as_root():
    done = subprocess.run([str(TOOLS / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
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
