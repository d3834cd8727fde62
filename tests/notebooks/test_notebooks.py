"""The notebooks run from start to end in small, in environments like those of Kaggle and Colab."""

import json
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from small_families import with_tokenizer

import dapo_jax as dx
from dapo_jax.monitor.records import read_metrics

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("first_run", "gemma_gsm8k_tpu")
LIMIT_S = 900  # for a cell

# What these machines set for their TPU, which is one host's: no run may wait for others.
COLAB = {"COLAB_RELEASE_TAG": "release-colab", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
KAGGLE = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434,8435,8436,8437,8438",
}


def executed(name, folder):
    """The notebook after all of its cells have run in `folder`; the first that fails raises."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()


def printed(notebook, text):
    """What the code cell with this text has printed and shown."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
    return "".join(output.get("text", "") + str(output.get("data", "")) for output in cell.outputs)


def set_machine(monkeypatch, values):
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # with it, a kernel does not show what commands print
    for name, value in {"DAPO_JAX_NOTEBOOK_SMALL": "1", "PYTHONPATH": str(FOLDER.parent), **values}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_uses_names_of_dx_alone_and_shows_what_it_printed_without_traces_of_a_machine(name):
    assert name in NAMES
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {} and re.fullmatch(r"[a-z]+-\d\d", cell["id"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    source = "".join(line for cell in code for line in [*cell["source"], "\n"])
    assert re.findall(r"^ *(?:import|from) +dapo_jax.*", source, re.M) == ["import dapo_jax as dx"]
    assert set(re.findall(r"\bdx\.(\w+)", source)) <= set(dx.__all__)
    ran = [cell["execution_count"] for cell in code]
    assert ran == (list(range(1, len(code) + 1)) if name == "first_run" else [None] * len(code))
    assert [bool(cell["outputs"]) for cell in code] == [number not in (None, 1) for number in ran]  # 1 installs
    assert not re.search(r"/root/|/home/|Traceback", json.dumps([cell["outputs"] for cell in code]))


@pytest.mark.slow
@pytest.mark.colab
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Colab's Python is newer: bash scripts/test_pythons.sh")
def test_the_first_run_trains_compares_and_exports(tmp_path, monkeypatch):
    set_machine(monkeypatch, COLAB)
    notebook = executed("first_run", tmp_path)
    text = printed(notebook, "dx.train(config)")
    assert "step 10/10  acc " in text and "\rtrain 10/10" in text and "image/png" in text
    assert re.search("11 records in .*runs/first_run_tiny_10", text)
    assert "| 3 > 4 | '" in printed(notebook, "after = answers")
    assert "model.safetensors" in printed(notebook, "result.export")
    assert "step 5/5" in printed(notebook, "reward=says_it")


@pytest.mark.full
def test_gemma_is_compiled_trained_measured_and_exported(tmp_path, monkeypatch):
    set_machine(monkeypatch, KAGGLE)
    monkeypatch.setenv("DAPO_JAX_NOTEBOOK_MODEL", with_tokenizer("gemma3", tmp_path))
    notebook = executed("gemma_gsm8k_tpu", tmp_path)
    assert "It fits" in printed(notebook, "dapo_jax.preflight")
    assert "step 2/2" in printed(notebook, "dx.train(config)")
    assert "(2, 'eval/arithmetic/acc/mean@1'" in printed(notebook, "/acc/mean@")
    assert "adapter_model.safetensors" in printed(notebook, "result.export")


@pytest.mark.slow
def test_the_stop_button_saves_and_returns(tmp_path, monkeypatch):
    set_machine(monkeypatch, {})
    manager, client = start_new_kernel(startup_timeout=LIMIT_S)
    changes = {"workdir": str(tmp_path / "run"), "trainer.total_training_steps": 10_000, "trainer.save_freq": -1}
    code = f"import dapo_jax as dx\nresult = dx.train(dx.load_config('tiny', {changes}))\nprint('WHY', result.stopped)"
    text = ""

    def receive(message):
        nonlocal text
        before, text = text, text + message["content"].get("text", "")
        if "step     2/10000" in text and "step     2/10000" not in before:
            manager.interrupt_kernel()

    try:
        reply = client.execute_interactive(code, output_hook=receive, timeout=LIMIT_S)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    stopped_after = re.search(r"WHY stopped by SIGINT after step (\d+)", text)
    assert stopped_after and read_metrics(tmp_path / "run")[-1]["step"] == int(stopped_after[1])
    assert (tmp_path / "run" / "checkpoints" / stopped_after[1]).is_dir()
