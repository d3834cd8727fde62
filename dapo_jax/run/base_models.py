"""Host: the language models that a run starts from: random, from a model's files, or from another run."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.derived import uses_reference
from dapo_jax.config.places import place_of
from dapo_jax.config.sections import Config, DataConfig, LoraConfig, ModelConfig, ReferenceConfig
from dapo_jax.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer, within_rows
from dapo_jax.errors import InputError
from dapo_jax.hub.names import GGUF, is_gguf, model_name
from dapo_jax.hub.repositories import model_at
from dapo_jax.hub.smollm2 import is_smollm2
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import context_length, read_architecture
from dapo_jax.models.identity import WEIGHTS, Identity, differences, identity
from dapo_jax.models.load import load_params
from dapo_jax.models.lora import ALL_LINEAR, Lora, adapter_table, merged, present_targets
from dapo_jax.models.weights import (
    Weight,
    cast_matrices,
    count_params,
    init_params,
    unflatten,
    weight_shardings,
    weight_table,
)
from dapo_jax.monitor.bars import bar, shows_progress
from dapo_jax.parallel.checksums import digest
from dapo_jax.parallel.sharding import TRAIN_RULES, place_weight, weight_sharding
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.other_runs import RANDOM, Trained, find_trained, first_model
from dapo_jax.run.sampler import check_stop_strings

TEACHER = "algorithm.distillation.path"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Parameters, and a digest of what they were made from, which depends on no mesh and no dtype of products."""

    params: Any
    digest: str


def check_model_paths(paths: Mapping[str, str]) -> None:
    """Raises one InputError with every option of `model_paths` whose model does not exist."""
    problems = [_missing_model(option, path) for option, path in paths.items()]
    if any(problems):
        raise InputError("\n".join(problem for problem in problems if problem))


def model_paths(config: Config, *, training: bool = True) -> dict[str, str]:
    """The options that name a model to load, and what they name.

    Args:
        training: with the models that only training needs.
    """
    with_reference = training and uses_reference(config.algorithm, config.actor)
    paths = {
        "model.path": config.model.path,
        "reference.path": config.reference.path if with_reference else None,
        "critic.model.path": config.critic.model.path if training else None,
        TEACHER: config.algorithm.distillation.path if training else None,
        "reward.model.path": config.reward.model.path,
    }
    return {option: path for option, path in paths.items() if path and path != RANDOM}


def _missing_model(option: str, path: str) -> str | None:
    """What to do if `path` is no model; None if it exists, or is a name on the hub, which has its own errors."""
    if is_smollm2(path):
        return None
    if is_gguf(path):
        return f"{option}={path} {GGUF}"
    found = place_of(path).exists() or find_trained(path) is not None  # WORKDIR/checkpoints/STEP, local or not
    if found or model_name(path) is not None:
        return None
    return f"{option}={path} does not exist: give a Hugging Face model directory, or OWNER/NAME of the Hugging Face hub"


def context_warning(path: str, data: DataConfig) -> str | None:
    """A warning if prompts and responses exceed the context of the model at `path`; None if they do not."""
    path = first_model(path)
    made_for = None if path == RANDOM else context_length(model_at(path, weights=False))
    longest = data.max_prompt_length + data.max_response_length
    if made_for is None or longest <= made_for:
        return None
    return (
        f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
        f"{longest} tokens exceed the {made_for} positions that {path} was made for: text beyond them is rarely "
        "sensible; lower one of them or choose a model with a longer context"
    )


def read_policy(config: Config, *, training: bool = True) -> tuple[Architecture, Tokenizer]:
    """`read_model` for a run: also checks that its other models exist and that its options suit the model.

    Raises:
        InputError: see `check_model_paths`, `read_model` and `check_stop_strings`.
    """
    check_model_paths(model_paths(config, training=training))
    arch, tokenizer = read_model(config.model)
    tokenizer = dataclasses.replace(tokenizer, keeps_special=config.reward.keep_special_tokens)
    if warning := context_warning(config.model.path, config.data):
        logger.warning("%s", warning)
    check_stop_strings(tokenizer, config.rollout.stop)
    lora, present = lora_of(config.model.lora, arch), present_targets(arch)
    absent = [target for target in lora.targets if target not in present] if lora else []
    if lora and absent:
        left = tuple(target for target in lora.targets if target in present)
        raise InputError(
            f"model.lora.target_modules has {', '.join(absent)}, but no layer of this model has that beside experts, "
            f"which take no adapters: set model.lora.target_modules={left or present}"
        )
    return arch, tokenizer


def read_architecture_of(model: ModelConfig, option: str = "model.path") -> Architecture:
    """The architecture of a language model, for which its config.json is enough; see `read_model`."""
    path = model.path
    if (trained := find_trained(path)) is not None:
        return read_architecture_of(trained.config.model)
    if path != RANDOM:
        arch = read_architecture(model_at(path, weights=False))
        if arch.scalar_head:
            raise InputError(f"{option}={path} is a sequence-classification model: give a language model")
        return arch
    return Architecture(
        family="llama",
        vocab_size=-(-character_tokenizer().vocab_size // 8) * 8,  # so that meshes divide it
        **vars(model.random),
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
    )


def read_model(model: ModelConfig, option: str = "model.path") -> tuple[Architecture, Tokenizer]:
    """The architecture and the tokenizer of a model, whose path the user has given as `option`.

    Raises:
        InputError: a file is missing or damaged, or the two do not fit together.
    """
    arch, path = read_architecture_of(model, option), first_model(model.path)
    tokenizer = character_tokenizer() if path == RANDOM else load_tokenizer(model_at(path, weights=False))
    tokenizer = within_rows(tokenizer, arch.vocab_size)  # without added tokens that have no embedding
    largest = max(tokenizer.vocab_size - 1, tokenizer.pad_id, *tokenizer.eos_ids)
    if largest >= arch.vocab_size:
        raise InputError(
            f"the tokenizer of {option}={model.path} has ids up to {largest}, but the model has {arch.vocab_size} "
            "embeddings: use the tokenizer that belongs to the model; of more tokens than embeddings, only added "
            "tokens (added_tokens of tokenizer.json) that end or pad no text are left out"
        )
    return arch, tokenizer


def lora_of(options: LoraConfig, arch: Architecture) -> Lora | None:
    """The adapters to train; None to train all weights."""
    targets = present_targets(arch) if options.target_modules == (ALL_LINEAR,) else options.target_modules
    return Lora(options.rank, options.alpha, targets) if options.rank else None


def policy_identity(lora: LoraConfig, arch: Architecture, base: Loaded | None = None) -> Identity:
    """What a run's policy computes with besides the weights that it trains; `base` has its adapters."""
    scale = {"model.lora.alpha": lora.alpha} if lora.rank else {}
    return identity(arch, base.digest if base is not None else "", **scale)


def load_reference(
    reference: ReferenceConfig,
    model: ModelConfig,
    arch: Architecture,
    load: Callable[[str], Loaded],
    freeze: Callable[[Any], Any],
) -> Loaded:
    """The reference policy for `actor.statistics`: its weights in the dtype of products or, with LoRA, no adapters.

    Args:
        load: `load_policy` of a path.
    """
    if model.lora.rank:
        return Loaded({}, "")
    path = reference.path or model.path
    other = path not in (RANDOM, model.path)
    if other and read_architecture_of(dataclasses.replace(model, path=path), "reference.path") != arch:
        raise InputError(f"reference.path={path} must have the architecture of model.path={model.path}: choose another")
    loaded = load(path)
    return Loaded(freeze(loaded.params), loaded.digest)


def load_critic(path: str, arch: Architecture, mesh: Mesh) -> dict[str, Any]:
    """The float32 parameters of critic.model.path, sharded for training; with `score` if the model has a scalar head.

    Args:
        arch: the policy's. The critic's must be equal except for the head: both see the same tokens, and the mesh,
            kernels and micro-batches are chosen for it.
    """
    if find_trained(path) is not None:
        raise InputError(
            f"critic.model.path={path} is a run: give a model's files, such as those that dapo_jax.export writes"
        )
    place = model_at(path, weights=True)
    own = read_architecture(place)
    free = {"scalar_head": False, "tie_embeddings": arch.tie_embeddings, "initializer_range": arch.initializer_range}
    if dataclasses.replace(own, **free) != arch:
        raise InputError(
            f"critic.model.path={path} must have the architecture of model.path, except for the head: choose another, "
            "or leave it empty for the policy's weights"
        )
    return load_params(place, own, place_weight(mesh, TRAIN_RULES))


def load_policy(path: str, arch: Architecture, mesh: Mesh, *, seed: int = 0, shown: bool = False) -> Loaded:
    """The float32 parameters of the language model at `path`, sharded for training.

    Args:
        seed: of random weights.
        shown: show a progress bar.
    """
    if path == RANDOM:  # platforms may draw other last bits
        return Loaded(_random_params(arch, mesh)(seed), f"random weights of seed {seed}")
    if (trained := find_trained(path)) is not None:
        return load_trained(trained, arch, mesh)
    place = place_weight(mesh, TRAIN_RULES)
    with bar("loading the model", total=4 * count_params(arch), unit="B", shown=shown) as loaded:

        def counted(weight: Weight, array: np.ndarray) -> jax.Array:
            loaded.update(array.nbytes)
            return place(weight, array)

        params = load_params(model_at(path, weights=True), arch, counted)
    return Loaded(params, digest(params))


@functools.cache
def _random_params(arch: Architecture, mesh: Mesh) -> Callable[[int], dict[str, Any]]:
    """Makes random parameters of a seed, sharded for training."""
    shardings = weight_shardings(weight_table(arch), mesh, TRAIN_RULES)
    return jax.jit(lambda seed: init_params(arch, seed), out_shardings=shardings)


def trained_params(trained: Trained, arch: Architecture, mesh: Mesh) -> tuple[dict[str, Any], Identity]:
    """The weights or adapters that a run has trained, in float32, sharded for training, and its policy's identity.

    Raises:
        InputError: the checkpoint belongs to another model, or is damaged.
    """
    config = trained.config
    lora = lora_of(config.model.lora, arch)
    table = weight_table(arch) if lora is None else adapter_table(arch, lora)
    shape = unflatten(
        (weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight_sharding(weight, mesh, TRAIN_RULES)))
        for weight in table
    )
    checkpoints = Checkpoints(trained.directory, config.trainer, read_only=True)
    try:
        params, progress = checkpoints.restore_policy(trained.step, shape)
    finally:
        checkpoints.close()
    saved = progress.loaded.get("model.path", {})
    _check_policy(config.workdir, config.model.path, saved, policy_identity(config.model.lora, arch))
    return params, saved


def load_trained(trained: Trained, arch: Architecture, mesh: Mesh, dtype: Any = "float32") -> Loaded:
    """The float32 parameters of a run's policy, sharded for training; with adapters, merged into matrices of `dtype`.

    A run samples from those in the dtype of its matrix products.
    """
    return with_base(trained.config, arch, mesh, *trained_params(trained, arch, mesh), dtype=dtype)


def with_base(
    config: Config, arch: Architecture, mesh: Mesh, params: dict, saved: Identity | None = None, dtype: Any = "float32"
) -> Loaded:
    """The whole policy of what a run has trained: `params`, or the model of model.path with these adapters merged in.

    Args:
        saved: the policy's identity in the checkpoint of `params`; None if they come from no checkpoint.
        dtype: see `load_trained`.

    Raises:
        InputError: the files of model.path are not those that the adapters were trained on.
    """
    path, lora, own = config.model.path, lora_of(config.model.lora, arch), digest(params)
    if lora is None:
        return Loaded(params, own)
    base = load_policy(path, arch, mesh, seed=config.seed, shown=shows_progress(config.trainer, config.monitor))
    _check_policy(config.workdir, path, saved or {}, {WEIGHTS: base.digest})
    together = hashlib.sha256(f"{base.digest} {own} {lora.alpha}".encode()).hexdigest()
    return Loaded(merged(cast_matrices(base.params, arch, dtype), params, lora), together)


def _check_policy(workdir: str, path: str, saved: Identity, found: Identity) -> None:
    if changed := differences(saved, found):
        raise InputError(
            f"model.path={path} and model.lora must be those that the run in workdir={workdir} was trained with, but "
            f"now there are {', '.join(changed)}: restore the files and the options"
        )
