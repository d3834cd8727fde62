"""Host: the batch of a training step, and how it came about."""

from dataclasses import dataclass

from dapo_jax.data.experience import Experience


@dataclass(frozen=True)
class Collected:
    """What a training step trains on, and what is logged of how it came about."""

    experience: Experience | None  # the groups; None if the step is skipped
    metrics: dict[str, float]
    num_kept: int  # groups that passed the filter
    num_evaluated: int  # groups that were sampled
    solved: bool = False  # nothing is left to learn from, see dynamic_sampling/too_few.py
