"""The compiled functions of a run, lowered for devices that are not here, by the name that a case asks for."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms import advantages
from dapo_jax.algorithms.aggregation import MODES
from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.kl import PENALTIES
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.rollout_correction import CRITERIA, WEIGHTS, parse_threshold
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config, LengthRewardConfig
from dapo_jax.data.containers import Batch, Bins, MicroBatch
from dapo_jax.dynamic_sampling.group_filter import group_statistics
from dapo_jax.learner.actor import build_actor, loss_of
from dapo_jax.learner.batch import (
    jitted_importance_weights,
    jitted_kl_penalty,
    jitted_mismatch_metrics,
    jitted_probability_metrics,
    jitted_rejection_mask,
)
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.learner import build_estimator
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.trained_tokens import jitted_keep_samples
from dapo_jax.learner.update import jitted_token_weights
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import queries_at_once
from dapo_jax.models.weights import build_freeze, weight_shardings, weight_table
from dapo_jax.parallel.checksums import sums_of_shards
from dapo_jax.parallel.devices import devices_of
from dapo_jax.parallel.mesh import Meshes, make_mesh, num_batch_shards, with_tensor
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, batch_sharding, replicated
from dapo_jax.preflight.lengths import all_longest
from dapo_jax.preflight.programs import step_programs
from dapo_jax.preflight.report import read_shape
from dapo_jax.rewards.reward_model import build_reward_model
from dapo_jax.rewards.shaping import length_rewards, place_rewards, shape_rewards
from dapo_jax.rollout.decoding import keep_rows, resize_cache
from dapo_jax.rollout.engines import page_attention
from dapo_jax.rollout.sampling import SELECT, Sampling, keys_of, position_noise
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rungs
from dapo_jax.rollout.slot_programs import (
    layout_of_slots,
    lower_decode_slots,
    lower_empty_slots,
    lower_prefill_pages,
)
from dapo_jax.rollout.wave_layout import WaveLayout
from dapo_jax.rollout.wave_programs import layout_of_waves, lower_chunk, lower_prefill, wave_shape
from dapo_jax.settings import actor_settings, compute_dtype, critic_settings, engine_settings

ROWS, TOKENS, GROUPS = 16, 128, 4  # of what the small functions are given
Program = tuple[str, Callable[[], jax.stages.Lowered]]


@dataclass(frozen=True)
class Parts:
    """What the functions of a case are built from."""

    config: Config
    arch: Architecture
    meshes: Meshes

    @property
    def mesh(self) -> Mesh:
        """The one that trains. Only in a step's programs may the other differ."""
        return self.meshes.training

    def rows(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        """The shape of an array whose first dimension is divided over the devices."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(self.mesh))

    def whole(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))


def parts_of(config: Config, topology: str, *, devices: tuple[int, int] = (0, 8)) -> Parts:
    """The parts for the devices of `topology`, or some of them.

    Args:
        devices: the first, and the one after the last.
    """
    validate(config)
    there = _devices(topology)[slice(*devices)]
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    mesh = make_mesh(*sizes, there, in_order=len(there) < 8)
    return Parts(config, read_shape(config), Meshes(with_tensor(mesh, config.mesh.train_tensor), mesh))


@functools.cache
def _devices(topology: str) -> Any:
    return devices_of(topology, 8)


def step(*names: str) -> Callable[[Parts], Iterator[Program]]:
    """The programs of a training step whose names begin with one of the patterns `names`; all without any."""

    def found(parts: Parts) -> Iterator[Program]:
        lengths = all_longest(parts.config.data)
        programs = step_programs(parts.config, parts.arch, parts.meshes, lengths=lengths, memory=1e9).programs
        for name in names:
            assert any(re.match(name, program.name) for program in programs), f"no program is named like {name}"
        return iter(
            [
                (program.name, program.lower)
                for program in programs
                if not names or any(re.match(name, program.name) for name in names)
            ]
        )

    return found


def rungs_and_windows(parts: Parts) -> Iterator[Program]:
    """Keys of the rows, every batch of survivors in every window, and the ways to fewer rows in the widest window."""
    settings = engine_settings(parts.config, parts.arch, (0,), 0, parts.mesh)
    actor = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    with jax.set_mesh(parts.mesh):
        weights = actor.decode_weights.lower(actor.trainable.state_shape.params).out_info
    numbers = parts.rows(64, dtype=jnp.int32)
    yield "keys", lambda: keys_of.lower(0, 0, numbers, numbers)
    shards, dtype = num_batch_shards(parts.mesh), compute_dtype(parts.config.model, parts.mesh)
    prompts, samples = parts.config.data.train_batch_size, parts.config.rollout.n
    width, sampling = prompt_width(16, 16), Sampling.create(1.0, 1.0, -1)
    copies = WaveLayout(prompts, samples, shards, width=16, at_once=1).copies
    heights = rungs(prompts * samples // shards, settings.smallest_rows)
    assert len(heights) > 1 and len(settings.ladder) > 2
    for window in settings.ladder:
        for height in heights:
            whole = height == heights[0]
            shape = {"rows": height * shards, "prompts": prompts * copies if whole else height * shards, "width": width}
            yield (
                f"decode {height} rows, window {window}",
                functools.partial(lower_chunk, settings, weights, sampling, **shape, window=window),
            )
            wave = wave_shape(settings, dtype, **shape, window=window)
            for below in heights[heights.index(height) + 1 :]:
                rows = parts.rows(below * shards, dtype=jnp.int32)
                same = samples // copies if whole else 1
                yield (
                    f"keep {below} of {height} rows",
                    functools.partial(keep_rows.lower, replace(wave, caches=[]), rows, num_samples=same),
                )
                yield (
                    f"cache of {below} of {height} rows, window {window} to {settings.ladder[-1]}",
                    functools.partial(
                        resize_cache.lower, wave.caches[0], rows, num_samples=same, window=settings.ladder[-1]
                    ),
                )


def slots_and_pages(parts: Parts, pages: int | None = None) -> Iterator[Program]:
    """The slot engine: its memory, prefill into pages, and a chunk in all slots and in few.

    Args:
        pages: of a shard; None = as the engine takes.
    """
    settings = engine_settings(parts.config, parts.arch, (0,), 0, parts.mesh)
    actor = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    with jax.set_mesh(parts.mesh):
        weights = actor.decode_weights.lower(actor.trainable.state_shape.params).out_info
    dtype, lengths = compute_dtype(parts.config.model, parts.mesh), np.full(parts.config.data.train_batch_size, 16)
    layout = layout_of_slots(settings, dtype, lengths, parts.config.rollout.n, LengthHistory(128), 0.0)
    layout = replace(layout, pages=pages or layout.pages)
    yield "empty slots", lambda: lower_empty_slots(settings, dtype, layout)
    yield "prefill into pages", lambda: lower_prefill_pages(settings, weights, layout, layout.prefills[-1])
    for slots in {layout.slots, layout.few_slots}:
        yield (
            f"decode {slots} slots",
            functools.partial(
                lower_decode_slots,
                settings,
                weights,
                Sampling.create(1.0, 1.0, -1),
                layout,
                slots=slots,
                attend_pages=page_attention(settings),
            ),
        )


def continued(parts: Parts) -> Iterator[Program]:
    """What continues responses: prompts as long as prompt and response, with one sample, into a wave and into pages."""
    settings = engine_settings(parts.config, parts.arch, (0,), 0, parts.mesh)
    actor = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    with jax.set_mesh(parts.mesh):
        weights = actor.decode_weights.lower(actor.trainable.state_shape.params).out_info
    dtype, lengths, history = compute_dtype(parts.config.model, parts.mesh), np.full(64, 4000), LengthHistory(128)
    waves = layout_of_waves(settings, dtype, lengths, 1, history, 0.0)
    slots = layout_of_slots(settings, dtype, lengths, 1, history, 0.0)
    assert queries_at_once(waves.width) < waves.width == slots.prefills[-1].width
    yield "prefill", lambda: lower_prefill(settings, weights, Sampling.create(1.0, 1.0, -1), waves)
    yield "prefill into pages", lambda: lower_prefill_pages(settings, weights, slots, slots.prefills[-1])


def start_of_training(parts: Parts) -> Iterator[Program]:
    """Weights that are drawn, frozen, given to a critic; the optimizer's state; gradients to add to."""
    actor = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    critic = build_critic(critic_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    params = actor.trainable.state_shape.params
    yield "draw", lambda: actor.trainable.init_random.lower(0)
    yield "optimizer state", lambda: actor.trainable.init_from.lower(params)
    yield "gradients of zero", lambda: actor.trainable.zero_gradients.lower(params)
    yield (
        "freeze",
        lambda: build_freeze(parts.arch, compute_dtype(parts.config.model, parts.mesh), parts.mesh).lower(params),
    )
    yield "critic from policy", lambda: jax.jit(critic.init_from_policy).lower(params)


def losses(parts: Parts) -> Iterator[Program]:
    """The gradient of each loss, with each penalty and each mask, by the statistics of tokens."""
    default = actor_settings(parts.config, parts.arch, parts.mesh)
    variants = {f"loss {name}": replace(default, loss_mode=name) for name in LOSSES}
    for name in PENALTIES:
        variants[f"KL loss {name}"] = replace(default, kl_loss_coef=0.1, kl_loss_type=name)
    variants["off-policy sequence mask"] = replace(default, off_policy_mask_threshold=0.1)
    variants["entropy"] = replace(default, entropy_coeff=0.01)
    values, mask = parts.rows(ROWS, TOKENS), parts.rows(ROWS, TOKENS, dtype=jnp.bool_)
    whole_numbers = parts.rows(ROWS, TOKENS, dtype=jnp.int32)
    batch = MicroBatch(
        bins=Bins(*[whole_numbers] * 4),
        sources=whole_numbers,
        sequences=whole_numbers,
        responses=whole_numbers,
        mask=mask,
        loss_mask=mask,
        old_logprobs=values,
        advantages=values,
        loss_weights=values,
        importance_weights=values,
        ref_logprobs=values,
        selected=mask,
        sampled_logprobs=values,
    )
    for name, settings in variants.items():
        loss = functools.partial(loss_of, settings=settings)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        yield name, functools.partial(gradient.lower, TokenStatistics(values, values, values), batch)


def drawn_tokens(parts: Parts) -> Iterator[Program]:
    """What losses that draw tokens compute over a whole mini-batch."""
    actor = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh)
    batch = _mini_batch(parts)
    assert actor.select is not None
    yield "select", lambda: actor.select.lower(batch, parts.whole(ROWS, TOKENS))  # pyright: ignore
    yield "noise", lambda: position_noise.lower(0, SELECT, parts.whole(GROUPS, dtype=jnp.int32), ROWS // GROUPS, TOKENS)


def _mini_batch(parts: Parts) -> Any:
    tokens, mask = parts.whole(ROWS, TOKENS, dtype=jnp.int32), parts.whole(ROWS, TOKENS, dtype=jnp.bool_)
    ids, values = parts.whole(ROWS, dtype=jnp.int32), parts.whole(ROWS, TOKENS)
    return Batch(
        prompts=tokens,
        prompt_mask=mask,
        group_ids=ids,
        responses=tokens,
        mask=mask,
        loss_mask=mask,
        old_logprobs=values,
        advantages=values,
        noise=values,
    )


def estimator(parts: Parts) -> Iterator[Program]:
    """The advantages of algorithm.adv_estimator."""
    name = parts.config.algorithm.adv_estimator
    function = advantages.ESTIMATORS[name]
    of_rows = {"reward_baselines": (ROWS,), "accuracy": (ROWS,), "reward_parts": (ROWS, 2)}
    arrays = {extra: parts.rows(*shape) for extra, shape in of_rows.items()} | {
        extra: parts.rows(ROWS, TOKENS)
        for extra in ("values", "logprobs", "hint_logprobs", "entropy", "sum_pi_squared", "importance_weights")
    }
    sizes = {"num_groups": GROUPS} if needs(function, "num_groups") else {}
    jitted = build_estimator(parts.config.algorithm, parts.arch.vocab_size, parts.mesh)
    mask, ids = parts.rows(ROWS, TOKENS, dtype=jnp.bool_), parts.rows(ROWS, dtype=jnp.int32)
    extra = chosen(function, arrays)
    yield name, lambda: jitted.lower(parts.rows(ROWS, TOKENS), mask, ids, **extra, **sizes)


def rewards_and_filter(parts: Parts) -> Iterator[Program]:
    """From scores to token rewards and kept groups."""
    scores, mask = parts.rows(ROWS), parts.rows(ROWS, TOKENS, dtype=jnp.bool_)
    ids = parts.rows(ROWS, dtype=jnp.int32)
    yield "rewards", lambda: shape_rewards.lower(scores, ids, max_response_length=TOKENS, buffer_length=16)
    lengths, right = (parts.rows(ROWS, GROUPS, dtype=dtype) for dtype in (jnp.int32, jnp.bool_))
    for settings in (LengthRewardConfig(form="group"), LengthRewardConfig(form="cosine")):
        lower = functools.partial(length_rewards.lower, max_response_length=TOKENS, settings=settings)
        yield f"length rewards, {settings.form}", functools.partial(lower, lengths, right)
    yield "token rewards", lambda: place_rewards.lower(scores, mask)
    yield "group filter", lambda: group_statistics.lower(scores, ids, num_groups=GROUPS)


def batch_functions(parts: Parts) -> Iterator[Program]:
    """What is computed over a whole batch before the update."""
    ids, per_row = parts.whole(ROWS, dtype=jnp.int32), parts.whole(ROWS)
    values, mask = parts.whole(ROWS, TOKENS), parts.whole(ROWS, TOKENS, dtype=jnp.bool_)
    for mode in MODES:
        yield f"loss weights, {mode}", functools.partial(jitted_token_weights.lower, mask, ids, mode, scale_factor=9.0)
    for name in PENALTIES:
        yield f"KL penalty {name}", functools.partial(jitted_kl_penalty.lower, values, values, estimator=name)
    for new in (True, False):
        yield (
            f"keep samples, compute_new_adv={new}",
            functools.partial(
                jitted_keep_samples.lower,
                per_row,
                per_row,
                ids,
                parts.whole(ROWS, dtype=jnp.bool_),
                num_groups=GROUPS,
                keep_pos_ratio=0.5,
                keep_neg_ratio=0.5,
                compute_new_adv=new,
                norm_adv_by_std_in_grpo=True,
            ),
        )
    yield "mismatch", lambda: jitted_mismatch_metrics.lower(values, values, mask)
    yield "probabilities", lambda: jitted_probability_metrics.lower(values, values, mask)
    for name in WEIGHTS:
        yield (
            f"importance weights, {name}",
            functools.partial(
                jitted_importance_weights.lower,
                values,
                values,
                mask,
                rollout_is=name,
                threshold=parse_threshold("2.0"),
                batch_normalize=True,
            ),
        )
    bands = tuple((name, parse_threshold("0.5_2.0")) for name in CRITERIA)
    yield "rejection", lambda: jitted_rejection_mask.lower(values, values, mask, criteria=bands)


def reward_model(parts: Parts) -> Iterator[Program]:
    """A transformer with a scalar head over whole conversations."""
    arch = replace(parts.arch, scalar_head=True)
    model = build_reward_model(arch, compute_dtype(parts.config.model, parts.mesh), parts.mesh)
    params = _weights(arch, parts.mesh, TRAIN_RULES)
    weights = model.freeze.lower(params).out_info  # pyright: ignore[reportFunctionMemberAccess]
    tokens, mask = parts.rows(8, TOKENS, dtype=jnp.int32), parts.rows(8, TOKENS, dtype=jnp.bool_)
    yield "scores", lambda: model.scores.lower(weights, tokens, mask)  # pyright: ignore[reportFunctionMemberAccess]


def checksums(parts: Parts) -> Iterator[Program]:
    """What a checkpoint computes over all that it saves of a policy."""
    state = build_actor(actor_settings(parts.config, parts.arch, parts.mesh), parts.mesh).trainable.state_shape
    arrays = jax.tree.leaves(state)
    yield "checksums", lambda: sums_of_shards.lower(arrays, tuple(array.sharding for array in arrays))


def gathers(parts: Parts) -> Iterator[Program]:
    """What export and checkpoints of several hosts do with weights that lie apart: make them whole everywhere."""
    for name, rules in {"training": TRAIN_RULES, "decoding": DECODE_RULES}.items():
        params = _weights(parts.arch, parts.mesh, rules)
        whole = jax.jit(lambda tree: tree, out_shardings=replicated(parts.mesh))
        yield f"{name} weights", functools.partial(whole.lower, params)


def _weights(arch: Architecture, mesh: Mesh, rules: Any) -> Any:
    table = weight_table(arch)
    shapes = {weight.path: weight.shape for weight in table}
    return jax.tree.map_with_path(
        lambda path, sharding: jax.ShapeDtypeStruct(
            shapes[tuple(key.key for key in path)], jnp.float32, sharding=sharding
        ),
        weight_shardings(table, mesh, rules),
    )


def wide_types(text: str) -> list[str]:
    """The lines of a lowered program that compute with numbers of 64 bits.

    Attributes may have some, and JAX's random bits count in unsigned ones.
    """
    without = text
    while (shorter := re.sub(r"\{[^{}\n]*\}", "", without)) != without:
        without = shorter
    return [line.strip() for line in without.splitlines() if re.search(r"tensor<(?:[^>]*x)?(?:f64|i64)>", line)]
