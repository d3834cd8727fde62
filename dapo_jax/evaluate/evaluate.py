"""Host: the evaluation command: how good a model, or each checkpoint of a run, is.

    python -m dapo_jax.evaluate --config FILE [--config.key=value ...] [--step N | --all-steps] [--output DIR]

measures config.model.path (a Hugging Face directory or name, or the workdir of a run: its newest
checkpoint) on the held-out problems and on evaluate.tasks. With --step or --all-steps: checkpoints of that run, or of
config.workdir if model.path is not a run. It needs no training data. docs/evaluation.md describes options and output.
"""

import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dapo_jax.command.command_line import command
from dapo_jax.command.help import command_parser
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.command.output_directory import is_written, new_output, output_directory
from dapo_jax.command.validation import validate
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, with_values
from dapo_jax.data.experience import Experience
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError, say
from dapo_jax.learner.decode_weights import build_decode_weights
from dapo_jax.models.architecture import Architecture
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.console import aligned
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.monitor.tensorboard import TensorBoard
from dapo_jax.parallel.compilation import keep_compiled
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.processes import gather, is_first
from dapo_jax.run.base_models import load_policy, load_trained, read_policy
from dapo_jax.run.checkpoint import saved_steps
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.episodes import Environments, open_environments
from dapo_jax.run.held_out import HeldOut, Receive, evaluate
from dapo_jax.run.meshes import check_stops, check_weights, device_notes
from dapo_jax.run.other_runs import Trained, find_trained
from dapo_jax.run.parts import build_held_out, describe, open_rewards, open_sampler, read_episodes, report_devices
from dapo_jax.run.passes import compute_dtype
from dapo_jax.run.problems import Problems, TaskSet
from dapo_jax.run.settings import engine_settings
from dapo_jax.training.sample_texts import turns_of

OF_THE_RUN = (  # what a run's own evaluations depend on, besides its problems and their verifier
    *("data.max_prompt_length", "data.max_response_length", "data.truncation", "data.filter_overlong_prompts"),
    *("data.system_prompt", "data.chat_template_kwargs", "model.dtype", "rollout.stop"),
    *("reward.keep_special_tokens", "environment.path", "environment.tools", "environment.arguments"),
    *("environment.max_turns", "environment.max_turn_length", "environment.max_observation_length"),
    *("environment.observation_truncation", "environment.reward"),
    *("environment.tool_format", "environment.turn_template"),
    *("seed", "evaluate.n", "evaluate.temperature", "evaluate.top_p", "evaluate.top_k"),
)
METRICS, GENERATIONS = "metrics.json", "generations.jsonl"  # of the command's output


def bench(config: Config, output: str | Path, *, step: int | None = None, all_steps: bool = False) -> list[dict]:
    """Measures one model, or checkpoints of a run, and writes metrics and generations to the directory `output`.

    For checkpoints, TensorBoard gets the metrics as curves over training steps. Every process must call it; process 0
    writes. The directory is OUTPUT.partial until it is complete.

    Args:
        step: of a checkpoint to measure.
        all_steps: measure all checkpoints, in their order.

    Returns:
        One dict per model: model (path), step (None unless it is a checkpoint), metrics (`bench/...`, `time/bench`).

    Raises:
        ValueError: the config, the model or the problems do not fit together, the checkpoint does not exist, or
            `output` holds another evaluation.
    """
    validate(config, training=False)
    checkpoints = _checkpoints(config.model.path, config.workdir, step) if all_steps or step is not None else []
    output = new_output(output)
    if checkpoints:
        config = with_values(config, {"model.path": checkpoints[0].config.workdir})
    config = with_downloads(config, training=False)
    results: list[dict] = []
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(config))
        directory = stack.enter_context(output_directory(output))
        if is_first():
            say(policy.description)
        models: list[Trained | None] = [*checkpoints] or [_newest(config.model.path)]
        curves = None
        if is_first() and models[0] is not None:
            curves = stack.enter_context(closing(TensorBoard(directory, first_step=0)))
        for trained in models:
            start = time.perf_counter()
            params = policy.load(trained)
            known = {"model": config.model.path, "step": trained.step if trained else None}
            write = _writer(policy.held_out.sampler.tokenizer, directory, known)
            metrics = evaluate(
                policy.held_out, policy.decode_weights, params, prefix="bench", receive=write, verdicts_needed=True
            )
            del params
            metrics["time/bench"] = time.perf_counter() - start
            results.append({**known, "metrics": metrics})
            if is_first():
                (directory / METRICS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            if curves is not None:
                curves.add_scalars(known["step"], metrics)
    return results


@dataclasses.dataclass(frozen=True)
class _Measuring:
    """What measures models of one architecture, one after the other."""

    held_out: HeldOut
    decode_weights: Callable[[Any], Any]  # params -> weights for the sampler
    load: Callable[[Trained | None], Any]  # a run's checkpoint, or None for model.path -> params
    description: str  # one line: model, devices, problems


@contextmanager
def open_policy(config: Config) -> Iterator[_Measuring]:
    """Builds what samples and scores, and nothing that trains."""
    keep_compiled(config.trainer.compilation_cache_dir)
    arch, tokenizer = read_policy(config, training=False)
    with open_environments(config, tokenizer) as environments:
        config, problems = read_episodes(config, tokenizer, environments, training=False)
        if not problems.task_sets:
            raise InputError("there is nothing to evaluate: give data.val_files or evaluate.tasks")
        yield from _opened(config, arch, tokenizer, problems, environments)


def _opened(
    config: Config,
    arch: Architecture,
    tokenizer: Tokenizer,
    problems: Problems,
    environments: Environments | None,
) -> Iterator[_Measuring]:
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, expert=config.mesh.expert)
    check_weights(arch, mesh)
    check_stops(config.environment, config.rollout, arch, mesh)
    report_devices(device_notes(config, mesh), config.mesh, mesh)
    dtype = compute_dtype(config.model, mesh)
    decode_weights = build_decode_weights(arch, dtype, mesh)

    monitor, shown = Monitor.silent(), shows_progress(config.trainer, config.monitor)
    settings = engine_settings(config, arch, tokenizer.eos_ids, tokenizer.pad_id, mesh)

    def load(trained: Trained | None) -> Any:
        if trained is not None:
            return load_trained(trained, arch, mesh, dtype).params
        return load_policy(config.model.path, arch, mesh, seed=config.seed, shown=shown).params

    with (
        jax.set_mesh(mesh),
        open_rewards(config, problems, tokenizer, mesh, monitor) as rewards,
        open_sampler(settings, tokenizer, config.rollout.stop, monitor.stage) as sampler,
    ):
        sampler = dataclasses.replace(sampler, environments=environments)
        held_out = build_held_out(config.evaluate, config.monitor, problems, sampler, rewards, shown=shown)
        data = f"{sum(len(task.prompts) for task in problems.task_sets)} problems to evaluate on"
        described = [*describe(config, arch, problems, mesh, "xla")[:2], data]
        yield _Measuring(held_out, decode_weights, load, "; ".join(described))


def _newest(model: str) -> Trained | None:
    """The newest checkpoint of the run at `model`, as process 0 sees it; None if it is no run."""
    trained = find_trained(model)
    return trained and dataclasses.replace(trained, step=gather(trained.step)[0])


def _checkpoints(model: str, workdir: str, step: int | None) -> list[Trained]:
    """All checkpoints of the run at `model` or in `workdir`, or the one of a step."""
    trained = find_trained(model) or find_trained(workdir)
    if trained is None:
        raise InputError(
            f"--step and --all-steps need a run: neither model.path={model} nor workdir={workdir} is the workdir of "
            "one: give it by --config.model.path"
        )
    saved = gather(saved_steps(trained.directory))[0]  # a run that goes on may save or remove one between two looks
    if step is not None and step not in saved:
        raise InputError(
            f"--step={step} must be a checkpoint of workdir={trained.config.workdir}: choose one of {saved}"
        )
    return [dataclasses.replace(trained, step=one) for one in (saved if step is None else [step])]


def as_in_the_run(config: Config, chosen: Collection[str], *, checkpoints: bool) -> tuple[Config, tuple[str, ...]]:
    """`config` with the prompts, lengths and sampling of the run that is measured, and what that changed, in words.

    Args:
        chosen: keys that keep their value in `config`.
        checkpoints: whether checkpoints of a run are asked for by their step.
    """
    trained = find_trained(config.model.path) or (find_trained(config.workdir) if checkpoints else None)
    if trained is None:
        saved = saved_steps(checkpoint_dir(config.workdir, config.trainer))
        measured = f"model.path={config.model.path} is measured, not the run in workdir={config.workdir}"
        return config, (f"{measured}: --step or --all-steps measure its checkpoints",) if saved else ()
    given, theirs = flat(config), flat(trained.config)
    taken = {key: theirs[key] for key in OF_THE_RUN if key not in chosen}
    measured = without_switched_off(config, with_values(config, taken), chosen)
    kept = flat(measured)
    changes = ", ".join(f"{key}={kept[key]} (not {given[key]})" for key in taken if kept[key] != given[key])
    if not changes:
        return measured, ()
    line = f"as in the run {trained.config.workdir}: {changes}; --config.KEY=VALUE chooses another value"
    return measured, (line,)


def _writer(tokenizer: Tokenizer, output: Path, known: dict[str, Any]) -> Receive:
    """Appends all samples of a batch to the generations."""

    def write(task: TaskSet, experience: Experience) -> None:
        if not is_first():
            return
        assert experience.answers is not None
        with open(output / GENERATIONS, "a", encoding="utf-8") as file:
            for group, index in enumerate(experience.rows.tolist()):
                row = task.prompts.rows[index]
                prompt = tokenizer.decode(experience.prompts[group], skip_special_tokens=False)
                for sample, response in enumerate(experience.texts[group]):
                    scores = {name: float(values[group, sample]) for name, values in experience.scores.items()}
                    line = {
                        **known,
                        "task": task.name_of(row),
                        "row": index + 1,
                        "origin": row.origin,
                        "sample": sample,
                        "prompt": prompt,
                        "response": response,
                        **turns_of(experience, (group, sample), tokenizer),
                        "ground_truth": row.ground_truth,
                        "answer": experience.answers[group][sample],
                        "scores": {name: value for name, value in scores.items() if not np.isnan(value)},
                        "length": int(experience.lengths[group, sample]),
                        "finished": bool(experience.finished[group, sample]),
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    return write


def table(results: Sequence[dict]) -> str:
    """One line per model and task set: `acc` (or `score` where there is no `acc`) and response lengths."""
    rows = []
    for result in results:
        named: dict[str, dict[str, float]] = {}
        for name, value in result["metrics"].items():
            if found := re.fullmatch(r"bench/(.+)/(acc|score|response_length)/([^/]+)", name):
                named.setdefault(found[1], {})[f"{found[2]}/{found[3]}"] = value
        for task, values in named.items():
            score = "acc/" if any(name.startswith("acc/") for name in values) else "score/"
            cells = {"tokens": values["response_length/mean"], "cut off": values["response_length/clip_ratio"]}
            cells |= {name.removeprefix(score): value for name, value in values.items() if name.startswith(score)}
            step = "-" if result["step"] is None else str(result["step"])
            rows.append({"step": step, "task set": task} | {name: f"{value:.3f}" for name, value in cells.items()})
    return aligned(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("python -m dapo_jax.evaluate", __doc__, options="evaluate")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="training step of the checkpoint to measure")
    which.add_argument("--all-steps", action="store_true", help="measure all checkpoints of the run")
    parser.add_argument("--output", help="directory to write, new or empty; WORKDIR/evaluation (_step_N) unless given")
    parser.add_argument("--if-missing", action="store_true", help="do nothing if OUTPUT exists")
    given, rest = parser.parse_known_args(arguments)
    checkpoints = given.step is not None or given.all_steps
    with command(["evaluate", *rest], functools.partial(as_in_the_run, checkpoints=checkpoints)) as (config, _):
        name = "evaluation" if given.step is None else f"evaluation_step_{given.step}"
        output = given.output or f"{config.workdir}/{name}"
        written = is_written(Path(output).expanduser())
        if given.if_missing and written:
            return
        if written and not given.output:
            raise InputError(f"{output} holds an evaluation already: give --output DIR, or remove it")
        results = bench(config, output, step=given.step, all_steps=given.all_steps)
        if is_first():
            say(table(results))
            say(f"metrics and generations are in {output}")
