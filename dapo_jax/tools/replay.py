"""Host: computes a step of a run again from the run's own files, and says which number differs, if any.

    dapo-jax replay RUN --step N [--group K] [--from-batch] [--report FILE.html] [--tolerance T] [OPTION=VALUE ...]

It starts from the nearest checkpoint before step N, or from the beginning, and computes all steps from there as the
run did, on the devices that are here. Nothing is written to the run's folder; the run may still be training. --group K
shows the way of the step's K-th group as a table. --from-batch takes the batch that trainer.keep_batches has kept of
the step, and computes what needs no weights: verdicts, rewards, kept groups, advantages. --report writes the run's
report page with what was found. OPTION=VALUE changes the run's config, such as mesh.fsdp=1 for other devices, or the
path of a file that has moved. docs/reliability.md says what is compared.

Exit code: 0 all is equal, 1 something differs, 2 the step cannot be computed again.
"""

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import checkpoint_dir, judge_folder
from dapo_jax.config.values import with_values
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Collected
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.errors import say
from dapo_jax.monitor.kept_batches import FOLDER, batch_file, read_batch
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.workdir import open_workdir
from dapo_jax.parallel.checksums import checksums
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.parts import COMPILED, Run, open_run
from dapo_jax.tools.replay_batch import from_kept_batch
from dapo_jax.tools.replay_comparison import Replay, comparable
from dapo_jax.tools.replay_group import Group, UpdateWatch, check_group, group_table, groups_by_number
from dapo_jax.tools.replay_plan import Plan, planned
from dapo_jax.tools.report.report import report
from dapo_jax.training.loop import conclude_step, next_batch
from dapo_jax.training.state import RunState, first_state, restore_state, saved_arrays
from dapo_jax.training.step import train_step


def replay(
    run: str | Path,
    step: int,
    *,
    group: int | None = None,
    from_batch: bool = False,
    tolerance: float | None = None,
    **options: Any,
) -> Replay:
    """Computes a step of a run again, as `dapo-jax replay` does, and compares it with what the run has recorded.

        found = dx.replay("runs/tiny", 37)
        assert found.equal, found.differences

    Args:
        run: its work directory, to which nothing is written.
        step: a training step that it has done.
        group: of the step, from 1: `print` shows its table too.
        from_batch: compute only what needs no weights, from the batch that trainer.keep_batches has kept of the step.
        tolerance: numbers may differ by so much, times the recorded number if that is above 1; None = 0 on the run's
            devices, else 1e-4.
        options: values by dotted key that replace the run's.

    Raises:
        InputError: the step cannot be computed again.
    """
    return carried_out(planned(run, step, tolerance, options, from_batch=from_batch), group)


def carried_out(plan: Plan, group: int | None = None) -> Replay:
    """Computes the steps of `plan`, and compares each with what the run has recorded.

    Args:
        group: whose table is wanted, from 1.

    Raises:
        InputError: the run's files do not allow it, or the step has no such group.
    """
    if group is not None and not plan.from_batch and (row := plan.rows.get(plan.step)):
        judged = sum(row.get(f"dynamic_sampling/{name}", 0.0) for name in ("num_evaluated_prompts", "num_carried_in"))
        check_group(group, int(judged))
    reserve_gpu_memory(plan.config.trainer.gpu_memory_fraction)
    with tempfile.TemporaryDirectory(prefix="dapo_jax_replay_") as folder:
        copied = {judge_folder(str(plan.run)): judge_folder(folder), plan.run / COMPILED: Path(folder, COMPILED)}
        for recorded, copy in copied.items():
            if recorded.is_dir():
                shutil.copytree(recorded, copy)
        directory = checkpoint_dir(str(plan.run), plan.config.trainer)
        own = {
            "workdir": folder,
            "trainer.checkpoint_dir": directory,
            "trainer.logger": (),
            "trainer.profile_steps": (),
            "trainer.keep_batches": str(plan.step) if batch_file(plan.run / FOLDER, plan.step).is_file() else "",
        }
        alone = {"trainer.coordinator": "", "trainer.num_processes": 1, "trainer.process_id": -1}
        config = without_switched_off(plan.config, with_values(plan.config, own | alone), ())
        validate(config)
        if plan.from_batch:
            with open_workdir(folder, detailed=False):
                return from_kept_batch(plan, with_downloads(config), group)
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
                    # As the run did: also after its last step, if it was extended later.
                    row = self._plan.rows.get(state.progress.step)
                    evaluates = None if row is None else any(name.startswith("eval/") for name in row)
                    state = conclude_step(run, self._checkpoints, records, state, evaluates=evaluates)
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
        groups = groups_by_number(parts, decode)
        self._found.samples(self._plan.run, groups)
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
        compared.arrays("state", *map(comparable, (stream, found)))
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
        trained = [] if sampled.experience is None else sampled.experience.numbers.tolist()
        metric, rows = self._run.config.algorithm.filter_groups.metric, self._run.problems.train_set.rows
        return group_table(groups, number, trained, self._watch.batch, metric, rows, self._watch.of_row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax replay", __doc__)
    parser.add_argument("run", help="work directory of a run")
    parser.add_argument("--step", type=int, required=True, help="training step to compute again")
    parser.add_argument("--group", type=int, help="show this group of the step, from 1")
    parser.add_argument("--from-batch", action="store_true", help="without weights, from the batch kept of the step")
    parser.add_argument("--report", type=Path, help="write the run's report page with what was found to this file")
    parser.add_argument("--tolerance", type=float, help="0 on the run's devices, else 1e-4, unless given")
    given, options = parser.parse_known_args(arguments)
    with refusals(["replay", *options]):
        say(plan := planned(given.run, given.step, given.tolerance, options, from_batch=given.from_batch))
        say(found := carried_out(plan, given.group))
        if given.report is not None:
            replayed = "\n".join([str(plan), str(found)])
            say(f"the report is in {report([('', given.run)], given.report, replayed=replayed)}")
    sys.exit(0 if found.equal else 1)
