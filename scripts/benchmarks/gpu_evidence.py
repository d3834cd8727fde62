"""Host: an evening's evidence on a GPU in half an hour: parts in order of worth, each as far as the time allows.

    bash scripts/gpu_evidence.sh [--output DIR] [--minutes N] [--parts NAME,NAME] [--trl PYTHON] [--page FILE] [--small]

kernels    attention kernels, tokens and log-probabilities against the CPU, a training (accelerator_report.py)
slots      as many rows as a step has, on equal lengths and on a long tail: tokens per second, share of bandwidth
updates    0.5B and 1.5B: tokens per second, share of peak, memory against the forecast
kill       SIGKILL at random moments and a restart: the same bits (crash_test.py)
parts      DAPO against its parts: SmolLM2-135M on sums, all weights, five seeds (run_ablation.py)
trl        the same task with TRL in its own environment (compare_trl.py), whose Python --trl names
mawps      SmolLM2-135M on word problems, to the end
spelling   filter or not, on reasoning-gym's spell_backward with a model of 0.9 million weights, five seeds
long       a whole step at 0.5B and 1.5B with random weights and responses of up to 8,192 tokens

Each part writes DIR/NAME.json and DIR/NAME.log, and what it measured to DIR/NAME/; DIR/evidence.md is written again
after each. Run again with the same DIR, parts that have passed stay, and training runs resume. --page FILE only writes
the page from DIR. Without a GPU, or with --small, all sizes are tiny. What cannot run here is "not measured", and the
page says why. Exit code: 0, 1 if a part failed, 2 if an option is wrong.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerator_report import OneLineParser, last_lines, run_command

ROOT = Path(__file__).resolve().parents[2]
NAME, PASSED = "gpu_evidence", "passed"
GRACE_S = 5.0  # of the time, for ending a process and writing the page
PROBE = "import jax; print(f'{len(jax.devices())} x {jax.devices()[0].device_kind}, JAX {jax.__version__}')"


@dataclass(frozen=True)
class Given:
    """What the commands of a part depend on."""

    folder: Path  # of the part's results
    minutes: float  # that it may take
    small: bool
    trl: str  # an interpreter, or ""


@dataclass(frozen=True)
class Part:
    """Commands, one after the other."""

    name: str
    title: str
    commands: Callable[[Given], list[list[str]]]
    most: float  # minutes
    needs: Callable[[Given], str] = lambda given: ""  # why it cannot run here; "" if it can


def script(path: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / path), *options]


def report(sections: str) -> Callable[[Given], list[list[str]]]:
    """The accelerator report, of some sections."""

    def commands(given: Given) -> list[list[str]]:
        shutil.rmtree(given.folder, ignore_errors=True)  # it wants an empty folder
        minutes = max(given.minutes - 0.2, 0.01)  # it ends by itself, and with it the process of its section
        limits = ["--output", str(given.folder), "--minutes", f"{minutes:g}", "--sections", sections]
        return [script("benchmarks/accelerator_report.py", *limits, *["--small"] * given.small)]

    return commands


def kill(given: Given) -> list[list[str]]:
    kills, steps = (1, 12) if given.small else (3, 30)
    shutil.rmtree(given.folder, ignore_errors=True)
    options = [f"--config.trainer.total_training_steps={steps}"]  # both runs share the cache of programs, by default
    return [script("benchmarks/crash_test.py", "--kills", str(kills), "--folder", str(given.folder), *options)]


def parts(given: Given) -> list[list[str]]:
    seeds = ["0"] if given.small else [*"01234"]
    places = ["--runs", str(given.folder / "runs"), "--output", str(given.folder)]
    run = script("comparisons/run_ablation.py", "dapo", "--seeds", *seeds, *places, *few(given))
    return [data("sums"), run]


def trl(given: Given) -> list[list[str]]:
    places = ["--runs", str(given.folder / "runs"), "--output", str(given.folder)]
    return [data("sums"), script("comparisons/compare_trl.py", "--trl", given.trl, *places, *few(given))]


def mawps(given: Given) -> list[list[str]]:
    return [train("mawps", given)]


def spelling(given: Given) -> list[list[str]]:
    model = str(given.folder / "model")
    if given.small:
        return [script("comparisons/small_model.py", "--output", model, "--steps", "2", "--batch-size", "4")]
    places = ["--runs", str(given.folder / "runs"), "--output", str(given.folder)]
    compare = script("comparisons/run_ablation.py", "filter_spelling", "--seeds", *"01234", *places)
    return [*[script("comparisons/small_model.py")] * (not Path("runs/small_model").exists()), compare]


def long(given: Given) -> list[list[str]]:
    sizes = ["tiny"] if given.small else ["qwen2.5-0.5b", "qwen2.5-1.5b"]
    lengths = "24" if given.small else "lognormal:median=2000,sigma=0.8,clip=8192"
    rows = ["--batch", "16" if given.small else "64", "--prompt-length", "32" if given.small else "512"]
    options = [*rows, "--dtypes", "float32" if given.small else "bfloat16", "--lengths", lengths, "--repeats", "1"]
    return [script("benchmarks/benchmark_step.py", "--shape", size, *options) for size in sizes]


def few(given: Given) -> list[str]:
    options = {"trainer.total_training_steps": 1, "trainer.test_freq": 1, "evaluate.max_prompts": 2}
    return [f"--config.{name}={value}" for name, value in options.items()] if given.small else []


def data(name: str) -> list[str]:
    return [sys.executable, "-m", "dapo_jax.cli", "data", name]


def train(config: str, given: Given, *options: str) -> list[str]:
    place = [f"--config={ROOT / 'configs' / config}.py", f"--config.workdir={given.folder}"]
    return [sys.executable, "-m", "dapo_jax.train", *place, *options, *few(given)]


def lacking(*packages: str, files: Sequence[str] = (), model: bool = False) -> Callable[[Given], str]:
    """What of these is not here."""

    def needs(given: Given) -> str:
        from dapo_jax.hub.smollm2 import SMOLLM2

        found = [f"the package {name}" for name in packages if importlib.util.find_spec(name) is None]
        found += [f"{file}" for file in files if not (ROOT / file).exists()]
        found += [f"SmolLM2-135M ({SMOLLM2})"] * (model and not Path(SMOLLM2).expanduser().exists())
        return f"{', '.join(found)} is not here" if found else ""

    return needs


def needs_trl(given: Given) -> str:
    if not given.trl:
        return "--trl names no Python that has torch, transformers and trl"
    return lacking("matplotlib", model=True)(given)


PARTS = (
    Part("kernels", "Kernels, tokens, training", report("attention,tokens,training"), 5),
    Part("slots", "Slots at equal and long-tailed lengths", report("rows_0.5b,rows_1.5b,long_tail"), 7),
    Part("updates", "Updates", report("update_0.5b,update_1.5b,memory"), 6),
    Part("kill", "Kill and resume to the bit", kill, 4),
    Part("parts", "DAPO against its parts", parts, 10, lacking("matplotlib", model=True)),
    Part("trl", "The same task with TRL", trl, 6, needs_trl),
    Part("mawps", "Word problems", mawps, 5, lacking(files=["data/mawps"], model=True)),
    Part("spelling", "Filter or not, on spelling backwards", spelling, 6, lacking("reasoning_gym", "matplotlib")),
    Part("long", "Steps with responses of up to 8,192 tokens", long, 6),
)


def run_part(part: Part, folder: Path, *, minutes: float, small: bool, trl: str) -> dict[str, Any]:
    """What became of a part: status, seconds, the end of its output."""
    given = Given(folder / part.name, min(minutes, part.most), small, trl)
    result: dict[str, Any] = {"name": part.name, "small": small, "seconds": 0.0, "commands": [], "output": ""}
    if reason := part.needs(given):
        return result | {"status": f"not measured: {reason}"}
    if minutes <= 0:
        return result | {"status": "not measured: no time was left"}
    start, status = time.monotonic(), PASSED
    for command in part.commands(given):
        result["commands"].append(shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", ""))
        log = folder / f"{part.name}.log"
        code = run_command(command, log, 60 * given.minutes - (time.monotonic() - start))
        result["output"] += last_lines(log) + "\n"
        if code != 0:
            status = f"failed: exit code {code}" if code is not None else f"cut off after {given.minutes:.1f} minutes"
            break
    return result | {"status": status, "seconds": round(time.monotonic() - start, 1)}


def page(folder: Path) -> str:
    """The page of what a folder has; a part without a file was not measured."""
    found = [(part, _read(folder / f"{part.name}.json")) for part in PARTS]
    machines = dict.fromkeys(one["machine"] for _, one in found if one)
    lines = ["# Evidence", f"`bash scripts/gpu_evidence.sh` on {' and '.join(machines) or 'no machine yet'}."]
    if any(one and one["small"] for _, one in found):
        lines.append("**Small sizes**: this shows that everything runs; its speeds and accuracies say nothing.")
    table = ["| part | result | seconds | commit |", "|---|---|---|---|"]
    for part, one in found:
        seconds, commit = (one["seconds"], one["commit"]) if one else ("-", "-")
        table.append(f"| {part.title} | {_status(one)} | {seconds} | {commit} |")
    lines.append("\n".join(table))
    for part, one in found:
        lines += [f"## {part.title}", _status(one).capitalize() + "."]
        if one and one["commands"]:
            lines.append("```bash\n" + "\n".join(one["commands"]) + "\n```")
        report = folder / part.name / "report.md"
        if report.exists():
            lines.append(report.read_text(encoding="utf-8").partition("\n")[2].replace("\n## ", "\n### ").strip())
        elif one and one["output"].strip():
            lines.append(f"~~~~text\n{one['output'].strip()}\n~~~~")
    return "\n\n".join(lines) + "\n"


def _status(one: dict[str, Any] | None) -> str:
    return one["status"] if one else "not measured"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog=NAME, description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_evidence"), help="may have earlier results")
    parser.add_argument("--minutes", type=float, default=25.0, help="most that all parts take together")
    parser.add_argument("--parts", help="only these: names with commas between")
    parser.add_argument("--trl", default="", help="a Python that has torch, transformers and trl")
    parser.add_argument("--page", type=Path, help="only write the page from the folder to this file")
    parser.add_argument("--small", action="store_true", help="tiny sizes, as on a machine without a GPU")
    given, names = parser.parse_args(arguments), [part.name for part in PARTS]
    chosen = names if given.parts is None else given.parts.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--parts: {', '.join(unknown)} unknown: choose from {', '.join(names)}")
    if not 0 < given.minutes < 1e6:
        parser.error(f"--minutes={given.minutes:g} must be more than 0")
    folder = given.output.resolve()
    written = given.page.resolve() if given.page else folder / "evidence.md"
    given.trl = given.trl and os.path.abspath(given.trl)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output={given.output} cannot be written ({error.strerror}): choose another folder")
    os.chdir(ROOT)  # where data/ and runs/ are
    if given.page is None:
        try:
            run_parts([part for part in PARTS if part.name in chosen], folder, given)
        except KeyboardInterrupt:
            sys.exit(f"\n{NAME}: ended; {folder} has the results so far")
    written.write_text(page(folder), encoding="utf-8")
    print(f"The page: {written}")
    return int(any(_status(_read(folder / f"{part.name}.json")).startswith("failed") for part in PARTS))


def run_parts(chosen: Sequence[Part], folder: Path, given: argparse.Namespace) -> None:
    """Runs what has not passed yet, and writes its file and the page after each part."""
    end = time.monotonic() + 60 * given.minutes - GRACE_S
    machine = output_of(sys.executable, "-c", PROBE) or "no device"
    about = {"machine": machine, "commit": output_of("git", "describe", "--always", "--dirty=+")}
    small = given.small or " cpu" in machine or machine == "no device"
    for part in chosen:
        path = folder / f"{part.name}.json"
        before = _read(path)
        if before and (before["status"], before["small"], before["machine"]) == (PASSED, small, machine):
            print(f"{part.title}: passed before")
            continue
        print(f"{part.title} ... ", end="", flush=True)
        result = run_part(part, folder, minutes=(end - time.monotonic()) / 60, small=small, trl=given.trl)
        print(f"{result['status']} ({result['seconds']:.0f} s)", flush=True)
        path.write_text(json.dumps(result | about, indent=1))
        (folder / "evidence.md").write_text(page(folder), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
