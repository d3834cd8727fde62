"""A small policy with rollouts and updates, for the tests of the laws."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from shapes import ARCH, one_device_mesh

from dapo_jax.config.sections import ActorConfig, CriticConfig, DistillationConfig, OptimConfig, PolicyLossConfig
from dapo_jax.data.containers import Batch, MicroBatch, Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.learner.actor import Actor, ActorSettings, build_actor
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.trainable import Passes
from dapo_jax.learner.trained_networks import Network
from dapo_jax.learner.update import Update, compute_statistics, update_policy
from dapo_jax.models.attention import XLA, BinAttention
from dapo_jax.models.flops import TokenFlops
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN, Sampling

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [11], [12, 13], [3, 3, 3], [20, 21, 22, 23], [2, 40]]
NUMBERS = list(range(100, 108))
SAMPLES = 4
EOS, PAD = (2, 3), 2  # pad equals one of the two end-of-sequence tokens
LENGTH = 9
OPTIONS = ActorConfig(
    logprob_chunk_size=40,
    kl_loss_type="k3+",
    optim=OptimConfig(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    grad_clip=1.0,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=10.0,
    policy_loss=PolicyLossConfig(
        clip_cov_ratio=0.2,
        clip_cov_lb=-9.0,
        clip_cov_ub=9.0,
        kl_cov_ratio=0.2,
        ppo_kl_coef=0.5,
        tau_pos=1.0,
        tau_neg=1.05,
    ),
)


def passes(*, arch=ARCH, dtype=jnp.float32, remat="full", attention=XLA) -> Passes:
    return Passes(arch=arch, dtype=jnp.dtype(dtype), remat=remat, attention=attention)


def actor_settings(*, loss_mode="vanilla", temperature=0.8, distillation=None, lora=None, **changes) -> ActorSettings:
    """`changes`: of OPTIONS and of the passes."""
    of_passes = {name: changes.pop(name) for name in ("arch", "dtype", "remat", "attention") if name in changes}
    loss = dataclasses.replace(OPTIONS.policy_loss, loss_mode=loss_mode)
    options = dataclasses.replace(OPTIONS, policy_loss=loss, use_kl_loss="kl_loss_coef" in changes, **changes)
    distillation = distillation or DistillationConfig()
    return ActorSettings(passes(**of_passes), options, temperature, distillation=distillation, lora=lora)


@functools.cache
def actor_on(mesh: Mesh, *, decode_mesh: Mesh | None = None, **changes) -> Actor:
    """One for all tests, with all that it has compiled: it holds no state."""
    return build_actor(actor_settings(**changes), mesh, decode_mesh=decode_mesh)


@contextlib.contextmanager
def policy_on(mesh: Mesh | None = None, **changes):
    """A mesh, which is set meanwhile, an actor on it and its first state; without a mesh, on one device."""
    mesh = mesh or one_device_mesh()
    with jax.set_mesh(mesh):
        actor = actor_on(mesh, **changes)
        yield mesh, actor, actor.trainable.init_random(0)


@functools.cache
def critic_of(mesh):
    return build_critic(passes(), CriticConfig(cliprange_value=0.2, optim=OPTIONS.optim, grad_clip=1.0), mesh)


def engine_settings(mesh, **changes) -> EngineSettings:
    values = dict(
        arch=ARCH,
        mesh=mesh,
        eos_ids=EOS,
        pad_id=PAD,
        max_prompt_length=8,
        max_response_length=LENGTH,
        max_num_seqs=1024,
        memory_share=1.0,
        chunk_length=3,
        lookahead=0,
        seed=0,
    )
    return EngineSettings(**{**values, **changes})


def roll_out(actor, state, mesh, *, prompts=PROMPTS, numbers=NUMBERS, purpose=TRAIN, sampling=None, **changes):
    sampling = sampling or Sampling.create(0.8, 1.0, -1)
    request = Request(actor.decode_weights(state.params), SAMPLES, purpose, sampling)
    return Engine(engine_settings(mesh, **changes), None).generate(prompts, numbers, request)


def plain_batch(prompt_mask: np.ndarray, mask: np.ndarray, **fields) -> Batch:
    """A batch with these masks [Q, P] and [B, R]; what `fields` do not say is 0, or 1 for a token."""
    zeros = np.broadcast_to(np.float32(0), mask.shape)
    samples = len(mask) // len(prompt_mask)
    values = {
        "prompts": prompt_mask.astype(np.int32),
        "prompt_mask": prompt_mask,
        "group_ids": np.arange(len(mask), dtype=np.int32) // samples,
        "responses": mask.astype(np.int32),
        "mask": mask,
        "loss_mask": mask,
        "old_logprobs": zeros,
        "advantages": zeros,
    }
    return Batch(**{**values, **fields})


def batch_of(rollout: Rollout, width: int = 8) -> Batch:
    prompts, prompt_mask = pad_prompts(PROMPTS, width, PAD)
    mask, rng = rollout.mask, np.random.default_rng(0)
    advantages = rng.normal(size=(len(mask), 1)) * mask

    def noise(size):
        return rng.normal(0, size, mask.shape).astype(np.float32) * mask

    return plain_batch(
        prompt_mask,
        mask,
        prompts=prompts,
        responses=rollout.responses,
        old_logprobs=rollout.logprobs,
        advantages=advantages.astype(np.float32),
        ref_logprobs=rollout.logprobs + noise(0.3),
        noise=rng.uniform(size=mask.shape).astype(np.float32),
        values=noise(0.1),
        returns=noise(1.0),
    )


def rows(number: int) -> MicroBatches:
    """Micro-batches of so many rows, over the devices of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.empty else num_batch_shards(mesh)  # pyright: ignore[reportArgumentType]
    assert number % shards == 0
    parts = dict(mesh.shape).get("context", 1)
    return MicroBatches(num_shards=shards, rows_per_device=number // shards, parts=parts)


def bins(shards: int, tokens: int, attention: BinAttention = XLA, parts: int = 1) -> MicroBatches:
    """Packed micro-batches of so many tokens on each of the devices, or on as many `parts` of them together."""
    flops = TokenFlops(layers=1.0, head=0.0, pair=0.01)
    return MicroBatches(shards, max_tokens_per_device=tokens, attention=attention, flops=flops, parts=parts)


def micro_batch(batch: Batch) -> MicroBatch:
    """All rows in one, on one device."""
    (piece,) = rows(len(batch.mask)).split(batch)
    return piece.micro_batch


def update_settings(*, mini=16, micro=16, lr=1e-4, epochs=1, count_empty=False, mode="token-mean"):
    """`micro`: a number of rows, or MicroBatches."""
    network = Network(
        options=ActorConfig(ppo_epochs=epochs, loss_agg_mode=mode),
        mini_batch_size=mini // SAMPLES,
        mini_batch_rows=mini,
        micro_batch_size=1,
        packs=False,
        max_tokens=0,
        loss_scale_factor=float(LENGTH),
        count_empty_sequences=count_empty,
    )
    return Update(network, rows(micro) if isinstance(micro, int) else micro, learning_rate=lr)


def step(actor, state, batch, mesh, **changes):
    state, finish = update_policy(actor, state, batch, update_settings(**changes), mesh)
    return state, finish()[0]


def logprobs_of(actor, params, batch, split, mesh):
    """The log-probabilities that training computes, in these micro-batches."""
    return compute_statistics(actor, params, batch, split, mesh).logprobs


@functools.cache
def reference():
    """The run on one device that the others are compared with."""
    with policy_on() as (mesh, actor, state):
        rollout = roll_out(actor, state, mesh)
        state, metrics = step(actor, state, batch_of(rollout), mesh)
        return rollout, metrics, jax.device_get(state.params)


def gradient_of(batch, *, micro, mode="token-mean", mesh=None, **changes):
    """The gradient of one mini-batch, read from an optimizer that changes no direction."""
    with policy_on(mesh, **changes) as (used, actor, state):
        state, metrics = step(actor, state, batch, used, mini=32, micro=micro, mode=mode)
        return jax.device_get(state.moments[0].mu), metrics


def assert_same_gradient(found, expected, names, **tolerance):
    """Two gradients with their metrics, of which those of the names are compared."""
    assert_close(found[0], expected[0], 1e-5)
    for name in names:
        np.testing.assert_allclose(found[1][name], expected[1][name], err_msg=name, **tolerance)


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
