"""Host: one training step of DAPO (arXiv:2503.14476, algorithm 1), from prompts to new weights.

sample_groups   sample and verify G responses per prompt, shape their rewards (equation 13), keep groups whose
                scores differ (equation 11), until there are enough
train_on        advantages (equation 9), then mini-batches of the decoupled clip objective (equation 8)
train_step      both, with the metrics; with trainer.rollout_ahead the next step's groups are sampled meanwhile
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.config.derived import gen_batch_size, segment_steps
from dapo_jax.config.sections import Config
from dapo_jax.data.collected import Collected
from dapo_jax.data.experience import Experience
from dapo_jax.dynamic_sampling.accumulation import Accepted, accumulate_groups, expected_prompts
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups
from dapo_jax.dynamic_sampling.segments import Advance, accumulate_segments
from dapo_jax.estimator_inputs import NOTHING, estimator_inputs
from dapo_jax.learner.batch import make_batch, penalize_kl
from dapo_jax.learner.learner import update
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.router_replay import saved_fields
from dapo_jax.learner.update import Finish, sequence_lengths, tokens_of_devices
from dapo_jax.monitor import filter_log, statistics
from dapo_jax.monitor.console import RoundsShown
from dapo_jax.monitor.log import log_bytes
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import Histograms, histogram
from dapo_jax.progress import Progress, advance, is_finite, recomputes
from dapo_jax.rewards.lowest import lowest_given, with_lowest
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.segments import Segments, begin_groups, continue_groups, verify_groups
from dapo_jax.run import Run
from dapo_jax.settings import update_settings, updates_of_step
from dapo_jax.state import RunState
from dapo_jax.step_metrics import collect, performance_metrics, step_row

logger = logging.getLogger("dapo_jax.train")  # the command's log

KeepBatch = Callable[[int, dict[str, np.ndarray]], None]  # (step, arrays)


def sample_batch(
    run: Run, weights: Any, stream: StreamState, progress: Progress, step: int
) -> tuple[Collected, StreamState]:
    """Samples what `step` will train on with decoding `weights`; also returns the stream after it.

    Args:
        progress: of the policy whose weights they are.
    """
    accepted = sample_groups(run, weights, stream, step=step, version=progress.step, kl_coef=progress.kl_coef)
    sampled = collect(accepted, run.config.data, run.problems.order)
    if run.config.algorithm.filter_groups.enable and sampled.experience is not None:
        filter_log.log_step(sampled.metrics)
    sampled.metrics["reward/workers_replaced"] = run.rewards.workers_replaced()
    sampled.metrics.update(run.rewards.judge_metrics())
    return sampled, accepted.state


def sample_groups(run: Run, weights: Any, stream: StreamState, *, step: int, version: int, kl_coef: float) -> Accepted:
    """Samples prompts until data.train_batch_size groups are accepted (DAPO, section 3.2).

    Args:
        weights: of the policy, for decoding, on the sampler's mesh.
        step: training step, from 1.
        version: training steps that the policy has seen.
        kl_coef: of the KL divergence in the reward.
    """
    config, groups, settings = run.config, run.config.algorithm.filter_groups, run.config.rollout
    problems, mesh, prompts = run.problems, run.sampler.mesh, run.problems.train_set
    sampling = Sampling.create(settings.temperature, settings.top_p, settings.top_k, settings.min_response_length)
    source = PromptSource.of(problems.order, groups.skip_uniform, config.data.curriculum, seed=config.seed)
    sizes = {"target": config.data.train_batch_size, "gen_batch_size": gen_batch_size(config)}
    shown = RoundsShown(run.monitor.console, **sizes, carried=len(stream.carried or ()))
    limits: dict[str, Any] = {**sizes, "step": step, "max_error_share": config.reward.max_error_share}

    def judge(experience: Experience) -> Round:
        """Turns verdicts into rewards, and marks the groups to keep."""
        lowest = lowest_given(experience.scores, experience.failed)
        experience = with_lowest(experience, stream.lowest)
        experience = run.rewards.shape(experience, prompts)  # reward model, soft overlong punishment
        if config.algorithm.use_kl_in_reward:
            experience = penalize_kl(run.learner, experience, kl_coef)
        with run.monitor.stage("filter"):
            round_ = filter_groups(experience, groups, mesh)
        shown.end(len(round_.keep), int(round_.keep.sum()))
        return dataclasses.replace(round_, lowest=lowest)

    def sample_round(numbers: Sequence[int]) -> Callable[[], Round]:
        """Samples the prompts with these numbers. The result waits for the verdicts and marks the groups to keep."""
        shown.begin(len(numbers))
        rows = [problems.order.row(number) for number in numbers]
        verified = samples.sample(rows, numbers, run.rewards.verify(prompts, rows, settings.n))
        return lambda: judge(verified())

    if groups.enable:
        filter_log.log_start()
    if settings.segment_length:
        with jax.set_mesh(mesh):
            advance = advance_of(run, weights, judge, sampling, version=version)
            steps = segment_steps(config)
            return accumulate_segments(advance, stream, source, groups, segment_steps=steps, **limits)
    with (
        jax.set_mesh(mesh),
        run.sampler.open(
            weights,
            prompts,
            num_samples=settings.n,
            purpose=TRAIN,
            sampling=sampling,
            num_prompts=expected_prompts(stream, groups, **sizes, step=step),
            version=version,
        ) as samples,
    ):
        accepted = accumulate_groups(sample_round, stream, source, groups, **limits)
    return accepted.with_given_up(samples.given_up)


def advance_of(
    run: Run, weights: Any, judge: Callable[[Experience], Round], sampling: Sampling, *, version: int
) -> Advance:
    """How a step of partial rollouts begins groups, continues and judges them."""
    segments = Segments(run.config.rollout.segment_length, run.config.data.max_response_length)
    prompts, order, num_samples = run.problems.train_set, run.problems.order, run.config.rollout.n

    def begin(numbers: Sequence[int]) -> Experience:
        rows = [order.row(number) for number in numbers]
        return begin_groups(
            run.sampler,
            weights,
            prompts,
            rows,
            numbers,
            segments,
            num_samples=num_samples,
            sampling=sampling,
            version=version,
        )

    def judge_ended(groups: Experience) -> Round:
        with run.monitor.stage("reward"):
            verified = verify_groups(groups, run.rewards.verify(prompts, groups.rows.tolist(), num_samples))
        return judge(verified)

    return Advance(
        begin=begin,
        go_on=lambda groups: continue_groups(run.sampler, weights, groups, segments, sampling=sampling),
        ended=segments.ended,
        judge=judge_ended,
    )


def train_step(
    run: Run,
    records: RunRecords,
    state: RunState,
    sampled: Collected,
    stream: StreamState,
    start: float,
) -> RunState:
    """Trains on the groups of `sampled`; with trainer.rollout_ahead the next batch is sampled meanwhile.

    Args:
        stream: as it is after `sampled`.
        start: time.perf_counter() when the step began.
    """
    config, progress = run.config, state.progress
    step = progress.step + 1
    ahead, weights = None, None
    if config.trainer.rollout_ahead and step < config.trainer.total_training_steps:
        weights = run.learner.decode_weights(state.models.actor.params)  # before the update donates them
    models, finish = train_on(
        run, state.models, sampled.experience, progress, step, lowest=stream.lowest, keep_batch=records.write_batch
    )
    if weights is not None:  # other devices sample while these train
        ahead, later = sample_batch(run, weights, stream, progress, step + 1)
        ahead, stream = (None, stream) if ahead.solved else (ahead, later)  # then the newer policy is asked once more
    found, histograms = finish()
    found |= run.monitor.slowest_process()
    progress, further = advance(config, progress, sampled, sampled.metrics | found)
    seconds, mesh = time.perf_counter() - start, run.learner.mesh
    performance = performance_metrics(
        sampled.experience, seconds, arch=run.arch, mesh=mesh, num_devices=run.num_devices
    )
    metrics = sampled.metrics | found | further | performance
    rows, tokenizer = run.problems.train_set.rows, run.sampler.tokenizer
    row = step_row(sampled, metrics, histograms, rows, tokenizer, num_samples=config.monitor.num_samples)
    progress = dataclasses.replace(
        progress,
        unrecorded=row,
        log_bytes=log_bytes(config.workdir),
        step_seconds=progress.step_seconds + seconds,
    )
    return RunState(models, progress, stream, run.sampler.state(), ahead)


def train_on(
    run: Run,
    models: Models,
    experience: Experience | None,
    progress: Progress,
    step: int,
    *,
    lowest: Mapping[str, float] = NOTHING,
    keep_batch: KeepBatch = lambda step, arrays: None,
) -> tuple[Models, Finish]:
    """Advantages of the accepted groups (equation 9), then all updates on them; without groups, nothing.

    Only starts the updates: the second result waits for them and returns metrics and histograms. A batch whose loss or
    gradient is not finite goes to `keep_batch`.

    Args:
        lowest: of each number that the verifier has given.
    """
    if experience is None:
        return models, lambda: ({}, {})
    recomputed = recomputes(run.config, progress)
    further = estimator_inputs(run, experience, models, lowest)  # for some estimators: hints, greedy responses
    batch, batch_metrics = make_batch(
        run.learner, experience, models, recompute=recomputed, kl_coef=progress.kl_coef, **further
    )
    batch_metrics |= statistics.spread("sample/staleness", step - 1 - experience.versions)
    token_staleness = staleness_of_tokens(run.config, experience, step)
    if token_staleness is not None:
        batch_metrics |= statistics.spread("sample/token_staleness", token_staleness)
    batch_metrics |= statistics.balance_metrics(
        sequence_lengths(batch)[: experience.finished.size],
        tokens_of_devices(batch, update_settings(run.config, run.arch, run.learner.mesh, "actor", step)),
    )
    models, wait = update(run.learner, models, batch, updates_of_step(run.config, run.arch, run.learner.mesh, step))

    def finish() -> tuple[dict[str, float], Histograms]:
        metrics, histograms = wait()
        metrics |= batch_metrics  # if recomputed, they compare sampler and training pass
        if recomputed:  # then the first optimizer step compares the training pass with itself
            metrics.pop("rollout_corr/first_clipfrac", None)
        histograms["critic/advantages"] = histogram(batch.advantages[batch.loss_mask])
        if token_staleness is not None:
            histograms["sample/token_staleness"] = histogram(token_staleness)
        if not is_finite(metrics):
            logger.error("step %d: the loss or a gradient is not finite: its updates are skipped", step)
            keep_batch(step, saved_fields(batch))
        return metrics, histograms

    return models, finish


def staleness_of_tokens(config: Config, experience: Experience, step: int) -> np.ndarray | None:
    """Training steps between the policy that drew each token and the one before `step`; None without segments."""
    if not config.rollout.segment_length:
        return None
    versions = Segments(config.rollout.segment_length, config.data.max_response_length).token_versions(experience)
    return (step - 1 - versions)[experience.mask]
