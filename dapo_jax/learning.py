"""Host: all that is learnt from the accepted groups of one training step."""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from dapo_jax.checkpoint import Progress
from dapo_jax.config import ActorConfig, Config, CriticConfig, mini_batch_size, trains_on_older_samples
from dapo_jax.containers import Batch
from dapo_jax.learner.models import Models
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.update import (
    Finish,
    UpdateSettings,
    sequence_lengths,
    tokens_of_devices,
    update_critic,
    update_policy,
)
from dapo_jax.monitor import statistics
from dapo_jax.monitor.records import NoRecords, RunRecords
from dapo_jax.monitor.tensorboard import Histograms, histogram
from dapo_jax.rollout.experience import Experience
from dapo_jax.run import Run
from dapo_jax.training_batch import make_batch, micro_batches

logger = logging.getLogger(__name__)



def train_on(
    run: Run,
    records: RunRecords | NoRecords,
    models: Models,
    experience: Experience | None,
    progress: Progress,
    step: int,
) -> tuple[Models, Finish]:
    """Begins all updates on the accepted groups: the models after them; nothing happens without groups.

    The result's second part waits for the updates and returns metrics and histograms. A batch whose loss or gradient
    is not finite is kept for inspection.
    """
    if experience is None:
        return models, lambda: ({}, {})
    recomputed = recomputes(run.config, progress)
    batch, batch_metrics = make_batch(run, experience, models, recompute=recomputed, kl_coef=progress.kl_coef)
    batch_metrics |= statistics.spread("sample/staleness", step - 1 - experience.versions)
    batch_metrics |= statistics.balance_metrics(
        sequence_lengths(batch)[: experience.finished.size],
        tokens_of_devices(batch, update_settings(run, "actor", step))
    )
    models, wait = update(run, models, batch, step)

    def finish() -> tuple[dict[str, float], Histograms]:
        metrics, histograms = wait()
        metrics |= batch_metrics  # with recomputed log-probabilities, which compares them with the sampler's
        if recomputed:  # there, the first optimizer step compares the training pass with itself
            metrics.pop("rollout_corr/first_clipfrac", None)
        histograms["critic/advantages"] = histogram(batch.advantages[batch.loss_mask])
        if not is_finite(metrics):
            logger.error("step %d: the loss or a gradient is not finite: its updates are skipped", step)
            records.write_batch(step, {name: value for name, value in vars(batch).items() if value is not None})
        return metrics, histograms

    return models, finish


def update(run: Run, models: Models, batch: Batch, step: int) -> tuple[Models, Finish]:
    """Begins all optimizer steps of a training step: the critic's, then after trainer.critic_warmup the policy's.

    The result's second part waits for them and returns metrics and histograms.
    """
    parts: list[tuple[str, Finish, dict[str, float]]] = []
    if run.critic is not None:
        assert models.critic is not None
        settings = update_settings(run, "critic", step)
        with run.stage("update_critic"):
            critic, finish = update_critic(run.critic, models.critic, batch, settings, run.mesh, run.pace)
        models = dataclasses.replace(models, critic=critic)
        parts.append(("update_critic", finish, {"critic/lr": settings.learning_rate}))
    if step > run.config.trainer.critic_warmup:
        run.decode_weights.drop()
        settings = update_settings(run, "actor", step)
        with run.stage("update_actor"):
            actor, finish = update_policy(run.actor, models.actor, batch, settings, run.mesh, run.pace)
        models = dataclasses.replace(models, actor=actor)
        known = {"actor/lr": settings.learning_rate}
        if run.config.actor.use_kl_loss:
            known["actor/kl_coef"] = run.config.actor.kl_loss_coef
        parts.append(("update_actor", finish, known))

    def finish_all() -> tuple[dict[str, float], Histograms]:
        metrics: dict[str, float] = {}
        histograms: Histograms = {}
        for name, finish, known in parts:
            with run.stage(name):
                found, distributions = finish()
            metrics |= found | known
            histograms |= distributions
        return metrics, histograms

    return models, finish_all


def learning_rate_of(config: Config, name: str, step: int) -> float:
    """The learning rate of the "actor" or the "critic" in training step `step`, from 1."""
    optim = getattr(config, name).optim
    waited = config.trainer.critic_warmup if name == "actor" else 0
    return learning_rate(
        step - waited,
        lr=optim.lr,
        warmup_steps=optim.lr_warmup_steps,
        scheduler=optim.lr_scheduler_type,
        total_steps=config.trainer.total_training_steps - waited,
        min_ratio=optim.min_lr_ratio,
    )


def learning_rate_plan(config: Config, *, done: int) -> str:
    """One line: the policy's learning rate from the step after `done` on; empty if it stays the same."""
    optim, last, waited = config.actor.optim, config.trainer.total_training_steps, config.trainer.critic_warmup
    first, warm = max(done, waited) + 1, min(waited + optim.lr_warmup_steps, last)

    def at(step: int) -> str:
        return f"{learning_rate_of(config, 'actor', step):.3g} in step {step}".replace("e-0", "e-")

    falls = optim.lr_scheduler_type != "constant" and max(first, warm) < last
    if first < warm:
        then = f", then falls to {at(last)} ({optim.lr_scheduler_type})" if falls else ", then stays there"
        return f"learning rate: rises from {at(first)} to {at(warm)} (warm-up){then if warm < last else ''}"
    return f"learning rate: falls from {at(first)} to {at(last)} ({optim.lr_scheduler_type})" if falls else ""


def warn_of_warm_up(config: Config) -> None:
    """Warns of a warm-up that the run does not get to the end of."""
    warm_up, steps = config.actor.optim.lr_warmup_steps, config.trainer.total_training_steps
    updates = steps - config.trainer.critic_warmup
    if 0 < updates < warm_up:
        logger.warning(
            "actor.optim.lr_warmup_steps=%d is more than the %d steps that update the policy: the learning rate never "
            "reaches actor.optim.lr=%g: lower the warm-up, or raise trainer.total_training_steps=%d",
            warm_up, updates, config.actor.optim.lr, steps,
        )  # fmt: skip


def update_settings(run: Run, name: str, step: int) -> UpdateSettings:
    """How training step `step` passes over its batch, for the "actor" or the "critic"."""
    config = run.config
    section: ActorConfig | CriticConfig = getattr(config, name)
    return UpdateSettings(
        learning_rate=learning_rate_of(config, name, step),
        mini_batch_rows=mini_batch_size(config, name) * config.rollout.n,
        micro_batches=micro_batches(config, run.mesh, name),
        epochs=section.ppo_epochs,
        loss_agg_mode=section.loss_agg_mode,
        loss_scale_factor=config.actor.loss_scale_factor or float(config.data.max_response_length),
        count_empty_sequences=config.actor.count_empty_sequences,
    )


def recomputes(config: Config, progress: Progress) -> bool:
    """Whether old log-probabilities come from the training forward pass instead of the sampler."""
    mode = config.actor.old_logprob
    fallen_back = progress.recompute_logprobs and progress.recompute_dtype in ("", config.model.dtype)
    fallen_back = fallen_back and not trains_on_older_samples(config)
    return mode == "recompute" or (mode == "auto" and fallen_back)


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether the losses and gradients of a step are."""
    losses = [metrics[name] for name in ("actor/loss", "critic/vf_loss") if name in metrics]
    skipped = [metrics[name] for name in ("actor/skipped_updates", "critic/skipped_updates") if name in metrics]
    return bool(np.all(np.isfinite(losses))) and not any(skipped)
