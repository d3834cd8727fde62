"""Wrong input, case by case: the training command names its place, the value and a cure, and harms nothing."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ends_within import ends_within
from safetensors.numpy import load_file, save_file
from shapes import BATCHES, SUMS
from small_run import CONFIGS, small_config

from dapo_jax import training as train
from dapo_jax.base_models import read_model
from dapo_jax.checkpoint import Checkpoints
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.optimizer import Models
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.progress import Progress
from dapo_jax.settings import actor_settings

TINY = str(CONFIGS / "tiny.py")
HF_MODEL = Path(__file__).parent / "models" / "data" / "llama_tied"
RUN = {
    **BATCHES,
    "data.max_prompt_length": 64,
    "trainer.total_training_steps": 4,
    "reward.num_workers": 1,
    "reward.function": "arithmetic",
}
BEFORE = {  # in the work directory before each case
    "notes.txt": "mine\n",
    "metrics.jsonl": '{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n',
    "samples/step_000001.jsonl": '{"response": "7"}\n',
}
REACHED = "the first step is reached"


@dataclass(frozen=True)
class Case:
    """Wrong input: what is prepared in a new directory, the options that name it, and what must be told of it."""

    told: tuple[str, ...]  # parts of the message; DIR stands for the new directory
    options: dict[str, Any] = field(default_factory=dict)  # of the config; with DIR too
    prepare: Callable[[Path], Any] = lambda directory: None
    arguments: tuple[str, ...] | None = None  # the whole command line instead
    code: int = 2


CASES: dict[str, Case] = {}
ACCEPTED: dict[str, Case] = {}  # unusual, but right


def run(monkeypatch, capsys, arguments: list[str]) -> tuple[int, str]:
    """The exit code of the training command and what it says on stderr."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as ended, ends_within():
        train.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def arguments_of(case: Case, directory: Path) -> list[str]:
    options = {"workdir": "DIR/run", **RUN, **({} if "data.task" in case.options else SUMS), **case.options}
    given = case.arguments or ("--config", TINY, *(f"--config.{name}={value}" for name, value in options.items()))
    return [argument.replace("DIR", str(directory)) for argument in given]


def check(case: Case, monkeypatch, capsys, directory: Path) -> None:
    workdir = directory / "run"
    for name, content in BEFORE.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(content)
    case.prepare(directory)
    logs = not (workdir / "train.log").exists()
    before = {name: (workdir / name).read_text() for name in BEFORE if (workdir / name).is_file()}
    code, told = run(monkeypatch, capsys, arguments_of(case, directory))
    assert code == case.code, told
    assert "Traceback" not in told
    assert "dapo_jax: " in told
    for part in case.told:
        assert part.replace("DIR", str(directory)) in told, told
    assert {name: (workdir / name).read_text() for name in before} == before
    if logs and (workdir / "train.log").exists():
        assert "Traceback" in (workdir / "train.log").read_text()


# The command line and the config.


def config_file(name: str, text: str, *told: str) -> None:
    """A case with the config file DIR/config.py."""
    CASES[f"config_file_{name}"] = Case(
        ("--config=DIR/config.py must be a Python file whose get_config() returns", *told, "correct the file"),
        prepare=lambda directory: (directory / "config.py").write_text(text),
        arguments=("--config", "DIR/config.py"),
    )


def options(name: str, changes: dict[str, Any], *told: str) -> None:
    CASES[f"config_{name}"] = Case(told, changes)


GIVE_A_FILE = "give a recipe (`dapo-jax configs` lists them), for example --config tiny"
CASES["no_config"] = Case(("--config is missing", GIVE_A_FILE), arguments=("--debug=false",))
CASES["config_missing"] = Case(("--config=DIR/no.py is not a file", GIVE_A_FILE), arguments=("--config", "DIR/no.py"))
CASES["config_is_a_directory"] = Case(("--config=DIR is not a file", GIVE_A_FILE), arguments=("--config", "DIR"))
CASES["stray_argument"] = Case(
    ("unexpected arguments ['stray']", "options are written --config.key=value"), arguments=("--config", TINY, "stray")
)
CASES["unknown_option"] = Case(("'confg.seed'", "correct the command"), arguments=("--config", TINY, "--confg.seed=1"))
CASES["option_without_value"] = Case(
    ("Missing value for flag --config.seed", "correct the command"), arguments=("--config", TINY, "--config.seed")
)
START = "from dapo_jax.config import default_config\ndef get_config():\n    c = default_config(); "
config_file("raises", "def get_config():\n    return 1 / 0", "fails in line 2 with ZeroDivisionError: division by zero")
config_file("exits", "raise SystemExit(3)", "fails in line 1 with SystemExit: 3")
config_file("is_no_python", "get_config(:", "SyntaxError")
config_file("imports_what_is_not_there", "import no_such_module", "No module named 'no_such_module'")
config_file("has_no_get_config", "seed = 1", "has no get_config")
config_file("returns_something_else", "def get_config():\n    return {'seed': 1}", "returns {'seed': 1}")
config_file("has_text_for_a_number", f"{START}c.actor.optim.lr = 'fast'; return c", "line 3", "'lr'", "fast")
config_file("has_an_unknown_key", f"{START}c.actor.optim.lrr = 1.0; return c", 'Did you mean "lr" instead of "lrr"')
CASES["config_file_is_not_from_default_config"] = Case(
    ("missing config keys ['actor', 'algorithm'", "start from default_config()"),
    prepare=lambda directory: (directory / "config.py").write_text(
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'seed': 1})"
    ),
    arguments=("--config", "DIR/config.py"),
)
CASES["config_file_has_wrong_types"] = Case(
    ("rollout.n=None must be an integer: correct it", "seed=True must be an integer", "rollout.stop=(1,) must be"),
    prepare=lambda directory: (directory / "config.py").write_text(
        f"{START}c.unlock(); del c['seed']; c.seed = True; c.rollout.n = None; c.rollout.stop = (1,); return c"
    ),
    arguments=("--config", "DIR/config.py"),
)
options("unknown_key", {"nonsense": 1}, "--config.nonsense=1: there is no key nonsense", "sections.py lists the keys")
options("misspelt_key", {"actor.clip_ratio_lo": 0.1}, "no key actor.clip_ratio_lo: did you mean actor.clip_ratio_low")
options("misspelt_section", {"rolout.n": 4}, "there is no key rolout.n: did you mean rollout.n")
options("two_unknown_keys", {"rollout.nn": 4, "sead": 1}, "there is no key rollout.nn", "did you mean seed?")
options("text_for_an_integer", {"rollout.n": "many"}, "--config.rollout.n=many", "invalid literal", "correct the com")
options("text_for_a_float", {"actor.optim.lr": "fast"}, "--config.actor.optim.lr=fast", "correct the command")
options("float_for_an_integer", {"rollout.n": 2.5}, "--config.rollout.n=2.5", "correct the command")
options("none_for_an_integer", {"seed": None}, "--config.seed=None", "correct the command")
options("one_of_two_values", {"actor.optim.betas": "(0.9,)"}, "actor.optim.betas=(0.9,) must be 2 values, each a num")
options("number_for_texts", {"data.train_files": 3}, "data.train_files=(3,) must be several values, each text: correct")
for number in ("nan", "inf", "-inf"):
    options(f"{number}_for_a_number", {"actor.optim.lr": number}, f"actor.optim.lr={number} must be a finite number: c")
options("nan_that_no_range_catches", {"actor.clip_ratio_c": "nan"}, "actor.clip_ratio_c=nan must be a finite number")
options("zero", {"rollout.n": 0}, "rollout.n=0 must be greater than 0")
options("negative", {"trainer.total_training_steps": -3}, "trainer.total_training_steps=-3 must be greater than 0")
options("negative_seed", {"seed": -1}, "seed=-1 must be 0 or more")
options("more_than_32_bits", {"seed": 2**70}, f"seed={2**70} must be less than 2**31: lower it")
options("too_many_workers", {"reward.num_workers": 10**6}, "reward.num_workers=1000000 must be at most 1024")
options("no_frequency", {"trainer.save_freq": 0}, "trainer.save_freq=0 must be greater than 0, or -1 (only at the end)")
options("out_of_range", {"rollout.top_p": 1.5}, "rollout.top_p=1.5 must be in (0, 1]; 1 switches it off")
options(
    "beta_of_one", {"actor.optim.betas": "(0.9, 1.0)"}, "actor.optim.betas=(0.9, 1.0) must be two numbers in [0, 1)"
)
options("unknown_choice", {"data.truncation": "up"}, "data.truncation='up' must be one of error, left, right, middle")
options("unknown_loss", {"actor.policy_loss.loss_mode": "x"}, "actor.policy_loss.loss_mode='x' must be one of vanilla")
options("contradiction", {"trainer.critic_warmup": 2}, "critic_warmup=2 is not read without algorithm.adv_est")
options(
    "filter_off_with_rounds",
    {"algorithm.filter_groups.enable": False, "data.gen_batch_size": 8},
    "data.gen_batch_size=8 is not read without algorithm.filter_groups.enable=True",
)
options(
    "aliases_that_exclude_each_other",
    {"algorithm.use_dynamic_sample": True, "algorithm.online_filtering": True},
    "exclude each other: choose one",
)
options(
    "indivisible_batch",
    {"actor.ppo_mini_batch_size": 3},
    "data.train_batch_size=4 must be a multiple of actor.ppo_mini_batch_size=3",
)
options(
    "several_problems",
    {"rollout.n": 0, "rollout.temperature": "nan", "data.truncation": "up", "seed": -1},
    "rollout.n=0",
    "rollout.temperature=nan",
    "data.truncation='up'",
    "seed=-1",
)
options("broken_json", {"data.chat_template_kwargs": "[1"}, "data.chat_template_kwargs='[1' must be a JSON object (Exp")
options(
    "deep_json", {"data.chat_template_kwargs": '{"a":' * 10**5}, "data.chat_template_kwargs=", "recursion", "write it l"
)
options(
    "template_variable_that_is_taken",
    {"data.chat_template_kwargs": '{"messages": 1}'},
    """data.chat_template_kwargs='{"messages": 1}' must not hold messages""",
    "leave them out",
)
options(
    "mesh_of_too_many",
    {"mesh.fsdp": 16},
    "mesh.fsdp=16",
    "must divide the number of devices, 8 (cpu)",
    "set mesh.fsdp=2, 4 or 8",
)
options(
    "mesh_that_does_not_divide",
    {"mesh.data": 3},
    "mesh.data=3",
    "must be the number of devices, 8 (cpu): set mesh.data=-1",
)
options(
    "mesh_that_does_not_divide_the_model",
    {"mesh.tensor": 8},
    "the mesh does not fit",
    "mesh.tensor=8 must divide",
    "set mesh.tensor=1 or 2",
)
options("heads", {"model.random.num_heads": 3}, "num_heads=3 must be a multiple of model.random.num_kv_heads=2")
options("odd_head", {"model.random.head_dim": 7}, "model.random.head_dim=7 must be even")
options("open_brace", {"data.arithmetic.template": "{"}, "data.arithmetic.template='{' must have the fields {a}", "cor")
options("no_such_reward", {"reward.function": "os.no"}, "reward.function='os.no' must be a path", "correct the path")
options("no_workdir", {"workdir": ""}, "workdir is empty: name the directory")
options("process_alone", {"trainer.process_id": 4}, "trainer.coordinator", "give trainer.coordinator=HOST:PORT")


# Files with prompts.

ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "arithmetic",
    "reward_model": {"ground_truth": "2"},
}
FROM_FILE = {"data.task": "files"}


def asking(content: str) -> dict[str, Any]:
    return {**ROW, "prompt": [{"role": "user", "content": content}]}


def lines(*rows: Any) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def parquet(*rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


def prompts(name: str, content: bytes | None, *told: str, file: str = "rows.jsonl", accepted=False, **changes) -> None:
    """A case with the prompt file DIR/rows.jsonl of this content."""

    def prepare(directory: Path) -> None:
        if content is not None:
            (directory / file).write_bytes(content)

    given = {**FROM_FILE, "data.train_files": f"('DIR/{file}',)", **{k.replace("__", "."): changes[k] for k in changes}}
    (ACCEPTED if accepted else CASES)[f"prompts_{name}"] = Case(told, given, prepare)


WHOLE = parquet(*[ROW] * 50)
prompts("missing", None, "prompt file DIR/rows.jsonl does not exist: correct the path")
CASES["prompts_directory"] = Case(
    ("prompt file DIR/rows.jsonl is a directory: it has no .parquet or .jsonl or .json files",),
    {**FROM_FILE, "data.train_files": "('DIR/rows.jsonl',)"},
    lambda directory: (directory / "rows.jsonl").mkdir(),
)
prompts("empty", b"", "DIR/rows.jsonl", "hold no rows: name files that do")
prompts("wrong_suffix", b"x", "rows.csv ends in '.csv', must end in one of .parquet, .jsonl", file="rows.csv")
DAMAGED = "is damaged or incomplete"
prompts("parquet_truncated", WHOLE[:500], "DIR/a.parquet", DAMAGED, "download it again", file="a.parquet")
prompts("parquet_of_text", b"hello, hello", "DIR/a.parquet", DAMAGED, "download it again", file="a.parquet")
prompts("parquet_of_nothing", b"", "DIR/a.parquet", DAMAGED, "download it again", file="a.parquet")
prompts(
    "parquet_with_damaged_pages",
    WHOLE[:20] + b"\xff" * 40 + WHOLE[60:],
    "DIR/a.parquet",
    DAMAGED,
    "again",
    file="a.parquet",
)
prompts("parquet_pointer", b"version https://git-lfs.github.com/spec/v1\n", "run 'git lfs pull'", file="a.parquet")
prompts(
    "parquet_of_other_columns",
    parquet({"a": 1}),
    "a.parquet row 1: prompt is missing",
    "set data.prompt_key",
    file="a.parquet",
)
ONE_OBJECT = "write one object on each line"
prompts("invalid_json", lines(ROW, ROW, "{nope"), "DIR/rows.jsonl row 3: must be a JSON object, not Expe", ONE_OBJECT)
prompts("a_number", lines(ROW, 3), "rows.jsonl row 2: must be a JSON object, not a int", ONE_OBJECT)
prompts(
    "one_list",
    json.dumps([ROW, ROW], indent=1).encode(),
    "DIR/rows.json is one JSON list",
    ONE_OBJECT,
    file="rows.json",
)
for key, cure in {"prompt": "set data.prompt_key", "data_source": "name the row's task"}.items():
    without = {name: value for name, value in ROW.items() if name != key}
    prompts(f"without_{key}", lines(without), f"rows.jsonl row 1: {key} is missing", cure)
prompts("without_truth", lines({**ROW, "reward_model": {}}), "reward_model.ground_truth is missing", "write the exp")
prompts(
    "wrong_types",
    lines({**ROW, "prompt": 3}, {**ROW, "data_source": 3}, {**ROW, "extra_info": 3}),
    "row 1: prompt is '3' (int)",
    "row 2: data_source is '3' (int)",
    "row 3: extra_info is '3' (int)",
    "leave it out",
)
prompts("message_without_content", lines({**ROW, "prompt": [{"role": "user"}]}), "each with text as role and content")
prompts("empty_prompt", lines({**ROW, "prompt": ""}), "row 1: prompt is '' (str), must be non-empty text", "correct")
prompts("prompt_without_tokens", lines(asking("")), "DIR/rows.jsonl row 1 has no tokens: fill or remove it")
HUGE = asking("1 + " * 5000)
prompts("huge", lines(ROW, HUGE), "max_prompt_length=64", "longest 20000", "raise data.max_prompt_length")
prompts(
    "all_huge_and_dropped",
    lines(HUGE),
    "no prompt is left",
    "raise data.max_prompt_length",
    data__filter_overlong_prompts=True,
)
for side in ("left", "right", "middle"):
    prompts(f"huge_cut_{side}", lines(ROW, HUGE), REACHED, accepted=True, data__truncation=side)
prompts("huge_dropped", lines(ROW, HUGE), REACHED, accepted=True, data__filter_overlong_prompts=True)
prompts("deep_json", b'{"a":' * 10**5, "row 1: must be a JSON object, not maximum recursion depth", ONE_OBJECT)
nested = '{"a":' * 500 + "1" + "}" * 500
prompts(
    "deep_value",
    lines(f'{json.dumps(ROW)[:-1]}, "extra_info": {nested}}}'),
    "row 1: extra_info is nested deeper than 100 levels: flatten it",
)
prompts("half_a_character", lines(asking("\ud800")), r"row 1: prompt holds '\ud800', half of a character: write the")
prompts(
    "truth_that_no_answer_equals",
    lines(ROW, {**ROW, "reward_model": {"ground_truth": "five"}}),
    "no response can match these ground truths (1 rows)",
    "rows.jsonl row 2: ground_truth='five' is not an answer that arithmetic accepts",
)
prompts(
    "held_out_truth_that_no_answer_equals",
    lines(ROW, {**ROW, "reward_model": {"ground_truth": "five"}}),
    "rows.jsonl row 2: ground_truth='five' is not an answer that arithmetic accepts",
    data__task="arithmetic",
    data__train_files="()",
    evaluate__tasks='{"named": {"files": "DIR/rows.jsonl"}}',
)
prompts(
    "half_a_character_in_the_truth",
    lines({**ROW, "reward_model": {"ground_truth": "\udfff"}}),
    r"row 1: reward_model holds '\udfff', half of a character: write the whole",
)
prompts("no_utf8", lines(ROW) + b'{"prompt": "\xff"}\n', "row 2: is no UTF-8 text (byte 0xff", "save the file as")
prompts("utf16", json.dumps(ROW).encode("utf-16"), "DIR/rows.jsonl is UTF-16 text: save it as UTF-8")
for value in ("1e999", "NaN"):
    prompts(f"truth_of_{value}", lines(json.dumps(ROW).replace('"2"', value)), "ground_truth is", "a finite number")
prompts("number_of_5000_digits", lines(json.dumps(ROW).replace('"2"', "9" * 5000)), "row 1", "4300 digits", ONE_OBJECT)
prompts(
    "no_verifier",
    lines({**ROW, "data_source": "x"}),
    "data_source='x' has no verifier",
    "set reward.function",
    reward__function="auto",
)
prompts(
    "evaluation_missing",
    lines(ROW),
    "prompt file DIR/no.jsonl does not exist",
    "correct the path",
    data__val_files="('DIR/no.jsonl',)",
)
prompts("byte_order_mark", b"\xef\xbb\xbf" + lines(ROW), REACHED, accepted=True)
prompts("nul_and_odd_unicode", lines(asking("\0"), asking("e\u0301\u202e\U0001f600\u2028")), REACHED, accepted=True)
prompts("truth_of_400_digits", lines(json.dumps(ROW).replace('"2"', "9" * 400)), REACHED, accepted=True)
prompts("duplicates", lines(*[ROW] * 9), "8 of 9 prompts repeat an earlier row's prompt", REACHED, accepted=True)


# Model directories.

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
QUERY = "model.layers.0.self_attn.q_proj.weight"
AGAIN = "download it again"


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
    (ACCEPTED if accepted else CASES)[f"model_{name}"] = Case(
        told, {"model.path": "DIR/model"}, lambda directory: change(write_model(directory))
    )


def removed(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).unlink()


def replaced(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes(content)


def edited(name: str, **changes: Any) -> Callable[[Path], Any]:
    """JSON with other values; ... removes the key."""

    def change(path: Path) -> None:
        values = json.loads((path / name).read_text()) | changes
        (path / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return change


def all_of(*changes: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: [change(path) for change in changes]


def with_tensor(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], Any]:
    """Weights with another tensor in the place of one, or without it."""

    def change_file(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        new = change(tensors.pop(name))
        save_file(tensors if new is None else {**tensors, name: new}, path / WEIGHTS)

    return change_file


def with_first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[0] = value
        return array

    return change


def with_index(text: str) -> Callable[[Path], Any]:
    return all_of(removed(WEIGHTS), replaced(INDEX, text.encode()))


def larger_vocabulary(path: Path) -> None:
    values = json.loads((path / TOKENIZER).read_text())
    values["model"]["vocab"] |= {f"word{index}": index for index in range(60, 400)}
    (path / TOKENIZER).write_text(json.dumps(values))


NO_MODEL = "give a Hugging Face model directory or a .gguf file"
CASES["model_missing"] = Case(("dapo_jax: model.path=DIR/no does not exist", NO_MODEL), {"model.path": "DIR/no"})
CASES["model_is_a_file"] = Case(
    ("the model path DIR/x is neither", NO_MODEL), {"model.path": "DIR/x"}, lambda path: (path / "x").write_text("")
)
CASES["reward_model_missing"] = Case(
    ("dapo_jax: reward.model.path=DIR/no does not exist", NO_MODEL), {"reward.model.path": "DIR/no"}
)
for key, others in {
    "model.path": {},
    "reward.model.path": {},
    "reference.path": {"actor.use_kl_loss": True},
    "critic.model.path": {"algorithm.adv_estimator": "gae"},
    "algorithm.distillation.path": {},
}.items():
    CASES[f"{key}_is_a_hub_name"] = Case(
        (
            f"{key}=Qwen/Qwen2.5-0.5B does not exist on this machine, and the Hugging Face hub",
            "cannot be reached",
            "`hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B`",
        ),
        {key: "Qwen/Qwen2.5-0.5B", **others},
    )
model("without_config", removed(CONFIG), "DIR/model/config.json does not exist: model.path must be a Hugging Face")
model("config_broken", replaced(CONFIG, b"{"), "DIR/model/config.json", DAMAGED, AGAIN)
model("config_no_utf8", replaced(CONFIG, b"\xff"), "DIR/model/config.json", DAMAGED, AGAIN)
model("config_deep", replaced(CONFIG, b"[" * 10**5), "DIR/model/config.json", DAMAGED, AGAIN)
model("config_a_list", replaced(CONFIG, b"[1]"), "DIR/model/config.json must hold a JSON object, not a list", AGAIN)
model("config_pointer", replaced(CONFIG, b"version https://git-lfs.github.com/spec/v1"), "run 'git lfs pull'")
CHOOSE = "choose a supported model"
model("family", edited(CONFIG, architectures=["GPT2LMHeadModel"]), "config.json: architectures=['GPT2LM", "is not supp")
model("families_no_list", edited(CONFIG, architectures={"a": 1}), "architectures={'a': 1} must be a list", CHOOSE)
model("key_missing", edited(CONFIG, hidden_size=...), "model/config.json: LlamaForCausalLM with no hidden_size", AGAIN)
for key, value, rule in (
    ("vocab_size", "x", "a positive integer"),
    ("hidden_size", 48.5, "a positive integer"),
    ("num_attention_heads", 0, "a positive integer"),
    ("num_hidden_layers", 10**6, "at most 10000"),
    ("rms_norm_eps", "x", "a positive number"),
    ("rope_theta", -1, "a positive number"),
    ("rope_scaling", 3, "an object"),
    ("tie_word_embeddings", "x", "true or false"),
    ("layer_types", 3, "a list"),
):
    model(f"{key}_mistyped", edited(CONFIG, **{key: value}), f"config.json: {key}={value!r} must be {rule}", AGAIN)
model("heads_indivisible", edited(CONFIG, num_key_value_heads=3), "num_key_value_heads=3", "must be a multiple", AGAIN)
model("without_weights", removed(WEIGHTS), "DIR/model holds neither model.safetensors nor", "convert other formats")
model("shard_missing", with_index('{"weight_map": {"a": "b.safetensors"}}'), "do not exist: ['b.safetensors']: downl")
model("index_broken", with_index("{"), f"DIR/model/{INDEX}", DAMAGED, AGAIN)
model("index_elsewhere", with_index('{"weight_map": {"a": "../b"}}'), f"{INDEX} must have a weight_map", AGAIN)
RAW = (HF_MODEL / WEIGHTS).read_bytes()
for name, content in {
    "truncated": RAW[: len(RAW) // 2],
    "empty": b"",
    "header_longer_than_the_file": struct.pack("<Q", 2**40) + RAW[8:],
    "header_no_json": struct.pack("<Q", 8) + b"abcdefgh" + RAW,
}.items():
    model(f"weights_{name}", replaced(WEIGHTS, content), f"DIR/model/{WEIGHTS}", DAMAGED, AGAIN)
model("weights_pointer", replaced(WEIGHTS, b"version https://git-lfs.github.com/spec/v1"), "run 'git lfs pull'")
ONE_DOWNLOAD = "take both from one download"
model("shape", with_tensor(QUERY, lambda array: array[:3].copy()), f"tensor {QUERY} has shape (3, 48)", ONE_DOWNLOAD)
model("dtype", with_tensor(QUERY, lambda array: array.astype(np.int32)), f"tensor {QUERY} has dtype I32", ONE_DOWNLOAD)
model("tensor_missing", with_tensor(QUERY, lambda array: None), f"tensor {QUERY} of shape", "is missing", ONE_DOWNLOAD)
for value in (np.nan, np.inf):
    model(
        f"{value}_weight",
        with_tensor(QUERY, with_first(value)),
        f"1 of 3072 values of tensor {QUERY} are NaN or",
        "download the model again",
    )
model("without_tokenizer", removed(TOKENIZER), "DIR/model has no tokenizer.json: save the model's fast tokenizer")
for name, content in {"broken": b"{", "a_list": b"[]", "no_utf8": b"\xff", "empty_object": b"{}"}.items():
    model(f"tokenizer_{name}", replaced(TOKENIZER, content), f"DIR/model/{TOKENIZER}", DAMAGED, AGAIN)
model("vocabulary_too_large", larger_vocabulary, "ids up to 399", "160 embeddings: use the tokenizer")
model("settings_broken", replaced(SETTINGS, b"{"), f"DIR/model/{SETTINGS}", DAMAGED, AGAIN)
model("settings_a_list", replaced(SETTINGS, b"[]"), f"DIR/model/{SETTINGS} must hold a JSON object", AGAIN)
model(
    "without_eos",
    all_of(edited(CONFIG, eos_token_id=...), edited(SETTINGS, eos_token=...), replaced(GENERATION, b"{}")),
    "DIR/model names no end-of-sequence token: give eos_token_id",
)
for value in (10**6, -1, "x", 1.5, True, 2**70):
    model(
        f"eos_{value}",
        edited(GENERATION, eos_token_id=value),
        f"DIR/model: eos_token_id={value!r} must be a token of the tokenizer: correct its files",
    )
model("eos_unknown", edited(SETTINGS, eos_token="no"), "DIR/model: eos_token='no' must be a token", "correct its files")
model("without_pad", edited(SETTINGS, pad_token=...), REACHED, accepted=True)
model("template_raises", replaced(TEMPLATE, b"{{ raise_exception('no way') }}"), "no way", "the model's template")
model("template_broken", replaced(TEMPLATE, b"{% for %}"), "the chat template failed", "the model's template")
model("template_no_utf8", replaced(TEMPLATE, b"\xff"), f"DIR/model/{TEMPLATE}", DAMAGED, AGAIN)
model("without_template", removed(TEMPLATE), "the tokenizer has no chat template", "add chat_template.jinja")
model(
    "template_a_number",
    all_of(removed(TEMPLATE), edited(SETTINGS, chat_template=3)),
    "tokenizer_config.json: chat_template='3' must be text",
    "write chat_template.jinja",
)


def gguf_file(name: str, content: bytes, *told: str) -> None:
    CASES[f"gguf_{name}"] = Case(
        told, {"model.path": "DIR/a.gguf"}, lambda directory: (directory / "a.gguf").write_bytes(content)
    )


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
ARCHITECTURE = gguf_text("general.architecture") + struct.pack("<I", 8)
gguf_file("empty", b"", "DIR/a.gguf", DAMAGED, AGAIN)
gguf_file("truncated", HEADER + gguf_text("general.architecture")[:-3], "DIR/a.gguf", DAMAGED, AGAIN)
gguf_file("wrong_magic", b"GGML" + HEADER[4:] + bytes(99), "a.gguf", "must begin with b'GGUF'", AGAIN)
gguf_file("of_another_version", b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "a.gguf", "version 99 must be one of", AGAIN)
gguf_file("long_array", HEADER + gguf_text("a") + struct.pack("<IIQ", 9, 0, 2**40), f"an array of {2**40} elem", AGAIN)
gguf_file("no_language_model", HEADER + ARCHITECTURE + gguf_text("clip"), "general.architecture='clip' must be one of")


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused(name, monkeypatch, capsys, tmp_path):
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    check(CASES[name], monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_accepted(name, monkeypatch, capsys, tmp_path):
    def reached(_):
        raise RuntimeError(REACHED)

    monkeypatch.setattr(train, "first_state", reached)
    check(Case(**{**vars(ACCEPTED[name]), "code": 1}), monkeypatch, capsys, tmp_path)


# Work directories.


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


def make_metrics_damaged(directory: Path) -> None:
    (directory / "run" / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')


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
        prepare=make_metrics_damaged,
        code=1,
    ),
    "is_full": Case(
        ("No space left on device", "free some space, then rerun the same command"),
        prepare=lambda directory: (directory / "run" / "config.json.tmp").symlink_to("/dev/full"),
        code=1,
    ),
    "has_a_full_log": Case(
        ("No space left on device", "free some space, then rerun the same command"),
        prepare=lambda directory: (directory / "run" / "train.log").symlink_to("/dev/full"),
        code=1,
    ),
}


@pytest.mark.parametrize("name", WORKDIRS)
def test_a_work_directory_is_refused(name, monkeypatch, capsys, tmp_path):
    check(WORKDIRS[name], monkeypatch, capsys, tmp_path)


def test_a_read_only_work_directory_and_an_unreadable_file_are_refused(monkeypatch, capsys, tmp_path):
    allowed = os.access
    for name in ("run", "rows.jsonl"):  # as for a user without the right: root has them all

        def access(path, mode, name=name):
            return Path(path).name != name and allowed(path, mode)

        monkeypatch.setattr("os.access", access)
        told = {
            "run": ("workdir=DIR/run must be a directory", "Permission denied", "let this user write there"),
            "rows.jsonl": ("prompt file DIR/rows.jsonl cannot be read by this user: change its permissions",),
        }[name]
        check(Case(told, CASES["prompts_empty"].options, CASES["prompts_empty"].prepare), monkeypatch, capsys, tmp_path)


def test_there_are_enough_cases():
    assert len(CASES) + len(WITH_CHECKPOINT) + len(WORKDIRS) >= 70
