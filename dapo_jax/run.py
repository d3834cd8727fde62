"""Host: everything a command needs, built once from the config."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.data.arithmetic import arithmetic_rows
from dapo_jax.data.order import PromptOrder
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.prompts import PromptSet, tokenize_prompts
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from dapo_jax.learner.actor import Actor, ActorSettings, build_actor
from dapo_jax.learner.optimizer import OptimizerSettings, TrainState
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.models.weights import count_params, weight_table
from dapo_jax.monitor.console import Console
from dapo_jax.monitor.timers import StageTimers
from dapo_jax.parallel.mesh import make_mesh, num_batch_shards
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible_weights
from dapo_jax.rewards.verifiers import verifier_for
from dapo_jax.rewards.worker_pool import VerifierPool
from dapo_jax.rollout.experience import Sampler, Stage
from dapo_jax.rollout.waves import WaveSettings

RANDOM = "random"  # model.path of a freshly initialised model


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change from step to step."""

    config: Config
    mesh: Mesh
    arch: Architecture
    train_set: PromptSet
    eval_set: PromptSet
    order: PromptOrder
    actor: Actor
    sampler: Sampler
    console: Console
    timers: StageTimers
    stage: Stage
    init_state: Callable[[], TrainState]  # the state before the first step


@contextmanager
def open_run(config: Config, *, initial_step: int) -> Iterator[Run]:
    """Builds a run and makes its mesh the current one; verifier processes end with it.

    Raises:
        ValueError: the model, the data, the mesh or the reward function do not fit, with the cure.
    """
    arch, tokenizer = read_model(config)
    train_set, eval_set = read_prompts(config, tokenizer)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    check_mesh(config, arch, mesh)
    actor = build_actor(actor_settings(config, arch, mesh), mesh)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        verifiers = stack.enter_context(
            VerifierPool(
                config.reward.function, num_workers=config.reward.num_workers, timeout_s=config.reward.timeout_s
            )
        )
        speaks = jax.process_index() == 0
        console = Console(config.trainer.total_training_steps, initial_step=initial_step, enabled=speaks)
        stack.callback(console.close)
        timers = StageTimers()

        @contextmanager
        def stage(name: str) -> Iterator[None]:
            console.stage(name)
            with timers.time(name):
                yield

        yield Run(
            config=config,
            mesh=mesh,
            arch=arch,
            train_set=train_set,
            eval_set=eval_set,
            order=PromptOrder(len(train_set), seed=config.seed, shuffle=config.data.shuffle),
            actor=actor,
            sampler=Sampler(tokenizer, verifiers, wave_settings(config, arch, tokenizer, mesh)),
            console=console,
            timers=timers,
            stage=stage,
            init_state=lambda: _init_state(config, arch, actor),
        )


def read_model(config: Config) -> tuple[Architecture, Tokenizer]:
    """The architecture and the tokenizer of model.path."""
    if config.model.path != RANDOM:
        path = Path(config.model.path).expanduser()
        arch, tokenizer = read_model_architecture(path), load_tokenizer(path)
    else:
        tokenizer = character_tokenizer()
        sizes = config.model.random
        arch = Architecture(
            family="llama",
            vocab_size=-(-tokenizer.vocab_size // 8) * 8,  # so that meshes divide it
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tie_embeddings=True,
            initializer_range=sizes.initializer_range,
        )
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"the tokenizer of model.path={config.model.path} has ids up to {tokenizer.vocab_size - 1}, the model "
            f"{arch.vocab_size} embeddings: they do not belong together"
        )
    return arch, tokenizer


def read_prompts(config: Config, tokenizer: Tokenizer) -> tuple[PromptSet, PromptSet]:
    """Problems to train on and to evaluate on, as tokens."""
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
    else:
        train_rows = read_prompt_files(data.train_files, prompt_key=data.prompt_key)
        eval_rows = read_prompt_files(data.val_files, prompt_key=data.prompt_key) if data.val_files else []
    if config.reward.function == "auto":
        for source in sorted({row.data_source for row in [*train_rows, *eval_rows]}):
            verifier_for(source)
    if config.evaluate.max_prompts > 0:
        eval_rows = eval_rows[: config.evaluate.max_prompts]
    empty = PromptSet([], [])
    return _tokenize(config, train_rows, tokenizer), _tokenize(config, eval_rows, tokenizer) if eval_rows else empty


def _tokenize(config: Config, rows: list[PromptRow], tokenizer: Tokenizer) -> PromptSet:
    prompts, _ = tokenize_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        filter_overlong=config.data.filter_overlong_prompts,
        system_prompt=config.data.system_prompt,
        chat_template_kwargs=json.loads(config.data.chat_template_kwargs),
    )
    return prompts


def check_mesh(config: Config, arch: Architecture, mesh: Mesh) -> None:
    """Raises one ValueError with every dimension that the mesh does not divide."""
    shape = dict(mesh.shape)
    problems = indivisible_weights(weight_table(arch), shape, TRAIN_RULES)
    problems += indivisible_weights(weight_table(arch), shape, DECODE_RULES)
    rows = config.actor.ppo_mini_batch_size * config.rollout.n
    micro = config.actor.ppo_micro_batch_size_per_device * num_batch_shards(mesh)
    if rows % micro:
        problems.append(
            f"actor.ppo_mini_batch_size x rollout.n = {rows} responses must be a multiple of "
            f"actor.ppo_micro_batch_size_per_device x mesh.data x mesh.fsdp = {micro}"
        )
    if problems:
        raise ValueError("the mesh does not fit:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(problems)))


def actor_settings(config: Config, arch: Architecture, mesh: Mesh) -> ActorSettings:
    """The part of the config that the compiled functions of the policy depend on."""
    actor = config.actor
    return ActorSettings(
        arch=arch,
        dtype=compute_dtype(config),
        temperature=config.rollout.temperature,
        remat=config.model.enable_gradient_checkpointing,
        chunk_size=actor.logprob_chunk_size * num_batch_shards(mesh),
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
        optimizer=OptimizerSettings(
            betas=actor.optim.betas,
            eps=actor.optim.eps,
            weight_decay=actor.optim.weight_decay,
            grad_clip=actor.grad_clip,
        ),
    )


def wave_settings(config: Config, arch: Architecture, tokenizer: Tokenizer, mesh: Mesh) -> WaveSettings:
    """The part of the config that sampling depends on."""
    return WaveSettings(
        arch=arch,
        mesh=mesh,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        max_response_length=config.data.max_response_length,
        max_num_seqs=config.rollout.max_num_seqs,
        chunk_length=config.rollout.decode_chunk_length,
        seed=config.seed,
    )


def compute_dtype(config: Config) -> jnp.dtype:
    """The dtype of matrix products."""
    if config.model.dtype != "auto":
        return jnp.dtype(config.model.dtype)
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def describe(run: Run) -> str:
    """One line: the model, its size, the devices and the data."""
    shape = "x".join(str(size) for size in run.mesh.devices.shape)
    return (
        f"{run.config.model.path} ({run.arch.family}, {count_params(run.arch) / 1e6:.1f}M parameters, "
        f"{compute_dtype(run.config).name}) on {run.mesh.size} {jax.default_backend()} device(s), mesh {shape}; "
        f"{len(run.train_set)} problems to train on, {len(run.eval_set)} held out"
    )


def _init_state(config: Config, arch: Architecture, actor: Actor) -> TrainState:
    if config.model.path == RANDOM:
        return actor.init_random(config.seed)
    return actor.init_from(load_params(Path(config.model.path).expanduser(), arch, actor.place))
