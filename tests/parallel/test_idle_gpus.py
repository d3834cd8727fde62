import jax
import pytest
from shapes import ARCH
from small_run import small_config

from dapo_jax.parallel import platforms as module
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.platforms import gpus_of_host, idle_gpus
from dapo_jax.run import parts as run

LISTED = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)"


@pytest.fixture
def path(tmp_path):
    """A folder with an nvidia-smi that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --list-gpus ] && echo "{LISTED}"\n')
    program.chmod(0o755)
    return str(tmp_path)


def test_what_names_the_gpus_of_a_host(path):
    assert gpus_of_host({"PATH": "/nowhere"}, 1) == {}
    assert gpus_of_host({"PATH": f"{path}:/bin"}, 1) == {"nvidia-smi": 2}
    of_slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "a100:2"}
    assert gpus_of_host({"PATH": "/nowhere", **of_slurm}, 3) == {"SLURM_GPUS_ON_NODE": 8, "SLURM_GPUS_PER_TASK": 6}
    for visible, count in {"0,1,2": 3, "GPU-12-1, GPU-3": 2, "0,-1,1": 1, "": 0, "-1": 0}.items():
        assert gpus_of_host({"PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": visible}, 1)["CUDA_VISIBLE_DEVICES"] == count


def test_gpus_that_no_process_of_the_host_uses_are_named(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node1")
    eight = {"PATH": "/nowhere", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    warning = idle_gpus(eight)
    assert warning and warning.startswith("JAX uses 1 of the 8 GPUs that SLURM_GPUS_ON_NODE names on node1: ")
    for processes in (1, 7, 8):  # on this host, plus one on another
        monkeypatch.setattr(module, "gather", lambda own, processes=processes: [own] * processes + [["node2", 8]])
        assert bool(idle_gpus(eight)) == (processes < 8)
    assert idle_gpus({"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(("platform", "data", "warns"), [("gpu", -1, True), ("gpu", 2, False), ("cpu", -1, False)])
def test_a_run_that_takes_all_devices_warns(monkeypatch, caplog, tmp_path, platform, data, warns):
    monkeypatch.setattr(run, "platform", lambda mesh: platform)
    monkeypatch.setattr(run, "idle_gpus", lambda: "JAX uses 1 of the 8 GPUs")
    mesh = make_mesh(2, 1, 1, jax.devices()[:2])
    config = small_config(tmp_path, **{"mesh.data": data, "mesh.fsdp": 1, "mesh.tensor": 1})
    run.report_devices(config, ARCH, mesh)
    assert [record.levelname for record in caplog.records if "1 of the 8" in record.message] == ["WARNING"] * warns
