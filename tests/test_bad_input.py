"""Wrong input, case by case: the training command names its place, the value and a cure, and harms nothing.

What is wrong with a config alone is in command/messages.yaml, and what with a config file in config/test_files.py.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from ends_within import ends_within
from safetensors.numpy import load_file, save_file
from shapes import BATCHES, SUMS
from small_run import CONFIGS, load_config, small_config

from dapo_jax import training as train
from dapo_jax.base_models import read_model
from dapo_jax.checkpoint import Checkpoints
from dapo_jax.command.command_line import refusals
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.values import freeze, with_values
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.optimizer import Models
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.progress import Progress
from dapo_jax.rewards import arithmetic
from dapo_jax.settings import actor_settings

TINY = str(CONFIGS / "tiny.py")
RECIPE = freeze(load_config("tiny"))
HF_MODEL = Path(__file__).parent / "models" / "data" / "llama_tied"
RUN = {
    **BATCHES,
    "workdir": "DIR/run",
    "data.max_prompt_length": 64,
    "trainer.total_training_steps": 4,
    "reward.num_workers": 1,
    "reward.function": "python:own",  # no process is started for it
}
BEFORE = {  # in the work directory before each case
    "notes.txt": "mine\n",
    "metrics.jsonl": '{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n',
    "samples/step_000001.jsonl": '{"response": "7"}\n',
}


@dataclass(frozen=True)
class Case:
    """Wrong input: what is prepared in a new directory, the options that name it, and what must be told of it."""

    told: tuple[str, ...]  # parts of the message; DIR stands for the new directory
    options: dict[str, Any] = field(default_factory=dict)  # of the config; with DIR too
    prepare: Callable[[Path], Any] = lambda directory: None
    arguments: tuple[str, ...] = ()  # the whole command line instead
    code: int = 2


CASES: dict[str, Case] = {}
ACCEPTED: dict[str, Case] = {}  # unusual, but right


def in_directory(value: Any, directory: Path) -> Any:
    if isinstance(value, tuple | list):
        return tuple(in_directory(part, directory) for part in value)
    return value.replace("DIR", str(directory)) if isinstance(value, str) else value


def run(case: Case, monkeypatch, directory: Path) -> int | str | None:
    """The exit code of the training command. How it reads options is in command/test_command_line.py."""
    options = RUN | ({} if "data.task" in case.options else SUMS) | case.options
    options = {name: in_directory(value, directory) for name, value in options.items()}

    @contextlib.contextmanager
    def command(arguments):
        with refusals(arguments):
            yield without_switched_off(RECIPE, with_values(RECIPE, options), options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended, ends_within():
        patch.setattr(train, "train", functools.partial(train.train, own={"own": arithmetic.score}))
        if not case.arguments:
            patch.setattr(train, "command", command)
        train.main(in_directory(case.arguments, directory))
    return ended.value.code


def check(case: Case, monkeypatch, capsys, directory: Path) -> None:
    workdir = directory / "run"
    for name, content in BEFORE.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(content)
    case.prepare(directory)
    logs = not (workdir / "train.log").exists()
    before = {name: (workdir / name).read_text() for name in BEFORE if (workdir / name).is_file()}
    code, told = run(case, monkeypatch, directory), capsys.readouterr().err
    assert code == case.code, told
    assert "Traceback" not in told and "dapo_jax: " in told
    for part in case.told:
        assert in_directory(part, directory) in told, told
    assert {name: (workdir / name).read_text() for name in before} == before
    if logs and (workdir / "train.log").exists():
        assert "Traceback" in (workdir / "train.log").read_text()


# The command line, and options that only a run can judge.


def options(name: str, changes: dict[str, Any], *told: str) -> None:
    CASES[f"options_{name}"] = Case(told, changes)


def command_line(name: str, arguments: tuple[str, ...], *told: str) -> None:
    CASES[f"command_line_{name}"] = Case(told, arguments=arguments)


command_line("without_config", ("--debug=false",), "--config is missing", "give a recipe (`dapo-jax configs`")
command_line("with_an_unknown_option", ("--config", TINY, "--config.sead=1"), "no key sead: did you mean seed?")
command_line(
    "with_several_problems",
    ("--config", TINY, "--config.workdir=DIR/run", "--config.rollout.n=0", "--config.seed=-1"),
    *("the config has problems:", "rollout.n=0 must be greater than 0", "seed=-1 must be 0 or more"),
)
command_line(
    "of_a_process_alone",
    ("--config", TINY, "--config.workdir=DIR/run", "--config.trainer.process_id=4"),
    *("trainer.coordinator", "give trainer.coordinator=HOST:PORT"),
)
CASES["config_file_raises"] = Case(
    ("--config=DIR/config.py must be a Python file whose get_config() returns", "ZeroDivisionError", "correct the"),
    prepare=lambda directory: (directory / "config.py").write_text("def get_config():\n    return 1 / 0"),
    arguments=("--config", "DIR/config.py"),
)
OF_8 = "must divide the number of devices, 8 (cpu)"
options("mesh_of_too_many", {"mesh.fsdp": 16}, "mesh.fsdp=16", OF_8, "set mesh.fsdp=2, 4 or 8")
options("mesh_of_too_few", {"mesh.data": 3}, "mesh.data=3", "must be the number of devices, 8 (cpu): set mesh.data=-1")
options("mesh_not_of_the_model", {"mesh.tensor": 8}, "the mesh does not fit", "=8 must divide", "mesh.tensor=1 or 2")
options("open_brace", {"data.arithmetic.template": "{"}, "data.arithmetic.template='{' must have the fields {a}", "cor")
options("no_such_reward", {"reward.function": "os.no"}, "reward.function='os.no' must be a path", "correct the path")


# Files with prompts.

ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "arithmetic",
    "reward_model": {"ground_truth": "2"},
}
TABLE = yaml.safe_load((Path(__file__).parent / "bad_input.yaml").read_text())


def add(name: str, case: Case, *, accepted: bool = False) -> None:
    (ACCEPTED if accepted else CASES)[name] = case


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values; None removes the key."""
    return {key: value for key, value in (values | changes).items() if value is not None}


def lines(*rows: Any) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(changed(ROW, row))}\n" for row in rows).encode()


def prompts(
    name: str, content: bytes | None, *told: str, file: str = "rows.jsonl", accepted: bool = False, **changes: Any
) -> None:
    """A case with the prompt file DIR/rows.jsonl of this content, None: without one."""

    def prepare(directory: Path) -> None:
        if content is not None:
            (directory / file).write_bytes(content)

    given = {"data.task": "files", "data.train_files": (f"DIR/{file}",), **changes}
    add(f"prompts_{name}", Case(told, given, prepare), accepted=accepted)


for name, case in TABLE["prompts"].items():
    told, changes = case.get("told", ()), case.get("options", {})
    prompts(name, lines(*case["rows"]), *told, accepted="accepted" in case, **changes)
prompts("missing", None, "prompt file DIR/rows.jsonl does not exist: correct the path")
CASES["prompts_directory"] = Case(
    ("prompt file DIR/rows.jsonl is a directory: it has no .parquet or .jsonl or .json files",),
    {"data.task": "files", "data.train_files": ("DIR/rows.jsonl",)},
    lambda directory: (directory / "rows.jsonl").mkdir(),
)
prompts("wrong_suffix", b"x", "rows.csv ends in '.csv', must end in one of .parquet, .jsonl", file="rows.csv")


def parquet(*rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


WHOLE = parquet(*[ROW] * 50)
AGAIN = "download it again"
BROKEN = "is damaged or incomplete", AGAIN
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
prompts(
    "one_list",
    json.dumps([ROW, ROW], indent=1).encode(),
    "DIR/rows.json is one JSON list",
    ONE_OBJECT,
    file="rows.json",
)
prompts("deep_json", b'{"a":' * 10**5, "row 1: must be a JSON object, not maximum recursion depth", ONE_OBJECT)
deep = functools.reduce(lambda inner, _: {"a": inner}, range(500), {})
prompts("deep_value", lines({"extra_info": deep}), "row 1: extra_info is nested deeper than 100 levels: flatten it")
prompts("no_utf8", lines({}) + b'{"prompt": "\xff"}\n', "row 2: is no UTF-8 text (byte 0xff", "save the file as")
prompts("utf16", json.dumps(ROW).encode("utf-16"), "DIR/rows.jsonl is UTF-16 text: save it as UTF-8")
prompts("byte_order_mark", b"\xef\xbb\xbf" + lines({}), accepted=True)
LONG, LONGER = (lines(json.dumps(ROW).replace('"2"', "9" * digits)) for digits in (400, 5000))
prompts("number_of_5000_digits", LONGER, "row 1", "4300 digits", ONE_OBJECT)
prompts("truth_of_400_digits", LONG, accepted=True, **{"reward.function": "arithmetic"})


# Model directories.

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
SETTINGS, GENERATION, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"


def write_model(directory: Path) -> Path:
    """A small Hugging Face directory, DIR/model."""
    path = directory / "model"
    path.mkdir()
    for name in (CONFIG, GENERATION, WEIGHTS):
        shutil.copy(HF_MODEL / name, path)
    (path / SETTINGS).write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    (path / TEMPLATE).write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    character_tokenizer().backend.save(str(path / TOKENIZER))
    return path


def model(name: str, change: Callable[[Path], Any], *told: str, accepted: bool = False) -> None:
    """A case with the directory DIR/model, changed."""
    prepare = lambda directory: change(write_model(directory))  # noqa: E731
    add(f"model_{name}", Case(told, {"model.path": "DIR/model"}, prepare), accepted=accepted)


def with_files(path: Path, files: dict[str, Any]) -> None:
    """Removes, replaces or edits files, as bad_input.yaml says."""
    for name, content in files.items():
        if content is None:
            (path / name).unlink()
        elif isinstance(content, dict):
            (path / name).write_text(json.dumps(changed(json.loads((path / name).read_text()), content)))
        else:
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


for name, case in TABLE["models"].items():
    files = {file: content for file, content in case.items() if "." in file}
    change = functools.partial(with_files, files=files)
    model(name, change, *case.get("told", ()), accepted="accepted" in case)
RAW = (HF_MODEL / WEIGHTS).read_bytes()
for name, file, content in (
    ("config_no_utf8", CONFIG, b"\xff"),
    ("config_deep", CONFIG, b"[" * 10**5),
    ("tokenizer_no_utf8", TOKENIZER, b"\xff"),
    ("template_no_utf8", TEMPLATE, b"\xff"),
    ("weights_truncated", WEIGHTS, RAW[: len(RAW) // 2]),
    ("weights_with_a_header_longer_than_the_file", WEIGHTS, struct.pack("<Q", 2**40) + RAW[8:]),
    ("weights_with_a_header_of_no_json", WEIGHTS, struct.pack("<Q", 8) + b"abcdefgh" + RAW),
):
    model(name, functools.partial(with_files, files={file: content}), f"DIR/model/{file}", *BROKEN)


def first_is(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([[value], array.ravel()[1:]], dtype=array.dtype).reshape(array.shape)


QUERY = "model.layers.0.self_attn.q_proj.weight"
NOT_FINITE = f"1 of 3072 values of tensor {QUERY} are NaN or", "download the model again"
for name, of_query, told in (
    ("shape", lambda array: array[:3].copy(), (f"tensor {QUERY} has shape (3, 48)", "take both from one download")),
    ("dtype", lambda array: array.astype(np.int32), (f"tensor {QUERY} has dtype I32", "take both from one download")),
    ("tensor_missing", None, (f"tensor {QUERY} of shape", "is missing", "take both from one download")),
    ("nan_weight", first_is(np.nan), NOT_FINITE),
    ("inf_weight", first_is(np.inf), NOT_FINITE),
):

    def change(path: Path, of_query=of_query) -> None:
        tensors = load_file(path / WEIGHTS)
        query = tensors.pop(QUERY)
        save_file(tensors | ({QUERY: of_query(query)} if of_query else {}), path / WEIGHTS)

    model(name, change, *told)


def larger_vocabulary(path: Path) -> None:
    values = json.loads((path / TOKENIZER).read_text())
    values["model"]["vocab"] |= {f"word{index}": index for index in range(60, 400)}
    (path / TOKENIZER).write_text(json.dumps(values))


model("vocabulary_too_large", larger_vocabulary, "ids up to 399", "160 embeddings: use the tokenizer")
NO_MODEL = "give a Hugging Face model directory or a .gguf file"
for key in ("model.path", "reward.model.path"):
    CASES[f"{key}_missing"] = Case((f"dapo_jax: {key}=DIR/no does not exist", NO_MODEL), {key: "DIR/no"})
CASES["model_is_a_file"] = Case(
    ("the model path DIR/x is neither", NO_MODEL), {"model.path": "DIR/x"}, lambda path: (path / "x").write_text("")
)
HUB = "Qwen/Qwen2.5-0.5B"
for key, others in {
    "model.path": {},
    "reward.model.path": {},
    "reference.path": {"actor.use_kl_loss": True},
    "critic.model.path": {"algorithm.adv_estimator": "gae"},
    "algorithm.distillation.path": {},
}.items():
    no_hub = f"{key}={HUB} does not exist on this machine, and the Hugging Face hub"
    download = f"`hf download {HUB} --local-dir models/Qwen2.5-0.5B`"
    CASES[f"{key}_is_a_hub_name"] = Case((no_hub, "cannot be reached", download), {key: HUB, **others})


def gguf_file(name: str, content: bytes, *told: str) -> None:
    CASES[f"gguf_{name}"] = Case(
        told, {"model.path": "DIR/a.gguf"}, lambda directory: (directory / "a.gguf").write_bytes(content)
    )


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
ARCHITECTURE = gguf_text("general.architecture") + struct.pack("<I", 8)
gguf_file("empty", b"", "DIR/a.gguf", *BROKEN)
gguf_file("truncated", HEADER + gguf_text("general.architecture")[:-3], "DIR/a.gguf", *BROKEN)
gguf_file("wrong_magic", b"GGML" + HEADER[4:] + bytes(99), "a.gguf", "must begin with b'GGUF'", AGAIN)
gguf_file(
    "of_another_version",
    b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "a.gguf",
    "version 99 must be one of",
    "download it again",
)
gguf_file(
    "long_array",
    HEADER + gguf_text("a") + struct.pack("<IIQ", 9, 0, 2**40),
    f"an array of {2**40} elem",
    "download it again",
)
gguf_file("no_language_model", HEADER + ARCHITECTURE + gguf_text("clip"), "general.architecture='clip' must be one of")


# Work directories.

WORKDIRS = {
    "is_a_file": Case(
        ("workdir=DIR/file must be a directory", "choose another by --config.workdir="),
        {"workdir": "DIR/file"},
        lambda directory: (directory / "file").write_text(""),
    ),
    "cannot_be_made": Case(
        ("workdir=/proc/no must be a directory that this process can create", "choose another by"),
        {"workdir": "/proc/no"},
    ),
    "has_damaged_metrics": Case(
        ("DIR/run/metrics.jsonl, line 2: not JSON", "fix or remove the line"),
        prepare=lambda path: (path / "run" / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n'),
        code=1,
    ),
    **{
        f"has_a_full_{name}": Case(
            ("No space left on device", "free some space, then rerun the same command"),
            prepare=lambda directory, name=name: (directory / "run" / name).symlink_to("/dev/full"),
            code=1,
        )
        for name in ("config.json.tmp", "train.log")
    },
}
WITH_CHECKPOINT = {
    "of_another_model": Case(
        ("the checkpoint of step 3 is of another model", "(56, 48)", "(56, 40)", "choose another workdir"),
        {"model.random.hidden_size": 40},
    ),
    "of_other_models": Case(
        ("the checkpoint of step 3 holds ['actor'], but the run has ['actor', 'critic']", "choose another workdir"),
        {"algorithm.adv_estimator": "gae"},
    ),
    "that_may_not_be_used": Case(
        ("workdir=DIR/run holds a checkpoint of step 3 and trainer.resume_mode=disable", "choose another workdir"),
        {"trainer.resume_mode": "disable"},
    ),
    "with_a_damaged_config": Case(
        ("DIR/run/config.json", "is damaged", "remove it"),
        prepare=lambda directory: (directory / "run" / "config.json").write_text("{"),
    ),
}


@pytest.mark.parametrize("name", [*CASES, *WORKDIRS])
def test_it_is_refused(name, monkeypatch, capsys, tmp_path):
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    check((CASES | WORKDIRS)[name], monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_accepted(name, monkeypatch, capsys, tmp_path):
    def reached(_):
        raise RuntimeError("the first step is reached")

    monkeypatch.setattr(train, "first_state", reached)
    case = ACCEPTED[name]
    check(
        dataclasses.replace(case, told=(*case.told, "the first step is reached"), code=1), monkeypatch, capsys, tmp_path
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The work directory of a run with a checkpoint of step 3."""
    config = small_config(tmp_path_factory.mktemp("trained") / "run")
    arch, _ = read_model(config)
    mesh = make_mesh(-1, 1, 1)
    shape = build_actor(actor_settings(config, arch, mesh), mesh).trainable.state_shape
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), shape)
    checkpoints = Checkpoints(checkpoint_dir(config), max_to_keep=9)
    checkpoints.save(Models(actor=state, critic=None), Progress(step=3), {"next_prompt": np.zeros(1)})
    checkpoints.close()
    return Path(config.workdir)


@pytest.mark.parametrize("name", WITH_CHECKPOINT)
def test_a_checkpoint_is_refused(name, checkpoint, monkeypatch, capsys, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "run")
    saved = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    check(WITH_CHECKPOINT[name], monkeypatch, capsys, tmp_path)
    assert {path: path.read_bytes() for path in saved} == saved


def test_a_second_run_is_refused(monkeypatch, capsys, tmp_path):
    with open_workdir(tmp_path / "run", detailed=False):
        told = ("workdir=DIR/run is locked by another run (process ", "or choose another directory by")
        check(Case(told), monkeypatch, capsys, tmp_path)


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
    check(Case(told, CASES["prompts_empty"].options, CASES["prompts_empty"].prepare), monkeypatch, capsys, tmp_path)
