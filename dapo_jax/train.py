"""Host: the training command and its loop.

    python -m dapo_jax.train --config configs/tiny.py [--config.actor.optim.lr=1e-3 ...]

Started again with the same workdir, it goes on after the last checkpoint as if it had not stopped.
"""

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dapo_jax.algorithms.kl import adapted_coefficient
from dapo_jax.checkpoint import Checkpoints, Progress
from dapo_jax.collection import Collected, collect, collected_arrays, measure, restore_collected
from dapo_jax.command_line import processes_of, read_config, refusals
from dapo_jax.config import ActorConfig, Config, CriticConfig, checkpoint_dir, mini_batch_size
from dapo_jax.containers import Batch
from dapo_jax.dynamic_sampling.accumulation import StreamState
from dapo_jax.dynamic_sampling.schedule import History
from dapo_jax.evaluate import evaluate, mean_accuracy
from dapo_jax.learner.models import Models
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.update import UpdateSettings, update_critic, update_policy
from dapo_jax.monitor import statistics
from dapo_jax.monitor.log import close_logging, setup_logging
from dapo_jax.monitor.records import NoRecords, RunRecords, config_differences, read_metrics, write_config
from dapo_jax.parallel.processes import check_agreement, is_first
from dapo_jax.prompt_stream import restore_stream, stream_arrays
from dapo_jax.rollout.experience import Experience
from dapo_jax.run import Run, check_processes, describe, open_run
from dapo_jax.training_batch import (
    make_batch,
    micro_batches,
    sequence_kl,
)
from dapo_jax.validation import validate, warnings

logger = logging.getLogger(__name__)

Finish = Callable[[], dict[str, float]]

MISMATCH_K3 = 1e-3  # old_logprob=auto recomputes beyond either of these two
MISMATCH_CLIPFRAC = 5e-3


def train(config: Config) -> Models:
    """Trains as `config` says and returns the last state of each model.

    Raises:
        ValueError: the config, the model, the data or the mesh do not fit together.
        RuntimeError: the run cannot go on, for example because too few groups pass the filter.
    """
    validate(config)
    total = config.trainer.total_training_steps
    setup_logging(config.workdir, detailed=config.monitor.console == "detailed", process=jax.process_index())
    check_processes(config)
    checkpoints = Checkpoints(checkpoint_dir(config), max_to_keep=config.trainer.max_ckpt_to_keep)
    resume_step = starting_point(config, checkpoints)
    try:
        with open_run(config, initial_step=resume_step or 0) as run:
            if resume_step is None:
                models, progress, stream = first_state(run)
                ahead = None
            else:
                models, progress, stream, ahead = restore(run, checkpoints, resume_step)
            records = RunRecords(config.workdir, resume_step=resume_step) if is_first() else NoRecords()
            logger.info("%s", describe(run))
            if resume_step is None and config.trainer.val_before_train:
                record(run, records, 0, evaluate(run, models.actor.params))
            while progress.step < total:
                start = time.perf_counter()
                step = progress.step + 1
                batch = ahead
                if batch is None:
                    batch, stream = next_batch(run, run.decode_weights(models.actor.params), stream, progress, step)
                collected = time.perf_counter()
                ahead, weights = None, None
                if config.trainer.rollout_ahead and step < total:
                    weights = run.decode_weights(models.actor.params)  # before the update takes their memory
                models, finish = train_on(run, models, batch.experience, progress, step)
                if weights is not None:  # other devices sample while these train
                    ahead, stream = next_batch(run, weights, stream, progress, step + 1)
                metrics = batch.metrics | finish()
                progress = advance(config, progress, batch, metrics)
                metrics |= performance_metrics(run, batch.experience, time.perf_counter() - start)
                metrics["dynamic_sampling/first_release_s"] = collected - start
                if is_due(step, config.trainer.test_freq, total):
                    metrics |= evaluate(run, models.actor.params)
                if batch.experience is not None:
                    records.write_samples(step, sample_texts(run, batch.experience))
                record(run, records, step, metrics)
                if is_due(step, config.trainer.save_freq, total):
                    with run.stage("save_checkpoint"):
                        checkpoints.save(models, progress, state_arrays(run, stream, ahead))
            run.console.close()
            if is_first():
                run.console.final_table(summary(run, progress))
            records.close()
    finally:
        checkpoints.close()
        close_logging()
    return models


def starting_point(config: Config, checkpoints: Checkpoints) -> int | None:
    """The step of the checkpoint to go on from, None for a new run. Writes config.json."""
    latest = checkpoints.latest_step()
    check_agreement({"the step of the newest checkpoint": latest})
    if latest is not None and config.trainer.resume_mode == "disable":
        raise ValueError(
            f"workdir={config.workdir} holds a checkpoint of step {latest} and trainer.resume_mode=disable: "
            "choose another workdir, or resume_mode=auto to go on"
        )
    if not is_first():
        return latest
    values = dataclasses.asdict(config)
    if latest is not None:
        for line in config_differences(config.workdir, values):
            logger.warning("going on with another config: %s", line)
    for line in warnings(config):
        logger.warning("%s", line)
    write_config(config.workdir, values)
    return latest


def first_state(run: Run) -> tuple[Models, Progress, StreamState]:
    """The models, the progress and the prompt stream before the first step."""
    algorithm = run.config.algorithm
    stream = StreamState(
        next_prompt=0,
        keep_rate=algorithm.filter_groups.stream.keep_rate_prior,
        history=History.empty(len(run.train_set)),
    )
    return run.init_models(), Progress(kl_coef=algorithm.kl_ctrl.kl_coef), stream


def restore(
    run: Run, checkpoints: Checkpoints, step: int
) -> tuple[Models, Progress, StreamState, Collected | None]:
    """The models, the progress, the prompt stream and what was sampled ahead, as they were after `step`."""
    critic_shape = run.critic.trainable.state_shape if run.critic is not None else None
    shape = Models(actor=run.actor.trainable.state_shape, critic=critic_shape)
    models, progress, arrays = checkpoints.restore(step, shape)
    logger.warning("going on after step %d of %s", step, run.config.workdir)
    ahead = arrays.get("ahead")
    return models, progress, restore_stream(run, arrays), restore_collected(run, ahead) if ahead is not None else None


def state_arrays(run: Run, stream: StreamState, ahead: Collected | None) -> dict[str, Any]:
    """The prompt stream and what was sampled ahead as NumPy arrays for a checkpoint."""
    arrays = stream_arrays(run, stream)
    return arrays if ahead is None else {**arrays, "ahead": collected_arrays(ahead)}


def next_batch(
    run: Run, weights: Any, stream: StreamState, progress: Progress, step: int
) -> tuple[Collected, StreamState]:
    """What `step` will train on, sampled with decoding `weights`, and the stream after it.

    Args:
        progress: of the policy whose weights they are.
    """
    accepted = collect(run, weights, stream, step=step, version=progress.step, kl_coef=progress.kl_coef)
    return measure(run, accepted), accepted.state


def train_on(
    run: Run, models: Models, experience: Experience | None, progress: Progress, step: int
) -> tuple[Models, Finish]:
    """Begins all updates on the accepted groups: the models after them; nothing happens without groups.

    The result's second part waits for the updates and returns the metrics.
    """
    if experience is None:
        return models, dict
    batch, batch_metrics = make_batch(
        run, experience, models, recompute=recomputes(run.config, progress), kl_coef=progress.kl_coef
    )
    batch_metrics |= statistics.spread("sample/staleness", step - 1 - experience.versions)
    models, finish = update(run, models, batch, step)
    return models, lambda: finish() | batch_metrics


def update(run: Run, models: Models, batch: Batch, step: int) -> tuple[Models, Finish]:
    """Begins all optimizer steps of a training step: the critic's, then after trainer.critic_warmup the policy's.

    The result's second part waits for them and returns the metrics.
    """
    parts: list[tuple[str, Finish, dict[str, float]]] = []
    if run.critic is not None:
        assert models.critic is not None
        settings = update_settings(run, "critic", step)
        with run.stage("update_critic"):
            critic, finish = update_critic(run.critic, models.critic, batch, settings, run.mesh)
        models = dataclasses.replace(models, critic=critic)
        parts.append(("update_critic", finish, {"critic/lr": settings.learning_rate}))
    if step > run.config.trainer.critic_warmup:
        run.decode_weights.drop()
        settings = update_settings(run, "actor", step)
        with run.stage("update_actor"):
            actor, finish = update_policy(run.actor, models.actor, batch, settings, run.mesh)
        models = dataclasses.replace(models, actor=actor)
        parts.append(("update_actor", finish, {"actor/lr": settings.learning_rate}))

    def finish_all() -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, finish, known in parts:
            with run.stage(name):
                metrics |= finish() | known
        return metrics

    return models, finish_all


def update_settings(run: Run, name: str, step: int) -> UpdateSettings:
    """How training step `step` passes over its batch, for the "actor" or the "critic"."""
    config = run.config
    section: ActorConfig | CriticConfig = getattr(config, name)
    waited = config.trainer.critic_warmup if name == "actor" else 0
    return UpdateSettings(
        learning_rate=learning_rate(
            step - waited,
            lr=section.optim.lr,
            warmup_steps=section.optim.lr_warmup_steps,
            scheduler=section.optim.lr_scheduler_type,
            total_steps=config.trainer.total_training_steps - waited,
            min_ratio=section.optim.min_lr_ratio,
        ),
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
    fallen_back = progress.recompute_logprobs and not config.trainer.rollout_ahead
    return mode == "recompute" or (mode == "auto" and fallen_back)


def advance(config: Config, progress: Progress, batch: Collected, metrics: dict[str, float]) -> Progress:
    """The progress after a training step."""
    mismatch = metrics.get("rollout_corr/k3_kl", 0.0) > MISMATCH_K3 or (
        metrics.get("rollout_corr/first_clipfrac", 0.0) > MISMATCH_CLIPFRAC
    )
    if config.algorithm.filter_groups.leftover == "carry" or config.trainer.rollout_ahead:
        mismatch = False  # the two differ because an older policy sampled
    if mismatch and config.actor.old_logprob == "auto" and not progress.recompute_logprobs:
        logger.warning(
            "sampling and training log-probabilities differ (k3 %.2e, clipped %.2e): old log-probabilities are "
            "recomputed from the next step on; model.dtype=float32 avoids the difference",
            metrics["rollout_corr/k3_kl"],
            metrics.get("rollout_corr/first_clipfrac", 0.0),
        )
    kl_coef = progress.kl_coef
    if config.algorithm.use_kl_in_reward and batch.experience is not None:
        kl = sequence_kl(batch.experience)
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
        control = config.algorithm.kl_ctrl
        if control.type == "adaptive":
            kl_coef = adapted_coefficient(
                kl_coef,
                kl,
                target_kl=control.target_kl,
                horizon=control.horizon,
                num_sequences=batch.experience.finished.size,
            )
    return Progress(
        step=progress.step + 1,
        recompute_logprobs=progress.recompute_logprobs or mismatch,
        kl_coef=kl_coef,
        groups_kept=progress.groups_kept + batch.num_kept,
        groups_dropped=progress.groups_dropped + batch.num_evaluated - batch.num_kept,
        tokens_generated=progress.tokens_generated + int(metrics["dynamic_sampling/generated_tokens"]),
        tokens_trained=progress.tokens_trained + int(metrics["dynamic_sampling/trained_tokens"]),
    )


def performance_metrics(run: Run, trained: Experience | None, seconds: float) -> dict[str, float]:
    """`perf/` and `timing_s/` of a step; evaluation and saving are not part of its seconds."""
    if trained is None:
        return {"perf/time_per_step": seconds, "timing_s/step": seconds}
    prompt_tokens = sum(len(prompt) for prompt in trained.prompts) * trained.finished.shape[1]
    tokens = trained.num_tokens + prompt_tokens
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / run.num_devices,
        "timing_s/step": seconds,
    }


def record(run: Run, records: RunRecords | NoRecords, step: int, metrics: dict[str, float]) -> None:
    """Writes a step's metrics everywhere: metrics.jsonl, TensorBoard, the console."""
    metrics |= run.timers.pop()
    records.write(step, metrics)
    run.console.step_line(step, metrics)


def is_due(step: int, frequency: int, total: int) -> bool:
    """True every `frequency` steps and at the last; -1 means only at the last."""
    return step == total or (frequency > 0 and step % frequency == 0)


def sample_texts(run: Run, experience: Experience) -> list[dict]:
    """The first sample of the first accepted groups, with its scores, for samples/."""
    texts = []
    for group in range(min(run.config.monitor.num_samples, len(experience))):
        row = run.train_set.rows[experience.rows[group]]
        texts.append(
            {
                "prompt": run.sampler.tokenizer.decode(experience.prompts[group], skip_special_tokens=False),
                "response": experience.texts[group][0],
                "ground_truth": row.ground_truth,
                **{name: float(values[group, 0]) for name, values in experience.scores.items()},
            }
        )
    return texts


def summary(run: Run, progress: Progress) -> list[tuple[str, str]]:
    """The table at the end of a run."""
    workdir = Path(run.config.workdir)
    accuracies = [mean_accuracy(row) for row in read_metrics(workdir)]
    evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
    problems = f"{len(run.eval_set)} held-out problems, mean@{run.config.evaluate.n}"
    seconds = sorted(run.timers.totals.items(), key=lambda item: -item[1])
    return [
        ("held-out accuracy before", f"{evaluated[0]:.3f} ({problems})" if evaluated else "-"),
        ("held-out accuracy after", f"{evaluated[-1]:.3f}" if evaluated else "-"),
        ("tokens generated", f"{progress.tokens_generated:,}"),
        ("tokens trained", f"{progress.tokens_trained:,}"),
        ("groups kept", f"{progress.groups_kept:,}"),
        ("groups dropped", f"{progress.groups_dropped:,}"),
        ("seconds per stage", ", ".join(f"{stage} {time:.0f}" for stage, time in seconds)),
        ("TensorBoard", f"tensorboard --logdir {workdir / 'tensorboard'}"),
        ("checkpoints", checkpoint_dir(run.config)),
    ]


def main() -> None:
    with refusals():
        config = read_config(sys.argv)
        with processes_of(config), refusals():
            train(config)


if __name__ == "__main__":
    main()
