"""Host: the parts of a run, each built once from the config: what samples, scores, learns, measures and records."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from dapo_jax.config.derived import judge_folder, trains_on_older_samples
from dapo_jax.config.sections import Config, EvaluateConfig, MeshConfig, MonitorConfig, TrainerConfig
from dapo_jax.data.containers import Batch
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.environments.episodes import try_on
from dapo_jax.errors import InputError
from dapo_jax.learner.learner import Learner
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import count_params
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.console import Console
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.monitor import Monitor, StepProfiles
from dapo_jax.monitor.timers import Stage, StageTimers
from dapo_jax.monitor.watchdog import Watchdog
from dapo_jax.parallel.compilation import compilation_shown, keep_compiled
from dapo_jax.parallel.mesh import platform
from dapo_jax.parallel.platforms import idle_gpus, unused_gpu
from dapo_jax.parallel.processes import check_agreement, is_first
from dapo_jax.parallel.stopping import Pace, unpaced
from dapo_jax.rewards.pipeline import RewardPipeline, open_verifiers
from dapo_jax.rewards.response_format import check_prompt
from dapo_jax.rewards.scoring import load_scorer
from dapo_jax.rewards.trial import check_rewards
from dapo_jax.rewards.weighted import functions_of
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.run.base_models import read_policy
from dapo_jax.run.episodes import Environments, open_environments
from dapo_jax.run.held_out import HeldOut
from dapo_jax.run.meshes import device_notes, make_meshes
from dapo_jax.run.networks import build_learner
from dapo_jax.run.passes import compute_dtype, passes
from dapo_jax.run.problems import Problems, read_problems
from dapo_jax.run.sampler import Sampler, build_engine
from dapo_jax.run.settings import engine_settings, learning_rate_plan, warn_of_warm_up, with_total_steps

logger = logging.getLogger(__name__)

COMPILED = "compiled"  # folder of a work directory
Check = Callable[[], None]  # called where a run may stop; raises to stop it


@dataclass(frozen=True)
class Run:
    """The parts of a run, which do not change from step to step."""

    config: Config
    arch: Architecture
    problems: Problems  # what it trains on
    sampler: Sampler
    rewards: RewardPipeline
    learner: Learner
    held_out: HeldOut  # what measures it
    monitor: Monitor
    observe: Callable[[Round | Batch], object] = lambda made: None  # sees what steps judge and train on

    @property
    def num_devices(self) -> int:
        """Devices that train or sample."""
        return len({*self.learner.mesh.devices.flat, *self.sampler.mesh.devices.flat})


@contextmanager
def open_run(config: Config, *, initial_step: int = 0, check: Check = lambda: None) -> Iterator[Run]:
    """Builds the parts of a run and makes the mesh that trains the current one; verifier processes end with it.

    Args:
        initial_step: training steps that are done.
        check: called regularly during sampling and between micro-batches; may raise.

    Raises:
        ValueError: a model, the data, the mesh or the reward function do not fit, with the cure.
    """
    arch, tokenizer = read_policy(config)
    keep_programs(config.trainer, Path(config.workdir), resumes=initial_step > 0)
    with ExitStack() as stack:
        environments = stack.enter_context(open_environments(config, tokenizer, check))
        config, problems = read_episodes(config, tokenizer, environments)
        num_prompts, batch = len(problems.train_set), config.data.train_batch_size
        trainer = with_total_steps(config.trainer, batch, num_prompts, done=initial_step)
        config = dataclasses.replace(config, trainer=trainer)
        mesh, rollout_mesh = meshes = make_meshes(config, arch)
        of_training = passes(config, arch, mesh)
        report_devices(device_notes(config, mesh, of_training), config.mesh, mesh)
        stack.enter_context(jax.set_mesh(mesh))
        monitor = stack.enter_context(open_monitor(config, initial_step=initial_step))
        warn_of_warm_up(config.actor.optim, config.trainer)
        plan = learning_rate_plan(config.actor.optim, config.trainer, done=initial_step)
        for line in filter(None, [*describe(config, arch, problems, mesh, of_training.attention.name), plan]):
            logger.info("%s", line)
            monitor.console.note(line)
        rewards = stack.enter_context(open_rewards(config, problems, tokenizer, rollout_mesh, monitor, check))
        monitor.console.stage("load")
        pace = unpaced if config.trainer.rollout_ahead else Pace(check)
        settings = engine_settings(config, arch, tokenizer.eos_ids, tokenizer.pad_id, rollout_mesh)
        sampler = stack.enter_context(open_sampler(settings, tokenizer, config.rollout.stop, monitor.stage, check))
        sampler = dataclasses.replace(sampler, environments=environments)
        shown = shows_progress(config.trainer, config.monitor)
        yield Run(
            config=config,
            arch=arch,
            problems=problems,
            sampler=sampler,
            rewards=rewards,
            learner=build_learner(config, arch, tokenizer, meshes, monitor, pace),
            held_out=build_held_out(config.evaluate, config.monitor, problems, sampler, rewards, shown=shown),
            monitor=monitor,
        )


def keep_programs(trainer: TrainerConfig, workdir: Path, *, resumes: bool) -> None:
    """Where the run's compiled programs are kept: on GPUs, so that a restart computes with the same kernels.

    Raises:
        InputError: trainer.deterministic=on, for devices of which nothing is known.
    """
    platform, own = jax.default_backend(), workdir / COMPILED
    if trainer.deterministic == "on" and platform not in ("cpu", "gpu", "tpu"):
        raise InputError(f"trainer.deterministic=on cannot be had on {platform}, of which nothing is known: set auto")
    if platform != "gpu" or trainer.deterministic != "on":
        keep_compiled(trainer.compilation_cache_dir, every=platform == "gpu" and trainer.deterministic == "auto")
        return
    if resumes and not own.is_dir():
        logger.warning("%s is not there: programs are compiled anew, and may not compute the same bits", own)
    keep_compiled(own, every=True, only_here=True)


def read_episodes(
    config: Config, tokenizer: Tokenizer, environments: Environments | None, *, training: bool = True
) -> tuple[Config, Problems]:
    """The problems, each the beginning of an episode if there is an environment, which is tried on its first row.

    The config has no reward function where the environment gives rewards.
    """
    if environments is None:
        return config, read_problems(config, tokenizer, training=training)
    config = dataclasses.replace(config, reward=environments.without_function(config))
    problems = read_problems(config, tokenizer, training=training, environments=environments.pool.descriptions)
    checked = set()
    for rows, _ in problems.by_function():
        for row in rows:
            own = {name: value for name, value in row.template_kwargs.items() if name != "tools"}
            if own and (of := row.task, json.dumps(own, sort_keys=True)) not in checked:
                checked.add(of)
                environments.chats[row.task].of(row).check()
            if row.task not in environments.speaks_first:
                first, *_ = replies = try_on(environments.pool, row, config.seed)
                said = [dataclasses.asdict(reply) for reply in replies]
                check_agreement({f"what the environment says in its trial for {row.origin}": said})
                environments.speaks_first[row.task] = bool(first.messages)
    return config, problems


@contextmanager
def open_monitor(config: Config, *, initial_step: int) -> Iterator[Monitor]:
    """What shows and times the run of this process."""
    updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    varies = {
        "clip": updates > 1 or trains_on_older_samples(config.algorithm, config.trainer),
        "kept": config.algorithm.filter_groups.enable,
        "turns": bool(config.environment.path or config.environment.tools),
    }
    console = Console(
        config.trainer.total_training_steps,
        initial_step=initial_step,
        enabled=is_first(),
        mode=config.monitor.console if "console" in config.trainer.logger else "quiet",
        constant=[name for name, column_varies in varies.items() if not column_varies],
    )
    profiles = StepProfiles(Path(config.workdir) / "profile", config.trainer.profile_steps)
    with ExitStack() as stack:
        stack.callback(console.close)
        if console.shows_stages:
            stack.enter_context(compilation_shown(console.compiling))
        stack.callback(profiles.end)
        patience = config.reward.judge.patience_s if config.reward.judge.base_url else 0.0
        watchdog = Watchdog(config.monitor.watchdog_minutes, config.monitor.watchdog_ends, patience)
        stack.callback(watchdog.end)
        yield Monitor(console, StageTimers(), profiles, watchdog)


@contextmanager
def open_rewards(
    config: Config,
    problems: Problems,
    tokenizer: Tokenizer,
    mesh: Mesh,
    monitor: Monitor,
    check: Check = lambda: None,
) -> Iterator[RewardPipeline]:
    """Starts the verifiers of all problems, and tries each on its problems.

    Args:
        mesh: on which a reward model scores.

    Raises:
        ValueError: a verifier cannot work, or does not fit its problems.
    """
    reward, groups = config.reward, config.algorithm.filter_groups
    functions, dtype = [function for _, function in problems.by_function()], compute_dtype(config.model, mesh)
    with open_verifiers(functions, reward, judge_folder(config.workdir)) as (verifiers, judge):
        check_rewards(problems.by_function(), verifiers, groups.metric if groups.enable else None)
        for prompts, function in problems.by_prompts():
            if "format" in functions_of(function) and len(prompts):
                text = tokenizer.decode(prompts.tokens[0], skip_special_tokens=False)
                check_prompt(text, reward.format.pattern)
        yield RewardPipeline(
            tokenizer=tokenizer,
            verifiers=verifiers,
            function=problems.function,
            scorer=load_scorer(reward.model, config.data, dtype, mesh) if reward.model.path else None,
            settings=reward,
            max_response_length=config.data.max_response_length,
            mesh=mesh,
            stage=monitor.stage,
            check=check,
            judge=judge,
        )


@contextmanager
def open_sampler(
    settings: EngineSettings, tokenizer: Tokenizer, stop: tuple[str, ...], stage: Stage, check: Check = lambda: None
) -> Iterator[Sampler]:
    """An engine with these settings; what it compiles in the background ends with it. `stop`: rollout.stop."""
    engine = build_engine(settings, check)
    try:
        yield Sampler(tokenizer, engine, settings.mesh, stop, stage)
    finally:
        engine.close()


def build_held_out(
    options: EvaluateConfig,
    monitor: MonitorConfig,
    problems: Problems,
    sampler: Sampler,
    rewards: RewardPipeline,
    *,
    shown: bool,
) -> HeldOut:
    """What measures a policy, as a stage of its own; `shown`: show a progress bar."""
    return HeldOut(
        task_sets=problems.task_sets,
        sampler=dataclasses.replace(sampler, stage=nullcontext),
        rewards=rewards,
        bootstrapped=options.bootstrap,
        detailed=monitor.detailed_stats,
        shows_progress=shown,
        stage=sampler.stage,
    )


def report_devices(notes: Sequence[str], options: MeshConfig, mesh: Mesh) -> None:
    """Logs the notes of `device_notes`, and warns of GPUs of this machine that the mesh leaves out."""
    for note in notes:
        logger.info("%s", note)
    if warning := unused_gpu():
        logger.warning("%s", warning)
    if options.data == -1 and platform(mesh) == "gpu" and (warning := idle_gpus()):
        logger.warning("%s", warning)


def describe(config: Config, arch: Architecture, problems: Problems, mesh: Mesh, attention: str) -> list[str]:
    """Four lines: the model and its size; the devices; the data and a step's sizes; where the records are."""
    adapters = f", adapters of rank {config.model.lora.rank}" * bool(config.model.lora.rank)
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    measured = sum(len(task.prompts) for task in problems.task_sets)
    data, apart = config.data, "; others sample" * bool(config.trainer.rollout_ahead)
    return [
        f"model: {config.model.path} ({arch.family}, {tqdm.format_sizeof(count_params(arch))} parameters{adapters})",
        f"devices: {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {axes}, "
        f"{compute_dtype(config.model, mesh).name}, {attention} attention{apart}",
        f"data: {len(problems.train_set)} problems to train on, {measured} to evaluate on; a step "
        f"trains on {data.train_batch_size} x {config.rollout.n} responses of up to {data.max_response_length} tokens, "
        f"{config.actor.ppo_mini_batch_size} x {config.rollout.n} per update",
        f"workdir: {config.workdir}; log: {config.workdir}/{LOG}",
    ]
