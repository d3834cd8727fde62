"""Host: trains several settings with several seeds each, one run after the other, and compares them.

    dapo-jax sweep --config tiny --seeds 0 1 2 --arm base --arm slow:actor.optim.lr=1e-3 --output runs/rates

An arm is NAME, or NAME:OPTION=VALUE,OPTION=VALUE with what it changes. All other options are those of `dapo-jax train`,
which runs in DIR/NAME/seed_N. Rerun the same command to resume, also with further arms or seeds: finished runs are
passed over. In the end a table and the page DIR/report.html compare the arms (docs/report.md).
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dapo_jax.command.command_line import read_options, refusals
from dapo_jax.command.help import command_parser
from dapo_jax.command.validation import validate
from dapo_jax.config.places import is_address
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, with_values
from dapo_jax.errors import InputError, say
from dapo_jax.monitor.recipe import config_differences
from dapo_jax.monitor.records import METRICS, read_metrics
from dapo_jax.tools.plot import points
from dapo_jax.tools.report.describe import steps_left
from dapo_jax.tools.report.numbers import duration
from dapo_jax.tools.report.read import SWEEP, read_run
from dapo_jax.tools.report.report import report

FINISHED = "finished"  # file in the workdir of a finished run, with its TOTAL
TOTAL = "trainer.total_training_steps"
# A comma between two options: not within brackets, and before an even number of quotes.
_COMMA = re.compile(r""",(?=[\w.-]+=)(?![^(\[{]*[)\]}])(?=(?:[^"]*"[^"]*")*[^"]*$)""")
# What a run adds to a name in its config.json: the commit on the hub, the checkpoint of another run.
_PIN = re.compile(r"(@refs/convert/parquet)?@[0-9a-f]{40}|(/checkpoints)?/\d+(?=')")


class Planned(NamedTuple):
    """A run of a sweep."""

    arm: str
    options: list[str]  # of the command line, without those of the run alone
    config: Config


def planned_runs(arms: Sequence[str], seeds: Sequence[int], options: Sequence[str], output: Path) -> list[Planned]:
    """The runs, arm by arm. InputError if an arm or its options are wrong, or a folder holds a run of other options.

    Args:
        options: of all arms, as for `dapo-jax train`; those of an arm override them.
    """
    found, earlier = [], set()
    for arm in arms:
        name, _, changes = arm.partition(":")
        own = [re.sub(r"=(['\"])(.*)\1$", r"=\2", change) for change in filter(None, _COMMA.split(changes))]
        if not re.fullmatch(r"[\w+-][\w.+ -]*", name) or not all(re.match("[^=]+=", change) for change in own):
            raise InputError(f"--arm {arm}: write NAME, of letters, digits and ._+-, or NAME:OPTION=VALUE,OPTION=VALUE")
        try:
            config = _config([*options, *own])
            for seed in seeds:
                of_run = with_values(config, {"seed": seed, "workdir": str(output / name / f"seed_{seed}")})
                found.append(Planned(name, [*options, *own], of_run))
                validate(of_run)
                _check_folder(of_run.workdir, flat(of_run))
        except InputError as error:
            raise InputError(f"--arm {name}: {error}") from error
        if earlier & {name, config}:
            raise InputError(f"--arm {arm} has the name or all options of an earlier arm: leave one out")
        earlier |= {name, config}
    return found


def _config(options: Sequence[str]) -> Config:
    """The config of an arm, without what each run has of its own."""
    config, origin = read_options(["sweep", *options])
    for key, setter in (("seed", "--seeds"), ("workdir", "--output")):
        if key in origin.given:
            raise InputError(f"{key} differs between the runs, and {setter} sets it: leave it out")
    for key in ("trainer.checkpoint_dir", "trainer.coordinator"):
        if value := flat(config)[key]:
            raise InputError(f"{key}={value} is for one run, and a sweep has several: leave it out")
    return with_values(config, {"seed": 0, "workdir": ""})


def _check_folder(workdir: str, options: Mapping[str, Any]) -> None:
    """InputError if a run's folder holds a run of other options."""
    changed = []
    for line in config_differences(workdir, options):
        key, _, values = line.partition(": ")
        before, _, given = values.partition(" -> ")  # absent: of an earlier version
        longer = key == TOTAL and int(given) >= int(before) >= 0
        same = longer or key == "workdir" or before == "absent" or _PIN.sub("", before) == given.replace("/'", "'")
        changed += [] if same else [line]
    if changed:
        found = f"{workdir} holds a run of other options ({'; '.join(changed)})"
        raise InputError(f"{found}: choose another --output, or give the options as before")


def sweep(runs: Sequence[Planned], output: Path) -> None:
    """Trains the runs that have not finished, then compares all. RuntimeError if one fails, or is stopped."""
    output.mkdir(parents=True, exist_ok=True)
    folders = [str(Path(run.config.workdir).relative_to(output)) for run in runs]
    (output / SWEEP).write_text("\n".join(folders) + "\n", encoding="utf-8")
    again = "rerun the same command to go on with this run; finished ones are passed over"
    for number, (arm, options, config) in enumerate(runs, start=1):
        workdir, start, run = Path(config.workdir), time.monotonic(), f"{arm}, seed {config.seed}"
        finished, total = workdir / FINISHED, config.trainer.total_training_steps
        if not finished.exists() or int(finished.read_text() or total) < total:
            say(f"{number} of {len(runs)}: {run}: in {workdir}")
            if code := run_training(options, workdir, config.seed):
                log = workdir / "train.log"
                raise RuntimeError(f"{run} failed with exit code {code}, see above and {log}: correct it, then {again}")
            if left := steps_left(read_run("", config.workdir)):
                raise RuntimeError(f"{run} was stopped with {left} steps left: {again}")
            finished.write_text(str(total))
        accuracies = points(read_metrics(workdir), None, "steps")[1]
        held_out = f"{accuracies[-1]:.3f}" if accuracies else "nothing"
        say(f"{number} of {len(runs)}: {run}: {held_out} held out, {duration(time.monotonic() - start)}")
    say(f"done: {report([('', str(output))])}")


def run_training(
    options: Sequence[str], workdir: Path, seed: int, *, output: IO[str] | None = None, cwd: Path | None = None
) -> int:
    """Runs `dapo-jax train` in a process of its own, and returns its exit code.

    Args:
        output: gets what it prints; None leaves it on this terminal.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM has arrived. The run has got it too, and has ended.
    """
    command = [sys.executable, "-m", "dapo_jax.train", *options, f"--config.seed={seed}", f"--config.workdir={workdir}"]
    heard: list[int] = []
    started: list[subprocess.Popen] = []

    def forward(number: int, _: object) -> None:
        heard.append(number)
        for process in started:
            process.send_signal(number)  # a terminal sends it as well: the run takes both as one

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        started.append(subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output))
        if heard:  # while it was started
            started[0].send_signal(heard[0])
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        raise KeyboardInterrupt
    return code


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax sweep", __doc__)
    parser.add_argument("--arm", action="append", help="NAME or NAME:OPTION=VALUE,...; the first is compared with")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"], help="of each arm; 0 1 2 unless given")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the runs and the report")
    arguments = sys.argv[1:] if arguments is None else arguments
    given, options = parser.parse_known_args(arguments)
    with refusals(["sweep", *arguments]):
        seeds = [int(word) for word in given.seeds if word.isdecimal()]
        options += [word for word in given.seeds if not word.isdecimal()]  # as in --seeds 0 1 actor.optim.lr=1e-3
        output = Path(given.output).expanduser()
        if is_address(given.output) or (output / METRICS).exists() or (output.exists() and not output.is_dir()):
            raise InputError(f"--output={given.output} must be a folder on this machine, and not a run: choose another")
        if not seeds or len(set(seeds)) < len(seeds):
            raise InputError(f"--seeds {' '.join(given.seeds)}: give different numbers")
        sweep(planned_runs(given.arm or ["base"], seeds, options, output), output)
