"""Host: computes a step of a run again from the run's own files, and says which number differs, if any.

    dapo-jax replay RUN --step N [--group K] [--tolerance T] [OPTION=VALUE ...]

It starts from the nearest checkpoint before step N, or from the beginning, and computes all steps from there as the
run did, on the devices that are here. Nothing is written to the run's folder; the run may still be training. --group K
shows the way of the step's K-th group as a table. OPTION=VALUE changes the run's config, such as mesh.fsdp=1 for other
devices, or the path of a file that has moved. docs/reliability.md says what is compared.

Exit code: 0 all is equal, 1 something differs, 2 the step cannot be computed again.
"""

import dataclasses
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dapo_jax import __version__
from dapo_jax.command.command_line import read_options, refusals
from dapo_jax.command.help import command_parser
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import checkpoint_dir, judge_folder
from dapo_jax.config.own_functions import file_and_function
from dapo_jax.config.places import expanded, is_address
from dapo_jax.config.sections import Config, MeshConfig
from dapo_jax.config.values import flat, with_values
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Collected
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.errors import InputError, say
from dapo_jax.interface.configs import with_changes
from dapo_jax.monitor.environment import environment, recorded_environment, recorded_version
from dapo_jax.monitor.kept_batches import FOLDER, batch_file, read_batch
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.recipe import read_config
from dapo_jax.monitor.records import METRICS, RunRecords, sample_files
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.parallel.checksums import checksums
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.run.checkpoint import Checkpoints, saved_steps
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.other_runs import Origin, find_checkpoint
from dapo_jax.run.parts import Run, open_run
from dapo_jax.tools.plot import metrics_of, record_of
from dapo_jax.tools.replay_comparison import Group, Replay, UpdateWatch, group_table
from dapo_jax.training.loop import conclude_step, next_batch
from dapo_jax.training.state import RunState, first_state, restore_state, saved_arrays
from dapo_jax.training.step import train_step

ROUNDING = 1e-4  # tolerance on other devices: of a number up to 1, and relative to a larger one
OF_ROUNDING = ("mesh.", "model.", "rollout.", "actor.", "critic.")  # options that may change the rounding


@dataclass(frozen=True)
class Plan:
    """What is computed again, from where, and how it is compared."""

    run: Path
    config: Config
    step: int
    origin: Origin | None  # None: the run's beginning
    rows: Mapping[int, Mapping[str, Any]]  # the run's metrics by step
    tolerance: float
    notes: Sequence[str]  # what may explain a difference

    def __str__(self) -> str:
        first, start = 1, "the beginning, as no checkpoint precedes it"
        if self.origin:
            first, start = self.origin.step + 1, f"the checkpoint of step {self.origin.step}"
        how = f"up to rounding, {self.tolerance:g} x max(1, |number|)" if self.tolerance else "to the bit"
        seconds = sum(row.get("timing_s/step") or 0.0 for step, row in self.rows.items() if first <= step <= self.step)
        what = f"replay of step {self.step} of {self.run} from {start}; compared {how}"
        took = f"steps to compute: {self.step - first + 1}, which took the run {seconds:.1f} s without evaluations"
        return "\n".join([what, took, *(f"note: {note}" for note in self.notes)])


def replay(
    run: str | Path, step: int, *, group: int | None = None, tolerance: float | None = None, **options: Any
) -> Replay:
    """Computes a step of a run again, as `dapo-jax replay` does, and compares it with what the run has recorded.

        found = dx.replay("runs/tiny", 37)
        assert found.equal, found.differences

    Args:
        run: its work directory, to which nothing is written.
        step: a training step that it has done.
        group: of the step, from 1: `print` shows its table too.
        tolerance: numbers may differ by so much, times the recorded number if that is above 1; None = 0 on the run's
            devices, else 1e-4.
        options: values by dotted key that replace the run's.

    Raises:
        InputError: the step cannot be computed again.
    """
    return carried_out(planned(run, step, tolerance, options), group)


def planned(run: str | Path, step: int, tolerance: float | None, options: Mapping[str, Any] | Sequence[str]) -> Plan:
    """How a step can be computed again; `options` by key, or as on the command line. InputError if it cannot."""
    folder = expanded(run)
    recorded = read_config(folder) if folder.is_dir() and not is_address(str(run)) else None
    if recorded is None:
        raise InputError(f"{run} must be a folder of this machine with the config.json of a run: give its workdir")
    rows = {row["step"]: row for row in metrics_of(record_of(folder, METRICS))}
    if step not in (done := [number for number in rows if number]):
        has = f"{min(done)} to {max(done)}" if done else "none yet"
        raise InputError(f"--step={step} must be a training step that {run} has done: {has}; choose one of these")
    if isinstance(options, Mapping):
        config = with_changes(recorded, options)
    else:
        given = ["replay", f"--config={folder / 'config.json'}", *options]
        config = read_options(given)[0] if options else recorded
    before, after = flat(recorded), flat(config)
    changed = [key for key, value in after.items() if before[key] != value and key != "workdir"]
    config, there = _here(folder, config)
    if tolerance is None:
        tolerance = ROUNDING if there or any(key.startswith(OF_ROUNDING) for key in changed) else 0.0
    notes = [*_notes(folder, config), *there, *(f"with {key}={after[key]}" for key in changed)]
    return Plan(folder, config, step, _origin(folder, recorded, step), rows, tolerance, notes)


def _origin(folder: Path, config: Config, step: int) -> Origin | None:
    """The nearest checkpoint before `step`; without one, that from which the run began, or None."""
    directory, other = checkpoint_dir(str(folder), config.trainer), config.trainer.resume_from_path
    saved = saved_steps(directory)
    if before := [one for one in saved if one < step]:
        return Origin(directory, before[-1])
    try:
        return find_checkpoint(other) if other else None
    except InputError as error:
        later = f"steps after {saved[0]} can be replayed" if saved else "no step can be replayed"
        problem = f"no checkpoint precedes step {step}, and the run's beginning is gone: {error}; {later}"
        raise InputError(problem) from error


def _here(folder: Path, config: Config) -> tuple[Config, list[str]]:
    """`config` with a mesh of the devices that are here, and how the run's machine differs, in words."""
    try:
        machines = [one | one["versions"] for one in (recorded_environment(folder), environment())]
        pairs = {name: [one[name] for one in machines] for name in ("devices", "processes", "host", "jax", "jaxlib")}
        notes = [f"the run's {name}: {old}; here: {new}" for name, (old, new) in pairs.items() if old != new]
    except (OSError, ValueError, KeyError, TypeError):
        notes = ["the run's environment.json cannot be read: its machine is not known"]
    fixed, count = config.mesh.fsdp * config.mesh.expert * config.mesh.tensor, len(jax.devices())
    if notes and (count % fixed or config.mesh.data not in (-1, count // fixed)):
        notes.append(f"mesh.data={count}, since the run's mesh needs other devices")
        config = dataclasses.replace(config, mesh=MeshConfig())
    return config, notes


def _notes(folder: Path, config: Config) -> Iterator[str]:
    """What else may explain a difference."""
    if (version := recorded_version(folder)) != __version__:
        yield f"the run is of dapo_jax {version}, this is {__version__}"
    for option, value in flat(config).items():
        copy, found = folder / "functions" / f"{option}.py", file_and_function(str(value))
        if found and copy.is_file() and found[0].is_file() and copy.read_bytes() != found[0].read_bytes():
            yield f"{option}={value}: the file is not {copy} any more, with which the run was computed"
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else ""
    for changed in re.findall(r"resuming with a changed config: (.*)", log):
        yield f"the run was resumed with a changed config: {changed}"


def carried_out(plan: Plan, group: int | None = None) -> Replay:
    """Computes the steps of `plan`, and compares each with what the run has recorded.

    Args:
        group: whose table is wanted, from 1.

    Raises:
        InputError: the run's files do not allow it, or the step has no such group.
    """
    reserve_gpu_memory(plan.config.trainer.gpu_memory_fraction)
    with tempfile.TemporaryDirectory(prefix="dapo_jax_replay_") as folder:
        if (answers := judge_folder(str(plan.run))).is_dir():
            shutil.copytree(answers, judge_folder(folder))
        directory = checkpoint_dir(str(plan.run), plan.config.trainer)
        own = {
            "workdir": folder,
            "trainer.checkpoint_dir": directory,
            "trainer.logger": (),
            "trainer.profile_steps": (),
            "trainer.keep_batches": str(plan.step) if batch_file(plan.run / FOLDER, plan.step).is_file() else "",
        }
        alone = {"trainer.coordinator": "", "trainer.num_processes": 1, "trainer.process_id": -1}
        config = with_values(plan.config, own | alone)
        validate(config)
        with (
            open_workdir(folder, detailed=False),
            closing(Checkpoints(directory, config.trainer, read_only=True)) as checkpoints,
            open_run(with_downloads(config), initial_step=plan.origin.step if plan.origin else 0) as run,
        ):
            return _Replaying(plan, checkpoints, run, group).result()


class _Replaying:
    """The steps of a plan under way: what each makes, and how it compares."""

    def __init__(self, plan: Plan, checkpoints: Checkpoints, run: Run, group: int | None) -> None:
        self._plan, self._checkpoints, self._number = plan, checkpoints, group
        self._watch, self._step, self._found = UpdateWatch(run), 0, Replay(plan.tolerance)
        self._run = dataclasses.replace(run if group is None else self._watch.run, observe=self._observe)
        self._next, self._rounds = list[Round](), list[Round]()
        self._rows: dict[int, Mapping[str, float]] = {}

    def _observe(self, made: Round | Batch) -> None:
        """What is judged before a batch is made belongs to its step; with rollout_ahead, what follows to the next."""
        if isinstance(made, Round):
            self._next.append(made)
            return
        self._rounds, self._next = self._next, []
        if self._step == self._plan.step:
            self._watch.batch = made

    def result(self) -> Replay:
        """Computes and compares all steps."""
        try:
            for state, sampled in self._steps():
                groups = self._compare(sampled)
                if self._step == self._plan.step:
                    self._found.not_compared = self._compare_batch() + self._compare_checkpoint(state)
                    self._found.table = self._table(groups, sampled)
        except RuntimeError as error:  # such as too few groups, with another verifier
            self._found.same("kept groups", f"the end of step {self._step}", "a row of metrics", str(error))
        return self._found

    def _steps(self) -> Iterator[tuple[RunState, Collected]]:
        """Computes the steps as training does; gives of each the state after it, and what it has trained on."""
        run, origin, sampled = self._run, self._plan.origin, None
        state = restore_state(run, self._checkpoints, origin) if origin else first_state(run)
        on_step = self._rows.__setitem__
        with RunRecords(run.config.workdir, run.config.trainer, resume_step=None, on_step=on_step) as records:
            while True:
                if state.progress.unrecorded is not None:
                    state = conclude_step(run, self._checkpoints, records, state)
                if sampled is not None:
                    yield state, sampled
                if state.progress.step == self._plan.step:
                    return
                self._step, start = state.progress.step + 1, time.perf_counter()
                self._found.begin(self._step)
                sampled, stream = next_batch(run, state)
                if sampled.solved:
                    raise RuntimeError("the data is solved here")
                sampled.metrics["dynamic_sampling/first_release_s"] = time.perf_counter() - start
                state = train_step(run, records, state, sampled, stream, start)
                if sampled.experience is None:  # there was no batch
                    self._rounds, self._next = self._next, []

    def _compare(self, sampled: Collected) -> list[Group]:
        """Compares samples and metrics of a step. All its groups by prompt number, also those that are carried in."""
        decode, trained = self._run.sampler.tokenizer.decode, sampled.experience
        parts = [] if trained is None else [(trained, [True] * len(trained))]
        parts += [(one.experience, one.keep.tolist()) for one in self._rounds]
        found: dict[int, Group] = {}
        for experience, keep in parts:
            for index, number in enumerate(experience.numbers.tolist()):
                prompt = decode(experience.prompts[index], skip_special_tokens=False)
                found[number] = Group(experience, index, keep[index], prompt)
        groups = [found[number] for number in sorted(found)]
        if (path := sample_files(self._plan.run).get(self._step)) is not None:
            lines = path.read_text(encoding="utf-8").splitlines()
            self._found.samples([json.loads(line) for line in lines], groups)
        if self._step in self._plan.rows:
            self._found.rows(self._plan.rows[self._step], self._rows[self._step])
        return groups

    def _compare_batch(self) -> list[str]:
        """Compares what the step has trained on with what trainer.keep_batches kept; returns what has no record."""
        kept, found = (read_batch(Path(folder), self._step) for folder in (self._plan.run, self._run.config.workdir))
        if kept is None:
            return ["tokens and log-probabilities of responses that are not in samples/"]
        self._found.batch(kept, found or {})
        return ["tokens and log-probabilities of responses that are not in samples/ and were not trained on"]

    def _compare_checkpoint(self, state: RunState) -> list[str]:
        """Compares the state after the step with its checkpoint; returns what cannot be compared, in words."""
        compared = self._found
        if self._step not in self._checkpoints.steps():
            return [f"weights: step {self._step} has no checkpoint"]
        saved, stream = self._checkpoints.record(self._step)
        found = saved_arrays(state, self._run.problems.train_set)
        compared.arrays("state", {**stream, "engine": {}}, {**found, "engine": {}})
        if compared.tolerance or not saved.arrays:
            return ["weights: their checksums say nothing about rounding"]
        models = {name: one for name, one in vars(state.models).items() if one is not None}
        for name, checksum in checksums(models).items():
            compared.same("weights", f"the checksum of {name}", saved.arrays.get(name), checksum)
        return []

    def _table(self, groups: Sequence[Group], sampled: Collected) -> str:
        """The table of the requested group; empty if none was requested."""
        if (number := self._number) is None:
            return ""
        if not 1 <= number <= len(groups):
            raise InputError(f"--group={number} must be a group of step {self._step}: 1 to {len(groups)}")
        group, trained = groups[number - 1], [] if sampled.experience is None else sampled.experience.numbers.tolist()
        own = int(group.experience.numbers[group.index])
        place = trained.index(own) if own in trained else None
        return f"group {number} of {len(groups)}: {group_table(group, place, self._watch)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax replay", __doc__)
    parser.add_argument("run", help="work directory of a run")
    parser.add_argument("--step", type=int, required=True, help="training step to compute again")
    parser.add_argument("--group", type=int, help="show this group of the step, from 1")
    parser.add_argument("--tolerance", type=float, help="0 on the run's devices, else 1e-4, unless given")
    given, options = parser.parse_known_args(arguments)
    with refusals(["replay", *options]):
        say(plan := planned(given.run, given.step, given.tolerance, options))
        say(found := carried_out(plan, given.group))
    sys.exit(0 if found.equal else 1)
