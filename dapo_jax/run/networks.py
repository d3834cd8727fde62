"""Host: builds the networks of a run: what is trained, the reference, the teacher of on-policy distillation."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.kl import ROUNDING, ROUNDING_BF16
from dapo_jax.config.derived import uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import Actor, ActorSettings, build_actor, build_statistics
from dapo_jax.learner.critic import Critic, build_critic
from dapo_jax.learner.decode_weights import LatestWeights
from dapo_jax.learner.learner import Batching, Learner, Networks, Teacher, build_estimator
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.trained_networks import trained, uses_critic
from dapo_jax.learner.update import OnMicroBatch
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.identity import identity
from dapo_jax.models.weights import build_freeze, weight_table
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.mesh import with_tensor
from dapo_jax.parallel.sharding import TRAIN_RULES, indivisible_weights, move
from dapo_jax.run.base_models import load_base, load_critic, load_reference, policy_identity, read_model
from dapo_jax.run.sampler import Sampler
from dapo_jax.run.settings import actor_settings, algorithm_settings, all_micro_batches, micro_batches

OPTION = "algorithm.distillation.path"


def build_learner(
    config: Config, arch: Architecture, sampler: Sampler, mesh: Mesh, monitor: Monitor, pace: OnMicroBatch
) -> Learner:
    """The networks on `mesh`, and what their batches depend on."""
    settings, networks = actor_settings(config, arch, mesh), trained(config)
    dtype, attention = settings.passes.dtype, settings.passes.attention
    batching = Batching(
        mesh=mesh,
        algorithm=(algorithm := algorithm_settings(config)),
        estimator=build_estimator(algorithm, arch.vocab_size, mesh),
        trained=networks,
        micro_batches=all_micro_batches(networks, config.model, attention, arch, mesh),
        num_groups=config.data.train_batch_size,
        rounding=ROUNDING if dtype == np.float32 else ROUNDING_BF16,
        pad_id=sampler.tokenizer.pad_id,
        seed=config.seed,
    )
    return Learner(_build_networks(config, arch, settings, sampler, mesh, monitor.stage), batching, monitor, pace)


def _build_networks(
    config: Config,
    arch: Architecture,
    settings: ActorSettings,
    sampler: Sampler,
    mesh: Mesh,
    stage: Stage,
) -> Networks:
    """The compiled functions of what is trained on `mesh`, with the weights that are not trained."""
    freeze = build_freeze(arch, settings.passes.dtype, mesh)
    base = load_base(config, arch, mesh) if settings.lora is not None else None
    frozen = freeze(base.params) if base is not None else None
    with_reference = uses_reference(config.algorithm, config.actor)
    reference = load_reference(config, arch, freeze, mesh) if with_reference else None
    teacher = load_teacher(config, sampler.tokenizer, mesh) if config.algorithm.distillation.path else None
    loaded = {"model.path": policy_identity(config, arch, base)}
    loaded |= {"reference.path": identity(arch, reference.digest)} if reference is not None else {}
    loaded |= {"algorithm.distillation.path": teacher.identity} if teacher is not None else {}
    decode_mesh = with_tensor(mesh, sampler.mesh.shape["tensor"])
    actor = build_actor(settings, mesh, frozen, decode_mesh=decode_mesh)
    critic = build_critic(settings.passes, config.critic, mesh) if uses_critic(config.algorithm) else None

    def decode_weights(params: Any) -> Any:
        with jax.set_mesh(mesh):  # callers may be sampling, under the other mesh
            weights = actor.decode_weights(params)
        return weights if sampler.mesh == decode_mesh else move(weights, sampler.mesh)

    return Networks(
        actor=actor,
        critic=critic,
        reference=reference.params if reference is not None else None,
        teacher=teacher,
        loaded=loaded,
        decode_weights=LatestWeights(decode_weights, stage),
        init_models=lambda: init_models(config, arch, actor, critic, mesh),
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


def read_teacher(config: Config) -> tuple[Architecture, Tokenizer]:
    """The architecture and the tokenizer of the teacher.

    Raises:
        InputError: see `read_model`.
    """
    return read_model(as_policy(config), OPTION)


def load_teacher(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> Teacher:
    """The teacher on the training mesh, sharded like the policy.

    Args:
        tokenizer: the policy's.

    Raises:
        InputError: the teacher is no language model, its tokens are others or too few, or the mesh does not divide
            its weights.
    """
    arch, own = read_teacher(config)
    check_vocabulary(config.model.path, config.algorithm.distillation.path, tokenizer, own)
    options = config.algorithm.distillation
    if options.form == "top_k" and options.top_k > tokenizer.vocab_size:
        raise InputError(
            f"algorithm.distillation.top_k={options.top_k} must be at most the {tokenizer.vocab_size} tokens of the "
            "policy: lower it"
        )
    if problems := indivisible_weights(weight_table(arch), dict(mesh.shape), TRAIN_RULES):
        raise InputError(f"the mesh does not fit {OPTION}={options.path}: " + "; ".join(problems))
    settings = teacher_settings(config, arch, mesh)
    freeze, base = build_freeze(arch, settings.passes.dtype, mesh), load_base(as_policy(config), arch, mesh)
    return Teacher(
        statistics=build_statistics(settings, mesh),
        params=freeze(base.params),
        identity=identity(arch, base.digest),
        micro_batches=micro_batches(trained(config)["actor"], settings.passes.attention, arch, mesh),
        vocab_size=arch.vocab_size,
    )


def as_policy(config: Config) -> Config:
    """`config` with the teacher as the model, and without adapters."""
    model = config.model
    lora = dataclasses.replace(model.lora, rank=0)
    return dataclasses.replace(
        config, model=dataclasses.replace(model, path=config.algorithm.distillation.path, lora=lora)
    )


def teacher_settings(config: Config, arch: Architecture, mesh: Mesh) -> ActorSettings:
    """What the teacher's compiled functions depend on."""
    settings = actor_settings(as_policy(config), arch, mesh)
    return dataclasses.replace(settings, temperature=config.algorithm.distillation.temperature or settings.temperature)


def check_vocabulary(model: str, path: str, policy: Tokenizer, teacher: Tokenizer) -> None:
    """Raises InputError unless each token of the policy `model` is the same text for the teacher at `path`.

    The teacher may have further tokens, and either may have embeddings without a token.
    """
    of_teacher = teacher.backend.get_vocab()
    different = [text for text, index in policy.backend.get_vocab().items() if of_teacher.get(text) != index]
    if different:
        text = min(different)
        raise InputError(
            f"{OPTION}={path} must have the tokens of model.path={model}, "
            f"but {len(different)} differ, such as {text!r} (policy: {policy.backend.token_to_id(text)}, teacher: "
            f"{of_teacher.get(text)}): choose a teacher with the policy's vocabulary, usually one of its family"
        )
