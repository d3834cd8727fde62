"""Host: tensors of 4-bit numbers with a scale for 32 of them (MXFP4, OCP Microscaling Formats 1.0), read as float32.

gpt-oss stores the matrices of its experts so. A number has a sign, two bits of exponent and one of mantissa (e2m1); a
byte holds two of them, the first in its lower half. A scale is a power of two (e8m0).

Sizes: E experts, K columns of a row, N of a result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK, BIAS, NAN = 32, 127, 255  # numbers of a block; of a scale: what is subtracted, and what stands for no number
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BLOCKS, SCALES = "_blocks", "_scales"  # how the names of the two tensors end


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The tensor [E, K, N] of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], both bytes.

    `blocks` and `scales` are tensors in files, as models/load.py has them, and so is this.
    """

    blocks: Any
    scales: Any

    def header(self) -> "Mxfp4Tensor":
        """What reads shape and dtype alone."""
        return self

    def get_dtype(self) -> str:
        """BF16, which holds every number; words if one of the two tensors is not of bytes."""
        found = (one.header().get_dtype() for one in (self.blocks, self.scales))
        return next((f"{dtype} in MXFP4, which takes U8" for dtype in found if dtype != "U8"), "BF16")

    def get_shape(self) -> tuple[int, ...]:
        """Of the tensor; of the blocks, if the two do not fit each other."""
        blocks, scales = (tuple(one.header().get_shape()) for one in (self.blocks, self.scales))
        if len(blocks) != 4 or blocks[3] * 2 != BLOCK or scales != blocks[:3]:
            return blocks
        return blocks[0], blocks[2] * BLOCK, blocks[1]

    def read(self) -> np.ndarray:
        """float32; NaN where a scale is."""
        return decoded(self.blocks.read(), self.scales.read())


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, K, N] float32 of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], both uint8."""
    numbers = np.empty((*blocks.shape, 2), np.float32)
    numbers[..., 0], numbers[..., 1] = NUMBERS[blocks & 15], NUMBERS[blocks >> 4]
    powers = np.where(
        scales == NAN, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(scales, NAN - 1).astype(np.int32) - BIAS)
    )
    numbers = numbers.reshape(*scales.shape, BLOCK) * powers[..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """`tensors` by their names, with one in the place of each pair of blocks and scales."""
    pairs = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    pairs = [name for name in pairs if name + SCALES in tensors]
    parts = {name + end for name in pairs for end in (BLOCKS, SCALES)}
    others = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return others | {name: Mxfp4Tensor(tensors[name + BLOCKS], tensors[name + SCALES]) for name in pairs}
