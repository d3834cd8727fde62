"""Host: the parts of a run, each built once from the config: what samples, scores, learns, measures and records."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh
from tqdm import tqdm

from dapo_jax.algorithms.kl import ROUNDING, ROUNDING_BF16
from dapo_jax.base_models import load_base, load_critic, load_reference, policy_identity, read_policy
from dapo_jax.config.derived import (
    checkpoint_dir,
    judge_folder,
    mini_batch_size,
    trains_on_older_samples,
    uses_reference,
)
from dapo_jax.config.sections import Config
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.held_out import HeldOut
from dapo_jax.learner.actor import Actor, build_actor
from dapo_jax.learner.choices import trained, uses_critic
from dapo_jax.learner.critic import Critic, build_critic
from dapo_jax.learner.decode_weights import LatestWeights
from dapo_jax.learner.learner import Learner, build_estimator
from dapo_jax.learner.optimizer import Models
from dapo_jax.meshes import check_memory, device_notes, make_meshes
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.identity import identity
from dapo_jax.models.weights import build_freeze, count_params
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.console import Console
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.monitor.profile import StepProfiles
from dapo_jax.monitor.timers import Stage, StageTimers
from dapo_jax.monitor.watchdog import Watchdog
from dapo_jax.parallel.compilation import compilation_shown, keep_compiled
from dapo_jax.parallel.idle_gpus import idle_gpus
from dapo_jax.parallel.mesh import platform, with_tensor
from dapo_jax.parallel.platforms import unused_gpu
from dapo_jax.parallel.processes import check_agreement, check_shared, is_first
from dapo_jax.parallel.sharding import move
from dapo_jax.parallel.stopping import Pace, unpaced
from dapo_jax.problems import Problems, read_problems
from dapo_jax.rewards.opening import open_verifiers
from dapo_jax.rewards.pipeline import RewardPipeline
from dapo_jax.rewards.response_format import check_prompt
from dapo_jax.rewards.scoring import load_scorer
from dapo_jax.rewards.trial import check_rewards
from dapo_jax.rewards.verifiers import NO_OWN
from dapo_jax.rewards.weighted import functions_of
from dapo_jax.rollout.engine import build_engine
from dapo_jax.rollout.sampler import Sampler
from dapo_jax.settings import (
    actor_settings,
    algorithm_settings,
    chosen_attention,
    compute_dtype,
    critic_settings,
    engine_settings,
    micro_batches,
    with_total_steps,
)
from dapo_jax.teacher import load_teacher

logger = logging.getLogger(__name__)

Check = Callable[[], None]  # called where a run may stop; raises to stop it
Own = Mapping[str, Callable[..., Any]]  # reward functions of this Python session, python:NAME by NAME


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

    @property
    def num_devices(self) -> int:
        """Devices that train or sample."""
        return len({*self.learner.mesh.devices.flat, *self.sampler.mesh.devices.flat})


@contextmanager
def open_run(config: Config, *, initial_step: int = 0, check: Check = lambda: None, own: Own = NO_OWN) -> Iterator[Run]:
    """Builds the parts of a run and makes the mesh that trains the current one; verifier processes end with it.

    Args:
        initial_step: training steps that are done.
        check: called regularly during sampling and between micro-batches; may raise.
        own: reward functions of this Python session, by the NAME of python:NAME.

    Raises:
        ValueError: a model, the data, the mesh or the reward function do not fit, with the cure.
    """
    keep_compiled(config.trainer.compilation_cache_dir)
    arch, tokenizer = read_policy(config)
    problems = read_problems(config, tokenizer)
    config = with_total_steps(config, len(problems.train_set), done=initial_step)
    mesh, rollout_mesh = make_meshes(config, arch)
    check_memory(config, mesh)
    report_devices(config, arch, mesh)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))

        def stage(name: str) -> AbstractContextManager[None]:
            return monitor.stage(name)

        # The rewards first: they may refuse the run, and the monitor's bar would stay on the screen.
        rewards = stack.enter_context(open_rewards(config, problems, tokenizer, rollout_mesh, stage, check, own))
        monitor = stack.enter_context(open_monitor(config, initial_step=initial_step))
        attention, _ = chosen_attention(config, arch, mesh)
        for line in describe(config, arch, problems, mesh, attention):
            logger.info("%s", line)
            monitor.console.note(line)
        monitor.console.stage("load")
        sampler = stack.enter_context(open_sampler(config, arch, tokenizer, rollout_mesh, monitor.stage, check))
        yield Run(
            config=config,
            arch=arch,
            problems=problems,
            sampler=sampler,
            rewards=rewards,
            learner=build_learner(config, arch, sampler, mesh, monitor.stage, check),
            held_out=build_held_out(config, problems, sampler, rewards, monitor.stage),
            monitor=monitor,
        )


@contextmanager
def open_monitor(config: Config, *, initial_step: int) -> Iterator[Monitor]:
    """What shows and times the run of this process."""
    updates = config.data.train_batch_size // mini_batch_size(config, "actor") * config.actor.ppo_epochs
    varies = {
        "clip": updates > 1 or trains_on_older_samples(config),
        "kept": config.algorithm.filter_groups.enable,
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
    stage: Stage,
    check: Check = lambda: None,
    own: Own = NO_OWN,
) -> Iterator[RewardPipeline]:
    """Starts the verifiers of all problems, and tries each on its problems.

    Args:
        mesh: on which a reward model scores.
        own: reward functions of this Python session, by the NAME of python:NAME.

    Raises:
        ValueError: a verifier cannot work, or does not fit its problems.
    """
    reward, groups = config.reward, config.algorithm.filter_groups
    functions = [function for _, function in problems.by_function()]
    with open_verifiers(functions, reward, own, judge_folder(config)) as (verifiers, judge):
        check_rewards(problems.by_function(), verifiers, groups.metric if groups.enable else None)
        for prompts, function in problems.by_prompts():
            if "format" in functions_of(function) and len(prompts):
                text = tokenizer.decode(prompts.tokens[0], skip_special_tokens=False)
                check_prompt(text, reward.format.pattern)
        yield RewardPipeline(
            tokenizer=tokenizer,
            verifiers=verifiers,
            function=problems.function,
            scorer=load_scorer(config, compute_dtype(config.model, mesh), mesh) if reward.model.path else None,
            overlong_buffer=reward.overlong_buffer,
            length=reward.length,
            max_response_length=config.data.max_response_length,
            mesh=mesh,
            stage=stage,
            check=check,
            judge=judge,
        )


@contextmanager
def open_sampler(
    config: Config, arch: Architecture, tokenizer: Tokenizer, mesh: Mesh, stage: Stage, check: Check = lambda: None
) -> Iterator[Sampler]:
    """An engine on `mesh`; what it compiles in the background ends with it."""
    settings = engine_settings(config, arch, tokenizer.eos_ids, tokenizer.pad_id, mesh)
    engine = build_engine(settings, check)
    try:
        yield Sampler(tokenizer, engine, mesh, config.rollout.stop, stage)
    finally:
        engine.close()


def build_learner(
    config: Config, arch: Architecture, sampler: Sampler, mesh: Mesh, stage: Stage, check: Check = lambda: None
) -> Learner:
    """The compiled functions of what is trained on `mesh`, with the weights that are not trained."""
    settings, algorithm = actor_settings(config, arch, mesh), algorithm_settings(config)
    freeze = build_freeze(arch, settings.dtype, mesh)
    base = load_base(config, arch, mesh) if settings.lora is not None else None
    frozen = freeze(base.params) if base is not None else None
    reference = load_reference(config, arch, freeze, mesh) if uses_reference(config) else None
    teacher = load_teacher(config, sampler.tokenizer, mesh) if config.algorithm.distillation.path else None
    loaded = {"model.path": policy_identity(config, arch, base)}
    loaded |= {"reference.path": identity(arch, reference.digest)} if reference is not None else {}
    loaded |= {"algorithm.distillation.path": teacher.identity} if teacher is not None else {}
    decode_mesh = with_tensor(mesh, sampler.mesh.shape["tensor"])
    actor = build_actor(settings, mesh, frozen, decode_mesh=decode_mesh)
    critic = build_critic(critic_settings(config, arch, mesh), mesh) if uses_critic(config) else None

    def decode_weights(params: Any) -> Any:
        with jax.set_mesh(mesh):  # callers may be sampling, under the other mesh
            weights = actor.decode_weights(params)
        return weights if sampler.mesh == decode_mesh else move(weights, sampler.mesh)

    return Learner(
        mesh=mesh,
        actor=actor,
        critic=critic,
        reference=reference.params if reference is not None else None,
        teacher=teacher,
        loaded=loaded,
        decode_weights=LatestWeights(decode_weights, stage),
        estimator=build_estimator(algorithm, arch.vocab_size, mesh),
        init_models=lambda: init_models(config, arch, actor, critic, mesh),
        algorithm=algorithm,
        options=config.actor,
        num_groups=config.data.train_batch_size,
        rounding=ROUNDING if settings.dtype == np.float32 else ROUNDING_BF16,
        micro_batches={name: micro_batches(config, arch, mesh, name) for name in trained(config)},
        pad_id=sampler.tokenizer.pad_id,
        seed=config.seed,
        stage=stage,
        pace=unpaced if config.trainer.rollout_ahead else Pace(check),
    )


def build_held_out(
    config: Config, problems: Problems, sampler: Sampler, rewards: RewardPipeline, stage: Stage
) -> HeldOut:
    """What measures a policy, as a stage of its own."""

    return HeldOut(
        task_sets=problems.task_sets,
        sampler=dataclasses.replace(sampler, stage=nullcontext),
        rewards=rewards,
        max_error_share=config.reward.max_error_share,
        bootstrapped=config.evaluate.bootstrap,
        detailed=config.monitor.detailed_stats,
        shows_progress=shows_progress(config),
        stage=stage,
    )


def init_models(config: Config, arch: Architecture, actor: Actor, critic: Critic | None, mesh: Mesh) -> Models:
    """The policy of model.path, and a critic: with a zero head on its weights or on those of critic.model.path, or with
    the scalar head that the latter has.
    """
    if config.model.lora.rank:
        state = actor.trainable.init_random(config.seed)
    else:
        state = actor.trainable.init_from(load_base(config, arch, mesh).params)
    if critic is None:
        return Models(actor=state, critic=None)
    if config.critic.model.path:
        trunk = load_critic(config.critic.model.path, arch, mesh)
    else:
        trunk = state.params if not config.model.lora.rank else load_base(config, arch, mesh).params
    begin = critic.trainable.init_from if "score" in trunk else critic.init_from_policy
    return Models(actor=state, critic=begin(trunk))


def check_processes(config: Config) -> None:
    """Raises ValueError unless all processes have the same config, and a place for checkpoints that all reach."""
    values = traverse_util.flatten_dict(dataclasses.asdict(config), sep=".", keep_empty_nodes=True)
    own = {"workdir", "trainer.process_id"}
    common = {name: json.loads(json.dumps(value, default=str)) for name, value in values.items() if name not in own}
    check_agreement(common | {"the directory of checkpoints": checkpoint_dir(config)})
    check_shared(checkpoint_dir(config))


def report_devices(config: Config, arch: Architecture, mesh: Mesh, *, training: bool = True) -> None:
    """Logs what was chosen for the devices, and warns of GPUs of this machine that the mesh leaves out."""
    for note in device_notes(config, arch, mesh, training=training):
        logger.info("%s", note)
    if warning := unused_gpu():
        logger.warning("%s", warning)
    if config.mesh.data == -1 and platform(mesh) == "gpu" and (warning := idle_gpus()):
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
        f"{mini_batch_size(config, 'actor')} x {config.rollout.n} per update",
        f"workdir: {config.workdir}; log: {config.workdir}/{LOG}",
    ]
