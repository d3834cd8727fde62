"""An exported model on the Hugging Face hub."""

import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
import yaml
from small_run import small_config
from test_export import save_checkpoint

from dapo_jax.config.values import DEFAULTS
from dapo_jax.export import export
from dapo_jax.export.hub import model_card

NAME = "someone/adder"


@pytest.fixture
def hub(monkeypatch):
    """Records the calls of the library, by its own signatures."""
    api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = f"https://hub/{NAME}"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    return api


@pytest.fixture
def run(tmp_path):
    config = small_config(tmp_path / "adder")
    save_checkpoint(config)
    (tmp_path / "adder").mkdir(exist_ok=True)
    (tmp_path / "adder" / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return str(tmp_path / "adder" / "config.json")


def push(run, output, *options, name=NAME):
    export.main(["--config", run, "--output", str(output), "--dtype", "float32", "--push-to-hub", name, *options])


def test_the_hub_gets_the_whole_directory_and_keeps_a_repository_that_exists(hub, run, tmp_path, capsys):
    push(run, tmp_path / "out", "--private")
    hub.create_repo.assert_called_once_with(NAME, private=True, exist_ok=True)
    hub.upload_folder.assert_called_once_with(repo_id=NAME, folder_path=tmp_path / "out", commit_message=mock.ANY)
    message = hub.upload_folder.call_args.kwargs["commit_message"]
    assert message.startswith("adder after step ") and "grpo" in message
    assert {"model.safetensors", "README.md"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert f"it is also at https://hub/{NAME}" in capsys.readouterr().out


def refused(run, output, message, capsys, code, **named):
    with pytest.raises(SystemExit) as end:
        push(run, output, **named)
    assert end.value.code == code
    error = capsys.readouterr().err
    assert message in error, error


def test_a_refusal_names_the_cure_and_leaves_the_directory(hub, run, tmp_path, capsys, monkeypatch):
    refused(run, tmp_path / "a", "must be OWNER/NAME", capsys, 2, name="adder")
    monkeypatch.setenv("HF_TOKEN", "")
    refused(run, tmp_path / "a", "needs a token of the Hugging Face hub: log in by `hf auth login`", capsys, 2)
    assert not (tmp_path / "a").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    hub.create_repo.side_effect = error = OSError("no right to write")
    refused(run, tmp_path / "b", f"check the network and HF_HUB_OFFLINE; the directory {tmp_path}/b is", capsys, 1)
    assert (tmp_path / "b" / "model.safetensors").exists()
    error.response = SimpleNamespace(status_code=401)
    refused(run, tmp_path / "a", "is refused (no right to write)", capsys, 2)
    assert (tmp_path / "a" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="2"):
        export.main(["--config", run, "--output", str(tmp_path / "c"), "--private"])
    assert "--private needs --push-to-hub" in capsys.readouterr().err


def test_the_card_names_the_base_the_options_and_the_accuracy(tmp_path):
    values = {"workdir": str(tmp_path), "model.path": "Qwen/Qwen2.5-0.5B@" + "a" * 40, "actor.optim.lr": 2e-6}
    rows = [{"step": step, "eval/math/acc/mean@4": step / 10, "eval/math/acc/std@4": 0.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    card = model_card(DEFAULTS | values, 2, adapter=False)
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen2.5-0.5B",
        "tags": ["dapo", "reinforcement-learning", "dapo_jax"],
    }
    assert "after 2 training steps" in body and "| `actor.optim.lr` | 2e-06 |" in body
    assert "| `eval/math/acc/mean@4` | 0.2000 |" in body and "std" not in body


def test_a_card_tells_no_path_of_this_machine(tmp_path):
    (tmp_path / "mine").mkdir()
    options = DEFAULTS | {"workdir": str(tmp_path / "run"), "model.path": str(tmp_path / "mine")}
    card = model_card(options, 3, adapter=True)
    assert str(tmp_path) not in card and "base_model" not in card and "Adapters for mine after 3" in card
    assert "library_name: peft" in card
