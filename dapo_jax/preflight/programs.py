"""Host: the compiled functions of a training step, lowered from a config and an architecture alone.

They are the functions that a run calls (learner/, rollout/), with the shapes and shardings that it gives them when
prompts and responses have given lengths. Nothing is allocated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.derived import gen_batch_size, plays_episodes, uses_reference
from dapo_jax.config.sections import Config
from dapo_jax.data.work import Work
from dapo_jax.learner.actor import build_actor, build_statistics
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.trainable import HOST, Trainable
from dapo_jax.learner.trained_networks import needs_statistics, trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import build_freeze, unflatten, weight_table
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.sharding import TRAIN_RULES, weight_sharding
from dapo_jax.preflight.compiled import DECODING, GRADIENTS, OPTIMIZER, PARAMETERS, Program, device_bytes
from dapo_jax.preflight.lengths import Lengths
from dapo_jax.preflight.rollout import RoundPlan, plan_round
from dapo_jax.preflight.step_batch import StepBatch
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.run.base_models import TEACHER, read_architecture_of
from dapo_jax.run.networks import teacher_settings
from dapo_jax.run.passes import passes as passes_of
from dapo_jax.run.settings import actor_settings, all_micro_batches, engine_settings, micro_batches


@dataclass(frozen=True)
class Step:
    """The programs of a training step, and the plan of its rollout and micro-batches."""

    programs: tuple[Program, ...]
    host_bytes: float  # that lie in the host's memory for each device
    sizes: Mapping[str, int]  # of the rollout engine's plan
    rows: int  # decoded at once, on all devices
    micro_batches: int  # of the policy, in a step
    work: Mapping[str, Work] = field(default_factory=dict)  # computed and needed, by stage


def step_programs(
    config: Config,
    arch: Architecture,
    meshes: Meshes,
    *,
    lengths: Lengths,
    memory: float,
    eos_ids: tuple[int, ...] = (0,),
    pad_id: int = 0,
) -> Step:
    """The programs of a step with prompts and responses of these lengths, if one round fills the batch.

    The reward model and evaluation are left out.

    Args:
        memory: bytes of a device, from which the rows decoded at once follow unless rollout.max_num_seqs sets them.
        eos_ids, pad_id: the tokenizer's; they change no shape.
    """
    builder = _Builder(config, arch, meshes, lengths)
    draws = config.rollout
    responses, prompts = lengths.sample(gen_batch_size(config.data), draws.n)
    with jax.set_mesh(meshes.sampling):
        plan = plan_round(
            engine_settings(config, arch, eos_ids, pad_id, meshes.sampling),
            builder.decoding,
            segment_length=config.rollout.segment_length,
            response_lengths=responses,
            prompt_lengths=prompts,
            free_bytes=max(memory - sum(builder.state.values()) - device_bytes(builder.decoding), 0.0),
            limits=Sampling.create(draws.temperature, draws.top_p, draws.top_k, draws.min_response_length).limits,
            returns=plays_episodes(config.environment),
            stops=bool(draws.stop),
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
        sizes=plan.sizes,
        rows=plan.rows,
        micro_batches=sum(int(program.calls) for program in learning if program.name.startswith("actor, gradients")),
        work={**plan.work, "update": builder.batch.work()},
    )


def _on(mesh: Mesh, program: Program) -> Program:
    """`program`, lowered under `mesh`."""

    def lower() -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return program.lower()

    return replace(program, lower=lower)


class _Builder:
    def __init__(self, config: Config, arch: Architecture, meshes: Meshes, lengths: Lengths) -> None:
        mesh = meshes.training
        self.config, self.arch, self.mesh = config, arch, mesh
        settings, self.networks = actor_settings(config, arch, mesh), trained(config)
        passes = settings.passes
        splits = all_micro_batches(self.networks, config.model, passes.attention, arch, mesh)
        whole = _shapes(weight_table(arch), mesh)
        frozen = build_freeze(arch, passes.dtype, mesh).lower(whole).out_info
        self.frozen = frozen if settings.lora is not None else None
        self.reference = None
        if uses_reference(config.algorithm, config.actor):
            self.reference = {} if settings.lora is not None else frozen
        self.actor = build_actor(settings, mesh, self.frozen, decode_mesh=meshes.sampling)
        self.teacher, self.teaching = None, self.actor.statistics
        if config.algorithm.distillation.path:
            options = config.algorithm.distillation
            of_teacher = read_architecture_of(replace(config.model, path=options.path), TEACHER)
            of_passes = passes_of(config, of_teacher, mesh)
            teaching = teacher_settings(settings, options, of_passes)
            freeze = build_freeze(of_teacher, teaching.passes.dtype, mesh)
            self.teacher = freeze.lower(_shapes(weight_table(of_teacher), mesh)).out_info
            self.teaching = build_statistics(teaching, mesh)
            splits["teacher"] = micro_batches(self.networks["actor"], of_passes.attention, of_teacher, mesh)
        draws = self.actor.select is not None
        self.batch = StepBatch(config, self.networks, splits, mesh, lengths, draws=draws)
        self.critic = build_critic(passes, config.critic, mesh) if "critic" in self.networks else None
        states = [self.actor.trainable.state_shape] + ([self.critic.trainable.state_shape] if self.critic else [])
        weights = [state.params for state in states] + [self.frozen, self.reference, self.teacher]
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
            yield replace(program, beside={**self.state, **program.beside})

    def learning(self) -> Iterator[Program]:
        """Log-probabilities and the optimizer steps of the policy, and of the critic if there is one."""
        config, statistics = self.config, self.actor.statistics
        recomputed = config.actor.old_logprob == "recompute" or needs_statistics(config.algorithm)
        hinted = needs(named_estimator(config.algorithm.adv_estimator), "hint_logprobs")  # at least as long
        yield from self._forward(
            "actor", "log-probabilities", statistics, self.params, times=float(recomputed) + hinted
        )
        if self.reference is not None:
            of_sampled = gen_batch_size(config.data) / config.data.train_batch_size  # before the filter
            times = of_sampled if config.algorithm.use_kl_in_reward else 1.0
            yield from self._forward("actor", "reference's log-probabilities", statistics, self.reference, times=times)
        if self.teacher is not None:
            if config.algorithm.distillation.form == "top_k":
                yield from self._forward("actor", "most likely tokens", self.actor.most_likely, self.params)
            yield from self._forward("teacher", "teacher's scores", self.teaching, self.teacher)
        yield from self._update("actor", self.actor.trainable)
        if self.critic is not None:
            params = self.critic.trainable.state_shape.params
            yield from self._forward("critic", "values", self.critic.values, params)
            yield from self._update("critic", self.critic.trainable)

    def _forward(self, network: str, name: str, function: Any, params: Any, times: float = 1.0) -> Iterator[Program]:
        """Forward passes of the "actor", the "critic" or the "teacher" over the whole batch."""
        read = device_bytes([params, self.frozen if network == "actor" else None])
        state = {**self.state, **self.decoding_bytes}
        for shape in self.batch.passes(network):
            yield Program(
                "values" if network == "critic" else "log-probabilities",
                f"{name}, {shape}",
                shape.count * times,
                lambda shape=shape: function.lower(params, shape.micro_batch),
                {PARAMETERS: read},
                {**state, PARAMETERS: state[PARAMETERS] - read},
                pairs=shape.pairs,
            )

    def _update(self, name: str, trainable: Trainable) -> Iterator[Program]:
        """The optimizer steps of the "actor" or the "critic"."""
        network = self.networks[name]
        epochs = network.options.ppo_epochs
        state = trainable.state_shape
        zeros = trainable.zero_gradients.lower(state.params)
        gradients = zeros.out_info
        of_gradients, of_params = device_bytes(gradients), device_bytes(state.params)
        # The decoding weights are dropped before the policy's update.
        beside = self.state if name == "actor" else {**self.state, **self.decoding_bytes}
        frozen = self.frozen if name == "actor" else None
        steps = self.config.data.train_batch_size / network.mini_batch_size * epochs
        operands = trainable.operands.shapes(state.params)  # what is cast counts as temporary
        read = device_bytes([operands, frozen])
        if names := trainable.operands.names:
            of_cast = device_bytes([state.params["layers"][each] for each in names])
            yield Program(
                "update",
                f"{name}, weights for products",
                steps,
                lambda: trainable.operands.lower(state.params),
                {PARAMETERS: of_cast},
                {**beside, PARAMETERS: self.state[PARAMETERS] - of_cast},
            )
            read -= device_bytes([operands["layers"][each] for each in names])
        others = {**beside, PARAMETERS: self.state[PARAMETERS] - read}
        for shape in self.batch.updates[name]:
            yield Program(
                "update",
                f"{name}, gradients of {shape}",
                shape.count * epochs,
                lambda shape=shape: trainable.accumulate.lower(operands, gradients, shape.micro_batch),
                {PARAMETERS: read, GRADIENTS: of_gradients},
                others,
                pairs=shape.pairs,
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


def _shapes(table: Any, mesh: Mesh) -> Any:
    return unflatten(
        (weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight_sharding(weight, mesh, TRAIN_RULES)))
        for weight in table
    )
