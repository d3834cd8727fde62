"""Host: the training command and its loop.

    python -m dapo_jax.train --config tiny [--config.actor.optim.lr=1e-3 ...]     (or: dapo-jax train ...)

Rerun the same command to resume from the last checkpoint of its workdir; the result is that of an uninterrupted run.
"""

import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.command_line import command
from dapo_jax.command.help import about, options_help
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import checkpoint_dir, in_folder
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat
from dapo_jax.data.experience import Collected, Experience
from dapo_jax.dynamic_sampling.prompt_stream import StreamState
from dapo_jax.errors import say
from dapo_jax.learner.optimizer import Models
from dapo_jax.monitor import filter_log
from dapo_jax.monitor.alarms import raise_evaluation_alarms
from dapo_jax.monitor.log import log_bytes, rewind_log
from dapo_jax.monitor.recipe import Recipe
from dapo_jax.monitor.records import OnStep, RunRecords, unheard
from dapo_jax.monitor.statistics import time_metrics
from dapo_jax.monitor.trackers import own_tracker
from dapo_jax.monitor.weights_and_biases import check_installed
from dapo_jax.monitor.workdir import Workdir, open_workdir
from dapo_jax.parallel.processes import LastingFailure, SharedFailure, gather, is_first
from dapo_jax.parallel.stopping import Stopped, StopRequest
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.held_out import evaluate, mean_accuracy
from dapo_jax.run.other_runs import pinned, starting_point
from dapo_jax.run.parts import Run, open_run
from dapo_jax.run.problems import TaskSet
from dapo_jax.run.progress import Progress, begun, check_finite, goodput, solved, solved_with, with_quality
from dapo_jax.run.run_id import RUN_ID, check_processes, find_run_id, write_run_id
from dapo_jax.training.metrics import utilisation
from dapo_jax.training.sample_texts import held_out_texts
from dapo_jax.training.state import RunState, first_state, restore_state, save_state
from dapo_jax.training.step import sample_batch, train_step
from dapo_jax.training.summary import open_records, own_functions, results, summary

logger = logging.getLogger("dapo_jax.train")  # the command's
RERUN = "rerun the same command"


def train(config: Config, *, recipe: Recipe | None = None, on_step: OnStep = unheard) -> Models:
    """Trains by `config` and returns the final state of each model.

    Args:
        recipe: where the options came from; None if no command has started the run.
        on_step: called in the first process with each row of the metrics: the step (0 = before training) and numbers.

    Raises:
        ValueError: the config, the model, the data or the mesh do not fit together.
        RuntimeError: the run cannot continue, for example because too few groups pass the filter.
        Stopped: a signal asked the run to stop; it has saved what it could.
    """
    validate(config)
    if "wandb" in config.trainer.logger:
        check_installed()
    for name in filter(is_own, config.trainer.logger):
        own_tracker(name)
    detailed, process = config.monitor.console == "detailed", jax.process_index()
    also = (filter_log.LOGGER,) if config.monitor.filter_log else ()
    with open_workdir(config.workdir, detailed=detailed, also=also, process=process) as workdir:
        return _train(config, workdir, recipe, on_step)


def _train(config: Config, workdir: Workdir, recipe: Recipe | None, on_step: OnStep) -> Models:
    """`train` in an open work directory."""
    start, given = time.time(), config.workdir
    config = with_downloads(pinned(in_folder(config, workdir.folder)))
    directory = checkpoint_dir(config.workdir, config.trainer)
    check_processes(flat(config), own_functions(config), directory)
    run_id = find_run_id(config.workdir, directory, given)  # before anything is cleaned up there
    checkpoints = Checkpoints(directory, config.trainer)
    with StopRequest() as stop:
        try:
            origin = starting_point(config, checkpoints, recipe.lines if recipe else ())
            with open_run(config, initial_step=origin.step if origin else 0, check=stop.check) as run:
                state = restore_state(run, checkpoints, origin) if origin else first_state(run)
                progress = begun(state.progress, run_id.id, run_id.workdir, start=start)
                state = dataclasses.replace(state, progress=progress)
                if is_first():
                    rewind_log(config.workdir, progress.log_bytes)
                    write_run_id(config.workdir, run_id)
                    workdir.upload(RUN_ID)  # before a checkpoint has it
                total, before = run.config.trainer.total_training_steps, progress if origin else None
                with open_records(config, total, before, workdir.upload, recipe, on_step) as records:
                    records.describe(flat(config), results(run.problems.task_sets))
                    state = run_steps(run, checkpoints, records, stop, state)
                    sum_up(run, checkpoints, state.progress)
        except Stopped as reason:
            logger.warning("%s", reason)
            raise
        finally:
            checkpoints.close()
    return state.models


def run_steps(run: Run, checkpoints: Checkpoints, records: RunRecords, stop: StopRequest, state: RunState) -> RunState:
    """Runs the remaining steps.

    After a signal to stop, it discards a step that has not changed any weights yet. Otherwise it finishes the step,
    unless that takes longer than trainer.stop_patience_s. With trainer.rollout_ahead it always finishes the update,
    because other devices sample meanwhile.
    """
    trainer, trained, solved_options = run.config.trainer, False, solved_with(run.config)

    def patience() -> float:
        return 0.0 if state.is_whole() else trainer.stop_patience_s

    while True:
        try:
            with stop.safe(patience):
                stop.check(agree=True)
                if state.progress.unrecorded is not None:
                    state = conclude_step(run, checkpoints, records, state)
                    if trained:  # only for steps that this process trained
                        check_finite(trainer, run.config.workdir, state.progress)
                is_solved = state.progress.solved and state.progress.solved_with == solved_options
                if state.progress.step == trainer.total_training_steps or is_solved:
                    return state
                run.monitor.profiles.begin(state.progress.step + 1)
                run.monitor.watchdog.begin(state.progress.step + 1)
                start = time.perf_counter()
                sampled, stream = next_batch(run, state)
                if sampled.solved:
                    return end_solved(run, checkpoints, records, state, sampled)
                sampled.metrics["dynamic_sampling/first_release_s"] = time.perf_counter() - start
                stop.check(agree=True)
                if not trainer.rollout_ahead:
                    state = train_step(run, records, state, sampled, stream, start)
            if trainer.rollout_ahead:
                state = train_step(run, records, state, sampled, stream, start)
        except Stopped as reason:
            raise Stopped(f"{reason} {save_before_end(run, checkpoints, state)}") from reason
        except Exception as error:
            if jax.process_count() == 1 or isinstance(error, SharedFailure):  # saving takes all processes
                rerun = "change what is named below, then rerun" if isinstance(error, LastingFailure) else RERUN
                logger.error("the run ends %s", save_before_end(run, checkpoints, state, rerun))
            raise
        trained = True
        run.monitor.watchdog.end(done=True)
        run.monitor.profiles.end()


def next_batch(run: Run, state: RunState) -> tuple[Collected, StreamState]:
    """What the next step trains on, which may have been sampled ahead, and the stream after it."""
    if state.ahead is not None:
        return state.ahead, state.stream
    weights = run.learner.networks.decode_weights(state.models.actor.params)
    return sample_batch(run, weights, state.stream, state.progress, state.progress.step + 1)


def sum_up(run: Run, checkpoints: Checkpoints, progress: Progress) -> None:
    """The table at the end of a run."""
    run.monitor.console.close()
    saved = checkpoints.steps()
    if progress.solved:
        logger.info("%s", progress.solved)
    if is_first():
        workdir, seconds = run.config.workdir, run.monitor.timers.totals
        table = summary(workdir, run.config.trainer, run.problems.task_sets, progress, seconds, saved)
        run.monitor.console.final_table(table, report=workdir)


def conclude_step(
    run: Run, checkpoints: Checkpoints, records: RunRecords, state: RunState, *, evaluates: bool | None = None
) -> RunState:
    """Evaluates, records and saves the step that was just trained, each if it is due.

    Args:
        evaluates: whether it evaluates; None = if it is due.
    """
    trainer, progress = run.config.trainer, state.progress
    step, total = progress.step, trainer.total_training_steps
    row = progress.unrecorded
    assert row is not None
    metrics, samples = dict(row["metrics"]), list(row["samples"])
    evaluated = step == 0 or is_due(step, trainer.test_freq, total) if evaluates is None else evaluates
    if evaluated:
        measured, texts, progress = measure(run, state)
        metrics, samples = metrics | measured, samples + texts
    quality = metrics.get(trainer.best_metric) if trainer.best_metric else mean_accuracy(metrics)
    if quality is None and trainer.best_metric and evaluated:
        known = ", ".join(name for name in metrics if name.startswith("eval/")) or "no eval/*"
        logger.warning("trainer.best_metric=%s is no metric of step %d, which has %s", trainer.best_metric, step, known)
    progress = with_quality(run.config.trainer, progress, quality)
    with run.monitor.stage("write"):
        records.write_samples(step, samples)
        records.write_histograms(step, row["histograms"])
    record(run, records, step, metrics | (goodput(progress) if step else {}))
    progress = dataclasses.replace(progress, unrecorded=None, log_bytes=log_bytes(run.config.workdir))
    state = dataclasses.replace(state, progress=progress, engine=run.sampler.engine.learnt.state())
    saved_before = checkpoints.latest_step() == step  # by a run that stopped between update and record
    minutes = trainer.save_minutes and gather(checkpoints.minutes_since_save())[0] >= trainer.save_minutes
    if step and (saved_before or minutes or is_due(step, trainer.save_freq, total)):
        save_state(run, checkpoints, state, replace=True)
    return state


def end_solved(run: Run, checkpoints: Checkpoints, records: RunRecords, state: RunState, last: Collected) -> RunState:
    """Evaluates, unless that was done, and saves a run that ends before its last step because its data is solved.

    Args:
        last: of the step that could not be filled.
    """
    run.monitor.watchdog.end()
    trainer, progress, step = run.config.trainer, state.progress, state.progress.step
    if not (is_due(step, trainer.test_freq, -1) if step else trainer.val_before_train):
        measured, texts, progress = measure(run, state)
        quality = measured.get(trainer.best_metric) if trainer.best_metric else mean_accuracy(measured)
        if quality is not None:
            progress = with_quality(run.config.trainer, progress, quality)
        if measured:
            records.amend(step, measured, texts)
            run.monitor.console.step_line(step, measured, trained=False)
    state = dataclasses.replace(state, progress=solved(progress, solved_with(run.config), last.metrics))
    save_state(run, checkpoints, state, replace=True)
    return state


def measure(run: Run, state: RunState) -> tuple[dict[str, float], list[dict[str, Any]], Progress]:
    """The metrics of the held-out problems with their alarm, some responses to them, and the progress afterwards."""
    texts: list[dict[str, Any]] = []

    def keep(task_set: TaskSet, experience: Experience) -> None:
        wanted = run.config.monitor.num_samples
        texts.extend(held_out_texts(experience, task_set, run.sampler.tokenizer, wanted=wanted))

    progress = state.progress
    metrics = evaluate(run.held_out, run.learner.networks.decode_weights, state.models.actor.params, receive=keep)
    found, memory = raise_evaluation_alarms(
        mean_accuracy(metrics), progress.alarms, run.config.monitor.alarms, progress.step
    )
    return metrics | found, texts, dataclasses.replace(progress, alarms=memory)


def save_before_end(run: Run, checkpoints: Checkpoints, state: RunState, rerun: str = RERUN) -> str:
    """When a run ends early: saves its state, and says what is lost and where the run will resume.

    During an update the state before it no longer exists, so only the newest checkpoint remains. `rerun` says what the
    user is to do.
    """
    run.monitor.watchdog.end()
    step = state.progress.step
    if state.is_whole():
        if step:
            save_state(run, checkpoints, state)
        return f"after step {step}; {rerun} to resume from there"
    saved = checkpoints.latest_step() or 0
    lost = f"step {step + 1} is" if saved == step else f"steps {saved + 1} to {step + 1} are"
    return (
        f"in the update of step {step + 1}: {lost} lost; {rerun} to resume "
        f"{f'after step {saved}' if saved else 'from the beginning'}"
    )


def record(run: Run, records: RunRecords, step: int, metrics: dict[str, float]) -> None:
    """Writes a step's metrics to metrics.jsonl, the trackers and the console."""
    metrics |= run.monitor.timers.pop()
    batching, ahead = run.learner.batching, bool(run.config.trainer.rollout_ahead)
    parts = run.config.model, run.arch, batching.trained, batching.mesh, metrics
    used = utilisation(*parts, estimator=named_estimator(batching.algorithm.adv_estimator), ahead=ahead)
    metrics |= time_metrics(metrics, ahead=ahead) | used
    records.write(step, metrics)
    run.monitor.console.step_line(step, metrics)


def is_due(step: int, frequency: int, total: int) -> bool:
    """Whether `step` is a multiple of `frequency` or the last one; a frequency of -1 means only the last."""
    return step == total or (frequency > 0 and step % frequency == 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, with the arguments of this process unless others are given."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(given):
        say(f"{about(__doc__)}\n{options_help('train')}")
        return
    exit_code = 0
    with command(["train", *given]) as (config, recipe):
        try:
            train(config, recipe=recipe)
        except Stopped:
            exit_code = config.trainer.stopped_exit_code
    sys.exit(exit_code)
