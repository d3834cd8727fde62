"""Host: everything a command needs, built once from the config."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.base_models import (
    check_model_paths,
    context_warning,
    load_base,
    load_critic,
    load_reference,
    lora_of,
    read_model,
)
from dapo_jax.config.derived import (
    checkpoint_dir,
    micro_batch_size,
    mini_batch_size,
    trains_on_older_samples,
    uses_reference,
)
from dapo_jax.config.sections import Config
from dapo_jax.data.arithmetic import arithmetic_rows
from dapo_jax.data.order import PromptOrder
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.prompts import PromptSet, tokenize_prompts
from dapo_jax.data.reasoning_gym import reasoning_gym_rows
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import Actor, LatestWeights, build_actor
from dapo_jax.learner.choices import trained, uses_critic
from dapo_jax.learner.critic import Critic, build_critic
from dapo_jax.learner.models import Models
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import build_freeze, count_params, weight_table
from dapo_jax.monitor.console import Console
from dapo_jax.monitor.profile import StepProfiles
from dapo_jax.monitor.timers import StageTimers
from dapo_jax.parallel.compilation import compilation_shown, keep_compiled
from dapo_jax.parallel.divisors import divisors, nearest
from dapo_jax.parallel.idle_gpus import idle_gpus
from dapo_jax.parallel.mesh import make_mesh, num_batch_shards, platform, split_devices
from dapo_jax.parallel.platforms import unused_gpu
from dapo_jax.parallel.processes import check_agreement, check_shared, is_first
from dapo_jax.parallel.sharding import (
    DECODE_RULES,
    TRAIN_RULES,
    indivisible_weights,
    move,
    replicated,
)
from dapo_jax.parallel.stopping import Pace, unpaced
from dapo_jax.problems import TaskSet, held_out_options, parse_tasks
from dapo_jax.rewards.scoring import ModelScorer, load_scorer
from dapo_jax.rewards.verifiers import verifier_for
from dapo_jax.rewards.worker_pool import VerifierPool
from dapo_jax.rollout.sampler import Sampler, Stage, check_stop_strings
from dapo_jax.rollout.waves import WaveEngine
from dapo_jax.settings import (
    actor_settings,
    check_memory,
    chosen_attention,
    compute_dtype,
    critic_settings,
    device_notes,
    engine_settings,
    with_total_steps,
)
from dapo_jax.start_checks import check_rewards, warn_of_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change from step to step."""

    config: Config
    mesh: Mesh  # that trains
    rollout_mesh: Mesh  # that samples: the same, or with trainer.rollout_ahead other devices
    arch: Architecture
    train_set: PromptSet
    task_sets: tuple[TaskSet, ...]  # to measure the policy on
    order: PromptOrder
    actor: Actor
    critic: Critic | None  # with a critic
    decode_weights: LatestWeights  # of the policy's parameters
    reference: Any  # weights for actor.logprobs, with a KL divergence; else None
    scorer: ModelScorer | None  # with a reward model
    estimator: Callable[..., Any]  # jitted, see training_batch.py
    sampler: Sampler
    verifiers: dict[str, VerifierPool]  # by the name of their function: the run's, and those of task sets
    chat_template_kwargs: dict[str, Any]
    console: Console
    timers: StageTimers
    profiles: StepProfiles
    stage: Stage
    pace: Callable[[Any], None]  # is called after each micro-batch of training, and may raise to end the step
    init_models: Callable[[], Models]  # what is trained, before the first step

    @property
    def num_devices(self) -> int:
        """Those that train and those that sample."""
        return len({*self.mesh.devices.flat, *self.rollout_mesh.devices.flat})


@contextmanager
def open_run(
    config: Config, *, initial_step: int = 0, check: Callable[[], None] = lambda: None, training: bool = True
) -> Iterator[Run]:
    """Builds a run and makes its mesh the current one; verifier processes end with it.

    Args:
        initial_step: training steps that are done.
        training: read what is trained on and show the progress; without, the run can only sample.
        check: is called again and again while responses are sampled and between micro-batches, and may raise.

    Raises:
        ValueError: a model, the data, the mesh or the reward function do not fit, with the cure.
    """
    keep_compiled(config.trainer.compilation_cache_dir)
    check_model_paths(config)
    arch, tokenizer = read_model(config)
    if warning := context_warning(config):
        logger.warning("%s", warning)
    check_stop_strings(tokenizer, config.rollout.stop)
    train_set, task_sets = read_prompts(config, tokenizer, training=training)
    warn_of_data(config, train_set, task_sets)
    if jax.process_count() > 1:
        check_agreement(
            {"the training prompts": train_set.checksum()}
            | {f"the prompts of {task.options.name or 'evaluation'}": task.prompts.checksum() for task in task_sets}
        )
    if training:
        config = with_total_steps(config, len(train_set), done=initial_step)
    mesh, rollout_mesh = make_meshes(config)
    check_mesh(config, arch, mesh)
    check_memory(config, mesh)
    for note in device_notes(config, arch, mesh):
        logger.info("%s", note)
    if warning := unused_gpu():
        logger.warning("%s", warning)
    if config.mesh.data == -1 and platform(mesh) == "gpu" and (warning := idle_gpus()):
        logger.warning("%s", warning)
    settings = actor_settings(config, arch, mesh)
    freeze = build_freeze(arch, settings.dtype, mesh)
    frozen = freeze(load_base(config, arch, mesh)) if settings.lora is not None else None
    actor = build_actor(settings, mesh, frozen)
    critic = build_critic(critic_settings(config, arch, mesh), mesh) if uses_critic(config) else None
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        functions = [reward_function(config), *(task.options.reward_function for task in task_sets)]
        verifiers = {name: stack.enter_context(verifier_pool(config, name)) for name in dict.fromkeys(functions)}
        check_rewards(config, train_set, task_sets, reward_function(config), verifiers)
        engine = WaveEngine(engine_settings(config, arch, tokenizer.eos_ids, tokenizer.pad_id, rollout_mesh), check)
        stack.callback(engine.close)
        console = Console(
            config.trainer.total_training_steps,
            initial_step=initial_step,
            enabled=training and is_first(),
            mode=config.monitor.console if "console" in config.trainer.logger else "quiet",
            constant=constant_columns(config),
        )
        stack.callback(console.close)
        if console.has_bar:
            stack.enter_context(compilation_shown(console.compiling))
        timers = StageTimers()
        profiles = StepProfiles(Path(config.workdir) / "profile", config.trainer.profile_steps)
        stack.callback(profiles.end)

        @contextmanager
        def stage(name: str) -> Iterator[None]:
            console.stage(name)
            with timers.time(name), jax.profiler.TraceAnnotation(name):
                yield

        yield Run(
            config=config,
            mesh=mesh,
            rollout_mesh=rollout_mesh,
            arch=arch,
            train_set=train_set,
            task_sets=task_sets,
            order=PromptOrder(max(len(train_set), 1), seed=config.seed, shuffle=config.data.shuffle),
            actor=actor,
            critic=critic,
            decode_weights=LatestWeights(decode_weights(actor, mesh, rollout_mesh), stage),
            reference=load_reference(config, arch, freeze, mesh) if uses_reference(config) else None,
            scorer=load_scorer(config, compute_dtype(config, mesh), rollout_mesh) if config.reward.model.path else None,
            estimator=build_estimator(config, arch.vocab_size, mesh),
            sampler=Sampler(tokenizer, verifiers[reward_function(config)], engine, config.rollout.stop),
            verifiers=verifiers,
            console=console,
            timers=timers,
            profiles=profiles,
            stage=stage,
            pace=unpaced if config.trainer.rollout_ahead else Pace(check),
            chat_template_kwargs=json.loads(config.data.chat_template_kwargs),
            init_models=lambda: init_models(config, arch, actor, critic, mesh),
        )


def constant_columns(config: Config) -> list[str]:
    """The columns of the console that say the same in every step."""
    updates = config.data.train_batch_size // mini_batch_size(config, "actor") * config.actor.ppo_epochs
    clips = updates > 1 or trains_on_older_samples(config)
    constant = {"clip": not clips, "kept": not config.algorithm.filter_groups.enable}
    return [name for name, is_constant in constant.items() if is_constant]


def make_meshes(config: Config) -> tuple[Mesh, Mesh]:
    """The mesh that trains and the one that samples. ValueError if the devices cannot be divided so."""
    shape = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if not config.trainer.rollout_ahead:
        mesh = make_mesh(*shape)
        return mesh, mesh
    training, sampling = split_devices(config.trainer.rollout_devices, config.mesh.tensor)
    rollout_mesh = make_mesh(-1, 1, config.mesh.tensor, sampling, in_order=True)
    return make_mesh(*shape, training, in_order=True), rollout_mesh


def decode_weights(actor: Actor, mesh: Mesh, rollout_mesh: Mesh) -> Callable[[Any], Any]:
    """The policy's parameters -> its weights for decoding, on the devices that sample."""
    if rollout_mesh is mesh:
        return actor.decode_weights
    return lambda params: move(actor.decode_weights(params), rollout_mesh)


def check_processes(config: Config) -> None:
    """Raises ValueError unless all processes have the same config, and a place for checkpoints that all reach."""
    values = traverse_util.flatten_dict(dataclasses.asdict(config), sep=".", keep_empty_nodes=True)
    own = {"workdir", "trainer.process_id"}
    common = {name: json.loads(json.dumps(value, default=str)) for name, value in values.items() if name not in own}
    check_agreement(common | {"the directory of checkpoints": checkpoint_dir(config)})
    check_shared(checkpoint_dir(config))


def read_prompts(
    config: Config, tokenizer: Tokenizer, *, training: bool = True
) -> tuple[PromptSet, tuple[TaskSet, ...]]:
    """Problems to train on (none without `training`) and the task sets to evaluate on, as tokens."""
    data = config.data
    if data.task == "arithmetic":
        task = data.arithmetic
        train_rows, eval_rows = arithmetic_rows(
            operators=task.operators,
            low=task.low,
            high=task.high,
            num_train=task.num_train,
            num_heldout=task.num_heldout,
            seed=config.seed,
            template=task.template,
        )
    elif data.task == "reasoning_gym":
        gym = data.reasoning_gym
        train_rows, eval_rows = reasoning_gym_rows(
            gym.datasets,
            num_train=gym.num_train,
            num_heldout=gym.num_heldout,
            seed=config.seed,
            template=gym.template,
        )
    else:
        train_rows = read_prompt_files(data.train_files, prompt_key=data.prompt_key) if training else []
        eval_rows = read_prompt_files(data.val_files, prompt_key=data.prompt_key) if data.val_files else []
    held_out, tasks = held_out_options(config), parse_tasks(config)
    sets = {dataclasses.replace(held_out, reward_function=reward_function(config)): eval_rows}
    sets |= {task: read_prompt_files(task.files, prompt_key=task.prompt_key) for task in tasks}
    sets = {task: rows if task.max_prompts < 0 else rows[: task.max_prompts] for task, rows in sets.items() if rows}
    by_source = [train_rows] if config.reward.function == "auto" else []
    by_source += [rows for task, rows in sets.items() if task.reward_function == "auto"]
    for source in sorted({row.data_source for rows in by_source for row in rows}):
        verifier_for(source)
    task_sets = tuple(TaskSet(task, _tokenize(config, rows, tokenizer)) for task, rows in sets.items())
    names = [name for task in task_sets for name, _ in task.by_name()]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"evaluate.tasks, {name!r} must not be a data_source of the held-out problems: rename it")
    return _tokenize(config, train_rows, tokenizer) if training else PromptSet([], []), task_sets


def verifier_pool(config: Config, function: str) -> VerifierPool:
    """The processes that verify with `function`."""
    reward = config.reward
    return VerifierPool(
        function,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_limit_mb=reward.memory_limit_mb,
        error_score=reward.error_score,
    )


def reward_function(config: Config) -> str:
    """The verifier of a run. A worker that knows its task loads what it needs before the first sample."""
    by_source = config.reward.function == "auto"
    return "reasoning_gym" if by_source and config.data.task == "reasoning_gym" else config.reward.function


def _tokenize(config: Config, rows: list[PromptRow], tokenizer: Tokenizer) -> PromptSet:
    return tokenize_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        filter_overlong=config.data.filter_overlong_prompts,
        system_prompt=config.data.system_prompt,
        chat_template_kwargs=json.loads(config.data.chat_template_kwargs),
    )


def check_mesh(config: Config, arch: Architecture, mesh: Mesh) -> None:
    """Raises one ValueError with every dimension that the mesh does not divide."""
    shape = dict(mesh.shape)
    problems = indivisible_weights(weight_table(arch), shape, TRAIN_RULES)
    problems += indivisible_weights(weight_table(arch), shape, DECODE_RULES)
    for name in () if config.actor.use_dynamic_bsz else trained(config):
        rows = mini_batch_size(config, name) * config.rollout.n
        micro = micro_batch_size(config, name) * num_batch_shards(mesh)
        if rows % micro:
            problems.append(
                f"{name}.ppo_mini_batch_size x rollout.n = {rows} responses must be a multiple of "
                f"{name}.ppo_micro_batch_size_per_device x mesh.data x mesh.fsdp = {micro}: "
                f"{_fitting_batches(config, name, rows, micro, num_batch_shards(mesh))}"
            )
    if problems:
        raise InputError("the mesh does not fit:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(problems)))


def _fitting_batches(config: Config, name: str, rows: int, micro: int, shards: int) -> str:
    """Sizes that would fit: of a micro-batch, else of a mini-batch in the training batch, else of both batches."""
    if rows % shards == 0:
        fitting = nearest(divisors(rows // shards), micro_batch_size(config, name))
        return f"set {name}.ppo_micro_batch_size_per_device={fitting}"
    minis = [one for one in divisors(config.data.train_batch_size) if one * config.rollout.n % micro == 0]
    if minis:
        return f"set {name}.ppo_mini_batch_size={nearest(minis, mini_batch_size(config, name))}"
    step, mini = micro // math.gcd(micro, config.rollout.n), mini_batch_size(config, name)
    fitting = nearest([count * step for count in (mini // step, mini // step + 1) if count], mini)
    return f"set {name}.ppo_mini_batch_size={fitting}, and data.train_batch_size to a multiple of it"


def build_estimator(config: Config, vocab_size: int, mesh: Mesh) -> Callable[..., Any]:
    """The jitted advantage estimator: (rewards, mask, group_ids, num_groups=..., further arrays by name).

    Its results are whole on every device.
    """
    function = ESTIMATORS[config.algorithm.adv_estimator]
    options = {**vars(config.algorithm), **vars(config.algorithm.cpo), "vocab_size": vocab_size}
    static = ("num_groups",) if needs(function, "num_groups") else ()
    bound = functools.partial(function, **chosen(function, options))
    return jax.jit(bound, static_argnames=static, out_shardings=replicated(mesh))


def describe(run: Run) -> str:
    """One line: the model, its size, the devices and the data."""
    shape = "x".join(str(size) for size in run.mesh.devices.shape)
    kernel, _ = chosen_attention(run.config, run.arch, run.mesh)
    return (
        f"{run.config.model.path} ({run.arch.family}, {count_params(run.arch) / 1e6:.1f}M parameters, "
        f"{compute_dtype(run.config, run.mesh).name}, {kernel} attention) "
        f"on {run.mesh.size} {platform(run.mesh)} device(s), mesh {shape}; "
        f"{len(run.train_set)} problems to train on, {sum(len(task.prompts) for task in run.task_sets)} to evaluate on"
    )


def init_models(config: Config, arch: Architecture, actor: Actor, critic: Critic | None, mesh: Mesh) -> Models:
    """The policy of model.path, and a critic: with a zero head on its weights or on those of critic.model.path, or with
    the scalar head that the latter has.
    """
    if lora_of(config) is not None:
        state = actor.trainable.init_random(config.seed)
    else:
        state = actor.trainable.init_from(load_base(config, arch, mesh))
    if critic is None:
        return Models(actor=state, critic=None)
    if config.critic.model.path:
        trunk = load_critic(config.critic.model.path, arch, mesh)
    else:
        trunk = state.params if lora_of(config) is None else load_base(config, arch, mesh)
    begin = critic.trainable.init_from if "score" in trunk else critic.init_from_policy
    return Models(actor=state, critic=begin(trunk))
