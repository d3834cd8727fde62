"""Host: the numbers of a response that made its verifier fail: the lowest that the verifier has given.

A response that raises, crashes or takes too long in its verifier is wrong. It must not earn more than a wrong answer,
and only the verifier knows what that earns: a time-out of a function of -1 and 1 that counted 0 would be rewarded. So
each of its numbers is the lowest of: what `Verifiers.wrong` gives it, the verdicts on its group, and those on groups of
earlier steps (StreamState.lowest). None of these depends on which verdict came first, nor on rounds or processes.
"""

from collections.abc import Mapping

import numpy as np

from dapo_jax.data.experience import Experience
from dapo_jax.rewards.messages import EPISODE_NUMBERS


def lowest_given(scores: Mapping[str, np.ndarray], failed: np.ndarray) -> dict[str, np.ndarray]:
    """By name, the lowest number [Q] that the verifier gave to a response of each group; inf where it gave none.

    What is counted of an episode is no verdict.

    Args:
        scores: [Q, G] each, NaN where there is none.
        failed: [Q, G] bool, verification failed.
    """
    given = {name: np.where(failed, np.nan, scores[name]) for name in scores if name not in EPISODE_NUMBERS}
    return {name: np.fmin.reduce(values, axis=1, initial=np.inf) for name, values in given.items()}


def lowered(scores: Mapping[str, np.ndarray], failed: np.ndarray, before: Mapping[str, float]) -> dict[str, np.ndarray]:
    """`scores` with the lowest numbers for the failures that the response caused: those that have a score.

    A number that such a response lacks is at most 0, if the verifier has ever given it.

    Args:
        scores, failed: as for `lowest_given`.
        before: the lowest number of each name in earlier steps.
    """
    wrong = failed & ~np.isnan(scores["score"])
    if not wrong.any():
        return dict(scores)
    groups, found = lowest_given(scores, failed), {}
    for name in dict.fromkeys([*scores, *before]):
        values = scores.get(name, np.full(failed.shape, np.nan))
        lowest = np.minimum(groups.get(name, np.inf), before.get(name, np.inf)) * np.ones(len(values))
        lowest = np.broadcast_to(lowest[:, None], values.shape)
        least = np.minimum(np.where(np.isnan(values), 0.0, values), lowest)
        found[name] = np.where(wrong & np.isfinite(lowest), least, values)
    return found


def with_lowest(experience: Experience, before: Mapping[str, float]) -> Experience:
    """`experience`, before a reward model's scores are mixed in, with the scores of `lowered`."""
    return experience.with_scores(**lowered(experience.scores, experience.failed, before))
