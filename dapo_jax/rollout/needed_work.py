"""Host: the operations that responses need of any engine, by stage; what the engine computes is its own to count."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops


def needed_work(arch: Architecture, prompt_lengths: np.ndarray, response_lengths: np.ndarray) -> dict[str, float]:
    """Operations by stage.

    prefill: each token of a prompt once, under causal attention. Its scores of the vocabulary are not counted.
    decode: each token of a response but the first, which the prompt predicts. A token attends to its prompt and to the
    tokens sampled before it.

    Args:
        prompt_lengths: [Q] tokens.
        response_lengths: [Q, G] tokens.
    """
    flops, prompts, responses = (
        token_flops(arch),
        prompt_lengths.astype(np.float64),
        response_lengths.astype(np.float64),
    )
    steps = np.maximum(responses - 1, 0)
    keys = steps * prompts[:, None] + steps * (steps + 1) / 2
    return {
        "prefill": float(flops.layers * prompts.sum() + flops.pair * (prompts * (prompts + 1) / 2).sum()),
        "decode": float((flops.layers + flops.head) * steps.sum() + flops.pair * keys.sum()),
    }


def work_of(computed: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> dict[str, Work]:
    """Work by stage, from what each part of the engine's work has computed and all responses need."""
    return {stage: Work(sum(part[stage] for part in computed), needs) for stage, needs in needed.items()}
