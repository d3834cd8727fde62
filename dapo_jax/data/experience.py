"""Host: groups of responses with what is known of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.data.work import Work
from dapo_jax.errors import InputError

OWN_SCORES = (
    *("seq_reward", "overlong_reward", "overlong", "length_reward", "seq_final_reward", "token_level_rewards"),
    "reward_model",
)
SCORE = "score "  # precedes the name of a score in a checkpoint
# In a checkpoint: records of experts of each group's prompt and then of its responses, one after the other, and tokens
# [Q, 1 + G] of each.
EXPERTS, EXPERT_TOKENS = "experts", "expert_tokens"
# In a checkpoint: tokens of each group's prompt, one after the other, and how many [Q], if an environment has added to
# those of its row.
PROMPTS, PROMPT_TOKENS = "prompts", "prompt_tokens"


def have_verdicts(scores: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """[Q, G] bool, False where `score` is NaN: no verdict could be had. Without a `score` nothing is missing."""
    return ~np.isnan(scores["score"]) if "score" in scores else np.ones(shape, bool)


def comparable(known: np.ndarray) -> np.ndarray:
    """[Q] bool, groups with enough verdicts to train on: two, or that of the only sample; known [Q, G] bool."""
    return known.sum(axis=1) >= min(2, known.shape[1])


@dataclass(frozen=True)
class Outcomes:
    """What is known of Q groups of G responses, apart from their tokens; all arrays are NumPy's."""

    numbers: np.ndarray  # [Q] int64, prompt numbers
    rows: np.ndarray  # [Q] int64, rows of the prompt set
    versions: np.ndarray  # [Q] int64, training steps that the sampling policy had seen
    lengths: np.ndarray  # [Q, G] int64, tokens that the policy wrote
    scores: dict[str, np.ndarray]  # [Q, G] float64 each, NaN where there is no verdict
    failed: np.ndarray  # [Q, G] bool, verification failed, with or without a verdict
    error: str = ""  # the most frequent error of the failed verifications
    work: Mapping[str, Work] = field(default_factory=dict)  # of sampling and scoring, by stage

    def score(self, name: str) -> np.ndarray:
        """The values [Q, G] of a score, NaN where there is none."""
        return self.scores.get(name, np.full(self.lengths.shape, np.nan))

    @property
    def known(self) -> np.ndarray:
        """[Q, G] bool, True for responses with a verdict."""
        return have_verdicts(self.scores, self.failed.shape)


@dataclass(frozen=True)
class Experience:
    """Q groups of G responses of at most R tokens, in prompt order; all arrays are NumPy's.

    Every field but `error` and `work` has one entry per group. Checkpoints hold the arrays and scores, except `failed`;
    texts follow from responses, and prompts from rows unless an environment has added to them. A response without a
    verdict has NaN in all scores, also in a checkpoint. It is not trained on, and in no statistic of scores.
    """

    numbers: np.ndarray  # [Q] int64, prompt numbers
    rows: np.ndarray  # [Q] int64, rows of the prompt set
    prompts: list[list[int]]  # [Q] token ids
    responses: np.ndarray  # [Q, G, R] int32
    mask: np.ndarray  # [Q, G, R] bool, True on response tokens, also on those that an environment wrote
    logprobs: np.ndarray  # [Q, G, R] float32, when the token was sampled
    finished: np.ndarray  # [Q, G] bool
    texts: list[list[str]]  # [Q][G] decoded responses
    scores: dict[str, np.ndarray]  # [Q, G] float64 each: acc, score and whatever else was measured
    versions: np.ndarray  # [Q] int64, training steps that the sampling policy had seen
    # [Q, G] bool, verification failed: no verdict, or the response made it fail; False in what a checkpoint restores
    failed: np.ndarray
    by_policy: np.ndarray | None = None  # [Q, G, R] bool, True on tokens that the policy wrote; None = all of `mask`
    kl: np.ndarray | None = None  # [Q, G, R] float32, divergence of each token from the reference; None = not measured
    # Experts that tokens went to when they were sampled, see Rollout; None = not recorded
    experts: list[list[np.ndarray]] | None = None  # [Q][G] of responses
    prompt_experts: list[np.ndarray] | None = None  # [Q]
    answers: list[list[str | None]] | None = None  # [Q][G] what the verifier read, as text; None = unknown
    error: str = ""  # the most frequent error of the failed verifications; "" once groups are chosen
    work: Mapping[str, Work] = field(default_factory=dict)  # of sampling and scoring, by stage; {} for chosen groups

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_errors(self) -> int:
        """Verifications that failed."""
        return int(self.failed.sum())

    @property
    def known(self) -> np.ndarray:
        """[Q, G] bool, True for responses with a verdict."""
        return have_verdicts(self.scores, self.finished.shape)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return int(self.policy_mask.sum())

    @property
    def policy_mask(self) -> np.ndarray:
        """[Q, G, R] bool, True on response tokens that the policy wrote: those to train on."""
        return self.mask if self.by_policy is None else self.mask & self.by_policy

    @property
    def lengths(self) -> np.ndarray:
        """[Q, G] int64, tokens that the policy wrote: those that rewards and statistics of length count."""
        return self.policy_mask.sum(axis=-1)

    @property
    def outcomes(self) -> Outcomes:
        """The same without the tokens, which take nearly all of the memory."""
        return Outcomes(
            self.numbers, self.rows, self.versions, self.lengths, self.scores, self.failed, self.error, self.work
        )

    def score(self, name: str) -> np.ndarray:
        """The values [Q, G] of a score, NaN where it was not measured."""
        return self.scores.get(name, np.full(self.finished.shape, np.nan))

    @property
    def final_rewards(self) -> np.ndarray:
        """The reward [Q, G] of each response, after the KL divergence if it is in the reward."""
        return self.scores.get("seq_final_reward", self.scores["seq_reward"])

    @property
    def sequence_kl(self) -> float:
        """Mean over responses with a verdict of the mean KL divergence of their tokens."""
        assert self.kl is not None
        return float(np.mean((self.kl.sum(axis=-1) / np.maximum(self.lengths, 1))[self.known]))

    def differs_by_rounding(self, per_token: float) -> np.ndarray:
        """[Q] bool, groups of several equal rewards whose KL divergences differ by rounding alone.

        Then two passes over one policy can differ by as much: `per_token` nats for each token of the longest response.
        """
        assert self.kl is not None
        known, lengths = self.known, self.lengths
        rewards, divergence = self.scores["seq_reward"], self.kl.sum(axis=-1, dtype=np.float64)

        def lowest_and_highest(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            lowest = np.min(values, axis=1, initial=np.inf, where=known)
            return lowest, np.max(values, axis=1, initial=-np.inf, where=known)

        (least, most), (low, high) = lowest_and_highest(rewards), lowest_and_highest(divergence)
        longest = np.max(lengths, axis=1, initial=0, where=known)
        return (known.sum(axis=1) > 1) & (least == most) & (high - low <= per_token * longest)

    def divergence(self, least: float, per_token: float) -> np.ndarray:
        """KL divergence [Q, G] of each response; up to `least` nats a token are 0, so that they order no responses.

        It is the smallest of the group where the group `differs_by_rounding` of `per_token`.
        """
        assert self.kl is not None
        found = self.kl.sum(axis=-1)
        found = np.where(np.abs(found) <= least * self.lengths, np.float32(0), found)
        return np.where(self.differs_by_rounding(per_token)[:, None], found.min(axis=1, keepdims=True), found)

    def with_scores(self, **scores: np.ndarray) -> "Experience":
        """The same with further values [Q, G]."""
        return replace(self, scores={**self.scores, **scores})

    def select(self, groups: np.ndarray) -> "Experience":
        """The groups at these indices."""

        def taken(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: taken(part) for name, part in value.items()}
            if isinstance(value, list):
                return [value[group] for group in groups]
            return None if value is None else value[groups]

        return Experience(**{name: taken(value) for name, value in self._by_group().items()})

    def _by_group(self) -> dict[str, Any]:
        """The fields with one entry per group."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("error", "work")}


@dataclass(frozen=True)
class Collected:
    """What a training step trains on, and what is logged of how it came about."""

    experience: Experience | None  # the groups; None if the step is skipped
    metrics: dict[str, float]
    num_kept: int  # groups that passed the filter
    num_evaluated: int  # groups that were sampled
    solved: bool = False  # nothing is left to learn from, see dynamic_sampling/accepted.py


def concatenate(parts: Sequence[Experience]) -> Experience:
    """The groups of all parts, one after the other. A score that a part lacks is NaN there."""
    if any(part.by_policy is not None for part in parts):
        parts = [replace(part, by_policy=part.policy_mask) for part in parts]
    if any(part.experts is not None for part in parts):
        parts = with_records(parts)

    def joined(values: list[Any]) -> Any:
        if any(value is None for value in values):
            return None
        return list(chain.from_iterable(values)) if isinstance(values[0], list) else np.concatenate(values)

    columns = {name: [getattr(part, name) for part in parts] for name in parts[0]._by_group()}
    names = dict.fromkeys(name for scores in columns.pop("scores") for name in scores)
    scores = {name: joined([part.score(name) for part in parts]) for name in names}
    return Experience(scores=scores, **{name: joined(values) for name, values in columns.items()})


def with_records(parts: Sequence[Experience]) -> list[Experience]:
    """The parts with empty records of experts where some have none."""
    known = [part.prompt_experts[0] for part in parts if part.prompt_experts]
    empty = known[0][:0] if known else np.zeros((0, 0, 0), np.int8)

    def complete(part: Experience) -> Experience:
        if part.experts is not None and part.prompt_experts is not None:
            return part
        return replace(part, experts=[[empty] * len(group) for group in part.texts], prompt_experts=[empty] * len(part))

    return [complete(part) for part in parts]


def joined_records(records: Sequence[np.ndarray]) -> np.ndarray:
    """Records of experts, one after the other. Empty ones may not know how many layers and experts the others have."""
    return np.concatenate([record for record in records if len(record)] or list(records[:1]))


def join(parts: Iterable[Experience | None]) -> Experience | None:
    """The groups of all parts; None if there are none."""
    present = [part for part in parts if part]
    return concatenate(present) if present else None


def to_arrays(experience: Experience, prompt_set: PromptSet | None = None) -> dict[str, np.ndarray]:
    """What a checkpoint holds of `experience`; None: its prompts are those of its rows."""
    values = experience._by_group()
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray) and name != "failed"}
    if experience.experts and experience.prompt_experts:
        groups = [[prompt, *rest] for prompt, rest in zip(experience.prompt_experts, experience.experts, strict=True)]
        arrays[EXPERTS] = joined_records(list(chain.from_iterable(groups)))
        arrays[EXPERT_TOKENS] = np.array([[len(record) for record in group] for group in groups], np.int64)
    if prompt_set is not None and experience.prompts != [prompt_set.tokens[row] for row in experience.rows]:
        arrays[PROMPTS] = np.array(list(chain.from_iterable(experience.prompts)), np.int32)
        arrays[PROMPT_TOKENS] = np.array(list(map(len, experience.prompts)), np.int64)
    return arrays | {SCORE + name: value for name, value in experience.scores.items()}


def from_arrays(arrays: Mapping[str, np.ndarray], prompt_set: PromptSet, tokenizer: Tokenizer) -> Experience:
    """The inverse of `to_arrays`, for groups of rows of `prompt_set`."""
    arrays = {name: np.asarray(values) for name, values in arrays.items()}
    scores = {name.removeprefix(SCORE): arrays.pop(name) for name in list(arrays) if name.startswith(SCORE)}
    records, of_group = {}, arrays.pop(EXPERT_TOKENS, None)
    if of_group is not None:
        found = np.split(arrays.pop(EXPERTS), np.cumsum(of_group)[:-1])
        groups = [found[start : start + of_group.shape[1]] for start in range(0, of_group.size, of_group.shape[1])]
        records = {"prompt_experts": [group[0] for group in groups], "experts": [group[1:] for group in groups]}
    prompts = [prompt_set.tokens[row] for row in arrays["rows"]]
    if (lengths := arrays.pop(PROMPT_TOKENS, None)) is not None:
        prompts = [one.tolist() for one in np.split(arrays.pop(PROMPTS), np.cumsum(lengths)[:-1])]
    texts = [
        [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in zip(*group, strict=True)]
        for group in zip(arrays["responses"], arrays["mask"], strict=True)
    ]
    return Experience(
        **arrays,  # pyright: ignore[reportArgumentType]
        **records,
        prompts=prompts,
        texts=texts,
        scores=scores,
        failed=np.zeros(arrays["finished"].shape, bool),
    )


def check_score_names(names: Iterable[str]) -> None:
    """Raises ValueError if a verifier returns a number under a name with a meaning of its own."""
    for name in names:
        problem = ": / separates the parts of a metric's name, use _ instead" if "/" in name else ""
        if name in OWN_SCORES:
            problem = ", which is computed from its score: give that number another name"
        if problem:
            raise InputError(f"the reward function returns {name!r}{problem}")
