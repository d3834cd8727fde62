"""Host: padding of rows to one width, with few widths for many lengths."""

from collections.abc import Sequence

import numpy as np


def bucket(length: int) -> int:
    """The smallest of 4, 6, 8, 12, 16, 24, 32, ... that is at least `length`: few shapes, little padding."""
    size = 4
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def pad_prompts(prompts: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded tokens [Q, width] int32 and mask [Q, width] bool."""
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = True
    return tokens, mask
