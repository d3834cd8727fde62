"""Host: the compiled functions of a training step, lowered from a config and an architecture alone.

They are the functions that a run calls (learner/, rollout/), with the shapes and shardings that it gives them when
each response has the same number of tokens. Nothing is allocated.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.derived import gen_batch_size, mini_batch_size, uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.data.containers import Batch
from dapo_jax.data.padding import bucket
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.choices import uses_critic
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.trainable import HOST, Trainable
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import build_freeze, unflatten, weight_table
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, weight_sharding
from dapo_jax.rollout.wave_plan import RoundPlan, plan_round
from dapo_jax.settings import actor_settings, critic_settings, engine_settings, micro_batches, rows_of_a_prompt

# What lies in a device's memory for longer than a call.
KINDS = ("parameters", "optimizer", "gradients", "decoding weights", "KV cache")
PARAMETERS, OPTIMIZER, GRADIENTS, DECODING, CACHE = KINDS
Lower = Callable[[], jax.stages.Lowered]
Sizes = Mapping[str, float]  # bytes on one device by kind


@dataclass(frozen=True)
class Program:
    """A compiled function of a training step."""

    stage: str
    name: str
    calls: float  # in a training step
    lower: Lower  # sets the mesh that the program runs on
    inside: Sizes  # arguments and results that outlive the call
    beside: Sizes = field(default_factory=dict)  # what lies in memory meanwhile


@dataclass(frozen=True)
class Step:
    """The programs of a training step, and the plan of its waves and micro-batches."""

    programs: tuple[Program, ...]
    host_bytes: float  # that lie in the host's memory for each device
    waves: int
    rows: int  # of a wave, on all devices
    micro_batches: int  # of the policy, in a step


def step_programs(
    config: Config,
    arch: Architecture,
    meshes: Meshes,
    *,
    response_length: int,
    memory: float,
    every_window: bool = True,
    eos_ids: tuple[int, ...] = (0,),
    pad_id: int = 0,
) -> Step:
    """The programs of a step in which each response has `response_length` tokens, and one round fills the batch.

    The reward model and evaluation are left out.

    Args:
        memory: bytes of a device, from which the rows of a wave follow unless rollout.max_num_seqs sets them.
        every_window: as in rollout/wave_plan.py.
        eos_ids, pad_id: the tokenizer's; they change no shape.
    """
    builder = _Builder(config, arch, meshes, response_length)
    with jax.set_mesh(meshes.sampling):
        plan = plan_round(
            engine_settings(config, arch, eos_ids, pad_id, meshes.sampling),
            builder.decoding,
            num_prompts=gen_batch_size(config),
            num_samples=config.rollout.n,
            response_length=response_length,
            free_bytes=max(memory - sum(builder.state.values()) - device_bytes(builder.decoding), 0.0),
            every_window=every_window,
        )
    with jax.set_mesh(meshes.training):
        learning = list(builder.learning())
    return Step(
        programs=(
            _on(meshes.training, builder.weights()),
            *(_on(meshes.sampling, program) for program in builder.rollout(plan)),
            *(_on(meshes.training, program) for program in learning),
        ),
        host_bytes=builder.host_bytes,
        waves=plan.waves,
        rows=plan.rows,
        micro_batches=sum(int(program.calls) for program in learning if program.name.startswith("actor, gradients")),
    )


def _on(mesh: Mesh, program: Program) -> Program:
    """`program`, lowered under `mesh`."""

    def lower() -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return program.lower()

    return replace(program, lower=lower)


class _Builder:
    def __init__(self, config: Config, arch: Architecture, meshes: Meshes, response_length: int) -> None:
        mesh = meshes.training
        self.config, self.arch, self.mesh, self.response_length = config, arch, mesh, response_length
        settings = actor_settings(config, arch, mesh)
        whole = _shapes(weight_table(arch), mesh)
        frozen = build_freeze(arch, settings.dtype, mesh).lower(whole).out_info
        self.frozen = frozen if settings.lora is not None else None
        self.reference = None
        if uses_reference(config):
            self.reference = {} if settings.lora is not None else frozen
        self.actor = build_actor(settings, mesh, self.frozen, decode_mesh=meshes.sampling)
        self.critic = build_critic(critic_settings(config, arch, mesh), mesh) if uses_critic(config) else None
        states = [self.actor.trainable.state_shape] + ([self.critic.trainable.state_shape] if self.critic else [])
        weights = [state.params for state in states] + [self.frozen, self.reference]
        moments = [state.moments for state in states]
        self.host_bytes = device_bytes(moments, kind=HOST)
        self.state = {PARAMETERS: device_bytes(weights), OPTIMIZER: device_bytes(moments)}
        self.params = self.actor.trainable.state_shape.params
        self.decoding = self.actor.decode_weights.lower(self.params).out_info
        self.decoding_bytes = {DECODING: device_bytes(self.decoding)}

    def weights(self) -> Program:
        """Re-laying the weights."""
        read = device_bytes([self.params, self.frozen])
        return Program(
            "weights",
            "decoding weights",
            1,
            lambda: self.actor.decode_weights.lower(self.params),
            {PARAMETERS: read, **self.decoding_bytes},
            {**self.state, PARAMETERS: self.state[PARAMETERS] - read},
        )

    def rollout(self, plan: RoundPlan) -> Iterator[Program]:
        """The programs of the engine."""
        for program in plan.programs:
            inside, beside = {CACHE: device_bytes(program.cache)}, {CACHE: device_bytes(program.other_cache)}
            (inside if program.reads_weights else beside).update(self.decoding_bytes)
            yield Program(program.stage, program.name, program.calls, program.lower, inside, {**self.state, **beside})

    def learning(self) -> Iterator[Program]:
        """Log-probabilities and the optimizer steps of the policy, and of the critic if there is one."""
        config = self.config
        shares = micro_batches(config, self.mesh)
        mini = self._rows(mini_batch_size(config, "actor"))
        minis = config.data.train_batch_size / mini_batch_size(config, "actor")
        state = {**self.state, **self.decoding_bytes}
        recomputed = config.actor.old_logprob == "recompute"
        passes = {"log-probabilities": (self.params, float(recomputed))}
        if self.reference is not None:
            passes["reference's log-probabilities"] = (self.reference, 1.0)
        for name, (params, times) in passes.items():
            for piece, count in self._pieces(mini, shares):
                yield Program(
                    "log-probabilities",
                    f"{name}, {_size(piece)}",
                    count * minis * times,
                    lambda params=params, piece=piece: self.actor.logprobs.lower(params, piece),
                    {PARAMETERS: device_bytes([params, self.frozen])},
                    {**state, PARAMETERS: state[PARAMETERS] - device_bytes([params, self.frozen])},
                )
        yield from self._update("actor", self.actor.trainable, mini, shares)
        if self.critic is not None:
            critic, shares = self.critic, micro_batches(config, self.mesh, "critic")
            mini = self._rows(mini_batch_size(config, "critic"))
            minis = config.data.train_batch_size / mini_batch_size(config, "critic")
            params = critic.trainable.state_shape.params
            for piece, count in self._pieces(mini, shares):
                yield Program(
                    "values",
                    f"values, {_size(piece)}",
                    count * minis,
                    lambda piece=piece: critic.values.lower(params, piece),
                    {PARAMETERS: device_bytes(params)},
                    {**state, PARAMETERS: state[PARAMETERS] - device_bytes(params)},
                )
            yield from self._update("critic", critic.trainable, mini, shares)

    def _update(self, name: str, trainable: Trainable, mini: Batch, shares: MicroBatches) -> Iterator[Program]:
        """The optimizer steps of the "actor" or the "critic"."""
        config, section = self.config, getattr(self.config, name)
        steps = config.data.train_batch_size / mini_batch_size(config, name) * section.ppo_epochs
        state = trainable.state_shape
        zeros = trainable.zero_gradients.lower(state.params)
        gradients = zeros.out_info
        of_gradients, of_params = device_bytes(gradients), device_bytes(state.params)
        # The decoding weights are dropped before the policy's update.
        beside = self.state if name == "actor" else {**self.state, **self.decoding_bytes}
        frozen = self.frozen if name == "actor" else None
        read = device_bytes([state.params, frozen])
        others = {**beside, PARAMETERS: self.state[PARAMETERS] - read}
        mini = self._trained(mini, name)
        for piece, count in self._pieces(mini, shares):
            yield Program(
                "update",
                f"{name}, gradients of {_size(piece)}",
                count * steps,
                lambda piece=piece: trainable.accumulate.lower(state.params, gradients, piece),
                {PARAMETERS: read, GRADIENTS: of_gradients},
                others,
            )
        moments = device_bytes(state.moments)
        yield Program(
            "update",
            f"{name}, optimizer step",
            steps,
            lambda: trainable.apply.lower(state, gradients, np.float32(0)),
            {PARAMETERS: of_params, OPTIMIZER: moments, GRADIENTS: of_gradients},
            {**beside, PARAMETERS: self.state[PARAMETERS] - of_params, OPTIMIZER: self.state[OPTIMIZER] - moments},
        )

    def _rows(self, prompts: int) -> Batch:
        """`prompts` groups as learner/batch.py's `rows_of` makes them, all zeros that take no memory."""
        config, samples = self.config, self.config.rollout.n
        length = min(bucket(self.response_length), config.data.max_response_length)
        copies = samples // rows_of_a_prompt(config, self.arch, self.mesh)
        prompt_shape, shape = (prompts * copies, bucket(config.data.max_prompt_length)), (prompts * samples, length)
        return Batch(
            prompts=_like(prompt_shape, np.int32),
            prompt_mask=_like(prompt_shape, np.bool_),
            responses=_like(shape, np.int32),
            mask=np.broadcast_to(np.arange(length) < self.response_length, shape),
            loss_mask=_like(shape, np.bool_),
            group_ids=_like(shape[:1], np.int32),
            old_logprobs=_like(shape, np.float32),
            advantages=_like(shape, np.float32),
        )

    def _trained(self, batch: Batch, name: str) -> Batch:
        """`batch` with what `make_batch` and the update add to it."""
        config = self.config
        corrected = config.actor.old_logprob == "recompute" and config.algorithm.rollout_correction.rollout_is != "none"
        names = ["loss_weights"]
        names += ["ref_logprobs"] * config.actor.use_kl_loss + ["importance_weights"] * corrected
        names += ["noise"] * (self.actor.select is not None) + ["values", "returns"] * uses_critic(config)
        added = {extra: _like(batch.mask.shape, np.float32) for extra in names}
        if self.actor.select is not None and name == "actor":
            added["selected"] = _like(batch.mask.shape, np.bool_)
        return batch.replace(**added)  # pyright: ignore[reportAttributeAccessIssue]

    def _pieces(self, batch: Batch, shares: MicroBatches) -> list[tuple[Batch, int]]:
        """The micro-batches of a mini-batch as shapes, each with how many there are."""
        sharding = batch_sharding(self.mesh)
        found: Counter[tuple[Any, ...]] = Counter()
        shapes: dict[tuple[Any, ...], Batch] = {}
        for _, piece in shares.split(batch):
            key = tuple(x.shape for x in jax.tree.leaves(piece))
            found[key] += 1
            shapes.setdefault(
                key, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), piece)
            )
        return [(shapes[key], count) for key, count in found.items()]


def device_bytes(tree: Any, *, kind: str | None = None) -> float:
    """Bytes on one device of shapes with shardings; those in the host's memory only if `kind` is HOST."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
            if (leaf.sharding.memory_kind == HOST) == (kind == HOST)
        )
    )


def _shapes(table: Any, mesh: Mesh) -> Any:
    return unflatten(
        (weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight_sharding(weight, mesh, TRAIN_RULES)))
        for weight in table
    )


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _size(piece: Batch) -> str:
    return f"{len(piece.responses)} x {piece.prompts.shape[1]} + {piece.responses.shape[1]} tokens"
