"""Host: a config from a model's name alone, with sizes for the devices that are there."""

import logging
import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from dapo_jax.config.places import is_address
from dapo_jax.config.sections import Config, MeshConfig, TrainerConfig
from dapo_jax.config.values import default_config, with_values
from dapo_jax.data.padding import bucket
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import divisors, say
from dapo_jax.hub.names import model_name
from dapo_jax.hub.repositories import model_at
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import context_length
from dapo_jax.models.weights import weight_table
from dapo_jax.monitor.recipe import read_config
from dapo_jax.parallel.memory import free_bytes
from dapo_jax.parallel.processes import gather, is_first
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible
from dapo_jax.run.base_models import read_model
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.meshes import make_meshes
from dapo_jax.run.other_runs import first_model
from dapo_jax.run.passes import fits_memory
from dapo_jax.run.problems import read_problems

LONGEST_PROMPT = 2048  # tokens; longer prompts are left out
PROMPTS, RESPONSE, AT_ONCE = (16, 64), (128, 1024), (16, 64)  # on CPUs, on accelerators: per step, tokens, per pass
MICRO_BATCH = "actor.ppo_micro_batch_size_per_device"
SIZES = (
    *("mesh.fsdp", "rollout.n", "data.train_batch_size", "actor.ppo_mini_batch_size"),
    *("data.max_prompt_length", "data.filter_overlong_prompts", "data.max_response_length"),
    MICRO_BATCH,
)


def names_model(name: str) -> bool:
    """Whether `name` is a model, and no recipe or config file: a directory, address or name on the hub."""
    if name.endswith((".py", ".json", ".yaml", ".yml")):
        return False
    return (
        Path(name).expanduser().is_dir() or name.endswith(".gguf") or is_address(name) or model_name(name) is not None
    )


def config_of_model(model: str) -> ConfigDict:
    """The defaults, with this model and a workdir of its name."""
    config = default_config()
    config.model.path = model
    config.workdir = f"runs/{Path(model.partition('@')[0]).name}"
    return config


def with_sizes(config: Config, given: Mapping[str, Any]) -> Config:
    """`config` with SIZES for its model, its data and the devices, which are printed. Every process must call it.

    A workdir with a run keeps that run's, so that the same command resumes it.

    Args:
        given: options that the caller has set, which stay.
    """
    before = read_config(config.workdir) if is_first() else None
    found = gather({key: attrgetter(key)(before) for key in SIZES} if before else None)[0]
    what = f"sizes of the run in {config.workdir}"
    if found is None:
        downloaded = with_downloads(config)
        arch, tokenizer = read_model(downloaded.model)
        found = {**_batch_sizes(config.mesh, config.trainer, arch, given), **_lengths(downloaded, tokenizer, given)}
        sized = with_values(config, {key: value for key, value in found.items() if key not in given})
        found[MICRO_BATCH] = _micro_batch_size(sized, arch)
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        what = f"sizes for {devices}, of which any can be given"
    values = {key: value for key, value in found.items() if key not in given and value is not False}
    if is_first() and values and config.monitor.console in ("steps", "detailed"):
        say(f"{what}: {' '.join(f'{key}={value}' for key, value in values.items())}")
    return with_values(config, values)


def _batch_sizes(
    mesh: MeshConfig, trainer: TrainerConfig, arch: Architecture, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All devices share the parameters, as far as they divide them, and each has rows of a mini-batch."""
    devices = jax.device_count()
    others = mesh.expert * mesh.tensor * max(mesh.data, 1)
    fsdp = 1
    if devices % others == 0 and not trainer.rollout_ahead:
        table, fixed = weight_table(arch), {"expert": mesh.expert, "tensor": mesh.tensor}
        shapes = [{"data": 1, "fsdp": size, **fixed} for size in divisors(devices // others)]
        fitting = [
            one["fsdp"] for one in shapes if not any(indivisible(table, one, r) for r in (TRAIN_RULES, DECODE_RULES))
        ]
        fsdp = max(fitting, default=1)
    n = given.get("rollout.n", 8)
    prompts = given.get("data.train_batch_size", max(_of_platform(PROMPTS), 2 * devices))
    mini = prompts // 4 if prompts % 4 == 0 and prompts // 4 * n >= devices else prompts
    return {
        "mesh.fsdp": fsdp,
        "rollout.n": n,
        "data.train_batch_size": prompts,
        "actor.ppo_mini_batch_size": mini,
    }


def _lengths(config: Config, tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts as long as those to train or to evaluate on, and responses as the model's context has room for."""
    if longest := given.get("data.max_prompt_length"):
        prompt = longest
    else:
        any_length = {"data.max_prompt_length": sys.maxsize, "data.filter_overlong_prompts": False}
        logging.disable(logging.WARNING)  # what is wrong with the data, the run says
        try:
            sets = read_problems(with_values(config, any_length), tokenizer).by_prompts()
        finally:
            logging.disable(logging.NOTSET)
        longest = max(len(tokens) for prompts, _ in sets for tokens in prompts.tokens)
        prompt = min(bucket(longest), LONGEST_PROMPT)
    context = context_length(model_at(first_model(config.model.path), weights=False))
    response = _of_platform(RESPONSE)
    return {
        "data.max_prompt_length": prompt,
        "data.filter_overlong_prompts": longest > prompt,
        "data.max_response_length": max(min(response, (context or prompt + response) - prompt), 1),
    }


def _micro_batch_size(config: Config, arch: Architecture) -> int:
    """The largest power of two, up to a device's share of a mini-batch, that fits its memory by the estimate."""
    mesh = make_meshes(config, arch).training
    free, rows = free_bytes(mesh), config.actor.ppo_mini_batch_size * config.rollout.n // mesh.size
    size = 1
    while 2 * size <= min(rows, _of_platform(AT_ONCE)):
        if not fits_memory(with_values(config, {MICRO_BATCH: 2 * size}), arch, mesh, free):
            break
        size *= 2
    return size


def _of_platform(sizes: tuple[int, int]) -> int:
    return sizes[jax.default_backend() != "cpu"]
