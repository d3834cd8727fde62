"""What is read from and written to a bucket of Google Cloud Storage, here a directory of this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import jax
import pytest
from bucket import ADDRESS, make_bucket
from small_run import assert_as_undisturbed, assert_same_policy, rows_without_clock, small_config

from dapo_jax.command.validation import validate
from dapo_jax.config import places
from dapo_jax.config.places import address_problem, local_model, place_of
from dapo_jax.config.values import with_values
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.export.export import export
from dapo_jax.monitor.tensorboard import EVENTS
from dapo_jax.run.checkpoint import saved_steps
from dapo_jax.run.other_runs import find_trained
from dapo_jax.training.loop import train


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "CACHE", tmp_path / "cache")
    return make_bucket(tmp_path, monkeypatch)


def test_a_missing_package_is_named(tmp_path):
    if address_problem(ADDRESS) is None:
        pytest.skip("gcsfs is installed")
    cure = r"needs the package gcsfs: pip install 'dapo_jax\[gcs\]'"
    with pytest.raises(ValueError, match=cure):
        place_of(f"{ADDRESS}/run")
    config = small_config(tmp_path, **{"trainer.checkpoint_dir": f"{ADDRESS}/run", "data.val_files": ("s3://a/b",)})
    with pytest.raises(ValueError, match=rf"trainer.checkpoint_dir={ADDRESS}/run {cure}") as told:
        validate(config)
    assert "data.val_files=s3://a/b must be gs://BUCKET/NAME" in str(told.value)


def test_a_user_without_a_home_directory_can_import_and_is_told_what_needs_one():
    """Neither HOME nor an entry of this user: some containers."""
    code = "import os, pwd; os.environ.pop('HOME'); pwd.getpwuid = lambda _: {}[0]\n"
    code += (
        "from dapo_jax.hub.smollm2 import SMOLLM2\nfrom dapo_jax.config.places import local_model\nlocal_model(SMOLLM2)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "DAPO_JAX_CACHE"} | {"HOME": "/"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert "InputError: ~/.cache/dapo_jax" in done.stderr and "needs a home directory" in done.stderr


def test_listings_are_not_kept(bucket):
    """gcsfs does otherwise: a run did not see its own lock in a directory that it had listed before."""
    place_of(ADDRESS)
    assert fsspec.filesystem("gcs").storage_options["use_listings_cache"] is False


def test_a_model_is_copied_once_and_again_when_it_has_changed(bucket):
    (bucket / "model").mkdir()
    model = bucket / "model"
    for name in ("config.json", "a.safetensors", "pytorch_model.bin"):
        (model / name).write_text(name)
    address = f"{ADDRESS}/model"
    copy = local_model(address)
    assert sorted(path.name for path in copy.iterdir()) == ["a.safetensors", "config.json"]
    (copy / "config.json").write_text("CONFIG.JSON")  # to see whether it is copied
    os.utime(copy / "config.json", (0, int((model / "config.json").stat().st_mtime)))
    (model / "a.safetensors").rename(model / "b.safetensors")
    assert local_model(address) == copy and (copy / "config.json").read_text() == "CONFIG.JSON"
    assert sorted(path.name for path in copy.iterdir()) == ["b.safetensors", "config.json"]
    (model / "config.json").write_text("longer than before")
    assert (local_model(address) / "config.json").read_text() == "longer than before"
    (model / "tuned").mkdir()
    (model / "tuned" / "config.json").write_text("tuned")
    assert (local_model(f"{address}/tuned") / "config.json").read_text() == "tuned"
    assert (local_model(address) / "config.json").read_text() == "longer than before"
    with pytest.raises(ValueError, match="the model path gs://bucket/none does not exist"):
        local_model(f"{ADDRESS}/none")


def test_outputs_of_commands_are_not_written_to_a_directory_called_gs(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (export, bench):
        with pytest.raises(ValueError, match=f"--output={ADDRESS}/out must be a directory on this machine"):
            command(small_config(tmp_path), f"{ADDRESS}/out")


def test_a_copy_without_room_is_refused(bucket, monkeypatch):
    (bucket / "model").mkdir()
    (bucket / "model" / "config.json").write_text("weights")
    monkeypatch.setattr(places.shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(RuntimeError, match="0.00 GB are free: make room, or mount the bucket as a directory"):
        local_model(f"{ADDRESS}/model")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_are_read_from_a_bucket(bucket, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"prompt": "1 + 1 =", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    file = bucket / f"train.{suffix}"
    if suffix == "jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), file)
    rows = read_prompt_files([f"{ADDRESS}/train.{suffix}"])
    assert [(row.prompt, row.ground_truth) for row in rows] == [("1 + 1 =", "2")]
    with pytest.raises(ValueError, match=rf"prompt file {ADDRESS}/none.{suffix} does not exist"):
        read_prompt_files([f"{ADDRESS}/none.{suffix}"])


@pytest.mark.slow
def test_checkpoints_in_a_bucket(whole, bucket, tmp_path):
    config = small_config(tmp_path, **{"trainer.checkpoint_dir": f"{ADDRESS}/run/checkpoints", "trainer.save_freq": 1})
    train(with_values(config, {"trainer.total_training_steps": 2}))
    models = train(config)  # resumes
    assert saved_steps(f"{ADDRESS}/run/checkpoints")[-1] == 4 and (bucket / "run" / "checkpoints" / "4").is_dir()
    assert_as_undisturbed(models, tmp_path, whole, saved_in=bucket / "run")


@pytest.mark.slow
def test_a_run_in_a_bucket(whole, bucket, tmp_path):
    """Data, base model, workdir and checkpoints; the machine is lost between two starts."""
    export(small_config(whole[0]), bucket / "model", dtype="float32")
    address = f"{ADDRESS}/runs/10"
    config = small_config(address, **{"model.path": f"{ADDRESS}/model"})
    train(with_values(config, {"trainer.total_training_steps": 2}))
    assert not any(path.name.startswith("gs:") for path in (*tmp_path.iterdir(), *Path.cwd().iterdir()))
    shutil.rmtree(tmp_path / "cache")
    models = train(config)
    folder = bucket / "runs" / "10"
    events = {path.name for path in folder.glob(EVENTS)}
    names = {path.name for path in folder.iterdir()} - events
    of_config = {"config.json", "environment.json", "lock.2", "run_id"}
    assert names == {"checkpoints", "metrics.jsonl", "samples", "train.log"} | of_config
    local = train(small_config(tmp_path / "local", **{"model.path": str(bucket / "model")}))
    assert_same_policy(models, jax.device_get(local.actor.params))
    assert rows_without_clock(folder) == rows_without_clock(tmp_path / "local")
    assert len(events) == 2 and "resuming after step 2" in (folder / "train.log").read_text()
    trained = find_trained(address)
    assert trained is not None and trained.step == 4
    assert export(config, tmp_path / "exported") == 4
    with pytest.raises(ValueError, match="is in this run's own workdir"):
        train(with_values(config, {"model.path": address}))
