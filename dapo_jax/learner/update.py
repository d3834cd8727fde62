"""Host: one training step on an accepted batch: mini-batches, micro-batches, optimizer steps."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.containers import Batch, Mean
from dapo_jax.learner.actor import Actor, Denominators, Metrics
from dapo_jax.learner.optimizer import TrainState
from dapo_jax.parallel.sharding import batch_sharding, fetch, put


def update_policy(
    actor: Actor,
    state: TrainState,
    batch: Batch,
    *,
    learning_rate: float,
    mini_batch_rows: int,
    micro_batch_rows: int,
    epochs: int,
    count_empty_sequences: bool,
    mesh: Mesh,
) -> tuple[TrainState, dict[str, float]]:
    """All optimizer steps on `batch`, and the metrics of the step.

    Mini-batch j is the j-th run of consecutive rows; which rows it holds never depends on their lengths.

    Args:
        batch: NumPy arrays; whole groups in prompt order.
        mini_batch_rows: responses per optimizer step.
        micro_batch_rows: responses per forward and backward pass, over all devices.
        count_empty_sequences: sequence means count rows without a token too.
    """
    steps: list[tuple[Metrics, jax.Array]] = []
    for _ in range(epochs):
        for mini_batch in split_rows(batch, mini_batch_rows):
            state, metrics, norm = _optimizer_step(
                actor, state, mini_batch, learning_rate, micro_batch_rows, count_empty_sequences, mesh
            )
            steps.append((metrics, norm))
    return state, _summarize(steps)


def recompute_logprobs(
    actor: Actor, state: TrainState, batch: Batch, *, micro_batch_rows: int, mesh: Mesh
) -> np.ndarray:
    """Log-probabilities [B, R] of `batch` under the current parameters, by the training forward pass."""
    parts = []
    for micro_batch in split_rows(batch, micro_batch_rows):
        parts.append(actor.logprobs(state.params, put(pad_rows(micro_batch, micro_batch_rows), batch_sharding(mesh))))
    return np.concatenate(fetch(parts))[: batch.mask.shape[0]] * batch.mask


def split_rows(batch: Batch, rows: int) -> Iterator[Batch]:
    """Consecutive slices of `rows` rows, with their prompts; the last may be shorter."""
    total = batch.mask.shape[0]
    for start in range(0, total, rows):
        yield jax.tree.map(
            lambda x, start=start: x[start * len(x) // total : (start + rows) * len(x) // total], batch
        )


def pad_rows(batch: Batch, rows: int) -> Batch:
    """`batch` with zero rows appended to `rows` rows: their mask is False, so they change nothing."""
    present = batch.mask.shape[0]

    def pad(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, rows * len(x) // present - len(x)),) + ((0, 0),) * (x.ndim - 1))

    return jax.tree.map(pad, batch)


def _optimizer_step(actor, state, mini_batch, learning_rate, micro_batch_rows, count_empty, mesh):
    lengths = mini_batch.mask.sum(axis=1)
    denominators = Denominators(
        num_tokens=np.float32(lengths.sum()),
        num_sequences=np.float32(len(lengths) if count_empty else np.count_nonzero(lengths)),
    )
    gradients = actor.zero_gradients(state.params)
    parts: list[Metrics] = []
    for micro_batch in split_rows(mini_batch, micro_batch_rows):
        placed = put(pad_rows(micro_batch, micro_batch_rows), batch_sharding(mesh))
        gradients, new = actor.accumulate(state.params, gradients, placed, denominators)
        parts.append(new)
    state, norm = actor.apply(state, gradients, np.float32(learning_rate))
    return state, functools.reduce(_merge, parts), norm


def _merge(first: Metrics, second: Metrics) -> Metrics:
    return {name: mean.merge(second[name]) for name, mean in first.items()}


def _summarize(steps: list[tuple[Metrics, jax.Array]]) -> dict[str, float]:
    """`actor/` metrics: token means over all optimizer steps; losses and norms averaged over the steps.

    In the first optimizer step the parameters are still those that sampled: there the difference between the two
    log-probabilities is the mismatch between sampling and training.
    """
    values, norms = fetch(([metrics for metrics, _ in steps], [norm for _, norm in steps]))
    first_values, merged = values[0], functools.reduce(_merge, values)
    summary = {f"actor/{name}": _value(mean) for name, mean in merged.items() if not name.startswith("logprob_")}
    summary["actor/pg_loss"] = float(merged["pg_loss"].total) / len(values)
    summary["actor/grad_norm"] = float(np.mean(norms))
    summary["actor/skipped_updates"] = float(np.sum(~np.isfinite(norms)))
    summary["actor/num_updates"] = float(len(values))
    summary["rollout_corr/logprob_abs_diff"] = _value(first_values["logprob_abs_diff"])
    summary["rollout_corr/k3_kl"] = _value(first_values["logprob_k3"])
    summary["rollout_corr/first_clipfrac"] = _value(first_values["pg_clipfrac"])
    return summary


def _value(mean: Mean) -> float:
    return float(mean.total) / max(float(mean.count), 1.0)
