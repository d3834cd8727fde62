"""Host: what the engine compiles and calls in a training step of partial rollouts, as the preflight sees it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dapo_jax.data.work import total_work
from dapo_jax.rollout.round_plan import RoundPlan

CONTINUED = "continued"  # begins the names of what continues responses


def plan_segments(
    plan: Callable[[np.ndarray, np.ndarray], RoundPlan],
    segment_length: int,
    *,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
) -> RoundPlan:
    """A step that begins such responses, and continues those of as many steps before it as the longest one takes.

    Args:
        plan: (response lengths [Q, G], prompt lengths [Q]) -> the round of an engine.
        segment_length: tokens that a response advances per step.
        response_lengths: [Q, G] tokens.
        prompt_lengths: [Q] tokens.
    """
    first = plan(np.minimum(response_lengths, segment_length), prompt_lengths)
    prompts, drawn = [], []
    for begun in range(segment_length, int(response_lengths.max()), segment_length):
        group, sample = np.nonzero(response_lengths > begun)
        prompts.append(prompt_lengths[group] + begun)
        drawn.append(np.minimum(response_lengths[group, sample] - begun, segment_length))
    if not prompts:
        return first
    further = plan(np.concatenate(drawn)[:, None], np.concatenate(prompts))
    return RoundPlan(
        programs=[
            *first.programs,
            *(replace(program, name=f"{CONTINUED}: {program.name}") for program in further.programs),
        ],
        rows=max(first.rows, further.rows),
        sizes={**first.sizes, **{f"{CONTINUED}_{name}": size for name, size in further.sizes.items()}},
        work=total_work([first.work, further.work]),
    )
