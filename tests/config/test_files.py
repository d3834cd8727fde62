"""A config file is Python, YAML, or JSON such as the config.json of a run."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from dapo_jax.command.command_line import read_config
from dapo_jax.command.tasks import held_out_options, parse_tasks
from dapo_jax.config.files import read_config_file
from dapo_jax.config.sections import Config
from dapo_jax.config.values import PATHS, default_config, flat, freeze, with_values
from dapo_jax.errors import InputError

TINY = Path(__file__).parents[2] / "configs" / "tiny.py"


def write(path: Path, config: Config) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return str(path)


def tiny(workdir: str) -> Config:
    return with_values(freeze(read_config_file(str(TINY))), {"workdir": workdir})


def test_the_config_of_a_run_is_read_back(tmp_path):
    config = tiny(str(tmp_path / "run"))
    file = write(tmp_path / "run" / "config.json", config)
    assert read_config(["train", "--config", file]) == config
    changed = read_config(["train", "--config", file, "--config.seed=7", "--config.actor.optim.betas=(0.8,0.9)"])
    assert changed == with_values(config, {"seed": 7, "actor.optim.betas": (0.8, 0.9)})


def test_the_workdir_of_a_run_is_where_its_config_is(tmp_path, monkeypatch):
    write(tmp_path / "moved" / "config.json", tiny("runs/where_it_was"))
    copy = write(tmp_path / "recipe.json", tiny("runs/of_the_recipe"))
    monkeypatch.chdir(tmp_path)
    assert freeze(read_config_file("moved/config.json")).workdir == "moved"
    assert freeze(read_config_file(copy)).workdir == "runs/of_the_recipe"


YAML = """
# A recipe in YAML.
model: {path: random, lora: {rank: 2, target_modules: all-linear}}
actor:
  optim: {lr: 1e-6, betas: [0.8, 0.9]}
  grad_clip: 2
data:
  task: arithmetic
  system_prompt: null
  chat_template_kwargs: {enable_thinking: no}
rollout: {stop: ["yes", "1e3"]}
trainer: {total_training_steps: 0x10}
"""


JSON = """{
  "model": {"path": "random", "lora": {"rank": 2, "target_modules": "all-linear"}},
  "actor": {"optim": {"lr": 1e-6, "betas": [0.8, 0.9]}, "grad_clip": 2}, "rollout": {"stop": ["yes", "1e3"]},
  "data": {"task": "arithmetic", "system_prompt": null, "chat_template_kwargs": {"enable_thinking": false}},
  "trainer": {"total_training_steps": 16}
}"""


@pytest.mark.parametrize(
    ("suffix", "text", "option"), [("yaml", YAML, []), ("yml", YAML, ["--config"]), ("json", JSON, [])]
)
def test_yaml_and_json_name_some_options(suffix, text, option, tmp_path):
    file = tmp_path / f"recipe.{suffix}"
    file.write_text(text)
    config = read_config(["train", *option, str(file), "--config.seed=7"])
    assert config == with_values(
        Config(),
        {
            "seed": 7,
            "model.path": "random",
            "model.lora.rank": 2,
            "model.lora.target_modules": ("all-linear",),
            "actor.optim.lr": 1e-6,
            "actor.optim.betas": (0.8, 0.9),
            "actor.grad_clip": 2.0,
            "data.task": "arithmetic",
            "data.chat_template_kwargs": '{"enable_thinking": false}',
            "rollout.stop": ("yes", "1e3"),
            "trainer.total_training_steps": 16,
        },
    )


FORMS = {
    "py": "a Python file whose get_config() returns default_config() with changes",
    "yaml": "a YAML object of options, such as the config.json of a run",
    "json": "a JSON object of options, such as the config.json of a run",
}
START = "from dapo_jax.config import default_config\ndef get_config():\n    c = default_config(); "


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        ("py", "def get_config():\n    return 1 / 0", "fails in line 2 with ZeroDivisionError: division by zero"),
        ("py", "raise SystemExit(3)", "fails in line 1 with SystemExit: 3"),
        ("py", "get_config(:", "SyntaxError"),
        ("py", "import no_such_module", "No module named 'no_such_module'"),
        ("py", "seed = 1", "has no get_config"),
        ("py", "def get_config():\n    return {'seed': 1}", "returns {'seed': 1}"),
        ("py", f"{START}c.actor.optim.lr = 'fast'; return c", "line 3.*'lr'.*fast"),
        ("py", f"{START}c.actor.optim.lrr = 1.0; return c", "there is no key lrr in line 3; did you mean lr"),
        (
            "py",
            f"{START}c.actor.lr = 1.0; return c",
            "key lr in line 3; did you mean actor.optim.lr or critic",
        ),
        ("yaml", "- 1", "holds list"),
        ("yaml", "", "holds NoneType"),
        ("yaml", "seed: [1", "is not YAML .*expected"),
        ("yaml", "seed: 1\n--- \nseed: 2", "is not YAML .*another document"),
        ("yaml", "seed: x", "seed"),
        (
            "yaml",
            "model_type: llama\n1: 2",
            r"has options unknown to dapo_jax .*: model_type \(did you mean model.dtype .*\), 1",
        ),
        ("yaml", "data: !!python/object/apply:os.system [exit]", "is not YAML .*could not determine a constructor"),
        ("json", "[1]", "holds list"),
        ("json", "{", "is not JSON"),
        ("json", '{"seed": "x"}', "seed"),
        ("json", "[" * 100_000, "is not JSON"),
        (
            "json",
            '{"model_type": "llama", "data": 3}',
            r"unknown to dapo_jax .*: model_type \(did .*\), data \(did you mean .*\)",
        ),
        ("yaml", "trainer: {test_frq: 1}\nsed: 1", r"trainer.test_frq \(did .* trainer.test_freq .*\), sed \(.*seed"),
        ("json", '{"data": {"nonsense": 1}}', "has options unknown to dapo_jax .*: data.nonsense"),
    ],
)
def test_a_file_that_is_no_config_is_refused(suffix, text, message, tmp_path):
    file = tmp_path / f"config.{suffix}"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_config_file(str(file))
    rule = re.escape(f"--config={file} must be {FORMS[suffix]}")
    assert re.match(f"(?s){rule}.*{message}.*correct the file$", str(refused.value))


def test_a_config_of_other_keys_is_refused():
    with pytest.raises(InputError, match=r"missing config keys \['actor', 'algorithm'.*start from default_config\(\)"):
        freeze(ConfigDict({"seed": 1}))
    values = default_config().unlock()
    values.actor.surprise = 1
    with pytest.raises(InputError, match=r"unknown config keys \['surprise'\] in ActorConfig"):
        freeze(values)


def test_an_object_is_taken_where_the_text_of_one_is(tmp_path):
    keys = ("evaluate.tasks", "data.chat_template_kwargs", "trainer.compiler_options")
    file = tmp_path / "recipe.py"

    def read(value: str, *options: str):
        changes = "".join(f"    config.{key} = {value}\n" for key in keys)
        file.write_text(TINY.read_text().replace("    return config", changes + "    return config"))
        config = flat(read_config(["train", "--config", str(file), *options]))
        return [json.loads(config[key]) for key in keys]

    assert read('{"one": {"n": True}}') == [{"one": {"n": True}}] * 3
    for text in ('{"two": {"n": true}}', "{'two': {'n': True}}"):
        found = read('{"one": 1}', *(f"--config.{key}={text}" for key in keys))
        assert [values["two"] for values in found] == [{"n": True}] * 3
    with pytest.raises(ValueError, match=r"data.chat_template_kwargs=.* must hold only JSON values"):
        read('{"one": object()}')


def test_the_home_of_the_user_is_known_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    values = freeze(read_config_file(str(TINY)))
    changed = read_config(["train", "--config", str(TINY), *(f"--config.{key}=~/x" for key in PATHS)])
    for key in PATHS:
        assert flat(changed)[key] in ("/home/me/x", ("/home/me/x",)), key
    held_out = held_out_options(values.data, values.evaluate, values.reward)
    [task] = parse_tasks('{"own": {"files": "~/x.jsonl"}}', held_out)
    assert task.files == ("/home/me/x.jsonl",)


def test_classes_and_tools_have_the_whole_path_of_their_file_also_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.environment.path = {"lake": "lake.py:Lake", "desk": "package.desk.Desk"}
    config.environment.tools = ("desk.py:add",)
    frozen = freeze(config)
    whole = f"{tmp_path}/"
    assert json.loads(frozen.environment.path) == {"lake": whole + "lake.py:Lake", "desk": "package.desk.Desk"}
    assert frozen.environment.tools == (whole + "desk.py:add",)
    config.environment.path = "{not JSON"
    assert freeze(config).environment.path == "{not JSON", "its reader refuses it"


def test_a_config_file_imports_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "task_of_mine.py").write_text(TINY.read_text())
    file = tmp_path / "variant_of_mine.py"
    code = "from {} import get_config as base\n\ndef get_config():\n    config = base()\n    config.seed = 7\n"
    code += "    return config\n"
    file.write_text(code.format("task_of_mine"))
    monkeypatch.chdir("/")
    path = list(sys.path)
    assert freeze(read_config_file(str(file))) == with_values(tiny("runs/tiny"), {"seed": 7})
    assert sys.path == path
    file.write_text(code.format("absent_of_mine"))
    with pytest.raises(InputError, match="fails in line 1 with ModuleNotFoundError: No module named 'absent_of_mine'"):
        read_config_file(str(file))
    assert sys.path == path
