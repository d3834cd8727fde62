"""Host: the experts that the sampler used for each token, so that training can use the same."""

from collections.abc import Sequence

import numpy as np

from dapo_jax.models.architecture import Choices


class ExpertRecords:
    """The experts of the tokens of Q prompts and their B responses, as an engine feeds them to the model.

    A response whose first tokens an earlier call has drawn has them as the end of its prompt: their records are kept,
    what the engine finds for them again is dropped.

    Args:
        prompt_lengths: [Q] tokens, without what responses have begun with.
        begun: [B] tokens that each response has begun with.
        known: [B] records of these, [tokens, l, k]; None = there are none.
    """

    def __init__(
        self, choices: Choices, prompt_lengths: Sequence[int], begun: np.ndarray, known: list[np.ndarray] | None
    ) -> None:
        self._begun, self.num_samples = begun, len(begun) // len(prompt_lengths)
        layers, per_token, dtype = choices
        self.prompts = [np.full((length, layers, per_token), -1, dtype) for length in prompt_lengths]
        empty: np.ndarray = np.zeros((0, layers, per_token), dtype)
        self.responses = [empty] * len(begun) if known is None else [one if len(one) else empty for one in known]
        self._most = np.full(len(begun), np.iinfo(np.int64).max)  # tokens of each response that are wanted

    def add_prompts(self, prompts: Sequence[int], fed: Sequence[int], experts: np.ndarray) -> None:
        """Takes what a prefill of `prompts` found.

        Args:
            fed: [M] tokens of each that it was given, the first ones.
            experts: [M, P, l, k], of left-padded tokens.
        """
        for prompt, count, found in zip(prompts, fed, experts, strict=True):
            begun, length = int(self._begun[prompt * self.num_samples]), len(self.prompts[prompt])
            known = len(self.responses[prompt * self.num_samples])
            new = count - length - known  # tokens that were begun and have not been fed before, the last ones
            if not begun:
                self.prompts[prompt][:count] = found[len(found) - count :]
            elif known and new > 0:
                self._put(prompt, known, found[len(found) - new :])
            elif new == begun:  # nothing is known of them
                self._put(prompt, begun - 1, found[-1:])

    def add_chunk(self, rows: np.ndarray, starts: np.ndarray, experts: np.ndarray) -> None:
        """Takes what was found while tokens from number `starts` [B] on of the responses `rows` [B] were drawn.

        The first is drawn from the token before, which may be the last of the prompt: all samples of the prompt feed
        that, and what the first of them finds is recorded.
        """
        for row, start, found in zip(rows.tolist(), starts.tolist(), experts, strict=True):
            if start:
                self._put(row, start - 1, found)
                continue
            if row % self.num_samples == 0:
                self.prompts[row // self.num_samples][-1] = found[0]
            self._put(row, 0, found[1:])

    def end(self, row: int, length: int) -> None:
        """Keeps what a response of `length` tokens needs: its last token was not fed."""
        self._most[row] = max(length - 1, 0)
        self.responses[row] = self.responses[row][: self._most[row]].copy()

    def _put(self, row: int, place: int, found: np.ndarray) -> None:
        held, most = self.responses[row], int(self._most[row])
        found = found[: max(most - place, 0)]
        end = place + len(found)
        if len(held) < end:
            grown = np.full((min(max(end, 2 * len(held)), most), *held.shape[1:]), -1, held.dtype)
            grown[: len(held)] = held
            self.responses[row] = held = grown
        held[place:end] = found
