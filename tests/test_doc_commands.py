"""Every command line of the README and of docs/: run here with small numbers, or where doc_commands.txt says."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import serving, use
from shapes import BATCHES, SUMS
from test_data_guide import blocks
from tools.test_data import publish, published_dapo

from dapo_jax import cli
from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.published import FILES as FILES_OF_DATA
from dapo_jax.evaluate import evaluate
from dapo_jax.export import export
from dapo_jax.monitor.records import read_metrics
from dapo_jax.training import loop as train

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"(python3?|dapo-jax|bash|pip|tensorboard|xprof|sbatch|docker|kubectl) ")

HERE = "here"

# What a command line says -> what is run.
SHORTENED = {
    "--config.trainer.total_training_steps": "2",
    "--config.trainer.profile_steps": "(2,)",
    "--step": "2",
    "--steps": "5",
    "--repeats": "1",
}
FILES = {name: "configs/tiny.py" for name in ("FILE", "mine.py", "configs/quickstart.py")} | {"WORKDIR": "runs/tiny"}
TRAIN = [
    f"--config.{option}={value}"
    for option, value in {
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        **SUMS,
        **BATCHES,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "evaluate.n": 4,
        "reward.num_workers": 1,
        "algorithm.filter_groups.max_num_gen_batches": 0,
    }.items()
]
BENCHMARK = "--shape tiny --batch 8 --group 4 --prompt-length 4".split()


def lines(block: str) -> Iterator[str]:
    """Commands of a block of shell, each on one line, without comments."""
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on
            command += "\n"
            continue
        for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
            if part:
                yield part
        command = ""


def commands() -> dict[str, str]:
    """Every command of the pages, and the page where it is first."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S):
            for line in lines(block):
                found.setdefault(line, page.name)
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", prose):
            if PROGRAM.match(code):
                words = re.sub(r"\[(--[^]|]*)[^]]*\]", r"\1", code).replace("--config ...", "--config FILE").split()
                found.setdefault(" ".join(words), page.name)
    return found


def places() -> dict[str, str]:
    """Beginning of a command -> the test or file that runs it, as in doc_commands.txt."""
    parts = re.findall(r"^([^# ].*)\n((?: {4}.*\n)+)", (ROOT / "tests/doc_commands.txt").read_text(), re.M)
    return {start.strip(): place for place, starts in parts for start in starts.splitlines()}


RUN_BY, COMMANDS = places(), commands()


def run_by(command: str) -> str | None:
    fitting = [start for start in RUN_BY if command.startswith(start)]
    return RUN_BY[max(fitting, key=len)] if fitting else None


def mine(text: str) -> list[str]:
    """The commands with this text that are run here."""
    return [command for command in COMMANDS if text in command and run_by(command) == HERE]


def small(command: str, number: int | str) -> list[str]:
    """The words of a command, with the files that there are and small numbers."""
    words = []
    for word in shlex.split(command):
        option, sign, value = word.partition("=")
        if sign and option in SHORTENED:
            word = f"{option}={SHORTENED[option]}"
        elif words and words[-1] in SHORTENED:
            word = SHORTENED[words[-1]]
        elif value in FILES:
            word = f"{option}={FILES[value]}"
        word = re.sub(r"\w+_ENV/bin/python", sys.executable, FILES.get(word, word))
        words.append(f"out/{number}" if word == "DIR" else f"{option}=runs/tiny" if value == "DIR" else word)
    return words


def test_every_command_is_run_by_something():
    assert [f"{page}: {command}" for command, page in COMMANDS.items() if run_by(command) is None] == []
    assert [start for start in RUN_BY if not any(command.startswith(start) for command in COMMANDS)] == []


@pytest.mark.parametrize("place", sorted({*RUN_BY.values()} - {HERE}))
def test_what_runs_a_command_exists(place):
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text()
    if test:
        assert f"def {test}(" in text
    else:
        assert [command for command in COMMANDS if run_by(command) == place and command in text]


def test_what_is_installed_is_an_extra_of_the_package():
    targets = {shlex.split(command)[-1] for command in mine("pip install ")} - {"tensorboard", "xprof"}  # of others
    for target in targets - {"."}:
        extras = re.fullmatch(r"(?:\.|dapo_jax)\[([\w,-]+)\]", target)
        assert extras and all(f'"{extra}": [' in (ROOT / "setup.py").read_text() for extra in extras[1].split(",")), (
            target
        )


@pytest.mark.parametrize("command", [command for command in COMMANDS if " --config " in command])
def test_its_config_exists_and_its_options_are_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    config = words[words.index("--config") + 1]
    config = "configs/tiny.py" if config in ("FILE", "mine.py") else config
    assert Path(config).exists() or Path(f"configs/{config}.py").exists()
    if options := [word for word in words if word.startswith("--config.")]:
        validate(read_config(["train", "--config", config, *options]))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder like a checkout, with the example of docs/rewards.md; runs/tiny has been trained for two steps."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "countdown.py").write_text(blocks("python")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        importlib.import_module("countdown").write_rows("countdown_train.jsonl", 16, seed=0)
        importlib.import_module("countdown").write_rows("countdown_heldout.jsonl", 2, seed=1)
        run_training(["--config", "configs/tiny.py"], patch)
        yield folder


def run_training(options: list[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", ["train", *options, *TRAIN])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert not end.value.code


@pytest.mark.slow
@pytest.mark.parametrize("command", {str(small(one, 0)): one for one in mine("dapo_jax.train --")}.values())
def test_training(command, checkout, monkeypatch, capsys):
    options = small(command, 0)[3:]
    if "profile_steps" in command:  # of runs/tiny they are done
        options.append("--config.workdir=runs/profile")
    if "countdown" in command:  # a random model never reaches the target
        options += ["--config.algorithm.filter_groups.enable=False", "--config.data.max_response_length=8"]
        filtering = ("data.arithmetic.", "algorithm.filter_groups.")
        read = [option for option in TRAIN if not option.removeprefix("--config.").startswith(filtering)]
        monkeypatch.setattr(sys.modules[__name__], "TRAIN", [*read, "--config.data.gen_batch_size=4"])
    run_training(options, monkeypatch)
    config = read_config(["train", *options])
    assert read_metrics(config.workdir)[-1]["step"] == 2
    assert bool(list(Path(config.workdir).rglob("*.trace.json.gz"))) == ("profile_steps" in command)
    if config.monitor.console == "json":
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["step"] for row in rows if "step" in row] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("command", mine("dapo_jax.evaluate.evaluate"))
def test_evaluation(command, checkout, capsys):
    words = small(command, number := mine("dapo_jax.evaluate.evaluate").index(command))[3:]
    if "--output" not in words:
        words += ["--output", f"out/{number}"]
    evaluate.main([*words, *TRAIN])
    assert "mean@4" in capsys.readouterr().out
    results = json.loads(Path(f"out/{number}/metrics.json").read_text())
    steps = [1, 2] if "--all-steps" in words else [2] if "--step" in words or "runs/tiny" in command else None
    assert [result["step"] for result in results] == (steps or [2 if "model.path" in command else None])


@pytest.mark.slow
@pytest.mark.parametrize("command", mine("dapo_jax.export.export"))
def test_export(command, checkout):
    export.main([*small(command, "export")[3:], *TRAIN])
    assert {path.name for path in Path("out/export").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("command", mine("prepare_"))
def test_preparation_of_data(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("singleop", "addsub", "multiarith"):
        Path(f"{name}.jsonl").write_text((ROOT / "tests/scripts/data/mawps.jsonl").read_text())
    _, script, *words = shlex.split(command)
    importlib.import_module(Path(script).stem).main(words)
    assert read_prompt_files([str(file) for file in Path("data").glob("*/*.parquet")])


@pytest.mark.parametrize("command", mine("dapo-jax data "))
def test_public_data_sets(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published_dapo(Path("dapo-math-17k.parquet"), [("What is 0 + 1?", "1")] * 3)
    words = shlex.split(command.replace("NAME", "gsm8k").replace("/shared/", ""))[1:]
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        publish(hub)
        cli.main(words)
    assert read_prompt_files([str(next(Path().glob(f"*/{file}"))) for file in FILES_OF_DATA[words[1]]])


@pytest.mark.parametrize("command", mine("dapo-jax plan "))
def test_the_plan_of_dynamic_sampling(command, capsys):
    cli.main(shlex.split(command)[1:])
    assert "keep rate" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", mine("soak"))
def test_soak(command, checkout, capsys):
    assert importlib.import_module("soak").main([*small(command, 0)[2:], *TRAIN[2:]]) in (0, 1)  # so short, caches grow
    assert "grown after 5 steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long("benchmark_rollout", "update_long_tail.json", "step_long_tail.json")  # each script once
@pytest.mark.parametrize(
    "command", mine("/benchmark_"), ids=lambda command: "-".join(re.findall(r"benchmark_\w+|\w+\.json", command))
)
def test_benchmarks(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    _, script, *words = small(command, 0)
    kind = ["--lengths", "4", *([] if "rollout" in script else ["--micro", "4"])]
    importlib.import_module(Path(script).stem).main([*words, *BENCHMARK, *kind, "--dtypes", "float32"])
    assert "| dapo_jax" in capsys.readouterr().out
