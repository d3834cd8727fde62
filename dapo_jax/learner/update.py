"""Host: passes over an accepted batch: mini-batches, micro-batches, optimizer steps."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.aggregation import token_weights
from dapo_jax.data.containers import Batch, Max, Mean, MicroBatch
from dapo_jax.data.work import Work, efficiencies
from dapo_jax.learner.actor import RATIO_BUCKETS, RATIO_STEP, ROUTING, Actor
from dapo_jax.learner.critic import Critic
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.optimizer import TrainState
from dapo_jax.learner.router_replay import choosing_experts, router_metrics
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.trainable import Metrics, Trainable
from dapo_jax.learner.trained_networks import Network
from dapo_jax.monitor.tensorboard import Histograms, counted
from dapo_jax.parallel.processes import settle
from dapo_jax.parallel.sharding import batch_sharding, fetch, put, replicated
from dapo_jax.parallel.stopping import unpaced

# of use in the first optimizer step only
MISMATCH = ("logprob_abs_diff", "logprob_abs_diff_max", "logprob_k3", "logprob_outliers", "ratio", "squared_ratio")
Finish = Callable[[], tuple[dict[str, float], Histograms]]  # waits for an update: its metrics and histograms
OnMicroBatch = Callable[[Any], None]  # is called with the result of a micro-batch
jitted_token_weights = jax.jit(token_weights, static_argnames=("mode", "scale_factor"))


@dataclass(frozen=True)
class Update:
    """How a network is updated on the batch of a training step."""

    network: Network
    micro_batches: MicroBatches
    learning_rate: float


def update_policy(
    actor: Actor, state: TrainState, batch: Batch, settings: Update, mesh: Mesh, pace: OnMicroBatch = unpaced
) -> tuple[TrainState, Finish]:
    """Begins all optimizer steps of the policy on `batch` (NumPy arrays; whole groups in prompt order).

    The second result waits for them. In the first optimizer step the parameters are still those that sampled (unless
    sampling runs ahead), so the difference between the two log-probabilities is the mismatch between sampling and
    training. The histogram `actor/ratio` counts the trained tokens of all optimizer steps.

    Args:
        pace: is called after each micro-batch, and may raise to end the update.
    """

    def select(state: TrainState, mini_batch: Batch) -> Batch:
        assert actor.select is not None
        logprobs = compute_statistics(actor, state.params, mini_batch, settings.micro_batches, mesh, pace).logprobs
        whole = put((choosing_experts(mini_batch), logprobs), replicated(mesh))  # no device takes the records
        return dataclasses.replace(mini_batch, selected=fetch(actor.select(*whole)))

    prepare = select if actor.select is not None else None
    state, steps, work = _optimizer_steps(actor.trainable, state, batch, settings, mesh, pace, prepare)

    def finish() -> tuple[dict[str, float], Histograms]:
        found = fetch(steps)
        if not found:
            return _summary("actor", found), {}
        ratios = np.sum([metrics.pop("ratio_counts").total for metrics, _ in found], axis=0)
        low, high = -RATIO_STEP / 2, (RATIO_BUCKETS - 0.5) * RATIO_STEP
        histograms = {"actor/ratio": counted(ratios, low=low, high=high)}
        routed = [metrics.pop(ROUTING) for metrics, _ in found if ROUTING in metrics]
        replayed = settings.micro_batches.choices is not None
        routers = router_metrics(routed, actor.experts_per_token, replayed=replayed) if routed else {}
        summary = _policy_summary(found, clips=actor.select is None)
        return summary | routers | efficiencies([{"update": work}]), histograms

    return state, finish


def update_critic(
    critic: Critic, state: TrainState, batch: Batch, settings: Update, mesh: Mesh, pace: OnMicroBatch = unpaced
) -> tuple[TrainState, Finish]:
    """Begins all optimizer steps of the critic on `batch`, like `update_policy` but without histograms."""
    state, steps, _ = _optimizer_steps(critic.trainable, state, batch, settings, mesh, pace)
    return state, lambda: (_summary("critic", fetch(steps)), {})


def compute_statistics(
    actor: Actor, params: Any, batch: Batch, micro_batches: MicroBatches, mesh: Mesh, pace: OnMicroBatch = unpaced
) -> TokenStatistics:
    """Statistics [B, R] of the tokens of `batch` under `params`, by the training forward pass."""
    return in_pieces(actor.statistics, params, batch, micro_batches, mesh, pace)


def compute_values(
    critic: Critic, params: Any, batch: Batch, micro_batches: MicroBatches, mesh: Mesh, pace: OnMicroBatch = unpaced
) -> np.ndarray:
    """Values [B, R] of `batch`."""
    return in_pieces(critic.values, params, batch, micro_batches, mesh, pace)


def mini_batches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Whole groups in prompt order, with their prompts, as batches of `rows` rows.

    A partial step makes as few of them as hold its groups, whose numbers of groups differ by at most one, the larger
    ones first. Groups of padding fill each up, so that every step has the same shapes.
    """
    prompts, samples = len(batch.prompts), len(batch.mask) // len(batch.prompts)
    is_real = batch.mask.reshape(prompts, -1).any(axis=1)
    real, padding, size = np.flatnonzero(is_real), np.flatnonzero(~is_real), rows // samples
    for groups in np.array_split(real, max(-(-len(real) // size), 1)):
        missing = size - len(groups)
        groups, padding = np.concatenate([groups, padding[:missing]]), padding[missing:]
        of_rows = (groups[:, None] * samples + np.arange(samples)).ravel()
        of_length = {prompts: groups, len(batch.mask): of_rows}  # the same if there is one sample of a prompt
        yield jax.tree.map(lambda x, taken=of_length: x[taken[len(x)]], batch)


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Tokens [B] of each response with its prompt; 0 for rows of padding."""
    responses, prompts = batch.mask.sum(axis=1), batch.prompt_mask.sum(axis=1)
    return np.where(responses, responses + np.repeat(prompts, len(batch.mask) // len(prompts)), 0)


def tokens_of_devices(batch: Batch, network: Network, micro_batches: MicroBatches) -> np.ndarray:
    """Tokens [S] of the sequences that each share of the devices passes over in an epoch."""
    totals = np.zeros(shares := micro_batches.num_shards)
    for mini_batch in mini_batches(batch, network.mini_batch_rows):
        tokens = sequence_lengths(mini_batch)
        for one in micro_batches.passes(mini_batch):
            of_bins = [tokens[np.array(rows, int)].sum() for rows in one.bins]
            totals += np.reshape(of_bins, (shares, -1)).sum(axis=1)
    return totals


def in_pieces(
    function: Callable[[Any, MicroBatch], Any],
    params: Any,
    batch: Batch,
    micro_batches: MicroBatches,
    mesh: Mesh,
    pace: OnMicroBatch,
) -> Any:
    """The result of `function`, arrays [S, U, ...] of each micro-batch, as [B, R, ...], 0 where there is no token."""
    pieces, results = [], []
    for piece in micro_batches.split(batch):
        pieces.append(piece)
        with jax.set_mesh(mesh):  # callers may be sampling, under the other mesh
            results.append(function(params, put(piece.micro_batch, batch_sharding(mesh))))
        settle(results[-1])
        pace(results[-1])

    def assemble(*parts: np.ndarray) -> np.ndarray:
        whole = np.zeros(batch.mask.shape + parts[0].shape[2:], parts[0].dtype)
        for piece, part in zip(pieces, parts, strict=True):
            piece.write(part, whole)
        return whole

    return jax.tree.map(assemble, *fetch(results))


def _optimizer_steps(
    trainable: Trainable,
    state: TrainState,
    batch: Batch,
    settings: Update,
    mesh: Mesh,
    pace: OnMicroBatch,
    prepare: Callable[[TrainState, Batch], Batch] | None = None,
) -> tuple[TrainState, list[tuple[Metrics, jax.Array]], Work]:
    """One optimizer step per mini-batch that has a token to train on.

    Returns the new state, each step's metrics and gradient norm, still on the devices, and the work of forward passes.

    Mini-batch j is the j-th of `mini_batches`; which rows it holds never depends on their lengths.
    """
    steps, work = [], Work()
    if batch.loss_weights is None:
        batch = with_loss_weights(batch, settings.network, mesh)
    for _ in range(settings.network.options.ppo_epochs):
        for mini_batch in mini_batches(batch, settings.network.mini_batch_rows):
            if not mini_batch.loss_mask.any():  # nothing to learn: momentum alone must not move the weights
                continue
            if prepare is not None:
                prepared = prepare(state, dataclasses.replace(mini_batch, loss_weights=None))
                mini_batch = dataclasses.replace(prepared, loss_weights=mini_batch.loss_weights)
            state, found, of_step = _optimizer_step(trainable, state, mini_batch, settings, mesh, pace)
            steps.append(found)
            work += of_step
    return state, steps, work


def _optimizer_step(
    trainable: Trainable, state: TrainState, mini_batch: Batch, settings: Update, mesh: Mesh, pace: OnMicroBatch
) -> tuple[TrainState, tuple[Metrics, jax.Array], Work]:
    """Gradients of all micro-batches of a mini-batch, and the step; what `_optimizer_steps` returns, of this one."""
    micro_batches = settings.micro_batches
    gradients, operands = trainable.zero_gradients(state.params), trainable.operands(state.params)
    parts, work = list[Metrics](), Work(needed=micro_batches.needed(mini_batch))
    for piece in micro_batches.split(mini_batch):
        work += Work(computed=micro_batches.computed(piece))
        placed = put(piece.micro_batch, batch_sharding(mesh))
        gradients, new = trainable.accumulate(operands, gradients, placed)
        settle(gradients)
        parts.append(new)
        pace(new)
    del operands
    state, norm = trainable.apply(state, gradients, np.float32(settings.learning_rate))
    settle(state)
    return state, (functools.reduce(_merge, parts), norm), work


def with_loss_weights(batch: Batch, network: Network, mesh: Mesh) -> Batch:
    """`batch` with the weight of each token in the loss of its mini-batch, for all optimizer steps.

    The devices compute them, so do this before the first step begins: later, the host would wait for that step.
    """
    weights, numbered = np.zeros(batch.mask.shape, np.float32), np.arange(len(batch.mask))
    for one in mini_batches(dataclasses.replace(batch, loss_weights=numbered), network.mini_batch_rows):
        weights[one.loss_weights] = _loss_weights(one, network, mesh)
    return dataclasses.replace(batch, loss_weights=weights)


def _loss_weights(mini_batch: Batch, network: Network, mesh: Mesh) -> np.ndarray:
    mask, group_ids = put((mini_batch.loss_mask, mini_batch.group_ids), replicated(mesh))
    return fetch(
        jitted_token_weights(
            mask,
            group_ids,
            mode=network.options.loss_agg_mode,
            num_sequences=float(len(mini_batch.mask)) if network.count_empty_sequences else None,
            scale_factor=network.loss_scale_factor,
        )
    )


def _merge(first: Metrics, second: Metrics) -> Metrics:
    return {name: part.merge(second[name]) for name, part in first.items()}


def _policy_summary(steps: list[tuple[Metrics, Any]], *, clips: bool) -> dict[str, float]:
    """`clips`: whether the first step's clipped share compares sampling with training."""
    summary, first = _summary("actor", steps), steps[0][0]
    for name in MISMATCH:
        del summary[f"actor/{name}"]
    summary["rollout_corr/logprob_abs_diff"] = _value(first["logprob_abs_diff"])
    summary["rollout_corr/logprob_abs_diff_max"] = _value(first["logprob_abs_diff_max"])
    summary["rollout_corr/logprob_outliers"] = _value(first["logprob_outliers"])
    summary["rollout_corr/eff_sample_size"] = _value(first["ratio"]) ** 2 / max(_value(first["squared_ratio"]), 1e-30)
    summary["rollout_corr/k3_kl"] = _value(first["logprob_k3"])
    if "student_mass" in first:
        summary["distillation/student_mass"] = summary.pop("actor/student_mass")
    if "pg_clipfrac" in first and clips:
        summary["rollout_corr/first_clipfrac"] = _value(first["pg_clipfrac"])
    return summary


def _summary(prefix: str, steps: list[tuple[Metrics, Any]]) -> dict[str, float]:
    """Token means over all optimizer steps; sums (of count 0) and norms are averaged over the steps.

    Without steps, only the counts.
    """
    norms = np.array([norm for _, norm in steps])
    counts = {
        f"{prefix}/skipped_updates": float(np.sum(~np.isfinite(norms))),
        f"{prefix}/num_updates": float(len(steps)),
    }
    if not steps:
        return counts
    merged = functools.reduce(_merge, [metrics for metrics, _ in steps])
    summary = {f"{prefix}/{name}": _value(part, len(steps)) for name, part in merged.items()}
    summary[f"{prefix}/grad_norm"] = float(np.mean(norms))
    return summary | counts


def _value(part: Mean | Max, num_steps: int = 1) -> float:
    """The mean or the highest value; of a sum (of count 0), the mean over the steps."""
    return float(part.value) if isinstance(part, Max) else float(part.total) / (float(part.count) or num_steps)
