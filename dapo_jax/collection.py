"""Host: the batch of one training step: sampled, verified, filtered, and measured."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dapo_jax.dynamic_sampling.accumulation import Accepted, StreamState, accumulate_groups
from dapo_jax.dynamic_sampling.metrics import sampling_metrics
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups, keep_all
from dapo_jax.monitor import filter_log, statistics
from dapo_jax.prompt_stream import filter_rule, policies, prompt_source
from dapo_jax.rollout.experience import Experience, Outcomes, from_arrays, to_arrays
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run import Run
from dapo_jax.training_batch import final_rewards, finish_rewards, penalize_kl


@dataclass(frozen=True)
class Collected:
    """What a training step trains on, and what is logged of how it came about."""

    experience: Experience | None  # the groups; None if the step is skipped
    metrics: dict[str, float]
    num_kept: int  # groups that passed the filter
    num_evaluated: int  # groups that were sampled


def collect(
    run: Run, weights: Any, stream: StreamState, *, step: int, version: int, kl_coef: float
) -> Accepted:
    """Samples prompts until data.train_batch_size groups are accepted.

    Args:
        weights: of the policy, for decoding, on run.rollout_mesh.
        step: training step, from 1.
        version: training steps that the policy has seen.
        kl_coef: of the KL divergence in the reward.
    """
    config, groups = run.config, run.config.algorithm.filter_groups
    rule = filter_rule(config)
    settings = config.rollout
    sampling = Sampling.create(settings.temperature, settings.top_p, settings.top_k, settings.min_response_length)

    carried, kept, rounds = len(stream.carried or ()), 0, 0

    def show() -> None:
        run.console.detail(f"round {rounds}, {carried + kept} of {config.data.train_batch_size} groups kept")

    def start_round(numbers: Sequence[int]) -> Callable[[], Round]:
        nonlocal rounds
        rounds += 1
        show()
        wait = run.sampler.start(
            weights,
            run.train_set,
            [run.order.row(number) for number in numbers],
            numbers,
            num_samples=settings.n,
            purpose=TRAIN,
            sampling=sampling,
            stage=run.stage,
            version=version,
        )

        def finish() -> Round:
            nonlocal kept
            experience = finish_rewards(run, wait())
            if config.algorithm.use_kl_in_reward:
                experience = penalize_kl(run, experience, kl_coef)
            with run.stage("filter"):
                if groups.enable:
                    round_ = filter_groups(experience, groups.metric, rule, run.rollout_mesh)
                else:
                    round_ = keep_all(experience)
            kept += int(round_.keep.sum())
            show()
            return round_

        return finish

    if groups.enable:
        filter_log.log_start()
    with jax.set_mesh(run.rollout_mesh):
        return accumulate_groups(start_round, stream, prompt_source(run), policies(config), step=step)


def measure(run: Run, accepted: Accepted) -> Collected:
    """The groups to train on, with the metrics of all that were sampled for them."""
    metrics = sampling_metrics(accepted) | experience_metrics(run, accepted)
    if run.config.algorithm.filter_groups.enable and accepted.experience is not None:
        filter_log.log_step(metrics)
    return Collected(
        accepted.experience,
        metrics,
        num_kept=sum(int(round_.keep.sum()) for round_ in accepted.rounds),
        num_evaluated=sum(len(round_.keep) for round_ in accepted.rounds),
    )


def experience_metrics(run: Run, accepted: Accepted) -> dict[str, float]:
    """What was sampled, and rewards and lengths of what is trained on, each if there is any."""
    trained, sampled = accepted.experience, [round_.outcomes for round_ in accepted.rounds]
    metrics = {
        "data/prompts_consumed": accepted.state.next_prompt,
        "data/epoch": run.order.epoch(accepted.state.next_prompt),
        "rollout/finished_task_count": sum(len(part.numbers) for part in sampled),
        "reward/num_errors": sum(int(part.failed.sum()) for part in sampled),  # carried groups' were told before
        "experience_pipeline/experience_count": 0 if trained is None else trained.finished.size,
        "experience_pipeline/filtered_count": sum(
            int((~round_.keep).sum()) * round_.outcomes.lengths.shape[1] for round_ in accepted.rounds
        ),
    }
    if sampled:
        metrics |= _sampled_metrics(sampled)
        metrics["reward/error_share"] = metrics["reward/num_errors"] / sum(part.failed.size for part in sampled)
    return metrics if trained is None else metrics | _trained_metrics(run, trained)


def _sampled_metrics(sampled: Sequence[Outcomes]) -> dict[str, float]:
    """Of all groups that were sampled, also those that the filter drops."""
    names = sorted({name for part in sampled for name in part.scores})
    scores = {name: np.concatenate([part.score(name) for part in sampled]) for name in names}
    compared = scores.get("acc", scores["seq_reward"])
    metrics = {
        **statistics.score_metrics(scores),
        "rollout/model_version": int(max(part.versions.max() for part in sampled)),
        "reward/unfiltered_mean": float(np.mean(scores["seq_reward"])),
        "reward/length_correlation": statistics.length_correlation(
            scores["score"],
            np.concatenate([part.lengths for part in sampled]),
            scores["acc"] > 0 if "acc" in scores else np.zeros(compared.shape, bool),
            np.concatenate([~part.failed for part in sampled]) & ~np.isnan(scores["score"]),
        ),
    }
    if compared.shape[1] > 1:  # one sample has nothing to be equal to
        metrics["dynamic_sampling/uniform_share"] = float(np.mean(compared.max(axis=1) == compared.min(axis=1)))
    return metrics


def _trained_metrics(run: Run, trained: Experience) -> dict[str, float]:
    data, prompt_lengths = run.config.data, np.array([len(prompt) for prompt in trained.prompts])
    return {
        **statistics.spread("critic/score", trained.scores["seq_reward"]),
        **statistics.spread("critic/rewards", final_rewards(trained)),
        **statistics.length_metrics("response", trained.mask.sum(axis=-1), data.max_response_length),
        **statistics.length_metrics("prompt", prompt_lengths, data.max_prompt_length),
        **statistics.spread("sample/model_version", trained.versions),
        "sample/task_count": len(np.unique(trained.rows)),
        **statistics.group_reward_metrics(final_rewards(trained)),
    }


def collected_arrays(collected: Collected) -> dict[str, Any]:
    """`collected` as NumPy arrays, nested by name, for a checkpoint."""
    text = json.dumps([collected.metrics, collected.num_kept, collected.num_evaluated])
    arrays: dict[str, Any] = {"numbers": np.frombuffer(text.encode(), np.uint8)}
    if collected.experience is not None:
        arrays["experience"] = to_arrays(collected.experience)
    return arrays


def restore_collected(run: Run, arrays: Mapping[str, Any]) -> Collected:
    """The inverse of `collected_arrays`."""
    metrics, num_kept, num_evaluated = json.loads(np.asarray(arrays["numbers"]).tobytes())
    experience = arrays.get("experience")
    if experience is not None:
        experience = from_arrays(experience, run.train_set, run.sampler.tokenizer)
    return Collected(experience, metrics, num_kept, num_evaluated)
