"""Models and data sets of a stand-in for the Hugging Face hub, as runs use them."""

import dataclasses
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Hub, directory, serving, unplug, use
from ports import free_port
from small_families import with_tokenizer
from small_run import small_config, sums
from test_export import hf_directory, save_checkpoint
from waiting import LIMIT_S

from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.data.columns import Columns
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.export.export import export
from dapo_jax.hub import client
from dapo_jax.hub.names import HubName, data_name, model_name
from dapo_jax.hub.repositories import fetch_model, model_at, pinned_name
from dapo_jax.monitor.recipe import write_config
from dapo_jax.preflight.report import read_shape
from dapo_jax.run.downloads import with_downloads
from dapo_jax.training.loop import train

MODEL, DATA = "someone/tiny-model", "hf://someone/sums"
FILES = {"data.task": "files", "data.train_files": (f"{DATA}/train",)}
UNREAD = {"pytorch_model.bin": b"pickle", "README.md": b"# Tiny", "original/config.json": b"{}", "x.onnx": b"onnx"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as found:
        use(found, tmp_path / "cache", monkeypatch)
        yield found


@pytest.fixture
def model(hub):
    """The repository of MODEL."""
    return hub.repository(f"models/{MODEL}")


@pytest.fixture
def commit(model, tmp_path) -> str:
    """Of MODEL, which is on the hub."""
    return model.commit(directory(hf_directory(tmp_path / "published", "llama_tied")) | UNREAD)


@pytest.fixture
def data(hub):
    """The repository of DATA."""
    return hub.repository("datasets/someone/sums")


def parquet(records: list[dict]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), file)
    return file.getvalue()


def config_of(workdir, **changes) -> Config:
    return small_config(workdir, **{"model.path": MODEL, **changes})


def record(config: Config) -> Config:
    """What a run writes when it starts."""
    Path(config.workdir).mkdir(exist_ok=True)
    write_config(config.workdir, dataclasses.asdict(config))
    return config


def sent(hub: Hub) -> list[str]:
    return sorted(address.rpartition("/")[2] for address in hub.downloads)


def test_names_are_read_as_they_are_written(tmp_path, monkeypatch):
    pinned = "0123456789abcdef" * 2 + "01234567"
    for text, name in {
        "Qwen/Qwen2.5-0.5B": HubName("model", "Qwen/Qwen2.5-0.5B"),
        "a/b@v1.0": HubName("model", "a/b", revision="v1.0"),
        f"a/b@{pinned}": HubName("model", "a/b", commit=pinned),
        f"a/b@refs/pr/1@{pinned}": HubName("model", "a/b", revision="refs/pr/1", commit=pinned),
    }.items():
        assert model_name(text) == name and str(name) == text
    parts = {"hf://a/b/train": "train", "hf://a/b/c/train@v1": "c/train", "hf://a/b/x/y.jsonl": "x/y.jsonl"}
    for text, part in parts.items():
        name = data_name(text)
        assert name is not None and name.part == part and str(name) == text
    for path in "models/mine runs/a ./a/b ../b a a/b/c a/b/c.gguf a/b@ a/b@x@y gs://a/b /a/b random".split():
        assert model_name(path) is None, path
    for path in ("hf://a/b", "hf://a", "a/b/train", "hf://a/b/../c"):
        assert data_name(path) is None, path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-0.5B").mkdir(parents=True)
    assert model_name("Qwen/Qwen2.5-0.5B") is None  # what exists here wins


def test_a_model_is_downloaded_once_and_only_what_is_read(hub, commit, tmp_path, monkeypatch):
    config = with_downloads(config_of(tmp_path / "run"))
    assert config.model.path == f"{MODEL}@{commit}"
    wanted = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"]
    assert sent(hub) == [*wanted, "tokenizer.json", "tokenizer_config.json"]
    hub.asked.clear()
    folder = model_at(config.model.path, weights=True)
    assert with_downloads(config) == config and hub.asked == []  # pinned: the hub is not even asked
    unplug(monkeypatch)
    assert (model_at(config.model.path, weights=True) / "model.safetensors").read_bytes() == (
        tmp_path / "published" / "model.safetensors"
    ).read_bytes()
    assert model_at(config.model.path, weights=True) == folder


def test_without_a_network_the_cache_is_used_with_a_warning(hub, commit, tmp_path, monkeypatch, caplog):
    with_downloads(config_of(tmp_path / "a"))
    unplug(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert with_downloads(config_of(tmp_path / "b")).model.path == f"{MODEL}@{commit}"
    assert "cannot be reached" in caplog.text and f"the copy of commit {commit} is used" in caplog.text
    shutil.rmtree(tmp_path / "cache" / "dapo_jax")  # a cache that another program has filled
    folder = tmp_path / "cache" / "huggingface" / "hub" / "models--someone--tiny-model"
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    assert with_downloads(config_of(tmp_path / "c")).model.path == f"{MODEL}@{commit}"


def test_a_download_that_was_cut_off_is_completed(hub, commit, tmp_path):
    name = pinned_name(HubName("model", MODEL))
    folder = fetch_model(name)
    (folder / "tokenizer.json").unlink()
    shutil.rmtree(tmp_path / "cache" / "huggingface" / "hub" / "models--someone--tiny-model" / "blobs")
    hub.downloads.clear()
    fetch_model(name)
    assert "tokenizer.json" in sent(hub) and "model.safetensors" in sent(hub)


def test_a_resumed_run_keeps_its_commit_although_the_branch_has_moved(model, commit, data, tmp_path):
    """Also where options other than the model's name are on the hub."""
    first = data.commit({"train.parquet": parquet(sums(1))})
    options = {
        **FILES,
        "data.val_files": (f"{DATA}/train@main",),
        "evaluate.tasks": json.dumps({"more": {"files": f"{DATA}/train"}}),
        "reward.function": "arithmetic",
    }
    config = config_of(tmp_path / "run", **options)
    pinned = record(with_downloads(config))
    assert pinned.data.train_files == (f"{DATA}/train@{first}",)
    assert pinned.data.val_files == (f"{DATA}/train@main@{first}",)
    assert json.loads(pinned.evaluate.tasks) == {"more": {"files": [f"{DATA}/train@{first}"]}}
    moved = model.commit({**model.commits[commit], "vocab.json": b"{}"})
    data.commit({"train.parquet": parquet(sums(2))})
    assert with_downloads(config) == pinned
    assert with_downloads(pinned) == pinned
    assert read_prompt_files(pinned.data.train_files)[0].ground_truth == "2"
    new = with_downloads(with_values(config, {"workdir": str(tmp_path / "new")}))
    assert new.model.path == f"{MODEL}@{moved}"
    assert read_prompt_files(new.data.train_files)[0].ground_truth == "3"


def test_a_branch_is_chosen_by_its_name_and_by_its_commit(model, commit, tmp_path):
    other = model.commit({**directory(tmp_path / "published"), "vocab.json": b"{}"}, "v2/x")
    config = config_of(tmp_path / "run", **{"model.path": f"{MODEL}@v2/x"})
    pinned = record(with_downloads(config))
    assert pinned.model.path == f"{MODEL}@v2/x@{other}" and with_downloads(config) == pinned
    back = with_downloads(config_of(tmp_path / "run"))  # another branch is another choice
    assert back.model.path == f"{MODEL}@{commit}"
    named = config_of(tmp_path / "run", **{"model.path": f"{MODEL}@{commit}"})
    assert with_downloads(named) == named


def test_a_repository_without_a_model_that_can_be_read_is_refused(hub, tmp_path):
    hub.repository("models/someone/tiny-GGUF").commit({"q4/a.gguf": b"GGUF a"})
    with pytest.raises(ValueError, match="model.path=someone/tiny-GGUF must hold config.json and the weights as safet"):
        with_downloads(config_of(tmp_path, **{"model.path": "someone/tiny-GGUF"}))


@pytest.mark.parametrize("stem", ["model", "model.safetensors"])  # the second as in Qwen3.5
def test_shards_are_downloaded_and_other_weights_are_not(hub, model, stem):
    described = ("config.json", "model.safetensors.index.json", "preprocessor_config.json")
    names = (*described, "consolidated.safetensors", *(f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)))
    model.commit({name: name.encode() for name in names})
    fetch_model(HubName("model", MODEL), weights=False)
    assert sent(hub) == [*described]
    fetch_model(HubName("model", MODEL))
    assert set(sent(hub)) == {*names} - {"consolidated.safetensors"}


def test_an_export_that_keeps_vision_downloads_the_weights_of_the_first_model(hub, model, tmp_path):
    model.commit(directory(Path(with_tokenizer("../nested/gemma3", tmp_path))))
    first, second = tmp_path / "first", tmp_path / "second"
    save_checkpoint(with_downloads(config_of(first), weights=False))
    config = config_of(second, **{"model.path": str(first)})
    save_checkpoint(config)
    assert "model.safetensors" not in sent(hub)
    export(config, tmp_path / "out", keep_vision=True)
    assert sent(hub).count("model.safetensors") == 1
    assert "base_model: someone/tiny-model" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("path", [MODEL, f"{DATA}/train"])
def test_what_the_hub_refuses_is_an_error_with_a_cure(hub, model, commit, data, path, tmp_path, monkeypatch):
    data.commit({"train.parquet": parquet(sums(1))})
    of_data = path != MODEL
    repository, key = (data, "data.train_files") if of_data else (model, "model.path")

    def refusal(path: str) -> str:
        of_files = {"data.task": "files", "data.train_files": (path,), "model.path": "random"}
        with pytest.raises(ValueError) as told:
            with_downloads(config_of(tmp_path, **(of_files if of_data else {"model.path": path})))
        assert str(told.value).startswith(f"{key}={path} ")
        return str(told.value)

    unknown = path.replace("someone/", "nobody/")
    assert "is neither there nor at http" in refusal(unknown) and "hf auth login" in refusal(unknown)
    assert "has no v9: correct it" in refusal(f"{path}@v9")
    repository.gated = True
    told = refusal(path)
    assert f"is gated: accept its terms at {hub.address}/{'datasets/' * of_data}someone/" in told
    assert "hf auth login" in told and "HF_TOKEN" in told
    repository.gated = False
    monkeypatch.setattr(client.shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    assert "0.00 GB are free): make room, or set HF_HOME" in refusal(path)
    monkeypatch.undo()
    use(hub, tmp_path / "cache2", monkeypatch)
    unplug(monkeypatch)
    by_hand = "hf download someone/sums --repo-type dataset --local-dir data/sums"
    by_hand = by_hand if of_data else f"hf download {MODEL} --local-dir models/tiny-model"
    assert "cannot be reached (" in refusal(path) and f"run `{by_hand}`" in refusal(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set): unset it" in refusal(path)


def test_every_option_that_the_hub_refuses_is_named_at_once(hub, tmp_path):
    paths = {"model.path": "a/b", "reward.model.path": "c/d"}
    with pytest.raises(ValueError, match=r"model.path=a/b must be .*\nreward.model.path=c/d must be"):
        with_downloads(config_of(tmp_path, **paths))


GSM8K = [{"question": "What is 2 + 3?", "answer": "It is 1,005 - 1,000. #### 1,005"}]
README = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n# Text\n"


def test_gsm8k_is_read_as_it_is_published(hub):
    hub.repository("datasets/openai/gsm8k").commit({"README.md": README, "main/train-0.parquet": parquet(GSM8K)})
    [row] = read_prompt_files(["hf://openai/gsm8k/main/train"])
    assert (row.data_source, row.ground_truth) == ("openai/gsm8k", "1005")
    assert isinstance(row.prompt, tuple) and row.prompt[0]["content"].startswith("What is 2 + 3? Let's think step by")
    assert read_prompt_files(["hf://openai/gsm8k/train"])[0].prompt == row.prompt  # its only config
    columns = Columns(prompt_template="Q: {question}", answer_key="answer")
    [own] = read_prompt_files(["hf://openai/gsm8k/train"], columns, names_sources=True)
    assert (own.data_source, own.question, own.ground_truth) == (
        "openai/gsm8k",
        "Q: What is 2 + 3?",
        GSM8K[0]["answer"],
    )
    with pytest.raises(ValueError, match="has no split main/test: choose one of main/train"):
        read_prompt_files(["hf://openai/gsm8k/main/test"])


def test_other_formats_are_read_from_the_copy_that_the_hub_makes(data, tmp_path):
    data.commit({"train.csv": b"a,b"})
    copy = data.commit({"default/train/0000.parquet": parquet(sums(1))}, "refs/convert/parquet")
    config = config_of(tmp_path / "run", **FILES, **{"model.path": "random"})
    pinned = record(with_downloads(config))
    assert pinned.data.train_files == (f"{DATA}/train@refs/convert/parquet@{copy}",)
    data.commit({"default/train/0000.parquet": parquet(sums(2))}, "refs/convert/parquet")
    assert with_downloads(config) == pinned
    assert [row.ground_truth for row in read_prompt_files(pinned.data.train_files)] == ["2"]
    with pytest.raises(ValueError, match="has no split test: choose one of another data set"):
        with_downloads(with_values(config, {"data.train_files": (f"{DATA}/test",)}))


def test_a_row_of_another_schema_is_named_with_its_columns(data):
    data.commit({"train.jsonl": b'{"x": 1}\n'})
    with pytest.raises(ValueError, match="train.jsonl has the columns x"):
        read_prompt_files([f"{DATA}/train"])


def test_preflight_asks_the_hub_for_a_description_only(hub, commit, tmp_path):
    assert read_shape(config_of(tmp_path).model).num_layers == 3
    assert "model.safetensors" not in sent(hub)
    hub.asked.clear()
    assert read_shape(config_of(tmp_path, **{"model.path": "Qwen/Qwen2.5-7B-Instruct"}).model).num_layers == 28
    assert hub.asked == []  # configs/shapes has it


@pytest.mark.slow
def test_a_run_from_the_hub_is_trained_resumed_measured_and_exported(model, commit, data, tmp_path, monkeypatch):
    data.commit({"data/train.parquet": parquet(sums(*range(8)))})
    options = {
        **FILES,
        "data.val_files": (f"{DATA}/train",),
        "reward.function": "arithmetic",
        "algorithm.filter_groups.enable": False,
        "data.gen_batch_size": 4,
        "model.lora.rank": 2,
    }
    run = tmp_path / "run"
    config = config_of(run, **options, **{"trainer.total_training_steps": 1})
    train(config)
    assert f"model.path={MODEL}" not in (run / "train.log").read_text().partition("Error")[2]
    model.commit({"config.json": b"{}", "model.safetensors": b"other"})
    unplug(monkeypatch)
    config = with_values(config, {"trainer.total_training_steps": 2})
    train(config)
    log = (run / "train.log").read_text()
    assert "resuming after step 1" in log and "changed config: model.path" not in log
    assert json.loads((run / "config.json").read_text())["model"]["path"] == f"{MODEL}@{commit}"
    [result] = bench(with_values(config, {"model.path": config.workdir}), tmp_path / "out")
    assert result["step"] == 2
    export(config, tmp_path / "adapter", adapter=True)
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (MODEL, commit)


DOWNLOADING = """
import sys, time, jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 3, int(sys.argv[2]))
import socket
socket.gethostname = lambda: "ab"[int(sys.argv[2]) // 2]  # two processes on host a, one on host b
from dapo_jax.config import places
from dapo_jax.config.sections import Config, ModelConfig
from dapo_jax.run.downloads import with_downloads
from dapo_jax.parallel.processes import first_per_host
from pathlib import Path
def act():
    time.sleep(2 if sys.argv[2] in "02" else 0)  # the first of their hosts
    with open(sys.argv[3] + "/acts_" + socket.gethostname(), "a") as file:
        file.write(sys.argv[2])
first_per_host(act)
places.CACHE = Path(sys.argv[3]) / "dapo_jax" / socket.gethostname()
print(with_downloads(Config(workdir=sys.argv[3], model=ModelConfig(path=sys.argv[4]))).model.path, flush=True)
"""


@pytest.mark.slow
def test_the_first_process_of_each_host_downloads(hub, commit, tmp_path):
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DOWNLOADING, port, str(number), str(tmp_path), MODEL],
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "HF_HOME": str(tmp_path / "ab"[number // 2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [output.split()[-1] for output in outputs] == [f"{MODEL}@{commit}"] * 3
    assert sent(hub).count("model.safetensors") == 2
    assert (tmp_path / "acts_a").read_text() == "01" and (tmp_path / "acts_b").read_text() == "2"
