"""Host: the records of a run, and its summary."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dapo_jax.algorithms.named import ESTIMATOR, LOSS
from dapo_jax.command.tasks import given_function, held_out_options, parse_tasks
from dapo_jax.config.derived import checkpoint_dir, environment_classes
from dapo_jax.config.sections import Config, TrainerConfig
from dapo_jax.monitor.console import Value
from dapo_jax.monitor.environment import write_environment
from dapo_jax.monitor.recipe import Recipe, keep_files, write_config, write_recipe
from dapo_jax.monitor.records import OnStep, RunRecords, read_metrics, unheard
from dapo_jax.parallel.processes import is_first
from dapo_jax.rewards.weighted import is_weighted, parse_parts
from dapo_jax.run.held_out import mean_accuracy
from dapo_jax.run.problems import TaskSet
from dapo_jax.run.progress import Progress


def own_functions(config: Config) -> dict[str, str]:
    """The names of what may be code of your own, by option."""
    functions = {LOSS: config.actor.policy_loss.loss_mode, ESTIMATOR: config.algorithm.adv_estimator}
    if is_weighted(given := given_function(config.reward)):
        functions |= {f"reward.functions.{part.name}": part.function for part in parse_parts(given)}
    else:
        functions["reward.function"] = given
    tasks = parse_tasks(config.evaluate.tasks, held_out_options(config.data, config.evaluate, config.reward))
    functions |= {f"evaluate.tasks.{index}": task.reward_function for index, task in enumerate(tasks)}
    for name, path in environment_classes(config.environment.path).items():
        functions["environment.path" + f".{name}" * bool(name)] = path
    return functions | {f"environment.tools.{index}": tool for index, tool in enumerate(config.environment.tools)}


def open_records(
    config: Config,
    total_steps: int,
    progress: Progress | None,
    upload: Callable[[str], None],
    recipe: Recipe | None = None,
    on_step: OnStep = unheard,
) -> RunRecords:
    """Opens the records and drops the rows of steps that will be repeated.

    Args:
        total_steps: after which the run ends, which its epochs may say.
        progress: where the run resumes; None for a new run.
    """
    if is_first():
        write_config(config.workdir, dataclasses.asdict(config))  # not earlier: only now can nothing refuse the run
        write_recipe(config.workdir, recipe)
        write_environment(config.workdir, total_steps)
        keep_files(config.workdir, own_functions(config), done=progress.step if progress else 0)
    last_row = None if progress is None else progress.step - (progress.unrecorded is not None)
    return RunRecords(
        config.workdir,
        config.trainer,
        resume_step=last_row,
        enabled=is_first(),
        upload=upload,
        given=recipe.given if recipe else (),
        on_step=on_step,
    )


def results(task_sets: Sequence[TaskSet]) -> list[str]:
    """The metrics by which runs are compared: the held-out accuracy of each task set."""
    return [
        f"eval/{name}/acc/mean@{task.options.n * min(map(len, problems))}"
        for task in task_sets
        for name, problems in task.by_name
    ]


def summary(
    workdir: str,
    trainer: TrainerConfig,
    task_sets: Sequence[TaskSet],
    progress: Progress,
    seconds: Mapping[str, float],
    saved: Collection[int],
) -> list[tuple[str, Value]]:
    """The table at the end of a run.

    Args:
        seconds: of each stage since the command was started.
        saved: the steps of the checkpoints.
    """
    folder = Path(workdir)
    rows = read_metrics(folder)
    accuracies = {row["step"]: mean_accuracy(row) for row in rows}
    trained = [row["rollout/acc/mean"] for row in rows if "rollout/acc/mean" in row]
    evaluated = [step for step, accuracy in accuracies.items() if accuracy is not None and step > 0]
    problems = ", ".join(f"{len(task.prompts)} x {task.options.n}" for task in task_sets)
    logdir = folder if folder.parent == Path(".") else folder.parent  # there a run has the name of its directory
    lost = progress.best is not None and progress.best_step not in (0, *saved)
    reason = f"none: step {progress.best_step} was not saved or not kept (trainer.save_freq, trainer.keep_best_ckpt)"
    further = f"the same command with --config.trainer.total_training_steps={2 * progress.step}"
    if progress.solved:
        further = f"harder data in a new workdir with trainer.resume_from_path={workdir}, or other options here"
    tensorboard = [("TensorBoard", f"tensorboard --logdir {logdir}")]
    return [
        *([("end", progress.solved)] if progress.solved else []),
        ("training accuracy", f"{trained[0]:.3f} -> {trained[-1]:.3f}" if trained else None),
        ("held-out accuracy before", accuracies.get(0)),
        ("held-out accuracy after", accuracies[evaluated[-1]] if evaluated else None),
        ("best", progress.best),
        ("best after step", None if progress.best is None else progress.best_step),
        *([("checkpoint of the best", reason)] if lost else []),
        ("held-out problems x samples", problems or None),
        ("tokens generated", progress.tokens_generated),
        ("tokens trained", progress.tokens_trained),
        ("groups kept", progress.groups_kept),
        ("groups dropped", progress.groups_dropped),
        ("seconds per stage", dict(sorted(seconds.items(), key=lambda item: -item[1]))),
        *(tensorboard if "tensorboard" in trainer.logger else []),
        ("checkpoints", checkpoint_dir(workdir, trainer)),
        *([] if trainer.total_epochs and not progress.solved else [("to go on", further)]),
    ]
