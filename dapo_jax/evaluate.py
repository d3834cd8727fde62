"""Host: accuracy of a policy on problems that it is not trained on."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from dapo_jax.monitor.statistics import evaluation_metrics
from dapo_jax.rollout.experience import Experience
from dapo_jax.rollout.sampling import EVALUATE, Sampling
from dapo_jax.run import Run
from dapo_jax.scoring import add_model_scores


def evaluate(run: Run, params: Any) -> dict[str, float]:
    """`eval/{data_source}/{score}/mean@k` of the held-out problems, with k = evaluate.n samples each.

    Every evaluation draws with the same noise, so that two of them differ by the policy alone.

    Args:
        params: training parameters.
    """
    if not len(run.eval_set):
        return {}
    settings = run.config.evaluate
    rows = range(len(run.eval_set))
    weights = run.decode_weights(params)
    with jax.set_mesh(run.rollout_mesh), run.stage("testing"):
        experience = run.sampler.start(
            weights,
            run.eval_set,
            rows,
            rows,
            num_samples=settings.n,
            purpose=EVALUATE,
            sampling=Sampling.create(settings.temperature, settings.top_p, settings.top_k),
            stage=lambda _: nullcontext(),
        )()
        if run.scorer is not None:
            experience = add_model_scores(experience, run.eval_set, run.scorer, run.config)
    return _by_source(run, experience)


def _by_source(run: Run, experience: Experience) -> dict[str, float]:
    sources = np.array([run.eval_set.rows[row].data_source for row in experience.rows])
    metrics = {}
    for source in sorted(set(sources)):
        chosen = sources == source
        metrics |= evaluation_metrics(f"eval/{source}", {name: values[chosen] for name, values in experience.scores.items()})
    return metrics


def mean_accuracy(metrics: Mapping[str, float]) -> float | None:
    """The mean over data sources of eval/{source}/acc/mean@k, None if nothing was evaluated."""
    values = [value for name, value in metrics.items() if name.startswith("eval/") and "/acc/mean@" in name]
    return float(np.mean(values)) if values else None
