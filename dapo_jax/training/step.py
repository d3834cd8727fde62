"""Host: one training step of DAPO (arXiv:2503.14476, algorithm 1), from prompts to new weights.

accumulate   samples and verifies G responses per prompt, until there are enough groups
judge        shapes the rewards of groups (equation 13), keeps those whose scores differ (equation 11)
train_on     advantages (equation 9), then mini-batches of the decoupled clip objective (equation 8)
train_step   an update, with the metrics; with trainer.rollout_ahead the next step's groups are sampled meanwhile
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Protocol

import jax
import numpy as np

from dapo_jax.config.derived import gen_batch_size, segment_steps
from dapo_jax.data.experience import Collected, Experience, to_arrays
from dapo_jax.dynamic_sampling.accepted import Accepted, accept
from dapo_jax.dynamic_sampling.accumulation import Found
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups
from dapo_jax.learner.batch import less_divergence, make_batch, penalize_kl, with_those_of_batch
from dapo_jax.learner.learner import update
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.router_replay import saved_fields
from dapo_jax.learner.update import Finish
from dapo_jax.monitor import filter_log
from dapo_jax.monitor.kept_batches import GROUPS, Arrays
from dapo_jax.monitor.log import log_bytes
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import Histograms
from dapo_jax.rewards.lowest import Lowest, lowest_given, sources_of, with_lowest
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run.parts import Run
from dapo_jax.run.progress import Progress, advance, is_finite, recomputes
from dapo_jax.run.sampler import GroupRollout
from dapo_jax.run.segments import SegmentedRollout, segments_of
from dapo_jax.run.settings import learning_rates
from dapo_jax.training.estimator_inputs import NOTHING, estimator_inputs
from dapo_jax.training.metrics import GREEDY, batch_records, collect, performance_metrics, with_greedy
from dapo_jax.training.sample_texts import step_row
from dapo_jax.training.state import RunState

logger = logging.getLogger("dapo_jax.train")  # the command's log


class HoldBatch(Protocol):
    """Takes the arrays that a step has trained on; `finite`: so are its loss and gradients."""

    def __call__(self, step: int, arrays: Arrays, *, finite: bool) -> None: ...


def sample_batch(
    run: Run, weights: Any, stream: StreamState, progress: Progress, step: int
) -> tuple[Collected, StreamState]:
    """Samples what `step` will train on with decoding `weights`; also returns the stream after it.

    Args:
        progress: of the policy whose weights they are.
    """
    environments = run.sampler.environments
    if environments is not None:
        environments.take_metrics()  # of an evaluation
    accepted = sample_groups(run, weights, stream, step=step, version=progress.step, kl_coef=progress.kl_coef)
    sampled = collect(accepted, run.config.data, run.problems)
    if not run.config.algorithm.filter_groups.enable:
        sampled.metrics.pop("train/mean_metric_std", None)  # there is none
    elif sampled.experience is not None:
        filter_log.log_step(sampled.metrics)
    if accepted.rounds:
        sampled.metrics["rollout/model_version"] = progress.step
    sampled.metrics["reward/workers_replaced"] = run.rewards.workers_replaced()
    sampled.metrics.update(run.rewards.judge_metrics())
    if environments is not None:
        sampled.metrics.update(environments.take_metrics())
    return sampled, accepted.state


def sample_groups(run: Run, weights: Any, stream: StreamState, *, step: int, version: int, kl_coef: float) -> Accepted:
    """Samples prompts until data.train_batch_size groups are accepted (DAPO, section 3.2).

    Args:
        weights: of the policy, for decoding, on the sampler's mesh.
        step: training step, from 1.
        version: training steps that the policy has seen.
        kl_coef: of the KL divergence in the reward.
    """
    config, groups, order = run.config, run.config.algorithm.filter_groups, run.problems.order
    if stream.carried is not None and stream.carried.kl is not None:  # rewarded by an earlier step's coefficient
        carried = less_divergence(stream.carried, run.learner.batching.rounding, kl_coef)
        stream = dataclasses.replace(stream, carried=carried)
    found = Found(
        stream,
        PromptSource(order.row, order.num_rows, groups.skip_uniform, config.data.curriculum, config.seed),
        groups,
        target=config.data.train_batch_size,
        gen_batch_size=gen_batch_size(config.data),
        step=step,
        max_error_share=config.reward.max_error_share,
        segment_steps=segment_steps(config.data, config.rollout),
        show=run.monitor.console.detail,
    )
    if groups.enable:
        filter_log.log_start()
    judged = functools.partial(judge, run, lowest=stream.lowest, kl_coef=kl_coef)
    with jax.set_mesh(run.sampler.mesh):
        return accumulate(open_rollout(run, weights, found, version), judged, found)


def accumulate(rollout: GroupRollout, judged: Callable[[Experience], Round], found: Found) -> Accepted:
    """Lines 2 to 7 of the algorithm: samples prompts until enough groups are kept, or until a policy ends the step.

    Raises:
        RuntimeError: as `Found` and `accept`.
    """
    with closing(rollout):
        while not found.certain:
            while numbers := found.next_prompts():  # line 2
                rollout.start(numbers)  # line 4: samples G responses to each prompt
            if not rollout.under_way:
                break
            groups = rollout.wait()  # line 5: with the verdicts on them
            if groups is not None:
                found.take(judged(groups), under_way=rollout.under_way)  # line 6: keeps those whose scores differ
            del groups  # the others take memory
    return accept(found, rollout.sampled)


def judge(run: Run, groups: Experience, *, lowest: Lowest, kl_coef: float) -> Round:
    """Turns verdicts into rewards (equation 13), and marks the groups to keep (equation 11).

    Args:
        lowest: numbers that the verifier has given in earlier steps.
    """
    prompts = run.problems.train_set
    given = lowest_given(groups.scores, groups.failed, sources_of(groups, prompts))
    groups = with_lowest(groups, prompts, lowest)
    groups = run.rewards.shape(groups, prompts)  # reward model, soft overlong punishment
    if run.config.algorithm.use_kl_in_reward:
        groups = penalize_kl(run.learner, groups, kl_coef)
    with run.monitor.stage("filter"):
        round_ = filter_groups(groups, run.config.algorithm.filter_groups, run.sampler.mesh)
    run.observe(round_)
    return dataclasses.replace(round_, lowest=given)


def train_on(
    run: Run,
    models: Models,
    experience: Experience | None,
    progress: Progress,
    step: int,
    *,
    lowest: Lowest = NOTHING,
    hold_batch: HoldBatch = lambda step, arrays, *, finite: None,
) -> tuple[Models, Finish]:
    """Advantages of the accepted groups (equation 9), then all updates on them; without groups, nothing.

    Only starts the updates: the second result waits for them, tells `hold_batch` of the batch, and returns metrics and
    histograms.

    Args:
        lowest: numbers that the verifier has given.
    """
    if experience is None:
        return models, lambda: ({}, {})
    learner, recompute = run.learner, recomputes(run.config, progress)
    further, greedy = estimator_inputs(run, experience, models, lowest)  # for some estimators: hints, greedy responses
    batch, metrics = make_batch(learner, experience, models, recompute=recompute, kl_coef=progress.kl_coef, **further)
    metrics |= {GREEDY: greedy} if greedy else {}
    run.observe(batch)
    rates = learning_rates(learner.batching.trained, run.config.trainer, step)
    models, wait = update(learner, models, batch, rates)
    segments = segments_of(run.config.rollout, run.config.data)
    found, histograms = batch_records(batch, experience, learner.batching, segments, step)  # while the devices work

    def arrays() -> dict[str, np.ndarray]:
        groups = to_arrays(experience, run.problems.train_set)
        return saved_fields(batch) | {GROUPS + name: value for name, value in groups.items()}

    hold = functools.partial(hold_batch, step, arrays)
    return models, functools.partial(finished, wait, metrics | found, histograms, step, hold)


def finished(
    wait: Finish,
    of_batch: Mapping[str, float],
    histograms: Histograms,
    step: int,
    hold: Callable[..., None],
) -> tuple[dict[str, float], Histograms]:
    """Waits for the updates on a batch: their metrics and histograms, with those of the batch."""
    metrics, of_update = wait()
    metrics = with_those_of_batch(metrics, of_batch)
    if not (finite := is_finite(metrics)):
        logger.error("step %d: the loss or a gradient is not finite: its updates are skipped", step)
    hold(finite=finite)
    return metrics, of_update | histograms


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
        weights = run.learner.networks.decode_weights(state.models.actor.params)  # before the update donates them
    models, finish = train_on(
        run, state.models, sampled.experience, progress, step, lowest=stream.lowest, hold_batch=records.hold_batch
    )
    if weights is not None:  # other devices sample while these train
        ahead, later = sample_batch(run, weights, stream, progress, step + 1)
        ahead, stream = (None, stream) if ahead.solved else (ahead, later)  # then the newer policy samples once more
    found, histograms = finish()
    found |= run.monitor.slowest_process()
    found = with_greedy(sampled.metrics, found.pop(GREEDY, 0)) | found
    progress, further = advance(config, progress, sampled, found)
    seconds, meshes = time.perf_counter() - start, (run.learner.mesh, run.sampler.mesh)
    performance = performance_metrics(
        sampled.experience, seconds, arch=run.arch, meshes=meshes, num_devices=run.num_devices
    )
    metrics = found | further | performance
    rows, tokenizer = run.problems.train_set.rows, run.sampler.tokenizer
    row = step_row(sampled, metrics, histograms, rows, tokenizer, num_samples=config.monitor.num_samples)
    progress = dataclasses.replace(
        progress,
        unrecorded=row,
        log_bytes=log_bytes(config.workdir),
        step_seconds=progress.step_seconds + seconds,
    )
    return RunState(models, progress, stream, run.sampler.engine.learnt.state(), ahead)


def open_rollout(run: Run, weights: Any, found: Found, version: int) -> GroupRollout:
    """What samples and verifies the prompts of a step; with partial rollouts, a segment of each response."""
    settings, segments = run.config.rollout, segments_of(run.config.rollout, run.config.data)
    prompts, expected = run.problems.train_set, found.schedule.expected_prompts
    sampling = Sampling.create(settings.temperature, settings.top_p, settings.top_k, settings.min_response_length)
    sizes = {"prompt_lengths": run.sampler.prompt_lengths(prompts.lengths), "num_prompts": expected}
    request = run.sampler.request(weights, settings.n, TRAIN, sampling, **sizes)
    verify = functools.partial(run.rewards.verify, prompts, num_samples=settings.n)
    parts = run.sampler, request, prompts, run.problems.order.row, verify, version
    if segments is None:
        return GroupRollout(*parts)
    return SegmentedRollout(*parts, segments=segments, begun=found.state.begun)
