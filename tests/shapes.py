"""The small model, the meshes and the sizes that tests share."""

import math

import jax
from jax.sharding import Mesh

from dapo_jax.models.architecture import Architecture
from dapo_jax.parallel.mesh import make_mesh

# N * H != D and K < N: square shapes would hide transposes.
ARCH = Architecture(
    family="llama",
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    initializer_range=0.2,
)

# Options of a run of seconds. A random model is right often enough on sums up to 4.
SUMS = {"data.arithmetic.high": 4, "data.arithmetic.num_heldout": 4}
BATCHES = {
    "data.train_batch_size": 4,
    "data.gen_batch_size": 8,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_device": 4,
}
SMALL = {
    **SUMS,
    **BATCHES,
    "trainer.total_training_steps": 4,
    "trainer.test_freq": 2,
    "trainer.save_freq": 2,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "reward.num_workers": 1,
    "actor.optim.lr": 1e-3,
}


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    """A mesh (data, fsdp, tensor) of the first devices."""
    return make_mesh(*shape, jax.devices()[: math.prod(shape)])


def one_device_mesh() -> Mesh:
    return mesh_of((1, 1, 1))
