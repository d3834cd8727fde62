"""Host: the teacher of on-policy distillation: its files, and whether its tokens and the mesh fit."""

import dataclasses

from jax.sharding import Mesh

from dapo_jax.base_models import load_base, read_model
from dapo_jax.config.sections import Config
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import ActorSettings, build_statistics
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.teacher import Teacher
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.identity import identity
from dapo_jax.models.weights import build_freeze, weight_table
from dapo_jax.parallel.sharding import TRAIN_RULES, indivisible_weights
from dapo_jax.settings import actor_settings, micro_batches

OPTION = "algorithm.distillation.path"


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
    check_vocabulary(config, tokenizer, own)
    options = config.algorithm.distillation
    if options.form == "top_k" and options.top_k > tokenizer.vocab_size:
        raise InputError(
            f"algorithm.distillation.top_k={options.top_k} must be at most the {tokenizer.vocab_size} tokens of the "
            "policy: lower it"
        )
    if problems := indivisible_weights(weight_table(arch), dict(mesh.shape), TRAIN_RULES):
        raise InputError(f"the mesh does not fit {OPTION}={options.path}: " + "; ".join(problems))
    settings = teacher_settings(config, arch, mesh)
    freeze, base = build_freeze(arch, settings.dtype, mesh), load_base(as_policy(config), arch, mesh)
    return Teacher(
        statistics=build_statistics(settings, mesh),
        params=freeze(base.params),
        identity=identity(arch, base.digest),
        micro_batches=teacher_micro_batches(config, arch, mesh),
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


def teacher_micro_batches(config: Config, arch: Architecture, mesh: Mesh) -> MicroBatches:
    """How rows are divided among its passes: as the policy's, but its tokens choose their experts themselves."""
    return dataclasses.replace(micro_batches(config, arch, mesh), choices=None)


def check_vocabulary(config: Config, policy: Tokenizer, teacher: Tokenizer) -> None:
    """Raises InputError unless each token of the policy is the same text for the teacher.

    The teacher may have further tokens, and either may have embeddings without a token.
    """
    of_teacher = teacher.backend.get_vocab()
    different = [text for text, index in policy.backend.get_vocab().items() if of_teacher.get(text) != index]
    if different:
        text = min(different)
        raise InputError(
            f"{OPTION}={config.algorithm.distillation.path} must have the tokens of model.path={config.model.path}, "
            f"but {len(different)} differ, such as {text!r} (policy: {policy.backend.token_to_id(text)}, teacher: "
            f"{of_teacher.get(text)}): choose a teacher with the policy's vocabulary, usually one of its family"
        )
