"""Host: the training command and its loop.

    python -m dapo_jax.train --config configs/tiny.py [--config.actor.optim.lr=1e-3 ...]

Started again with the same workdir, it goes on after the last checkpoint as if it had not stopped.
"""

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from dapo_jax.algorithms.kl import adapted_coefficient
from dapo_jax.checkpoint import Checkpoints, Progress
from dapo_jax.command_line import processes_of, read_config, refusals
from dapo_jax.config import ActorConfig, Config, CriticConfig, checkpoint_dir, mini_batch_size
from dapo_jax.containers import Batch
from dapo_jax.dynamic_sampling.accumulation import Accepted, StreamState, accumulate_groups
from dapo_jax.dynamic_sampling.metrics import sampling_metrics
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups, keep_all
from dapo_jax.dynamic_sampling.schedule import History
from dapo_jax.evaluate import evaluate, mean_accuracy
from dapo_jax.learner.models import Models
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.update import UpdateSettings, update_critic, update_policy
from dapo_jax.monitor import statistics
from dapo_jax.monitor.log import close_logging, setup_logging
from dapo_jax.monitor.records import NoRecords, RunRecords, config_differences, read_metrics, write_config
from dapo_jax.parallel.processes import is_first
from dapo_jax.prompt_stream import filter_rule, policies, prompt_source, restore_stream, stream_arrays
from dapo_jax.rollout.experience import Experience
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run import Run, check_processes, describe, open_run
from dapo_jax.training_batch import (
    final_rewards,
    finish_rewards,
    make_batch,
    micro_batches,
    penalize_kl,
    sequence_kl,
)
from dapo_jax.validation import validate, warnings

logger = logging.getLogger(__name__)

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
            else:
                models, progress, stream = restore(run, checkpoints, resume_step)
            records = RunRecords(config.workdir, resume_step=resume_step) if is_first() else NoRecords()
            logger.info("%s", describe(run))
            if resume_step is None and config.trainer.val_before_train:
                record(run, records, 0, evaluate(run, models.actor.params))
            while progress.step < total:
                start = time.perf_counter()
                step = progress.step + 1
                accepted = collect(run, models, stream, progress, step)
                collected = time.perf_counter()
                models, metrics = train_on(run, models, accepted.experience, progress, step)
                metrics |= sampling_metrics(accepted) | experience_metrics(run, accepted)
                progress, stream = advance(config, progress, accepted, metrics), accepted.state
                metrics |= performance_metrics(run, accepted, time.perf_counter() - start)
                metrics["dynamic_sampling/first_release_s"] = collected - start
                if is_due(step, config.trainer.test_freq, total):
                    metrics |= evaluate(run, models.actor.params)
                if accepted.experience is not None:
                    records.write_samples(step, sample_texts(run, accepted.experience))
                record(run, records, step, metrics)
                if is_due(step, config.trainer.save_freq, total):
                    with run.stage("save_checkpoint"):
                        checkpoints.save(models, progress, stream_arrays(run, stream))
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


def restore(run: Run, checkpoints: Checkpoints, step: int) -> tuple[Models, Progress, StreamState]:
    """The models, the progress and the prompt stream after `step`."""
    critic_shape = run.critic.trainable.state_shape if run.critic is not None else None
    shape = Models(actor=run.actor.trainable.state_shape, critic=critic_shape)
    models, progress, arrays = checkpoints.restore(step, shape)
    logger.warning("going on after step %d of %s", step, run.config.workdir)
    return models, progress, restore_stream(run, arrays)


def collect(run: Run, models: Models, stream: StreamState, progress: Progress, step: int) -> Accepted:
    """Samples prompts until data.train_batch_size groups are accepted."""
    config, groups = run.config, run.config.algorithm.filter_groups
    rule = filter_rule(config)
    weights = run.decode_weights(models.actor.params)
    settings = config.rollout
    sampling = Sampling.create(settings.temperature, settings.top_p, settings.top_k, settings.min_response_length)

    def start_round(numbers: Sequence[int]) -> Callable[[], Round]:
        wait = run.sampler.start(
            weights,
            run.train_set,
            [run.order.row(number) for number in numbers],
            numbers,
            num_samples=settings.n,
            purpose=TRAIN,
            sampling=sampling,
            stage=run.stage,
            version=progress.step,
        )

        def finish() -> Round:
            experience = finish_rewards(run, wait())
            if config.algorithm.use_kl_in_reward:
                experience = penalize_kl(run, experience, progress.kl_coef)
            return filter_groups(experience, groups.metric, rule, run.mesh) if groups.enable else keep_all(experience)

        return finish

    return accumulate_groups(start_round, stream, prompt_source(run), policies(config), step=step)


def train_on(
    run: Run, models: Models, experience: Experience | None, progress: Progress, step: int
) -> tuple[Models, dict[str, float]]:
    """The models after all updates on the accepted groups, and the metrics; nothing happens without groups."""
    if experience is None:
        return models, {}
    batch, batch_metrics = make_batch(
        run, experience, models, recompute=recomputes(run.config, progress), kl_coef=progress.kl_coef
    )
    models, update_metrics = update(run, models, batch, step)
    return models, update_metrics | batch_metrics


def update(run: Run, models: Models, batch: Batch, step: int) -> tuple[Models, dict[str, float]]:
    """All optimizer steps of a training step: the critic's, then after trainer.critic_warmup the policy's."""
    metrics: dict[str, float] = {}
    if run.critic is not None:
        assert models.critic is not None
        settings = update_settings(run, "critic", step)
        with run.stage("update_critic"):
            critic, critic_metrics = update_critic(run.critic, models.critic, batch, settings, run.mesh)
        models = dataclasses.replace(models, critic=critic)
        metrics |= critic_metrics | {"critic/lr": settings.learning_rate}
    if step > run.config.trainer.critic_warmup:
        run.decode_weights.drop()
        settings = update_settings(run, "actor", step)
        with run.stage("update_actor"):
            actor, actor_metrics = update_policy(run.actor, models.actor, batch, settings, run.mesh)
        models = dataclasses.replace(models, actor=actor)
        metrics |= actor_metrics | {"actor/lr": settings.learning_rate}
    return models, metrics


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
    return mode == "recompute" or (mode == "auto" and progress.recompute_logprobs)


def advance(config: Config, progress: Progress, accepted: Accepted, metrics: dict[str, float]) -> Progress:
    """The progress after a training step."""
    mismatch = metrics.get("rollout_corr/k3_kl", 0.0) > MISMATCH_K3 or (
        metrics.get("rollout_corr/first_clipfrac", 0.0) > MISMATCH_CLIPFRAC
    )
    if config.algorithm.filter_groups.leftover == "carry":
        mismatch = False  # carried groups differ because an older policy sampled them
    if mismatch and config.actor.old_logprob == "auto" and not progress.recompute_logprobs:
        logger.warning(
            "sampling and training log-probabilities differ (k3 %.2e, clipped %.2e): old log-probabilities are "
            "recomputed from the next step on; model.dtype=float32 avoids the difference",
            metrics["rollout_corr/k3_kl"],
            metrics.get("rollout_corr/first_clipfrac", 0.0),
        )
    kl_coef = progress.kl_coef
    if config.algorithm.use_kl_in_reward and accepted.experience is not None:
        kl = sequence_kl(accepted.experience)
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
        control = config.algorithm.kl_ctrl
        if control.type == "adaptive":
            kl_coef = adapted_coefficient(
                kl_coef,
                kl,
                target_kl=control.target_kl,
                horizon=control.horizon,
                num_sequences=accepted.experience.finished.size,
            )
    kept = sum(int(round_.keep.sum()) for round_ in accepted.rounds)
    evaluated = sum(len(round_.keep) for round_ in accepted.rounds)
    return Progress(
        step=progress.step + 1,
        recompute_logprobs=progress.recompute_logprobs or mismatch,
        kl_coef=kl_coef,
        groups_kept=progress.groups_kept + kept,
        groups_dropped=progress.groups_dropped + evaluated - kept,
        tokens_generated=progress.tokens_generated + int(metrics["dynamic_sampling/generated_tokens"]),
        tokens_trained=progress.tokens_trained + int(metrics["dynamic_sampling/trained_tokens"]),
    )


def experience_metrics(run: Run, accepted: Accepted) -> dict[str, float]:
    """`rollout/` of all evaluated groups; rewards and lengths of the trained ones."""
    data, trained = run.config.data, accepted.experience
    evaluated = [round_.experience for round_ in accepted.rounds]
    progress = {
        "data/prompts_consumed": accepted.state.next_prompt,
        "data/epoch": run.order.epoch(accepted.state.next_prompt),
    }
    if trained is None:
        return progress
    evaluated = evaluated or [trained]  # all of them carried from earlier steps
    names = set.intersection(*(set(experience.scores) for experience in evaluated))
    scores = {name: np.concatenate([part.scores[name] for part in evaluated]) for name in sorted(names)}
    prompt_lengths = np.array([len(prompt) for prompt in trained.prompts])
    return {
        **statistics.score_metrics(scores),
        **statistics.spread("critic/score", trained.scores["seq_reward"]),
        **statistics.spread("critic/rewards", final_rewards(trained)),
        **statistics.length_metrics("response", trained.mask.sum(axis=-1), data.max_response_length),
        **statistics.length_metrics("prompt", prompt_lengths, data.max_prompt_length),
        "reward/unfiltered_mean": float(np.mean(scores["seq_reward"])),
        "reward/num_errors": sum(experience.num_errors for experience in evaluated),
    } | progress


def performance_metrics(run: Run, accepted: Accepted, seconds: float) -> dict[str, float]:
    """`perf/` and `timing_s/` of a step; evaluation and saving are not part of its seconds."""
    trained = accepted.experience
    if trained is None:
        return {"perf/time_per_step": seconds, "timing_s/step": seconds}
    prompt_tokens = sum(len(prompt) for prompt in trained.prompts) * trained.finished.shape[1]
    tokens = trained.num_tokens + prompt_tokens
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / run.mesh.size,
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
        ("checkpoints", str(workdir / "checkpoints")),
    ]


def main() -> None:
    with refusals():
        config = read_config(sys.argv)
        with processes_of(config), refusals():
            train(config)


if __name__ == "__main__":
    main()
