"""Host: groups of responses with what is known of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError

OWN_SCORES = ("seq_reward", "overlong_reward", "overlong", "seq_final_reward", "token_level_rewards", "reward_model")


@dataclass(frozen=True)
class Outcomes:
    """What is known of Q groups of G responses beside their tokens; all arrays are NumPy's."""

    numbers: np.ndarray  # [Q] int64, prompt numbers
    rows: np.ndarray  # [Q] int64, rows of the prompt set
    versions: np.ndarray  # [Q] int64, training steps that the sampling policy had seen
    lengths: np.ndarray  # [Q, G] int64, tokens
    scores: dict[str, np.ndarray]  # [Q, G] float64 each
    failed: np.ndarray  # [Q, G] bool, verification failed
    error: str = ""  # the commonest of the failed verifications

    def score(self, name: str) -> np.ndarray:
        """The values [Q, G] of a score, NaN where there is none."""
        return self.scores.get(name, np.full(self.lengths.shape, np.nan))


@dataclass(frozen=True)
class Experience:
    """Q groups of G responses of at most R tokens, in prompt order; all arrays are NumPy's."""

    numbers: np.ndarray  # [Q] int64, prompt numbers
    rows: np.ndarray  # [Q] int64, rows of the prompt set
    prompts: list[list[int]]  # token ids
    responses: np.ndarray  # [Q, G, R] int32
    mask: np.ndarray  # [Q, G, R] bool
    logprobs: np.ndarray  # [Q, G, R] float32
    finished: np.ndarray  # [Q, G] bool
    texts: list[list[str]]  # decoded responses
    scores: dict[str, np.ndarray]  # [Q, G] float64 each: acc, score and whatever else was measured
    versions: np.ndarray  # [Q] int64, training steps that the sampling policy had seen
    failed: np.ndarray  # [Q, G] bool, verification failed; False in what a checkpoint restores
    kl: np.ndarray | None = None  # [Q, G, R] float32, divergence of each token from the reference; None = not measured
    answers: list[list[str | None]] | None = None  # [Q][G] what the verifier read, as text; None once groups are chosen
    error: str = ""  # the commonest of the failed verifications; "" once groups are chosen

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_errors(self) -> int:
        """Verifications that failed."""
        return int(self.failed.sum())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(self.mask.sum())

    @property
    def outcomes(self) -> Outcomes:
        """The same without the tokens, which take nearly all of the memory."""
        lengths = self.mask.sum(axis=-1)
        return Outcomes(self.numbers, self.rows, self.versions, lengths, self.scores, self.failed, self.error)

    def score(self, name: str) -> np.ndarray:
        """The values [Q, G] of a score, NaN where there is none."""
        return self.scores.get(name, np.full(self.finished.shape, np.nan))

    def with_scores(self, **scores: np.ndarray) -> "Experience":
        """The same with further values [Q, G]."""
        return replace(self, scores={**self.scores, **scores})

    def select(self, groups: np.ndarray) -> "Experience":
        """The groups at these indices."""
        return Experience(
            self.numbers[groups],
            self.rows[groups],
            [self.prompts[group] for group in groups],
            self.responses[groups],
            self.mask[groups],
            self.logprobs[groups],
            self.finished[groups],
            [self.texts[group] for group in groups],
            {name: values[groups] for name, values in self.scores.items()},
            self.versions[groups],
            self.failed[groups],
            None if self.kl is None else self.kl[groups],
        )


def describe_failures(parts: Sequence[Outcomes]) -> str:
    """How many verifications failed and their commonest error; "" if none did."""
    failed = sum(int(part.failed.sum()) for part in parts)
    if not failed:
        return ""
    error = max(parts, key=lambda part: part.failed.sum()).error
    count = sum(part.failed.size for part in parts)
    share = f"all {count}" if failed == count else f"{failed} of {count}"
    return f"the reward function failed on {share} responses, most often with {error}"


def total_failure(parts: Sequence[Outcomes], what: str) -> str | None:
    """What happened and what to do if there are verdicts on `what` and every one is a failure; None otherwise."""
    if not parts or not all(part.failed.all() for part in parts):
        return None
    return (
        f"{what}: {describe_failures(parts)}: correct it, and let it return its lowest score for a response that it "
        "cannot read (for a time-out raise reward.timeout_s); then rerun the same command"
    )


def check_score_names(names: Iterable[str]) -> None:
    """Raises ValueError if a verifier returns a number under a name that has a meaning already."""
    for name in names:
        if name in OWN_SCORES:
            raise InputError(
                f"the reward function returns {name!r}, which is computed from its score: give that number another name"
            )
        if "/" in name:
            raise InputError(
                f"the reward function returns {name!r}: in the names of metrics / stands between parts, use _ in it"
            )


def concatenate(parts: Sequence[Experience]) -> Experience:
    """The groups of all parts, one after the other. A score that a part lacks is NaN there."""
    names = {name: None for part in parts for name in part.scores}

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return Experience(
        join("numbers"),
        join("rows"),
        [prompt for part in parts for prompt in part.prompts],
        join("responses"),
        join("mask"),
        join("logprobs"),
        join("finished"),
        [texts for part in parts for texts in part.texts],
        {name: np.concatenate([part.score(name) for part in parts]) for name in names},
        join("versions"),
        join("failed"),
        None if any(part.kl is None for part in parts) else join("kl"),
    )


def to_arrays(experience: Experience) -> dict[str, np.ndarray]:
    """What a checkpoint has to hold of `experience`; prompts and texts follow from rows and responses."""
    names = ("numbers", "rows", "responses", "mask", "logprobs", "finished", "versions")
    arrays = {name: getattr(experience, name) for name in names}
    if experience.kl is not None:
        arrays["kl"] = experience.kl
    return {**arrays, **{f"score {name}": values for name, values in experience.scores.items()}}


def from_arrays(arrays: Mapping[str, np.ndarray], prompt_set: PromptSet, tokenizer: Tokenizer) -> Experience:
    """The inverse of `to_arrays`, for groups of rows of `prompt_set`."""
    fields: dict[str, Any] = {
        name: np.asarray(values) for name, values in arrays.items() if not name.startswith("score ")
    }
    texts = [
        [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in zip(*group, strict=True)]
        for group in zip(fields["responses"], fields["mask"], strict=True)
    ]
    return Experience(
        **fields,
        prompts=[prompt_set.tokens[row] for row in fields["rows"]],
        texts=texts,
        scores={name.removeprefix("score "): np.asarray(v) for name, v in arrays.items() if name.startswith("score ")},
        failed=np.zeros(fields["finished"].shape, bool),
    )
