"""Host: the numbers of a response that made its verifier fail: the lowest that the verifier has given.

A response that raises, crashes or takes too long in its verifier is wrong. It must not earn more than a wrong answer,
and only the verifier knows what that earns: a time-out of a function of -1 and 1 that counted 0 would be rewarded. So
each of its numbers is the lowest of: what `Verifiers.wrong` gives it, the verdicts on its group, and those on groups of
its data source in earlier steps (StreamState.lowest). None of these depends on which verdict came first, nor on rounds
or processes.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.rewards.messages import EPISODE_NUMBERS

Lowest = Mapping[str, Mapping[str, float]]  # numbers that the verifier has given, by data source and name


def lowest_given(
    scores: Mapping[str, np.ndarray], failed: np.ndarray, sources: Sequence[str]
) -> list[tuple[str, dict[str, float]]]:
    """Of each group its data source and, by name, the lowest number that the verifier gave to one of its responses.

    What is counted of an episode is no verdict.

    Args:
        scores: [Q, G] each, NaN where there is none.
        failed: [Q, G] bool, verification failed.
        sources: [Q] of data.
    """
    given = {name: np.where(failed, np.nan, scores[name]) for name in scores if name not in EPISODE_NUMBERS}
    lowest = {name: np.fmin.reduce(values, axis=1, initial=np.inf) for name, values in given.items()}
    return [
        (source, {name: float(values[index]) for name, values in lowest.items() if np.isfinite(values[index])})
        for index, source in enumerate(sources)
    ]


def updated_lowest(before: Lowest, given: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The lowest numbers so far, after groups of `lowest_given`."""
    found = {source: dict(numbers) for source, numbers in before.items()}
    for source, numbers in given:
        found[source] = _least(found.get(source, {}), numbers)
    return found


def _least(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: min(first.get(name, np.inf), second.get(name, np.inf)) for name in {**first, **second}}


def lowered(
    scores: Mapping[str, np.ndarray], failed: np.ndarray, sources: Sequence[str], before: Lowest
) -> dict[str, np.ndarray]:
    """`scores` with the lowest numbers for the failures that the response caused: those that have a score.

    A number that such a response lacks is at most 0, if the verifier has ever given it to its data source.

    Args:
        scores, failed, sources: as for `lowest_given`.
        before: of earlier steps.
    """
    wrong = failed & ~np.isnan(scores["score"])
    if not wrong.any():
        return dict(scores)
    given, found = lowest_given(scores, failed, sources), {}
    lowest = [_least(before.get(source, {}), numbers) for source, numbers in given]
    for name in dict.fromkeys([*scores, *(name for numbers in lowest for name in numbers)]):
        values = scores.get(name, np.full(failed.shape, np.nan))
        least = np.array([numbers.get(name, np.inf) for numbers in lowest])[:, None]
        lower = np.minimum(np.where(np.isnan(values), 0.0, values), least)
        found[name] = np.where(wrong & np.isfinite(least), lower, values)
    return found


def with_lowest(experience: Experience, prompts: PromptSet, before: Lowest) -> Experience:
    """`experience`, before a reward model's scores are mixed in, with the scores of `lowered`."""
    sources = sources_of(experience, prompts)
    return experience.with_scores(**lowered(experience.scores, experience.failed, sources, before))


def sources_of(experience: Experience, prompts: PromptSet) -> list[str]:
    """The data source [Q] of each group."""
    return [prompts.rows[row].data_source for row in experience.rows]
