"""Host: a run's meshes, and checks that the model, the batches and the memory of training fit them."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.config.derived import plays_episodes
from dapo_jax.config.sections import Config, DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from dapo_jax.errors import InputError, divisors, nearest
from dapo_jax.learner.trainable import HOST, Passes
from dapo_jax.learner.trained_networks import Network, trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.context import undivided
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.memory import FRACTION
from dapo_jax.parallel.mesh import Meshes, make_mesh, num_batch_shards, platform, split_devices, with_tensor
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible, indivisible_weights
from dapo_jax.rollout.engine import STOPS_LATE
from dapo_jax.run.passes import chosen_attention, compute_dtype, fits_memory, given_policy, memory_by_kind


def make_meshes(config: Config, arch: Architecture, devices: Sequence[Any] | None = None) -> Meshes:
    """The mesh to train on and the one to sample on, which fit the model, the training batches and offloading.

    Args:
        devices: those of the run; None = all.

    Raises:
        InputError: the devices cannot be divided like this, or model or batches do not fit.
    """
    shape, expert = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor), config.mesh.expert
    if config.trainer.rollout_ahead:
        of_training, of_sampling = split_devices(config.trainer.rollout_devices, config.mesh.tensor)
        whole = make_mesh(*shape, of_training, in_order=True)
        sampling = make_mesh(-1, 1, config.mesh.tensor, of_sampling, in_order=True)
    else:
        whole = sampling = make_mesh(*shape, devices, expert=expert)
    check_weights(arch, sampling)
    check_stops(config.environment, config.rollout, arch, sampling)
    networks = trained(config)
    size = _train_tensor(config, arch, networks, whole)
    _refuse(_training_problems(config.data, config.mesh.context, arch, networks, whole, size))
    mesh = with_tensor(whole, size, config.mesh.context)
    check_memory(networks, config.model, mesh)
    return Meshes(mesh, sampling)


def _train_tensor(config: Config, arch: Architecture, networks: Mapping[str, Network], mesh: Mesh) -> int:
    """The size of "tensor" in training on the devices of `mesh`, which is divided for sampling.

    If mesh.train_tensor is 0, it is the least divisor of mesh.tensor for which model and batches fit, and by an
    estimate the memory: fsdp sends less than tensor. It follows from the config and the kind of the devices alone.

    Raises:
        InputError: mesh.train_tensor does not divide the devices.
    """
    given, both = config.mesh.train_tensor, mesh.shape["fsdp"] * mesh.shape["tensor"]
    if given and both % given:
        raise InputError(
            f"mesh.train_tensor={given} must divide mesh.fsdp x mesh.tensor = {both}: "
            f"{_fitting_size(arch, mesh, given)}"
        )
    if given:
        return given
    sizes = divisors(mesh.shape["tensor"])
    usable = memory_by_kind(config.trainer, mesh)
    for size in sizes:
        if _training_problems(config.data, config.mesh.context, arch, networks, mesh, size):
            continue
        changed = with_tensor(mesh, size, config.mesh.context)
        shards = num_batch_shards(changed)
        if all(network.mini_batch_rows >= shards for network in networks.values()) and (
            usable is None or fits_memory(config, arch, changed, usable)
        ):
            return size
    return sizes[-1]


def _training_problems(
    data: DataConfig, context: int, arch: Architecture, networks: Mapping[str, Network], mesh: Mesh, size: int
) -> list[str]:
    """One line for each dimension of weights and batches that `mesh` does not divide with `size` along "tensor"."""
    changed = with_tensor(mesh, size)
    if changed.shape["fsdp"] % context:
        fitting = nearest(divisors(changed.shape["fsdp"]), context)
        return [
            f"mesh.context={context} must divide mesh.fsdp x mesh.tensor / mesh.train_tensor = "
            f"{changed.shape['fsdp']}: set mesh.context={fitting}"
        ]
    if changed == mesh:
        of_weights = _weight_problems(arch, mesh)
    else:
        names = {"fsdp": "mesh.fsdp x mesh.tensor / mesh.train_tensor", "tensor": "mesh.train_tensor"}
        of_weights = [
            f"{' x '.join(names.get(axis, f'mesh.{axis}') for axis in axes)} = "
            f"{math.prod(changed.shape[axis] for axis in axes)} must divide {dimension}: "
            f"{_fitting_size(arch, mesh, size)}"
            for axes, dimension, _ in indivisible(weight_table(arch), changed.shape, TRAIN_RULES)
        ]
    mesh = with_tensor(mesh, size, context)
    of_batches = batch_problems(networks, data.train_batch_size, mesh)
    return of_weights + of_batches + context_problems(arch, mesh)


def context_problems(arch: Architecture, mesh: Mesh) -> list[str]:
    """One line if the mesh of training does not divide the heads of a model."""
    context, tensor = mesh.shape.get("context", 1), mesh.shape["tensor"]
    if not (heads := undivided(arch, tensor, context)):
        return []
    fitting = [one for one in divisors(mesh.shape["fsdp"] * context) if not undivided(arch, tensor, one)]
    return [
        f"mesh.context={context} x {tensor} devices along tensor in training must divide {heads}: "
        f"set mesh.context={nearest(fitting, context)}"
    ]


def _fitting_size(arch: Architecture, mesh: Mesh, size: int) -> str:
    """Sizes of "tensor" in training, near `size`, for which `mesh` divides the weights."""
    sizes = divisors(mesh.shape["fsdp"] * mesh.shape["tensor"])
    table = weight_table(arch)
    fitting = [one for one in sizes if not indivisible(table, with_tensor(mesh, one).shape, TRAIN_RULES)]
    return f"set mesh.train_tensor={nearest(fitting, size) or 0}, or 0 to have it chosen"


def check_weights(arch: Architecture, mesh: Mesh) -> None:
    """Raises one InputError with every dimension of weights that the mesh does not divide."""
    _refuse(_weight_problems(arch, mesh))


def check_stops(environment: EnvironmentConfig, rollout: RolloutConfig, arch: Architecture, mesh: Mesh) -> None:
    """Raises InputError if a turn of an episode would end after the states of the model have seen more."""
    if plays_episodes(environment) and rollout.stop and arch.delta and platform(mesh) == "cpu":
        raise InputError(STOPS_LATE)


def _weight_problems(arch: Architecture, mesh: Mesh) -> list[str]:
    table, expert = weight_table(arch), mesh.shape.get("expert", 1)
    if expert > 1 and arch.experts is None:
        return [f"mesh.expert={expert} divides experts, but model.path has none: set it to 1"]
    lines = [line for rules in (TRAIN_RULES, DECODE_RULES) for line in indivisible_weights(table, mesh.shape, rules)]
    if arch.delta is not None and (kept := arch.delta.tail_size) % (tensor := mesh.shape["tensor"]):
        fitting = nearest(divisors(math.gcd(kept, arch.delta.value_heads)), tensor)
        lines.append(
            f"mesh.tensor={tensor} must divide the {kept} channels that a layer with linear attention keeps of the "
            f"last tokens: set mesh.tensor={fitting}"
        )
    return lines


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise InputError("the mesh does not fit:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(problems)))


def batch_problems(networks: Mapping[str, Network], train_batch_size: int, mesh: Mesh) -> list[str]:
    """One line per network whose mini-batches are no whole number of micro-batches on the devices of `mesh`."""
    problems, shards = [], num_batch_shards(mesh)
    for name, network in networks.items():
        rows, micro = network.mini_batch_rows, network.micro_batch_size * shards
        if rows % micro and not network.packs:
            problems.append(
                f"{name}.ppo_mini_batch_size x rollout.n = {rows} responses must be a multiple of "
                f"{name}.ppo_micro_batch_size_per_device x {shards} devices that rows are divided over = {micro}: "
                f"{_fitting_batches(name, network, shards, train_batch_size)}"
            )
    return problems


def _fitting_batches(name: str, network: Network, shards: int, train_batch_size: int) -> str:
    """Sizes that fit: for the micro-batch, else for the mini-batch, else for mini-batch and training batch."""
    rows, mini, micro = network.mini_batch_rows, network.mini_batch_size, network.micro_batch_size * shards
    samples = rows // mini
    if rows % shards == 0:
        fitting = nearest(divisors(rows // shards), network.micro_batch_size)
        return f"set {name}.ppo_micro_batch_size_per_device={fitting}"
    minis = [one for one in divisors(train_batch_size) if one * samples % micro == 0]
    if minis:
        return f"set {name}.ppo_mini_batch_size={nearest(minis, mini)}"
    step = micro // math.gcd(micro, samples)
    fitting = nearest([count * step for count in (mini // step, mini // step + 1) if count], mini)
    return f"set {name}.ppo_mini_batch_size={fitting}, and data.train_batch_size to a multiple of it"


def check_memory(networks: Mapping[str, Network], model: ModelConfig, mesh: Mesh) -> None:
    """Raises InputError if an option offloads to host memory that the devices cannot reach."""
    offloaded = [f"{name}.optim.offload=True" for name, network in networks.items() if network.options.optim.offload]
    if given_policy(model) == "offload":
        offloaded.append("model.remat_policy=offload")
    if not offloaded or (HOST in _memories(mesh) and platform(mesh) != "cpu"):
        return
    if platform(mesh) == "gpu":
        raise InputError(
            f"{offloaded[0]} cannot be compiled for absent GPUs, because JAX does not know their host memory: leave it "
            "out here, or compile on the GPUs with --topology=gpu"
        )
    raise InputError(
        f"{offloaded[0]} needs devices with their own memory, but JAX has {platform(mesh)}: choose another value"
    )


def _memories(mesh: Mesh) -> set[str]:
    return {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}


def device_notes(config: Config, mesh: Mesh, training: Passes | None = None) -> list[str]:
    """One line per choice for these devices that may surprise.

    Args:
        training: the passes of training on `mesh`; None for a command that does not train.
    """
    device, dtype, lines = mesh.devices.flat[0], compute_dtype(config.model, mesh), []
    if config.model.dtype == "auto" and device.platform == "gpu" and dtype == jnp.float32:
        lines.append(f"model.dtype=auto is float32: {device.device_kind} has no fast bfloat16 products")
    if training and (mesh.shape["tensor"] != config.mesh.tensor or "context" in mesh.shape):
        context = f", mesh.context={config.mesh.context}" if "context" in mesh.shape else ""
        lines.append(
            f"mesh.train_tensor={config.mesh.train_tensor}{context}: training divides the devices into "
            f"{' and '.join(', '.join(f'{axis} {size}' for axis, size in mesh.shape.items()).rsplit(', ', 1))}"
        )
    if training:
        name, problem = chosen_attention(config.model, config.data, training.arch, mesh)
        lines += [f"model.attention=fused is {name}: the fused kernel {problem}"] * bool(problem)
        if name == "cudnn" and config.trainer.deterministic == "auto":
            lines.append(
                "trainer.deterministic=auto: cuDNN's backward pass of attention may add in another order each time; on "
                "asks it for one order, and model.attention=triton has one"
            )
    if training and config.actor.share_prompts and config.actor.use_dynamic_bsz:
        attention = training.attention
        widest = max(attention.rounded(network.max_tokens) for network in trained(config).values())
        if 0 < attention.shared_width < widest:
            lines.append(
                f"passes of {widest} tokens copy the prompt for each response: {attention.name} shares it up to "
                f"{attention.shared_width} (actor.ppo_max_token_len_per_device)"
            )
    if device.platform == "gpu":
        taken = os.environ.get(FRACTION)
        if taken is not None:
            lines.append(f"JAX may take {taken} of each GPU's memory: trainer.gpu_memory_fraction changes it")
    return lines
