"""Every command line of the README and of docs/: run here with small numbers, or by the test that the table names."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripts.test_prepare_data import published_dapo
from shapes import BATCHES, SUMS
from test_data_guide import blocks

from dapo_jax import cli, evaluate, export
from dapo_jax import training as train
from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.monitor.records import read_metrics

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"(python3?|dapo-jax|bash|pip|tensorboard|xprof|sbatch|docker|kubectl) ")

MATH = "tests/scripts/test_run_dapo_math.py::"
SET_UP = "tests/scripts/test_set_up.py::"
LAUNCHERS = "tests/scripts/test_launchers.py::"
TPU_VM = f"{LAUNCHERS}test_the_way_to_a_tpu_vm_is_as_the_page_says"
GKE, SLURM = (f"{LAUNCHERS}test_the_way_to_{name}_is_as_the_page_says" for name in ("gke", "slurm"))
TENSORBOARD = "tests/monitor/test_tensorboard_browser.py::test_the_overview_shows_every_chart"
GUIDE = "tests/test_data_guide.py::"
JUDGED = "tests/rewards/test_judged.py::"
SLICE = "tests/preflight/test_preflight.py::test_the_report_for_a_slice_that_is_not_here"

# Beginnings of commands, and where they are run; the longest that fits counts. HERE: by this file.
HERE = "here"
RUN_BY = {
    "bash scripts/quickstart.sh": f"{SET_UP}test_the_quickstart_makes_an_environment_once_and_trains",
    "source .venv/bin/activate": f"{SET_UP}test_the_quickstart_makes_an_environment_once_and_trains",
    "bash scripts/test.sh": ".ci/run",
    "bash scripts/test_accelerators.sh": ".ci/run",
    "bash scripts/test_pythons.sh": ".ci/run",
    "bash scripts/docs/build_site.sh": ".ci/run",
    "pip install --no-deps jax-cuda13-plugin": f"{SET_UP}test_compilers_of_accelerators_are_installed_once",
    "bash scripts/accelerator_report.sh": "tests/scripts/test_accelerator_report.py::test_the_report_on_a_cpu",
    "bash scripts/docs/preflight_reports.sh": f"{SET_UP}test_the_reports_of_the_preflight_are_of_valid_configs",
    "export DAPO_FILE=": f"{MATH}test_the_stages_follow_each_other_with_the_same_options",
    "bash scripts/launch/run_dapo_math.sh": f"{MATH}test_the_stages_follow_each_other_with_the_same_options",
    "python scripts/data/prepare_": HERE,
    "bash scripts/launch/launch_tpu_vm.sh": TPU_VM,
    "export TPU_NAME=": TPU_VM,
    "ssh-add": TPU_VM,
    "export IMAGE=": GKE,
    "docker": GKE,
    "kubectl": GKE,
    "python3.12 -m venv": SLURM,
    ".venv/bin/pip install": SLURM,
    "sbatch": SLURM,
    "pip install": HERE,
    "python -m dapo_jax.train": HERE,
    "python -m dapo_jax.train --config configs/gsm8k.py --config.model.path=Qwen/": (
        "tests/test_downloads.py::test_a_run_from_the_hub_is_trained_resumed_measured_and_exported"
    ),
    "python -m dapo_jax.train --config configs/gsm8k.py '--config.reward.functions": (
        "tests/test_data_guide.py::test_several_rewards"
    ),
    'python -m dapo_jax.train --config configs/gsm8k.py \'--config.reward.functions={"correct": "gsm8k_flexible': (
        f"{JUDGED}test_the_judge_is_summed_with_what_runs_in_processes"
    ),
    "python -m dapo_jax.train --config configs/gsm8k.py --config.reward.function=judge": (
        f"{JUDGED}test_a_killed_run_resumes_without_asking_twice"
    ),
    "export JUDGE_KEY=": "tests/rewards/test_judge.py::test_the_key_is_sent_and_shown_nowhere",
    "python -m dapo_jax.train --config FILE --config.data.task=reasoning_gym": (
        "tests/data/test_reasoning_gym.py::test_a_run_reads_its_problems_and_takes_their_verifier"
    ),
    "python -m dapo_jax.train --config FILE --config.trainer.coordinator": (
        "tests/parallel/test_training_processes.py::test_processes_train_alike"
    ),
    "python -m dapo_jax.train --config dapo_jax/from_verl/defaults.py": (
        "tests/from_verl/test_translate.py::test_a_published_script_is_accepted_and_keeps_its_values"
    ),
    "python -m dapo_jax.from_verl": (
        "tests/from_verl/test_translate.py::test_the_command_prints_a_shell_script_or_writes_a_file"
    ),
    "dapo-jax env": "tests/test_env.py::test_the_report_names_versions_devices_and_variables",
    "python -m dapo_jax.evaluate": HERE,
    "python -m dapo_jax.export": HERE,
    "python -m dapo_jax.export --config FILE --output DIR --push-to-hub": (
        "tests/hub/test_upload.py::test_the_hub_has_every_file_of_the_directory"
    ),
    "python -m dapo_jax.preflight --config FILE": "tests/preflight/test_preflight.py::test_the_report_for_a_cpu",
    "python -m dapo_jax.preflight --config FILE --topology v5p": SLICE,
    "python -m dapo_jax.preflight --config configs/dapo_qwen2.5": SLICE,
    "python -m pytest test_countdown.py": f"{GUIDE}test_the_reward_function_passes_its_own_tests",
    "python countdown.py": f"{GUIDE}test_its_rows_are_read_and_its_command_is_valid",
    "dapo-jax plan": HERE,
    "dapo-jax --help": "tests/test_cli.py::test_help_and_version",
    "dapo-jax configs": "tests/test_cli.py::test_recipes_are_listed_and_printed",
    "dapo-jax train": "scripts/test_package.sh",
    "dapo-jax evaluate": "tests/test_evaluate.py::test_the_command_prints_a_table",
    "dapo-jax export": "tests/test_export.py::test_the_command_exports_what_a_run_has_trained",
    "dapo-jax from-verl": (
        "tests/from_verl/test_translate.py::test_the_command_prints_a_shell_script_or_writes_a_file"
    ),
    "python scripts/benchmarks/benchmark_": HERE,
    "python scripts/benchmarks/soak.py": HERE,
    "python scripts/benchmarks/crash_test.py": "tests/scripts/test_reliability.py::test_kills_cannot_be_seen",
    "python scripts/benchmarks/simulate_decoding.py": (
        "tests/scripts/test_simulate_decoding.py::test_the_command_prints_a_row_for_each_shape"
    ),
    "dapo-jax monitor": "tests/tools/test_monitor.py::test_log_and_metrics_are_summed_up_alike",
    "dapo-jax report": "tests/report/test_page.py::test_the_command_writes_into_the_run",
    "dapo-jax plot": "tests/tools/test_plot.py::test_a_picture_of_two_runs",
    "python scripts/comparisons/run_ablation.py": (
        "tests/scripts/test_run_ablation.py::test_finished_runs_are_reported_and_not_run_again"
    ),
    "python scripts/comparisons/small_model.py": (
        "tests/scripts/test_small_model.py::test_the_model_is_read_with_its_tokens"
    ),
    "python scripts/comparisons/compare_trl.py": (
        "tests/scripts/test_compare_trl.py::test_both_sides_are_run_and_reported"
    ),
    "python scripts/docs/write_results_doc.py": "tests/scripts/test_write_results_doc.py::test_a_page_is_up_to_date",
    "tensorboard": TENSORBOARD,
    "xprof": "tests/monitor/test_profile_viewers.py::test_xprof_shows_the_step",
}

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


def run_by(command: str) -> str | None:
    fitting = [start for start in RUN_BY if command.startswith(start)]
    return RUN_BY[max(fitting, key=len)] if fitting else None


def small(command: str, number: int) -> list[str]:
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


COMMANDS = commands()
MINE = [command for command in COMMANDS if run_by(command) == HERE]


def test_every_command_is_run_by_something():
    assert [f"{page}: {command}" for command, page in COMMANDS.items() if run_by(command) is None] == []
    assert [start for start in RUN_BY if not any(command.startswith(start) for command in COMMANDS)] == []


@pytest.mark.parametrize("name", sorted({name for name in RUN_BY.values() if name != HERE}))
def test_what_runs_a_command_exists(name):
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text()
    if test:
        assert f"def {test}(" in text
    else:
        assert [command for command in COMMANDS if run_by(command) == name and command in text]


@pytest.mark.parametrize("command", [command for command in MINE if command.startswith("pip install ")])
def test_what_is_installed_is_an_extra_of_the_package(command):
    *_, target = shlex.split(command)
    if target in ("tensorboard", "xprof"):
        return  # of others
    if extras := re.fullmatch(r"(?:\.|dapo_jax)\[([\w,-]+)\]", target):
        assert all(f'"{extra}": [' in (ROOT / "setup.py").read_text() for extra in extras[1].split(","))
    else:
        assert target == "."


@pytest.mark.parametrize("command", [command for command in COMMANDS if " --config " in command])
def test_options_are_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [FILES[word] if word in ("FILE", "mine.py") else word for word in shlex.split(command)]
    options = [word for word in words if word.startswith("--config.")]
    validate(read_config(["train", "--config", words[words.index("--config") + 1], *options]))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder like a checkout, with the example of docs/data.md, in which runs/tiny has been trained for two steps."""
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
@pytest.mark.parametrize("command", {str(small(one, 0)): one for one in MINE if "dapo_jax.train --" in one}.values())
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
@pytest.mark.parametrize("command", [command for command in MINE if "dapo_jax.evaluate" in command])
def test_evaluation(command, checkout, capsys):
    number = MINE.index(command)
    words = small(command, number)[3:]
    if "--output" not in words:
        words += ["--output", f"out/{number}"]
    evaluate.main([*words, *TRAIN])
    assert "mean@4" in capsys.readouterr().out
    results = json.loads(Path(f"out/{number}/metrics.json").read_text())
    steps = [1, 2] if "--all-steps" in words else [2] if "--step" in words or "runs/tiny" in command else None
    assert [result["step"] for result in results] == (steps or [2 if "model.path" in command else None])


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in MINE if "dapo_jax.export" in command])
def test_export(command, checkout):
    number = MINE.index(command)
    export.main([*small(command, number)[3:], *TRAIN])
    written = {path.name for path in Path(f"out/{number}").iterdir()}
    assert written >= {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("command", [command for command in MINE if "scripts/data/prepare_" in command])
def test_preparation_of_data(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"train.jsonl": "gsm8k_train", "test.jsonl": "gsm8k_test", "aime-2024.parquet": "aime24"}
    files |= {"singleop.jsonl": "mawps", "addsub.jsonl": "mawps", "multiarith.jsonl": "mawps"}
    for name, source in files.items():
        rows = [json.loads(line) for line in (ROOT / f"tests/scripts/data/{source}.jsonl").read_text().splitlines()]
        if name.endswith(".jsonl"):
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), name)
    published_dapo(Path("dapo-math-17k.parquet"), [("What is 0 + 1?", "1")] * 3)
    _, script, *words = shlex.split(command)
    module = importlib.import_module(Path(script).stem)
    importlib.import_module("data_preparation").command(module.main, words)
    output = words[words.index("--output") + 1]
    assert read_prompt_files([str(file) for file in Path().glob(output.replace("{split}", "*"))])


@pytest.mark.parametrize("command", [command for command in MINE if command.startswith("dapo-jax plan ")])
def test_the_plan_of_dynamic_sampling(command, capsys):
    cli.main(shlex.split(command)[1:])
    assert "keep rate" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in MINE if "soak" in command])
def test_soak(command, checkout, capsys):
    assert importlib.import_module("soak").main([*small(command, 0)[2:], *TRAIN[2:]]) in (0, 1)  # so short, caches grow
    assert "grown after 5 steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in MINE if "/benchmark_" in command])
def test_benchmarks(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    _, script, *words = small(command, 0)
    kind = ["--lengths", "4", *([] if "rollout" in script else ["--micro", "4"])]
    importlib.import_module(Path(script).stem).main([*words, *BENCHMARK, *kind, "--dtypes", "float32"])
    assert "| dapo_jax" in capsys.readouterr().out
