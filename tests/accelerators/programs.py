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
from dapo_jax.learner.actor import Actor, build_actor, loss_of
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
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.weights import build_freeze, weight_shardings, weight_table
from dapo_jax.parallel.checksums import sums_of_shards
from dapo_jax.parallel.devices import devices_of
from dapo_jax.parallel.mesh import Meshes, make_mesh, with_tensor
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, batch_sharding, replicated
from dapo_jax.preflight.lengths import all_longest
from dapo_jax.preflight.programs import step_programs
from dapo_jax.preflight.report import read_shape
from dapo_jax.rewards.reward_model import build_scores
from dapo_jax.rewards.shaping import length_rewards, place_rewards, shape_rewards
from dapo_jax.rollout.layout import Shape, cache_dtype
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.programs import Calls
from dapo_jax.rollout.sampling import SELECT, position_noise
from dapo_jax.rollout.sizes import choose_layout
from dapo_jax.run.passes import compute_dtype, passes
from dapo_jax.run.sampler import page_attention
from dapo_jax.run.settings import actor_settings, engine_settings

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

    @functools.cached_property
    def actor(self) -> Actor:
        return build_actor(actor_settings(self.config, self.arch, self.mesh), self.mesh)

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
    training = with_tensor(mesh, config.mesh.train_tensor, config.mesh.context)
    return Parts(config, read_shape(config.model), Meshes(training, mesh))


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
        asked = [one for one in programs if not names or any(re.match(name, one.name) for name in names)]
        return iter([(program.name, program.lower) for program in asked])

    return found


def engine(parts: Parts, pages: int | None = None) -> Iterator[Program]:
    """The rollout engine: its memory, prefill, and a chunk in all slots and in fewer.

    Args:
        pages: of a shard; None = as the engine takes.
    """
    calls = engine_calls(parts)
    calls = replace(calls, layout=replace(calls.layout, pages=pages or calls.layout.pages))
    yield "room", calls.lower_empty
    yield "prefill", lambda: calls.lower_prefill(calls.layout.prefills[-1])
    for slots in calls.layout.ladder:
        yield f"decode {slots} slots", functools.partial(calls.lower_decode, Shape(slots))


def decoding(parts: Parts) -> Iterator[Program]:
    """A chunk in all slots, of rows that may draw any token, with prompts as long as they may be."""
    prompts = np.full(parts.config.data.train_batch_size, parts.config.data.max_prompt_length)
    calls = replace(engine_calls(parts, prompts), limits=False)
    yield "decode", lambda: calls.lower_decode(calls.layout.first_shape)


def gathered(parts: Parts) -> Iterator[Program]:
    """The engine where no kernel attends to pages."""
    assert engine_calls(parts).attend is attend_gathered
    return engine(parts)


def returning(parts: Parts, pages: int | None = None) -> Iterator[Program]:
    """A chunk with tokens that an environment has given, and whole pages and chunks of them; `pages` as in `engine`."""
    calls = engine_calls(parts, returns=True)
    calls = replace(calls, layout=replace(calls.layout, pages=pages or calls.layout.pages))
    yield "decode with given tokens", lambda: calls.lower_decode(calls.layout.first_shape)
    for size, *_ in calls.layout.reads:
        yield f"read {size.tokens} given tokens", functools.partial(calls.lower_read, size)


def continued(parts: Parts) -> Iterator[Program]:
    """What continues responses: prompts as long as prompt and response, with one sample."""
    calls = engine_calls(parts, np.full(64, 4000), num_samples=1)
    size = calls.layout.prefills[-1]
    assert queries_at_once(size.width) < size.width
    yield "prefill", lambda: calls.lower_prefill(size)


def engine_calls(
    parts: Parts, lengths: np.ndarray | None = None, num_samples: int | None = None, *, returns: bool = False
) -> Calls:
    """What the engine calls for prompts of these lengths; None = those of a step, of 16 tokens each."""
    config = parts.config
    settings = engine_settings(config, parts.arch, (0,), 0, parts.mesh)
    with jax.set_mesh(parts.mesh):
        weights = parts.actor.decode_weights.lower(parts.actor.trainable.state_shape.params).out_info
    attend, _ = page_attention(settings)
    lengths = np.full(config.data.train_batch_size, 16) if lengths is None else lengths
    given = attend, cache_dtype(weights), lengths, num_samples or config.rollout.n
    layout = choose_layout(settings, *given, LengthHistory(config.data.max_response_length), 0.0, returns=returns)
    return Calls(settings, weights, layout, attend)


def start_of_training(parts: Parts) -> Iterator[Program]:
    """Weights that are drawn, frozen, given to a critic; the optimizer's state; gradients to add to."""
    trainable = parts.actor.trainable
    critic = build_critic(passes(parts.config, parts.arch, parts.mesh), parts.config.critic, parts.mesh)
    freeze = build_freeze(parts.arch, compute_dtype(parts.config.model, parts.mesh), parts.mesh)
    params = trainable.state_shape.params
    yield "draw", lambda: trainable.init_random.lower(0)
    yield "optimizer state", lambda: trainable.init_from.lower(params)
    yield "gradients of zero", lambda: trainable.zero_gradients.lower(params)
    yield "freeze", lambda: freeze.lower(params)
    yield "critic from policy", lambda: jax.jit(critic.init_from_policy).lower(params)


def losses(parts: Parts) -> Iterator[Program]:
    """The gradient of each loss, with each penalty and each mask, by the statistics of tokens."""
    default = actor_settings(parts.config, parts.arch, parts.mesh)
    of_loss = default.options.policy_loss
    changes: dict[str, dict[str, Any]] = {
        f"loss {name}": {"policy_loss": replace(of_loss, loss_mode=name)} for name in LOSSES
    }
    for name in PENALTIES:
        changes[f"KL loss {name}"] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": name}
    changes["off-policy sequence mask"] = {"off_policy_mask_threshold": 0.1}
    changes["entropy"] = {"entropy_coeff": 0.01}
    variants = {name: replace(default, options=replace(default.options, **one)) for name, one in changes.items()}
    values, mask = parts.rows(ROWS, TOKENS), parts.rows(ROWS, TOKENS, dtype=jnp.bool_)
    numbers = parts.rows(ROWS, TOKENS, dtype=jnp.int32)
    fields = {
        **dict.fromkeys(("sources", "sequences", "responses"), numbers),
        **dict.fromkeys(("mask", "loss_mask", "selected"), mask),
        **dict.fromkeys(("old_logprobs", "advantages", "loss_weights", "importance_weights"), values),
        **dict.fromkeys(("ref_logprobs", "sampled_logprobs"), values),
    }
    batch = MicroBatch(bins=Bins(*[numbers] * 4), **fields)
    for name, settings in variants.items():
        loss = functools.partial(loss_of, settings=settings)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        yield name, functools.partial(gradient.lower, TokenStatistics(values, values, values), batch)


def drawn_tokens(parts: Parts) -> Iterator[Program]:
    """What losses that draw tokens compute over a whole mini-batch."""
    select: Any = parts.actor.select
    tokens, mask = parts.whole(ROWS, TOKENS, dtype=jnp.int32), parts.whole(ROWS, TOKENS, dtype=jnp.bool_)
    values = parts.whole(ROWS, TOKENS)
    fields = {
        **dict.fromkeys(("prompts", "responses"), tokens),
        **dict.fromkeys(("prompt_mask", "mask", "loss_mask"), mask),
        **dict.fromkeys(("old_logprobs", "advantages", "noise"), values),
    }
    yield "select", lambda: select.lower(Batch(group_ids=parts.whole(ROWS, dtype=jnp.int32), **fields), values)
    yield "noise", lambda: position_noise.lower(0, SELECT, parts.whole(GROUPS, dtype=jnp.int32), ROWS // GROUPS, TOKENS)


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
    given = per_row, per_row, ids, parts.whole(ROWS, dtype=jnp.bool_)
    ratios = {"keep_pos_ratio": 0.5, "keep_neg_ratio": 0.5, "norm_adv_by_std_in_grpo": True}
    keep = functools.partial(jitted_keep_samples.lower, *given, num_groups=GROUPS, **ratios)
    for new in (True, False):
        yield f"keep samples, compute_new_adv={new}", functools.partial(keep, compute_new_adv=new)
    yield "mismatch", lambda: jitted_mismatch_metrics.lower(values, values, mask)
    yield "probabilities", lambda: jitted_probability_metrics.lower(values, values, mask)
    settings = {"threshold": parse_threshold("2.0"), "batch_normalize": True}
    weigh = functools.partial(jitted_importance_weights.lower, values, values, mask, **settings)
    for name in WEIGHTS:
        yield f"importance weights, {name}", functools.partial(weigh, rollout_is=name)
    bands = tuple((name, parse_threshold("0.5_2.0")) for name in CRITERIA)
    yield "rejection", lambda: jitted_rejection_mask.lower(values, values, mask, criteria=bands)


def reward_model(parts: Parts) -> Iterator[Program]:
    """A transformer with a scalar head over whole conversations."""
    arch = replace(parts.arch, scalar_head=True)
    params = _weights(arch, parts.mesh, TRAIN_RULES)
    weights = build_freeze(arch, compute_dtype(parts.config.model, parts.mesh), parts.mesh).lower(params).out_info
    tokens, mask = parts.rows(8, TOKENS, dtype=jnp.int32), parts.rows(8, TOKENS, dtype=jnp.bool_)
    yield "scores", lambda: build_scores(arch, parts.mesh).lower(weights, tokens, mask)


def checksums(parts: Parts) -> Iterator[Program]:
    """What a checkpoint computes over all that it saves of a policy."""
    arrays = jax.tree.leaves(parts.actor.trainable.state_shape)
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
