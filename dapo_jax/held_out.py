"""Host: accuracy of a policy on problems that it is not trained on."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from dapo_jax.config.sections import Config
from dapo_jax.data.experience import Experience, total_failure
from dapo_jax.monitor.bars import bar, shows_progress
from dapo_jax.monitor.statistics import evaluation_metrics, length_metrics
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.problems import TaskSet
from dapo_jax.rewards.scoring import add_model_scores
from dapo_jax.rollout.sampling import EVALUATE, Sampling
from dapo_jax.run import Run

logger = logging.getLogger(__name__)

_ACCURACY = re.compile(r"eval/.+/acc/mean@\d+")

Receive = Callable[[TaskSet, Experience], None]


def evaluate(
    run: Run,
    params: Any,
    *,
    prefix: str = "eval",
    receive: Receive = lambda *_: None,
    verdicts_needed: bool = False,
) -> dict[str, float]:
    """`prefix`/{task set}/{score}/{mean@n,std@n,best@k,worst@k,maj@k,pass@k} of all task sets, and response lengths.

    Every evaluation draws with the same noise, so that two of them differ by the policy alone.

    Args:
        params: training parameters.
        receive: is given each batch of verified responses.
        verdicts_needed: a task set with no verdict at all is an error, not a warning: a policy that cannot answer yet
            may learn to.

    Raises:
        RuntimeError: the reward function failed on every response to a task set whose verdicts are needed.
    """
    metrics: dict[str, float] = {}
    weights = run.decode_weights(params) if run.task_sets else None
    num_errors, total = 0, sum(len(task.prompts) * task.options.n for task in run.task_sets)
    with bar("evaluating", total=total, unit="response", shown=shows_progress(run.config)) as ended:
        for task in run.task_sets:
            batches, outcomes = [], []
            with jax.set_mesh(run.rollout_mesh), run.stage("testing"):
                for experience in _sample(run, weights, task, ended.update):
                    receive(task, experience)
                    batches.append(_Measured.of(experience))
                    outcomes.append(experience.outcomes)
                    num_errors += experience.num_errors
            if failure := total_failure(outcomes, f"evaluation of {task.options.name or 'the held-out problems'}"):
                if verdicts_needed:
                    raise SharedFailure(failure)
                logger.warning("%s", failure)
            metrics |= _task_metrics(run.config, prefix, task, _Measured.join(batches))
    return metrics | ({f"{prefix}/num_errors": num_errors} if run.task_sets else {})


def mean_accuracy(metrics: Mapping[str, float]) -> float | None:
    """The mean over task sets of eval/{task set}/acc/mean@n, None if nothing was evaluated."""
    values = [value for name, value in metrics.items() if _ACCURACY.fullmatch(name)]
    return float(np.mean(values)) if values else None


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What is kept of Q rows with n samples each."""

    scores: dict[str, np.ndarray]  # [Q, n], NaN where a sample has none
    answers: list[list[str | None]]  # [Q][n]
    lengths: np.ndarray  # [Q, n] tokens

    @classmethod
    def of(cls, experience: Experience) -> "_Measured":
        assert experience.answers is not None
        return cls(experience.scores, experience.answers, experience.mask.sum(axis=-1))

    @classmethod
    def join(cls, parts: "Sequence[_Measured]") -> "_Measured":
        names = dict.fromkeys(name for part in parts for name in part.scores)
        absent = [np.full(part.lengths.shape, np.nan) for part in parts]
        scores = {
            name: np.concatenate([part.scores.get(name, none) for part, none in zip(parts, absent, strict=True)])
            for name in names
        }
        answers = [row for part in parts for row in part.answers]
        return cls(scores, answers, np.concatenate([part.lengths for part in parts]))


def _sample(run: Run, weights: Any, task: TaskSet, on_ended: Callable[[int], object]) -> Iterator[Experience]:
    """Verified responses to all rows of a task set, a batch at a time."""
    options = task.options
    sampler = dataclasses.replace(run.sampler, verifiers=run.verifiers[options.reward_function])
    size = options.batch_size or len(task.prompts)
    for start in range(0, len(task.prompts), size):
        rows = range(start, min(start + size, len(task.prompts)))
        experience = sampler.start(
            weights,
            task.prompts,
            rows,
            rows,
            num_samples=options.n,
            purpose=EVALUATE,
            sampling=Sampling.create(options.temperature, options.top_p, options.top_k),
            stage=lambda _: nullcontext(),
            on_ended=on_ended,
        )()
        if run.scorer is not None:
            reward = dataclasses.replace(run.config.reward, function=options.reward_function)
            config = dataclasses.replace(run.config, reward=reward)
            experience = add_model_scores(experience, task.prompts, run.scorer, config)
        yield experience


def _task_metrics(config: Config, prefix: str, task: TaskSet, measured: _Measured) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, problems in task.by_name():
        most = max(map(len, problems))
        rows = np.array([[*rows, *[-1] * (most - len(rows))] for rows in problems])  # -1: no such row

        def grouped(values: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return np.where(rows[..., None] >= 0, values[rows], np.nan).reshape(len(rows), -1)

        metrics |= evaluation_metrics(
            f"{prefix}/{name}",
            {score: grouped(values) for score, values in measured.scores.items()},
            [[answer for row in problem for answer in measured.answers[row]] for problem in rows],
            bootstrapped=config.evaluate.bootstrap,
            detailed=config.monitor.detailed_stats,
        )
        lengths = measured.lengths[[row for problem in problems for row in problem]]
        metrics |= length_metrics(f"{prefix}/{name}/response", lengths, config.data.max_response_length)
        metrics[f"{prefix}/{name}/finished_task_count"] = len(problems)
    return metrics
