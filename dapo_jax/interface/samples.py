"""Host: what a policy has sampled, for loops of your own."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.data.experience import Experience

Prompt = str | Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Samples:
    """G responses of at most R tokens to each of Q prompts. All arrays are NumPy's."""

    prompts: list[Prompt]  # [Q], as they were given
    experience: Experience = dataclasses.field(repr=False)  # all that the package knows of them
    temperature: float  # of the distribution that the tokens were drawn from

    @property
    def texts(self) -> list[list[str]]:
        """[Q][G] decoded responses."""
        return self.experience.texts

    @property
    def tokens(self) -> np.ndarray:
        """[Q, G, R] int32 token ids, padded on the right."""
        return self.experience.responses

    @property
    def mask(self) -> np.ndarray:
        """[Q, G, R] bool, True on the tokens of a response, its end-of-sequence token included."""
        return self.experience.mask

    @property
    def logprobs(self) -> np.ndarray:
        """[Q, G, R] float32 log-probabilities of the tokens when they were sampled; 0 on padding."""
        return self.experience.logprobs

    @property
    def finished(self) -> np.ndarray:
        """[Q, G] bool, False where the length limit cut a response off."""
        return self.experience.finished

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, groups: Any) -> "Samples":
        """The groups at these indices, or where a mask [Q] is True."""
        given = np.asarray(groups)
        chosen = np.flatnonzero(given) if given.dtype == bool else given.astype(int)
        return Samples([self.prompts[index] for index in chosen], self.experience.select(chosen), self.temperature)
