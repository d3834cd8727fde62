"""Host: the language models that a run starts from: random, from a model's files, or from another run."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.derived import checkpoint_dir, uses_reference
from dapo_jax.config.places import place_of
from dapo_jax.config.sections import Config
from dapo_jax.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer, within_rows
from dapo_jax.errors import InputError
from dapo_jax.hub.names import GGUF, is_gguf, model_name
from dapo_jax.hub.repositories import model_at
from dapo_jax.hub.smollm2 import is_smollm2
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.identity import WEIGHTS, Identity, differences, identity
from dapo_jax.models.load import context_length, load_params, read_model_architecture
from dapo_jax.models.lora import ALL_LINEAR, Lora, adapter_table, merged, present_targets
from dapo_jax.models.weights import Weight, count_params, init_params, unflatten, weight_shardings, weight_table
from dapo_jax.monitor.bars import bar, shows_progress
from dapo_jax.parallel.checksums import digest
from dapo_jax.parallel.sharding import TRAIN_RULES, place_weight, weight_sharding
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.other_runs import RANDOM, Trained, find_trained
from dapo_jax.run.stops import check_stop_strings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Parameters, and a digest of what they were made from, which depends on no mesh and no dtype of products."""

    params: Any
    digest: str


def check_model_paths(config: Config, *, training: bool = True) -> None:
    """Raises one InputError with every option whose model does not exist.

    Args:
        training: also check the models that only training needs.
    """
    problems = [missing_model(option, path) for option, path in model_paths(config, training=training).items()]
    if any(problems):
        raise InputError("\n".join(problem for problem in problems if problem))


def model_paths(config: Config, *, training: bool = True) -> dict[str, str]:
    """The options that name a model to load, and what they name."""
    paths = {"model.path": config.model.path}
    paths |= (
        {"reference.path": config.reference.path or ""}
        if training and uses_reference(config.algorithm, config.actor)
        else {}
    )
    paths |= {"critic.model.path": config.critic.model.path} if training else {}
    paths |= {"algorithm.distillation.path": config.algorithm.distillation.path} if training else {}
    paths |= {"reward.model.path": config.reward.model.path}
    return {option: path for option, path in paths.items() if path and path != RANDOM}


def missing_model(option: str, path: str) -> str | None:
    """What to do if `path` is no model; None if it exists, or is a name on the hub, which has its own errors."""
    if is_smollm2(path):
        return None
    if is_gguf(path):
        return f"{option}={path} {GGUF}"
    found = place_of(path).exists() or find_trained(path) is not None  # WORKDIR/checkpoints/STEP, local or not
    if found or model_name(path) is not None:
        return None
    return f"{option}={path} does not exist: give a Hugging Face model directory, or OWNER/NAME of the Hugging Face hub"


def context_warning(config: Config) -> str | None:
    """A warning if prompts and responses exceed the model's context; None if they do not."""
    path, data = first_model(config), config.data
    made_for = None if path == RANDOM else context_length(model_at(path, weights=False))
    longest = data.max_prompt_length + data.max_response_length
    if made_for is None or longest <= made_for:
        return None
    return (
        f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
        f"{longest} tokens exceed the {made_for} positions that {path} was made for: text beyond them is rarely "
        "sensible; lower one of them or choose a model with a longer context"
    )


def first_model(config: Config) -> str:
    """model.path or, if that is another run, the model that it started from."""
    trained = find_trained(config.model.path)
    return config.model.path if trained is None else first_model(trained.config)


def read_policy(config: Config, *, training: bool = True) -> tuple[Architecture, Tokenizer]:
    """`read_model` for a run: also checks that its other models exist and that its options suit the model.

    Raises:
        InputError: see `check_model_paths`, `read_model` and `check_stop_strings`.
    """
    check_model_paths(config, training=training)
    arch, tokenizer = read_model(config)
    if warning := context_warning(config):
        logger.warning("%s", warning)
    check_stop_strings(tokenizer, config.rollout.stop)
    _check_lora(config, arch)
    return arch, tokenizer


def _check_lora(config: Config, arch: Architecture) -> None:
    lora, present = lora_of(config, arch), present_targets(arch)
    if lora is None:
        return
    absent = [target for target in lora.targets if target not in present]
    if absent:
        left = [target for target in lora.targets if target in present]
        raise InputError(
            f"model.lora.target_modules has {', '.join(absent)}, but every feed-forward network of this model is a "
            f"mixture of experts, and experts take no adapters: set model.lora.target_modules={tuple(left)}"
        )


def read_model(config: Config, option: str = "model.path") -> tuple[Architecture, Tokenizer]:
    """The architecture and the tokenizer of model.path, which `option` named.

    Raises:
        InputError: a file is missing or damaged, or the two do not fit together.
    """
    trained = find_trained(config.model.path)
    if trained is not None:
        arch, tokenizer = read_model(trained.config, option)
        return arch, dataclasses.replace(tokenizer, keeps_special=config.reward.keep_special_tokens)
    if config.model.path != RANDOM:
        path = model_at(config.model.path, weights=False)
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
    if arch.scalar_head:
        raise InputError(f"{option}={config.model.path} is a sequence-classification model: give a language model")
    tokenizer = dataclasses.replace(tokenizer, keeps_special=config.reward.keep_special_tokens)
    return arch, _fitted(tokenizer, arch.vocab_size, f"{option}={config.model.path}")


def _fitted(tokenizer: Tokenizer, num_rows: int, named: str) -> Tokenizer:
    """The tokenizer without added tokens that have no embedding, unless it needs one of them."""
    fitted = within_rows(tokenizer, num_rows)
    largest = max(fitted.vocab_size - 1, tokenizer.pad_id, *tokenizer.eos_ids)
    if largest >= num_rows:
        raise InputError(
            f"the tokenizer of {named} has ids up to {largest}, but the model has {num_rows} embeddings: use "
            "the tokenizer that belongs to the model; of more tokens than embeddings, only added tokens (added_tokens "
            "of tokenizer.json) that end or pad no text are left out"
        )
    return fitted


def lora_of(config: Config, arch: Architecture) -> Lora | None:
    """The adapters to train; None to train all weights."""
    lora = config.model.lora
    targets = present_targets(arch) if lora.target_modules == (ALL_LINEAR,) else lora.target_modules
    return Lora(lora.rank, lora.alpha, targets) if lora.rank else None


def policy_identity(config: Config, arch: Architecture, base: Loaded | None = None) -> Identity:
    """What a run's policy computes with besides the weights that it trains; `base` has its adapters."""
    scale = {"model.lora.alpha": config.model.lora.alpha} if config.model.lora.rank else {}
    return identity(arch, base.digest if base is not None else "", **scale)


def load_base(config: Config, arch: Architecture, mesh: Mesh) -> Loaded:
    """The float32 parameters of model.path, sharded for training."""
    if config.model.path == RANDOM:  # platforms may draw other last bits
        return Loaded(_random_params(arch, mesh)(config.seed), f"random weights of seed {config.seed}")
    return load_policy(config.model.path, arch, mesh, shown=shows_progress(config.trainer, config.monitor))


@functools.cache
def _random_params(arch: Architecture, mesh: Mesh) -> Callable[[int], dict[str, Any]]:
    """Makes random parameters of a seed, sharded for training."""
    shardings = weight_shardings(weight_table(arch), mesh, TRAIN_RULES)
    return jax.jit(lambda seed: init_params(arch, seed), out_shardings=shardings)


def load_reference(config: Config, arch: Architecture, freeze: Callable[[Any], Any], mesh: Mesh) -> Loaded:
    """The reference policy for `actor.statistics`: its weights in the dtype of products or, with LoRA, no adapters."""
    if config.model.lora.rank:
        return Loaded({}, "")
    path = config.reference.path or config.model.path
    if path == RANDOM:
        loaded = load_base(config, arch, mesh)
    elif config.reference.path is not None and _architecture(path) != arch:
        raise InputError(
            f"reference.path={path} must have the architecture of model.path={config.model.path}: choose another"
        )
    else:
        loaded = load_policy(path, arch, mesh, shown=shows_progress(config.trainer, config.monitor))
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
    own = read_model_architecture(place)
    free = {"scalar_head": False, "tie_embeddings": arch.tie_embeddings, "initializer_range": arch.initializer_range}
    if dataclasses.replace(own, **free) != arch:
        raise InputError(
            f"critic.model.path={path} must have the architecture of model.path, except for the head: choose another, "
            "or leave it empty for the policy's weights"
        )
    return load_params(place, own, place_weight(mesh, TRAIN_RULES))


def load_policy(path: str, arch: Architecture, mesh: Mesh, *, shown: bool = False) -> Loaded:
    """The float32 parameters of the language model at `path`, sharded for training; `shown`: show a progress bar."""
    trained = find_trained(path)
    if trained is not None:
        return load_trained(trained, arch, mesh)
    place = place_weight(mesh, TRAIN_RULES)
    with bar("loading the model", total=4 * count_params(arch), unit="B", shown=shown) as loaded:

        def counted(weight: Weight, array: np.ndarray) -> jax.Array:
            loaded.update(array.nbytes)
            return place(weight, array)

        params = load_params(model_at(path, weights=True), arch, counted)
    return Loaded(params, digest(params))


def trained_params(trained: Trained, arch: Architecture, mesh: Mesh) -> tuple[dict[str, Any], Identity]:
    """The weights or adapters that a run has trained, in float32, sharded for training, and its policy's identity.

    Raises:
        InputError: the checkpoint belongs to another model, or is damaged.
    """
    config, lora = trained.config, lora_of(trained.config, arch)
    table = weight_table(arch) if lora is None else adapter_table(arch, lora)
    shape = unflatten(
        (weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight_sharding(weight, mesh, TRAIN_RULES)))
        for weight in table
    )
    checkpoints = Checkpoints(checkpoint_dir(config.workdir, config.trainer), read_only=True)
    try:
        params, progress = checkpoints.restore_policy(trained.step, shape)
    finally:
        checkpoints.close()
    saved = progress.loaded.get("model.path", {})
    _check_policy(config, saved, policy_identity(config, arch))
    return params, saved


def load_trained(trained: Trained, arch: Architecture, mesh: Mesh) -> Loaded:
    """The float32 parameters of a run's policy, with its adapters merged, sharded for training."""
    params, saved = trained_params(trained, arch, mesh)
    return with_base(trained.config, arch, mesh, params, saved)


def with_base(
    config: Config, arch: Architecture, mesh: Mesh, params: dict[str, Any], saved: Identity | None = None
) -> Loaded:
    """The whole policy of what a run has trained: `params`, or the model of model.path with these adapters merged in.

    Args:
        saved: the policy's identity in the checkpoint of `params`; None if they come from no checkpoint.

    Raises:
        InputError: the files of model.path are not those that the adapters were trained on.
    """
    lora, own = lora_of(config, arch), digest(params)
    if lora is None:
        return Loaded(params, own)
    base = load_base(config, arch, mesh)
    _check_policy(config, saved or {}, {WEIGHTS: base.digest})
    together = hashlib.sha256(f"{base.digest} {own} {lora.alpha}".encode()).hexdigest()
    return Loaded(merged(base.params, params, lora), together)


def _check_policy(config: Config, saved: Identity, found: Identity) -> None:
    if changed := differences(saved, found):
        raise InputError(
            f"model.path={config.model.path} and model.lora must be those that the run in workdir={config.workdir} was "
            f"trained with, but now there are {', '.join(changed)}: restore the files and the options"
        )


def _architecture(path: str) -> Architecture:
    trained = find_trained(path)
    return read_model_architecture(model_at(path, weights=False)) if trained is None else read_model(trained.config)[0]
