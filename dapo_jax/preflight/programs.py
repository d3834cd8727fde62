"""Host: the compiled functions of a training step, lowered from a config and an architecture alone.

They are the functions that a run calls (learner/, rollout/), with the shapes and shardings that it gives them when
each response has the same number of tokens. Nothing is allocated.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, weight_sharding
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rungs, wave_size, window_of
from dapo_jax.rollout.wave_programs import (
    EngineSettings,
    cache_dtype,
    lower_chunk,
    lower_growth,
    lower_start,
    rows_at_once,
    wave_shape,
)
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
    lower: Lower  # under `jax.set_mesh`
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
    mesh: Mesh,
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
        memory: bytes of a device, from which the rows of a wave follow unless rollout.max_num_seqs says them.
        every_window: decode in each window of the cache; otherwise in the first and the last, and the calls of the
            others are shared out between these two, since all costs grow with the window in proportion.
        eos_ids, pad_id: the tokenizer's; they change no shape.
    """
    builder = _Builder(config, arch, mesh, response_length)
    with jax.set_mesh(mesh):
        settings = engine_settings(config, arch, eos_ids, pad_id, mesh)
        step_rollout = builder.rollout(settings, memory, every_window)
        learning = list(builder.learning())
    return Step(
        programs=(*step_rollout.programs, *learning),
        host_bytes=builder.host_bytes,
        waves=step_rollout.waves,
        rows=step_rollout.rows,
        micro_batches=sum(int(program.calls) for program in learning if program.name.startswith("actor, gradients")),
    )


@dataclass(frozen=True)
class _Rollout:
    programs: list[Program]
    waves: int
    rows: int


class _Builder:
    def __init__(self, config: Config, arch: Architecture, mesh: Mesh, response_length: int) -> None:
        self.config, self.arch, self.mesh, self.response_length = config, arch, mesh, response_length
        settings = actor_settings(config, arch, mesh)
        whole = _shapes(weight_table(arch), mesh)
        frozen = build_freeze(arch, settings.dtype, mesh).lower(whole).out_info
        self.frozen = frozen if settings.lora is not None else None
        self.reference = None
        if uses_reference(config):
            self.reference = {} if settings.lora is not None else frozen
        self.actor = build_actor(settings, mesh, self.frozen)
        self.critic = build_critic(critic_settings(config, arch, mesh), mesh) if uses_critic(config) else None
        states = [self.actor.trainable.state_shape] + ([self.critic.trainable.state_shape] if self.critic else [])
        weights = [state.params for state in states] + [self.frozen, self.reference]
        moments = [state.moments for state in states]
        self.host_bytes = device_bytes(moments, kind=HOST)
        self.state = {PARAMETERS: device_bytes(weights), OPTIMIZER: device_bytes(moments)}
        self.params = self.actor.trainable.state_shape.params
        self.decoding = self.actor.decode_weights.lower(self.params).out_info
        self.decoding_bytes = {DECODING: device_bytes(self.decoding)}

    def rollout(self, settings: EngineSettings, memory: float, every_window: bool) -> _Rollout:
        """Re-laying the weights, and the waves of a round."""
        config, mesh, weights = self.config, self.mesh, self.decoding
        taken = sum(self.state.values()) + device_bytes(weights)
        free = max(memory - taken, 0.0) * settings.memory_share
        samples, dtype, shards = config.rollout.n, cache_dtype(weights), num_batch_shards(mesh)
        most = rows_at_once(settings, dtype, LengthHistory(settings.max_response_length), samples, free)
        size = wave_size(gen_batch_size(config), samples, max_rows=most, shards=shards)
        waves = -(-gen_batch_size(config) // size)
        rows, width = size * samples, prompt_width(settings.max_prompt_length, settings.max_prompt_length)
        options = config.rollout
        sampling = Sampling.create(options.temperature, options.top_p, options.top_k, options.min_response_length)

        def caches(rows: int, prompts: int, window: int) -> list[Any]:
            return wave_shape(settings, dtype, rows=rows, prompts=prompts, width=width, window=window).caches

        def decode(rows: int, prompts: int, window: int, chunks: float) -> Program:
            return Program(
                "decode",
                f"decode {rows // shards} rows a shard, window {window}",
                chunks * waves,
                lambda: lower_chunk(
                    settings, weights, sampling, rows=rows, prompts=prompts, width=width, window=window
                ),
                {**self.decoding_bytes, CACHE: device_bytes(caches(rows, prompts, window))},
                self.state,
            )

        read = device_bytes([self.params, self.frozen])
        relay = Program(
            "weights",
            "decoding weights",
            1,
            lambda: self.actor.decode_weights.lower(self.params),
            {PARAMETERS: read, **self.decoding_bytes},
            {**self.state, PARAMETERS: self.state[PARAMETERS] - read},
        )
        first = caches(rows, size, settings.ladder[0])
        prefill = Program(
            "prefill",
            f"prefill {size // shards} prompts a shard, width {width}",
            waves,
            lambda: lower_start(settings, weights, sampling, prompts=size, num_samples=samples, width=width),
            {**self.decoding_bytes, CACHE: device_bytes(first)},
            self.state,
        )
        programs, chunks = [relay, prefill], _chunks(settings, self.response_length)
        decoded = chunks if every_window else _ends(chunks)
        programs += [decode(rows, size, window, count) for window, count in decoded.items()]
        smaller = rungs(rows // shards, settings.smallest_rows)[1:2]
        if smaller and chunks:  # the largest batch of survivors, in which each row has its own copy of the prompt
            left = smaller[0] * shards
            programs.append(decode(left, left, list(chunks)[-1], 0))
        for window, wider in zip(chunks, list(chunks)[1:], strict=False):
            cache, wide = caches(rows, size, window), caches(rows, size, wider)
            programs.append(
                Program(
                    "decode",
                    f"widen the window {window} to {wider}",
                    waves * self.arch.num_layers,
                    lambda cache=cache[0], wider=wider: lower_growth(cache, num_samples=samples, window=wider),
                    {CACHE: device_bytes([cache[0], wide[0]])},
                    {
                        **self.state,
                        **self.decoding_bytes,
                        CACHE: device_bytes(wide[1:]),
                    },  # the last layer becomes wider
                )
            )
        return _Rollout(programs, waves, rows)

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
        """`prompts` groups as training_batch.py's `rows_of` makes them, all zeros that take no memory."""
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


def _chunks(settings: EngineSettings, response_length: int) -> Counter[int]:
    """Chunks by the window that a wave of responses of `response_length` tokens decodes them in, in order."""
    found: Counter[int] = Counter()
    sampled, length = 1, settings.tokens_per_chunk
    while sampled < response_length:
        found[window_of(settings.ladder, sampled - 1 + length)] += 1
        sampled += length
    return found


def _ends(chunks: Mapping[int, float]) -> dict[int, float]:
    """The first and the last window, with the calls of those between in proportion to how near they are."""
    ends = dict.fromkeys((min(chunks, default=0), max(chunks, default=0)), 0.0)
    first, last = min(ends), max(ends)
    for window, count in chunks.items():
        share = (window - first) / max(last - first, 1)
        ends[first] += count * (1 - share)
        ends[last] += count * share
    return ends if chunks else {}


def _shapes(table: Any, mesh: Mesh) -> Any:
    return unflatten(
        (weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight_sharding(weight, mesh, TRAIN_RULES)))
        for weight in table
    )


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _size(piece: Batch) -> str:
    return f"{len(piece.responses)} x {piece.prompts.shape[1]} + {piece.responses.shape[1]} tokens"
