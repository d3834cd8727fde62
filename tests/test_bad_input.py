"""Wrong input, case by case: the training command names its place, the value and a cure, and harms nothing.

bad_input.yaml has the cases, and this file those whose files are not text. What is wrong with a config alone is in
command/messages.yaml, and what with a config file in config/test_files.py.
"""

import contextlib
import functools
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from ends_within import ends_within
from in_process import InThisProcess
from safetensors.numpy import load_file, save_file
from shapes import BATCHES, SUMS
from small_run import load_config, small_config

from dapo_jax.command.command_line import refusals
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.sections import TrainerConfig
from dapo_jax.config.values import freeze, with_values
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.optimizer import Models
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rewards import pipeline
from dapo_jax.run.base_models import read_model
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.progress import Progress
from dapo_jax.run.settings import actor_settings
from dapo_jax.training import loop as train

TABLE = yaml.safe_load((Path(__file__).parent / "bad_input.yaml").read_text())
RECIPE = freeze(load_config())
RUN = {
    **BATCHES,
    "workdir": "DIR/run",
    "data.max_prompt_length": 64,
    "trainer.total_training_steps": 4,
    "reward.num_workers": 1,
    "reward.function": "dapo_jax.rewards.numerals.arithmetic",
}
BEFORE = {  # in the work directory before each case
    "notes.txt": "mine\n",
    "metrics.jsonl": '{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n',
    "samples/step_000001.jsonl": '{"response": "7"}\n',
}
ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "arithmetic",
    "reward_model": {"ground_truth": "2"},
}
HF_MODEL = Path(__file__).parent / "models" / "data" / "llama_tied"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def in_directory(value: Any, directory: Path) -> Any:
    """With the directory of the test instead of DIR."""
    if isinstance(value, tuple | list):
        return tuple(in_directory(part, directory) for part in value)
    return value.replace("DIR", str(directory)) if isinstance(value, str) else value


def run(case: dict[str, Any], monkeypatch, directory: Path) -> int | str | None:
    """The exit code of the training command. How it reads options is in command/test_command_line.py."""
    options = case.get("options", {})
    if "rows" in case:
        options = {"data.task": "files", "data.train_files": ("DIR/rows.jsonl",)} | options
    if "model" in case:
        options = {"model.path": "DIR/model"} | options
    options = RUN | ({} if "data.task" in options else SUMS) | options
    options = {name: in_directory(value, directory) for name, value in options.items()}

    @contextlib.contextmanager
    def command(arguments):
        with refusals(arguments):
            yield without_switched_off(RECIPE, with_values(RECIPE, options), options), None

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended, ends_within():
        patch.setattr(pipeline, "VerifierPool", InThisProcess)
        if "arguments" not in case:
            patch.setattr(train, "command", command)
        train.main(in_directory(case.get("arguments", ()), directory))
    return ended.value.code


def prepare(case: dict[str, Any], directory: Path) -> None:
    write(directory / "run", BEFORE)
    write(directory, case.get("files", {}))
    if "rows" in case:
        write(directory, {"rows.jsonl": lines(*case["rows"])})
    if "model" in case:
        write_model(directory / "model")
        change = case["model"]
        change(directory / "model") if callable(change) else write(directory / "model", change)


def write(directory: Path, files: dict[str, Any]) -> None:
    """Writes, links, removes or edits files, as bad_input.yaml says."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, dict) and "link" in content:
            path.symlink_to(content["link"])
        elif isinstance(content, dict):
            path.write_text(json.dumps(changed(json.loads(path.read_text()), content)))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values; None removes the key."""
    return {key: value for key, value in (values | changes).items() if value is not None}


def lines(*rows: Any) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(changed(ROW, row))}\n" for row in rows).encode()


def write_model(path: Path) -> None:
    """A small Hugging Face directory."""
    path.mkdir()
    for name in (CONFIG, "generation_config.json", WEIGHTS):
        shutil.copy(HF_MODEL / name, path)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    special = json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"})
    write(path, {"tokenizer_config.json": special, "chat_template.jinja": template})
    character_tokenizer().backend.save(str(path / TOKENIZER))


def check(case: dict[str, Any], monkeypatch, capsys, directory: Path) -> None:
    workdir = directory / "run"
    prepare(case, directory)
    logs = not (workdir / "train.log").exists()
    before = {name: (workdir / name).read_text() for name in BEFORE}
    code, told = run(case, monkeypatch, directory), capsys.readouterr().err
    assert code == case.get("code", 2), told
    assert "Traceback" not in told and "dapo_jax: " in told
    for part in case["told"]:
        assert in_directory(part, directory) in told, told
    assert {name: (workdir / name).read_text() for name in before} == before
    if logs and (workdir / "train.log").exists():
        assert "Traceback" in (workdir / "train.log").read_text()


AGAIN = "download it again"
BROKEN = "is damaged or incomplete", AGAIN
CASES: dict[str, dict[str, Any]] = {
    f"{kind}-{name}": case for kind, cases in TABLE.items() if kind != "checkpoints" for name, case in cases.items()
}


def prompts(name: str, content: bytes, *told: str, file: str = "rows.jsonl", accepted: bool = False, **options) -> None:
    """A case with the prompt file DIR/rows.jsonl of this content."""
    options = {"data.task": "files", "data.train_files": (f"DIR/{file}",)} | options
    case = {"files": {file: content}, "options": options, "told": told}
    CASES[f"prompts-{name}"] = case | ({"accepted": True} if accepted else {})


def parquet(*rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


WHOLE = parquet(*[ROW] * 50)
for damage, content in {
    "truncated": WHOLE[:500],
    "of_text": b"hello, hello",
    "of_nothing": b"",
    "with_damaged_pages": WHOLE[:20] + b"\xff" * 40 + WHOLE[60:],
}.items():
    prompts(f"parquet_{damage}", content, "DIR/a.parquet", *BROKEN, file="a.parquet")
prompts("parquet_pointer", b"version https://git-lfs.github.com/spec/v1\n", "run 'git lfs pull'", file="a.parquet")
NO_PROMPT = "a.parquet row 1: prompt is missing", "set data.prompt_key"
prompts("parquet_of_other_columns", parquet({"a": 1}), *NO_PROMPT, file="a.parquet")
HUGE, DROP = {"prompt": [{"role": "user", "content": "1 + " * 5000}]}, {"data.filter_overlong_prompts": True}
prompts("huge", lines({}, HUGE), "max_prompt_length=64", "longest 20000", "raise data.max_prompt_length")
prompts("all_huge_and_dropped", lines(HUGE), "no prompt is left", "raise data.max_prompt_length", **DROP)
for side in ("left", "right", "middle"):
    prompts(f"huge_cut_{side}", lines({}, HUGE), accepted=True, **{"data.truncation": side})
prompts("huge_dropped", lines({}, HUGE), accepted=True, **DROP)
ONE_OBJECT = "write one object on each line"
ONE_LIST = json.dumps([ROW, ROW], indent=1).encode()
prompts("one_list", ONE_LIST, "DIR/rows.json is one JSON list", ONE_OBJECT, file="rows.json")
prompts("deep_json", b'{"a":' * 10**5, "row 1: must be a JSON object, not maximum recursion depth", ONE_OBJECT)
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(500), {})
prompts("deep_value", lines({"extra_info": DEEP}), "row 1: extra_info is nested deeper than 100 levels: flatten it")
prompts("no_utf8", lines({}) + b'{"prompt": "\xff"}\n', "row 2: is not UTF-8 text (byte 0xff", "save the file as")
prompts("utf16", json.dumps(ROW).encode("utf-16"), "DIR/rows.jsonl is UTF-16 text: save it as UTF-8")
prompts("byte_order_mark", b"\xef\xbb\xbf" + lines({}), accepted=True)
LONG, LONGER = (lines(json.dumps(ROW).replace('"2"', "9" * digits)) for digits in (400, 5000))
prompts("number_of_5000_digits", LONGER, "row 1", "4300 digits", ONE_OBJECT)
prompts("truth_of_400_digits", LONG, accepted=True, **{"reward.function": "arithmetic"})

RAW = (HF_MODEL / WEIGHTS).read_bytes()
for name, file, content in (
    ("config_no_utf8", CONFIG, b"\xff"),
    ("config_deep", CONFIG, b"[" * 10**5),
    ("tokenizer_no_utf8", TOKENIZER, b"\xff"),
    ("template_no_utf8", "chat_template.jinja", b"\xff"),
    ("weights_truncated", WEIGHTS, RAW[: len(RAW) // 2]),
    ("weights_with_a_header_longer_than_the_file", WEIGHTS, struct.pack("<Q", 2**40) + RAW[8:]),
    ("weights_with_a_header_of_no_json", WEIGHTS, struct.pack("<Q", 8) + b"abcdefgh" + RAW),
):
    CASES[f"models-{name}"] = {"model": {file: content}, "told": (f"DIR/model/{file}", *BROKEN)}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def with_query(change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], None]:
    """Weights with another tensor in the place of one, or without it."""

    def change_file(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        tensors[QUERY] = change(tensors[QUERY])
        save_file({name: array for name, array in tensors.items() if array is not None}, path / WEIGHTS)

    return change_file


def with_first(array: np.ndarray, value: float) -> np.ndarray:
    return np.concatenate([[value], array.ravel()[1:]], dtype=array.dtype).reshape(array.shape)


ONE_DOWNLOAD = "take both from one download"
NOT_FINITE = f"1 of 3072 values of tensor {QUERY} are NaN or", "download the model again"
for name, change, *told in (
    ("shape", with_query(lambda array: array[:3].copy()), f"tensor {QUERY} has shape (3, 48)", ONE_DOWNLOAD),
    ("dtype", with_query(lambda array: array.astype(np.int32)), f"tensor {QUERY} has dtype I32", ONE_DOWNLOAD),
    ("tensor_missing", with_query(lambda array: None), f"tensor {QUERY} of shape", "is missing", ONE_DOWNLOAD),
    ("nan", with_query(functools.partial(with_first, value=np.nan)), *NOT_FINITE),
    ("inf", with_query(functools.partial(with_first, value=np.inf)), *NOT_FINITE),
):
    CASES[f"models-{name}"] = {"model": change, "told": told}
HUB = "Qwen/Qwen2.5-0.5B"
for key, others in {
    "model.path": {},
    "reward.model.path": {},
    "reference.path": {"actor.use_kl_loss": True},
    "critic.model.path": {"algorithm.adv_estimator": "gae"},
    "algorithm.distillation.path": {},
}.items():
    no_hub = f"{key}={HUB} does not exist on this machine, and the Hugging Face hub"
    told = no_hub, "cannot be reached", f"`hf download {HUB} --local-dir models/Qwen2.5-0.5B`"
    CASES[f"models-{key}_is_a_hub_name"] = {"options": {key: HUB, **others}, "told": told}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "accepted" not in case])
def test_it_is_refused(name, monkeypatch, capsys, tmp_path):
    check(CASES[name], monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "accepted" in case])
def test_it_is_accepted(name, monkeypatch, capsys, tmp_path):
    def reached(_):
        raise RuntimeError("the first step is reached")

    monkeypatch.setattr(train, "first_state", reached)
    told = (*CASES[name].get("told", ()), "the first step is reached")
    check(CASES[name] | {"told": told, "code": 1}, monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The work directory of a run with a checkpoint of step 3."""
    config = small_config(tmp_path_factory.mktemp("trained") / "run")
    arch, _ = read_model(config.model)
    mesh = make_mesh(-1, 1, 1)
    shape = build_actor(actor_settings(config, arch, mesh), mesh).trainable.state_shape
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), shape)
    checkpoints = Checkpoints(checkpoint_dir(config.workdir, config.trainer), TrainerConfig(max_ckpt_to_keep=9))
    checkpoints.save(Models(actor=state, critic=None), Progress(step=3), {"next_prompt": np.zeros(1)})
    checkpoints.close()
    return Path(config.workdir)


@pytest.mark.parametrize("name", TABLE["checkpoints"])
def test_a_checkpoint_is_refused(name, checkpoint, monkeypatch, capsys, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "run")
    saved = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    check(TABLE["checkpoints"][name], monkeypatch, capsys, tmp_path)
    assert {path: path.read_bytes() for path in saved} == saved


def test_a_second_run_is_refused(monkeypatch, capsys, tmp_path):
    with open_workdir(tmp_path / "run", detailed=False):
        told = ("workdir=DIR/run is locked by another run (process ", "or choose another directory by")
        check({"told": told}, monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run", ("workdir=DIR/run must be a directory", "Permission denied", "let this user write there")),
        ("rows.jsonl", ("prompt file DIR/rows.jsonl cannot be read by this user: change its permissions",)),
    ],
)
def test_a_read_only_work_directory_and_an_unreadable_file_are_refused(name, told, monkeypatch, capsys, tmp_path):
    allowed = os.access  # as for a user without the right: root has them all
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != name and allowed(path, mode))
    check({"rows": [], "told": told}, monkeypatch, capsys, tmp_path)
