"""Host: the operations that responses need of any engine, by stage; what the engine computes is its own to count."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops


def needed_work(arch: Architecture, prompt_lengths: np.ndarray, response_lengths: np.ndarray) -> dict[str, float]:
    """Operations by stage.

    prefill: each token of a prompt once. Its scores of the vocabulary are not counted.
    decode: each step that samples a token of a response; not the first token, which prefill predicts.

    Args:
        prompt_lengths: [Q] tokens.
        response_lengths: [Q, G] tokens.
    """
    flops = token_flops(arch)
    return {
        "prefill": flops.of_prompts(prompt_lengths),
        "decode": flops.of_responses(prompt_lengths, response_lengths),
    }


def work_of(computed: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> dict[str, Work]:
    """Work by stage, from what each part of the engine's work has computed and all responses need."""
    return {stage: Work(sum(part[stage] for part in computed), needs) for stage, needs in needed.items()}
