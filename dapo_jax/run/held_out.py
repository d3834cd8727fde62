"""Host: accuracy of a policy on problems that it is not trained on."""

import dataclasses
import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.config.sections import RewardModelConfig
from dapo_jax.data.experience import Experience
from dapo_jax.monitor.bars import bar
from dapo_jax.monitor.statistics import HELD_OUT, evaluation_metrics, length_metrics
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rewards.lowest import lowered, lowest_given, updated_lowest
from dapo_jax.rewards.pipeline import RewardPipeline
from dapo_jax.rewards.scoring import mixed
from dapo_jax.rewards.verification import total_failure
from dapo_jax.rollout.sampling import EVALUATE, Sampling
from dapo_jax.run.problems import TaskSet
from dapo_jax.run.sampler import Sampler

logger = logging.getLogger(__name__)

EVALUATED = re.compile(r"eval/(.+)/finished_task_count")
SCORED = re.compile(r"eval/(.+)/score/mean@\d+")
JUDGED = ("model", "template", "extra_body", "max_score", "threshold", "max_tokens")  # what a judge's scores depend on
LIMITS = {"num_workers", "timeout_s", "memory_limit_mb"}  # of an environment
Receive = Callable[[TaskSet, Experience], None]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What measures a policy: problems, and how responses to them are sampled, scored and summed up."""

    task_sets: tuple[TaskSet, ...]
    sampler: Sampler
    rewards: RewardPipeline
    bootstrapped: bool  # see evaluation_metrics
    detailed: bool  # see evaluation_metrics
    shows_progress: bool  # on a terminal
    stage: Stage  # of the whole evaluation; the sampler's shows nothing

    def checksum(self) -> str:
        """Equal where accuracies can be compared: for the same problems, sampled, scored and summed up alike."""
        places = {"files", "prompt_key", "max_prompts", "batch_size"}  # the problems that they lead to count
        found: list[Any] = [self.sampler.stop, self.rewards.max_response_length, self.bootstrapped]
        reward, environments = self.rewards.settings, self.sampler.environments
        found += [reward.error_score, reward.keep_special_tokens, reward.format.pattern]
        found += [reward.model.weight, reward.model.function_weight]
        if self.rewards.judge is not None:
            found += [getattr(reward.judge, name) for name in JUDGED]
        if environments is not None:
            found += [value for name, value in vars(environments.settings).items() if name not in LIMITS]
        for task in self.task_sets:
            options = {name: value for name, value in vars(task.options).items() if name not in places}
            found += [options, task.prompts.checksum()]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def evaluate(
    held_out: HeldOut,
    decode_weights: Callable[[Any], Any],
    params: Any,
    *,
    prefix: str = "eval",
    receive: Receive = lambda *_: None,
    verdicts_needed: bool = False,
) -> dict[str, float]:
    """`prefix`/{task set}/{score}/{mean@n,std@n,best@k,worst@k,maj@k,pass@k} of all task sets, and response lengths.

    Every evaluation draws with the same noise, so two evaluations differ only in the policy.

    Args:
        decode_weights: makes weights for the sampler of `params`.
        params: training parameters.
        receive: is given each batch of verified responses.
        verdicts_needed: a task set with no verdict at all is an error, not a warning: a policy that cannot answer yet
            may learn to. With a max_error_share below 1 it always is an error.

    Raises:
        RuntimeError: too many verifications failed.
    """
    task_sets = held_out.task_sets
    if not task_sets:
        return {}
    metrics: dict[str, float] = {}
    weights, num_errors, num_missing = decode_weights(params), 0, 0
    total = sum(len(task.prompts) * task.options.n for task in task_sets)
    with bar("evaluating", total=total, unit="response", shown=held_out.shows_progress) as ended:
        for task in task_sets:
            batches, outcomes = [], []
            with jax.set_mesh(held_out.sampler.mesh), held_out.stage("testing"):
                for experience, score in _sample(held_out, weights, task, ended.update):
                    receive(task, experience)
                    batches.append(_Measured.of(experience, score))
                    outcomes.append(experience.outcomes)
                    num_errors += experience.num_errors
                    num_missing += int((~experience.known).sum())
            what = f"evaluation of {task.options.name or 'the held-out problems'}"
            if failure := total_failure(outcomes, what, most := held_out.rewards.settings.max_error_share):
                if verdicts_needed or most < 1:
                    raise SharedFailure(failure)
                logger.warning("%s", failure)
            sources = [row.data_source for row in task.prompts.rows]
            measured = _Measured.join(batches, sources, held_out.rewards.settings.model)
            metrics |= _task_metrics(held_out, prefix, task, measured)
    return metrics | {f"{prefix}/num_errors": num_errors, f"{prefix}/num_missing": num_missing}


def mean_accuracy(metrics: Mapping[str, float]) -> float | None:
    """The mean over task sets of eval/{task set}/acc/mean@n, None if nothing was evaluated.

    None too if a task set has no verdict at all: the mean over the others would be of other problems.
    """
    evaluated = {match[1] for name in metrics if (match := EVALUATED.fullmatch(name))}
    if evaluated - {match[1] for name in metrics if (match := SCORED.fullmatch(name))}:
        return None
    values = [value for name, value in metrics.items() if HELD_OUT.fullmatch(name)]
    return float(np.mean(values)) if values else None


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What is kept of Q rows with n samples each."""

    scores: dict[str, np.ndarray]  # [Q, n], NaN where a sample has none
    failed: np.ndarray  # [Q, n] bool, verification failed
    answers: list[list[str | None]]  # [Q][n]
    lengths: np.ndarray  # [Q, n] tokens that the policy wrote
    whole: np.ndarray  # [Q, n] with those of an environment

    @classmethod
    def of(cls, experience: Experience, score: np.ndarray) -> "_Measured":
        """What `join` takes: `score` is the verifier's, without that of a reward model."""
        assert experience.answers is not None
        whole = experience.mask.sum(axis=-1)
        scores = {**experience.scores, "score": score}
        return cls(scores, experience.failed, experience.answers, experience.lengths, whole)

    @classmethod
    def join(cls, parts: "Sequence[_Measured]", sources: Sequence[str], model: RewardModelConfig) -> "_Measured":
        """All batches. A response that made its verifier fail has the lowest score of any to its data source.

        As in training, only then a reward model's score is mixed in.

        Args:
            sources: [Q] of data, of all rows.
        """
        names = dict.fromkeys(name for part in parts for name in part.scores)
        absent = [np.full(part.lengths.shape, np.nan) for part in parts]
        scores = {
            name: np.concatenate([part.scores.get(name, none) for part, none in zip(parts, absent, strict=True)])
            for name in names
        }
        answers = [row for part in parts for row in part.answers]
        failed = np.concatenate([part.failed for part in parts])
        given = {name: values for name, values in scores.items() if name != "reward_model"}
        least = scores | lowered(given, failed, sources, updated_lowest({}, lowest_given(given, failed, sources)))
        scores = {name: np.where(np.isnan(values), np.nan, least[name]) for name, values in scores.items()}
        if "reward_model" in scores:
            scores["score"] = mixed(scores["score"], scores["reward_model"], model)
        lengths, whole = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "whole"))
        return cls(scores, failed, answers, lengths, whole)


def _sample(
    held_out: HeldOut, weights: Any, task: TaskSet, on_ended: Callable[[int], object]
) -> Iterator[tuple[Experience, np.ndarray]]:
    """Scored responses to all rows of a task set, a batch at a time, each with the scores [Q, n] of its verifier."""
    options, rewards, sampler = task.options, held_out.rewards, held_out.sampler
    size, function = options.batch_size or len(task.prompts), options.reward_function
    sampling = Sampling.create(options.temperature, options.top_p, options.top_k)
    request = sampler.request(weights, options.n, EVALUATE, sampling)
    given = {"num_samples": options.n, "function": function, "on_ended": on_ended}
    verify = functools.partial(rewards.verify, task.prompts, **given)
    for start in range(0, len(task.prompts), size):
        experience = sampler.sample(request, task.prompts, range(start, min(start + size, len(task.prompts))), verify)
        score = experience.score("score")
        yield rewards.add_model_scores(experience, task.prompts), score


def _task_metrics(held_out: HeldOut, prefix: str, task: TaskSet, measured: _Measured) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, problems in task.by_name:
        most = max(map(len, problems))
        rows = np.array([[*rows, *[-1] * (most - len(rows))] for rows in problems])  # -1: no such row

        def grouped(values: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return np.where(rows[..., None] >= 0, values[rows], np.nan).reshape(len(rows), -1)

        metrics |= evaluation_metrics(
            f"{prefix}/{name}",
            {score: grouped(values) for score, values in measured.scores.items()},
            [[answer for row in problem for answer in measured.answers[row]] for problem in rows],
            n=min(map(len, problems)) * task.options.n,
            bootstrapped=held_out.bootstrapped,
            detailed=held_out.detailed,
        )
        chosen = [row for problem in problems for row in problem]
        lengths, whole = measured.lengths[chosen], measured.whole[chosen]
        limit = held_out.rewards.max_response_length
        metrics |= length_metrics(f"{prefix}/{name}/response", lengths, limit, whole)
        metrics[f"{prefix}/{name}/finished_task_count"] = len(problems)
    return metrics
