"""Host: builds the networks of a run: what is trained, the reference, the teacher of on-policy distillation."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.kl import ROUNDING, ROUNDING_BF16
from dapo_jax.config.derived import uses_reference
from dapo_jax.config.sections import Config, DistillationConfig
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import ActorSettings, build_actor, build_statistics
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.decode_weights import LatestWeights
from dapo_jax.learner.learner import Batching, Learner, Networks, Teacher, build_estimator
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.trainable import Passes
from dapo_jax.learner.trained_networks import trained, uses_critic
from dapo_jax.learner.update import OnMicroBatch
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.identity import identity
from dapo_jax.models.weights import build_freeze, weight_table
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.mesh import Meshes, with_tensor
from dapo_jax.parallel.sharding import TRAIN_RULES, indivisible_weights, move
from dapo_jax.run.base_models import (
    TEACHER,
    load_critic,
    load_policy,
    load_reference,
    policy_identity,
    read_model,
)
from dapo_jax.run.meshes import context_problems
from dapo_jax.run.passes import passes
from dapo_jax.run.settings import actor_settings, algorithm_settings, all_micro_batches, micro_batches


def build_learner(
    config: Config, arch: Architecture, tokenizer: Tokenizer, meshes: Meshes, monitor: Monitor, pace: OnMicroBatch
) -> Learner:
    """The networks on the mesh that trains, and what their batches depend on."""
    settings = actor_settings(config, arch, meshes.training)
    batching = build_batching(config, arch, settings.passes, meshes.training, pad_id=tokenizer.pad_id)
    return Learner(_build_networks(config, arch, settings, tokenizer, meshes, monitor.stage), batching, monitor, pace)


def build_batching(config: Config, arch: Architecture, of_training: Passes, mesh: Mesh, *, pad_id: int) -> Batching:
    """What batches depend on besides the networks; no weights are read."""
    algorithm, networks = algorithm_settings(config.algorithm, config.reward), trained(config)
    return Batching(
        mesh=mesh,
        algorithm=algorithm,
        estimator=build_estimator(algorithm, arch.vocab_size, mesh),
        trained=networks,
        micro_batches=all_micro_batches(networks, config.model, of_training.attention, arch, mesh),
        num_groups=config.data.train_batch_size,
        rounding=ROUNDING if of_training.dtype == np.float32 else ROUNDING_BF16,
        pad_id=pad_id,
        seed=config.seed,
    )


def _build_networks(
    config: Config, arch: Architecture, settings: ActorSettings, tokenizer: Tokenizer, meshes: Meshes, stage: Stage
) -> Networks:
    """The compiled functions of what is trained, with the weights that are not trained."""
    mesh, sampling = meshes
    shown = shows_progress(config.trainer, config.monitor)
    load = functools.partial(load_policy, arch=arch, mesh=mesh, seed=config.seed, shown=shown)
    freeze, path = build_freeze(arch, settings.passes.dtype, mesh), config.model.path
    base, reference, teacher = load(path) if settings.lora is not None else None, None, None
    if uses_reference(config.algorithm, config.actor):
        reference = load_reference(config.reference, config.model, arch, load, freeze)
    if config.algorithm.distillation.path:
        teacher = load_teacher(config, settings, tokenizer, mesh)
    decode_mesh = with_tensor(mesh, sampling.shape["tensor"])
    actor = build_actor(settings, mesh, freeze(base.params) if base is not None else None, decode_mesh=decode_mesh)
    critic = build_critic(settings.passes, config.critic, mesh) if uses_critic(config.algorithm) else None
    loaded = {"model.path": policy_identity(config.model.lora, arch, base)}
    loaded |= {"reference.path": identity(arch, reference.digest)} if reference is not None else {}
    loaded |= {TEACHER: teacher.identity} if teacher is not None else {}

    def decode_weights(params: Any) -> Any:
        with jax.set_mesh(mesh):  # callers may be sampling, under the other mesh
            weights = actor.decode_weights(params)
        return weights if sampling == decode_mesh else move(weights, sampling)

    def init_models() -> Models:
        """The policy of model.path, and a critic: with a zero head on its weights or on those of critic.model.path, or
        with the scalar head that the latter has.
        """
        adapters = settings.lora is not None
        policy = actor.trainable.init_random(config.seed) if adapters else actor.trainable.init_from(load(path).params)
        if critic is None:
            return Models(actor=policy, critic=None)
        if config.critic.model.path:
            trunk = load_critic(config.critic.model.path, arch, mesh)
        else:
            trunk = load(path).params if adapters else policy.params
        begin = critic.trainable.init_from if "score" in trunk else critic.init_from_policy
        return Models(actor=policy, critic=begin(trunk))

    return Networks(
        actor=actor,
        critic=critic,
        reference=reference.params if reference is not None else None,
        teacher=teacher,
        loaded=loaded,
        decode_weights=LatestWeights(decode_weights, stage),
        init_models=init_models,
    )


def load_teacher(config: Config, policy: ActorSettings, tokenizer: Tokenizer, mesh: Mesh) -> Teacher:
    """The teacher on the training mesh, sharded like the policy.

    Args:
        policy, tokenizer: the policy's.

    Raises:
        InputError: the teacher is no language model, its tokens are others or too few, or the mesh does not divide
            its weights.
    """
    options = config.algorithm.distillation
    arch, own = read_model(dataclasses.replace(config.model, path=options.path), TEACHER)
    check_vocabulary(config.model.path, options.path, tokenizer, own)
    if options.form == "top_k" and options.top_k > tokenizer.vocab_size:
        raise InputError(
            f"algorithm.distillation.top_k={options.top_k} must be at most the {tokenizer.vocab_size} tokens of the "
            "policy: lower it"
        )
    table = weight_table(arch)
    if problems := indivisible_weights(table, dict(mesh.shape), TRAIN_RULES) + context_problems(arch, mesh):
        raise InputError(f"the mesh does not fit {TEACHER}={options.path}: " + "; ".join(problems))
    settings = teacher_settings(policy, options, passes(config, arch, mesh))
    shown = shows_progress(config.trainer, config.monitor)
    base = load_policy(options.path, arch, mesh, seed=config.seed, shown=shown)
    return Teacher(
        statistics=build_statistics(settings, mesh),
        params=build_freeze(arch, settings.passes.dtype, mesh)(base.params),
        micro_batches=micro_batches(trained(config)["actor"], settings.passes.attention, arch, mesh),
        identity=identity(arch, base.digest),
        vocab_size=arch.vocab_size,
    )


def teacher_settings(policy: ActorSettings, options: DistillationConfig, passes: Passes) -> ActorSettings:
    """What the teacher's compiled functions depend on; `passes` are its own."""
    temperature = options.temperature or policy.temperature
    return dataclasses.replace(policy, passes=passes, temperature=temperature, lora=None)


def check_vocabulary(model: str, path: str, policy: Tokenizer, teacher: Tokenizer) -> None:
    """Raises InputError unless each token of the policy `model` is the same text for the teacher at `path`.

    The teacher may have further tokens, and either may have embeddings without a token.
    """
    of_teacher = teacher.backend.get_vocab()
    different = [text for text, index in policy.backend.get_vocab().items() if of_teacher.get(text) != index]
    if different:
        text = min(different)
        raise InputError(
            f"{TEACHER}={path} must have the tokens of model.path={model}, "
            f"but {len(different)} differ, such as {text!r} (policy: {policy.backend.token_to_id(text)}, teacher: "
            f"{of_teacher.get(text)}): choose a teacher with the policy's vocabulary, usually one of its family"
        )
