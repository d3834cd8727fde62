"""Host: a run's meshes, and checks that the model and the batches fit them."""

import math
import os

import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.config.derived import micro_batch_size, mini_batch_size
from dapo_jax.config.sections import Config
from dapo_jax.errors import InputError
from dapo_jax.learner.choices import trained
from dapo_jax.learner.trainable import HOST
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.divisors import divisors, nearest
from dapo_jax.parallel.memory import FRACTION
from dapo_jax.parallel.mesh import make_mesh, num_batch_shards, platform, split_devices
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible_weights
from dapo_jax.settings import chosen_attention, compute_dtype, remat_policy


def make_meshes(config: Config) -> tuple[Mesh, Mesh]:
    """The mesh to train on and the one to sample on. InputError if the devices cannot be divided like this."""
    shape = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if not config.trainer.rollout_ahead:
        mesh = make_mesh(*shape)
        return mesh, mesh
    training, sampling = split_devices(config.trainer.rollout_devices, config.mesh.tensor)
    rollout_mesh = make_mesh(-1, 1, config.mesh.tensor, sampling, in_order=True)
    return make_mesh(*shape, training, in_order=True), rollout_mesh


def check_mesh(config: Config, arch: Architecture, mesh: Mesh, *, training: bool = True) -> None:
    """Raises one InputError with every dimension of weights and training batches that the mesh does not divide."""
    shape = dict(mesh.shape)
    problems = indivisible_weights(weight_table(arch), shape, TRAIN_RULES)
    problems += indivisible_weights(weight_table(arch), shape, DECODE_RULES)
    for name in trained(config) if training and not config.actor.use_dynamic_bsz else ():
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
    """Sizes that fit: for the micro-batch, else for the mini-batch, else for mini-batch and training batch."""
    if rows % shards == 0:
        fitting = nearest(divisors(rows // shards), micro_batch_size(config, name))
        return f"set {name}.ppo_micro_batch_size_per_device={fitting}"
    minis = [one for one in divisors(config.data.train_batch_size) if one * config.rollout.n % micro == 0]
    if minis:
        return f"set {name}.ppo_mini_batch_size={nearest(minis, mini_batch_size(config, name))}"
    step, mini = micro // math.gcd(micro, config.rollout.n), mini_batch_size(config, name)
    fitting = nearest([count * step for count in (mini // step, mini // step + 1) if count], mini)
    return f"set {name}.ppo_mini_batch_size={fitting}, and data.train_batch_size to a multiple of it"


def check_memory(config: Config, mesh: Mesh) -> None:
    """Raises InputError if an option offloads to host memory that the devices cannot reach."""
    offloaded = [f"{name}.optim.offload=True" for name in trained(config) if getattr(config, name).optim.offload]
    if remat_policy(config.model) == "offload":
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


def device_notes(config: Config, arch: Architecture, mesh: Mesh, *, training: bool = True) -> list[str]:
    """One line per choice for these devices that may surprise, of attention only in training."""
    device, dtype, lines = mesh.devices.flat[0], compute_dtype(config.model, mesh), []
    if config.model.dtype == "auto" and device.platform == "gpu" and dtype == jnp.float32:
        lines.append(f"model.dtype=auto is float32: {device.device_kind} has no fast bfloat16 products")
    if training and (chosen := chosen_attention(config.model, arch, mesh))[1]:
        lines.append(f"model.attention=fused is {chosen[0]}: the fused kernel {chosen[1]}")
    if device.platform == "gpu":
        taken = os.environ.get(FRACTION)
        if taken is not None:
            lines.append(f"JAX may take {taken} of each GPU's memory: trainer.gpu_memory_fraction changes it")
    return lines
