"""Host: what is recorded of a step besides metrics: some responses with their scores, for people to read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.data.experience import Collected, Experience
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.monitor.tensorboard import Histograms, histogram
from dapo_jax.run.problems import TaskSet

HELD_OUT_KIND = "held_out"  # the kind of responses to problems that are not trained on


def step_row(
    collected: Collected,
    metrics: Mapping[str, float],
    histograms: Histograms,
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    *,
    num_samples: int,
) -> dict[str, Any]:
    """What is recorded of a training step: metrics, histograms and the texts of `num_samples` responses.

    Args:
        metrics, histograms: of the whole step.
        rows: of the training problems.
    """
    row = {"metrics": {name: float(value) for name, value in metrics.items()}, "samples": [], "histograms": histograms}
    if (experience := collected.experience) is not None:
        row["samples"] = trained_texts(experience, rows, tokenizer, wanted=num_samples)
        row["histograms"] = histograms | {
            "response_length": histogram(experience.lengths[experience.known]),
            "critic/score": histogram(experience.scores["seq_reward"]),
            "rollout/logprob": histogram(experience.logprobs[experience.policy_mask & experience.known[:, :, None]]),
        }
    return row


def trained_texts(
    experience: Experience, rows: Sequence[PromptRow], tokenizer: Tokenizer, *, wanted: int
) -> list[dict[str, Any]]:
    """`wanted` trained responses: a quarter each of the kinds best, worst, truncated and, as a fair picture, the first
    of the first groups ("any"), which also fill up. None appears twice.

    Args:
        rows: of the training problems.
    """
    score = experience.scores["seq_reward"]
    groups = np.arange(len(experience))
    best, worst = np.nanargmax(score, axis=1), np.nanargmin(score, axis=1)
    kinds = {
        "best": [(group, best[group]) for group in np.argsort(-np.nanmax(score, axis=1), kind="stable")],
        "worst": [(group, worst[group]) for group in np.argsort(np.nanmin(score, axis=1), kind="stable")],
        "truncated": np.argwhere(~experience.finished),
    }
    chosen: dict[tuple[int, int], str] = {}
    for kind, candidates in kinds.items():
        new = dict.fromkeys((int(group), int(sample)) for group, sample in candidates)
        chosen |= dict.fromkeys([place for place in new if place not in chosen][: wanted // 4], kind)
    firsts = [(int(group), 0) for group in groups if (int(group), 0) not in chosen]
    chosen |= dict.fromkeys(firsts[: wanted - len(chosen)], "any")
    return [{"kind": kind} | _text(experience, place, rows, tokenizer) for place, kind in chosen.items()]


def held_out_texts(
    experience: Experience, task_set: TaskSet, tokenizer: Tokenizer, *, wanted: int
) -> list[dict[str, Any]]:
    """The first response to each of the first `wanted` problems of every task, as far as they are in this batch.

    Every evaluation has the same ones, whatever their score.
    """
    tasks = {problem[0]: task for task, problems in task_set.by_name for problem in problems[:wanted]}
    return [
        {"kind": HELD_OUT_KIND, "task": tasks[row]} | _text(experience, (group, 0), task_set.prompts.rows, tokenizer)
        for group, row in enumerate(experience.rows.tolist())
        if row in tasks
    ]


def _text(
    experience: Experience, place: tuple[int, int], rows: Sequence[PromptRow], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The response at `place`, (group, sample), with its prompt and scores, and the turns of an episode."""
    group, sample = place
    return {
        "prompt": tokenizer.decode(experience.prompts[group], skip_special_tokens=False),
        "response": experience.texts[group][sample],
        **turns_of(experience, place, tokenizer),
        "ground_truth": rows[experience.rows[group]].truth_text,
        "length": int(experience.lengths[place]),
        **{name: float(values[place]) for name, values in experience.scores.items() if not np.isnan(values[place])},
    }


def turns_of(experience: Experience, place: tuple[int, int], tokenizer: Tokenizer) -> dict[str, list[dict[str, str]]]:
    """{"turns": what the policy and the environment wrote, in order}; {} if no environment wrote anything."""
    if experience.by_policy is None:
        return {}
    kept = experience.mask[place]
    tokens, own = experience.responses[place][kept], experience.by_policy[place][kept]
    starts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist()]
    parts = zip(np.split(tokens, starts[1:]), own[starts].tolist(), strict=True) if len(tokens) else ()
    return {
        "turns": [
            {"by": "policy" if own else "environment", "text": tokenizer.decode(part.tolist())} for part, own in parts
        ]
    }
