"""Host: from the verifiers' scores to rewards: adds the reward model's score, overlong penalty and length reward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.sections import DataConfig, LengthRewardConfig, OverlongBufferConfig, RewardModelConfig
from dapo_jax.data.experience import Experience
from dapo_jax.data.padding import bucket, pad_prompts
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer, load_tokenizer, within_rows
from dapo_jax.data.work import Work
from dapo_jax.errors import InputError
from dapo_jax.hub.repositories import model_at
from dapo_jax.models.flops import TokenFlops, token_flops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.identity import Identity, identity
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import build_freeze, weight_table
from dapo_jax.parallel.checksums import digest
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import (
    TRAIN_RULES,
    batch_sharding,
    fetch,
    indivisible_weights,
    place_weight,
    put,
    put_rows,
)
from dapo_jax.rewards.reward_model import build_scores
from dapo_jax.rewards.shaping import length_rewards, shape_rewards


@dataclass(frozen=True)
class ModelScorer:
    """Scores conversations with a reward model, using its own tokenizer and chat template."""

    scores: Callable[[Any, jax.Array, jax.Array], jax.Array]  # of `build_scores`
    params: Any  # in the dtype of matrix products
    flops: TokenFlops  # of the model
    tokenizer: Tokenizer
    mesh: Mesh
    settings: RewardModelConfig
    data: DataConfig
    identity: Identity

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        template_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[np.ndarray, Work]:
        """The reward model's score [B] of each prompt (messages or text) with its response, and the work.

        Args:
            template_kwargs: of each prompt, on top of `data.chat_template_kwargs`.
        """
        conversations = self.tokenizer.encode_prompts(
            prompts, self.data, template_kwargs=template_kwargs, responses=responses
        )
        conversations = [tokens[-self.settings.max_length :] for tokens in conversations]
        lengths = np.array([len(tokens) for tokens in conversations])
        rows = self.settings.micro_batch_size_per_device * num_batch_shards(self.mesh)
        batches = plan_batches(lengths, rows)
        scores = np.zeros(len(conversations), np.float32)
        for chosen, width in batches:
            part = [conversations[index] for index in chosen]
            tokens, mask = pad_prompts(part + part[-1:] * (rows - len(part)), width, self.tokenizer.pad_id)
            arrays = put((tokens, mask), batch_sharding(self.mesh))
            scores[chosen] = fetch(self.scores(self.params, *arrays))[: len(part)]
        return scores, scoring_work(lengths, batches, rows, self.flops)


def plan_batches(lengths: np.ndarray, rows: int) -> list[tuple[np.ndarray, int]]:
    """The micro-batches: which conversations, at most `rows`, and the width to pad them to.

    The longest conversations come first. Each width is the bucket of a micro-batch's longest conversation, but at least
    a sixteenth of the first width: at most 9 widths, so few shapes are compiled.

    Args:
        lengths: [B] tokens of each conversation.
    """
    order = np.argsort(-lengths, kind="stable")
    narrowest = bucket(int(lengths[order[0]])) // 16
    parts = [order[start : start + rows] for start in range(0, len(order), rows)]
    return [(part, max(bucket(int(lengths[part[0]])), narrowest)) for part in parts]


def scoring_work(lengths: np.ndarray, batches: Sequence[tuple[np.ndarray, int]], rows: int, flops: TokenFlops) -> Work:
    """The work of micro-batches of `rows` rows each; the scalar head is not counted.

    Args:
        lengths: [B] tokens of each conversation.
        batches: of `plan_batches`.
    """
    computed = sum(rows * width * flops.of_prefilled(width) for _, width in batches)
    return Work(computed, flops.of_prompts(lengths))


def load_scorer(settings: RewardModelConfig, data: DataConfig, dtype: Any, mesh: Mesh) -> ModelScorer:
    """Loads the reward model at reward.model.path.

    Raises:
        InputError: it is not a sequence-classification model with one label, it has no tokenizer that fits, or the
            mesh does not divide its weights.
    """
    path = model_at(settings.path, weights=True)
    arch = read_architecture(path)
    if not arch.scalar_head:
        raise InputError(f"reward.model.path={settings.path} is a language model: give a sequence-classification model")
    tokenizer = within_rows(load_tokenizer(path), arch.vocab_size)
    if tokenizer.vocab_size > arch.vocab_size:
        raise InputError(
            f"the tokenizer of reward.model.path={settings.path} has ids up to {tokenizer.vocab_size - 1}, but the "
            f"model has {arch.vocab_size} embeddings: use the tokenizer that belongs to the model"
        )
    table = weight_table(arch)
    if problems := indivisible_weights(table, dict(mesh.shape), TRAIN_RULES):
        raise InputError(f"the mesh does not fit reward.model.path={settings.path}: " + "; ".join(problems))
    params = load_params(path, arch, place_weight(mesh, TRAIN_RULES))
    known = identity(arch, digest(params))
    with jax.set_mesh(mesh):  # other devices than those that train, with trainer.rollout_ahead
        params = build_freeze(arch, dtype, mesh)(params)
    return ModelScorer(
        scores=build_scores(arch, mesh),
        params=params,
        flops=token_flops(arch),
        tokenizer=tokenizer,
        mesh=mesh,
        settings=settings,
        data=data,
        identity=known,
    )


def add_model_scores(experience: Experience, prompts: PromptSet, scorer: ModelScorer) -> Experience:
    """Adds the score `reward_model`, and sets `score` to its weighted sum with the verifier's score.

    The work of the stage `reward_model` is added to that of sampling.
    """
    num_samples = experience.finished.shape[1]
    rows = [prompts.rows[row] for row in experience.rows for _ in range(num_samples)]
    found, work = scorer.score(
        [row.prompt for row in rows],
        [text for texts in experience.texts for text in texts],
        [row.template_kwargs for row in rows],
    )
    found = np.where(experience.known, found.astype(np.float64).reshape(experience.finished.shape), np.nan)
    score = mixed(experience.scores["score"], found, scorer.settings)
    experience = replace(experience, work={**experience.work, "reward_model": work})
    return experience.with_scores(reward_model=found, score=score)


def mixed(score: np.ndarray, found: np.ndarray, settings: RewardModelConfig) -> np.ndarray:
    """The weighted sum of a verifier's scores and those that a reward model has `found`."""
    return settings.function_weight * score + settings.weight * found


def add_rewards(
    experience: Experience,
    buffer: OverlongBufferConfig,
    length: LengthRewardConfig,
    *,
    max_response_length: int,
    mesh: Mesh,
) -> Experience:
    """Adds the scores `overlong_reward` (the penalty) and `seq_reward`, the response's reward.

    The latter is score + penalty + length reward. With a length reward, also `length_reward`. If the buffer is enabled
    and logged, also `overlong`: 1 where the penalty is not 0, else 0. All are NaN for a response without a verdict.
    """
    shape, known = experience.finished.shape, experience.known
    lengths = experience.lengths.astype(np.int32)
    rows = np.where(known, experience.scores["score"], 0.0).astype(np.float32).ravel(), lengths.ravel()
    shaped = shape_rewards(
        *put_rows(rows, mesh),
        max_response_length=max_response_length,
        buffer_length=buffer.len if buffer.enable else 0,
        penalty_factor=buffer.penalty_factor,
    )
    reward, penalty = (values[: experience.finished.size].reshape(shape) for values in fetch(shaped))
    found = {}
    if length.form != "none":
        longest = np.where(known, lengths, 0).max(axis=1, keepdims=True)
        compared = np.where(known, lengths, longest)  # without a verdict it is neither the shortest nor the longest
        groups = compared, experience.scores["acc"] > 0
        rewards = length_rewards(*put_rows(groups, mesh), max_response_length=max_response_length, settings=length)
        found["length_reward"] = fetch(rewards)[: len(experience)]
        reward = reward + found["length_reward"]
    found |= {"seq_reward": reward, "overlong_reward": penalty}
    if buffer.enable and buffer.log:
        found["overlong"] = (penalty < 0).astype(np.float32)
    return experience.with_scores(**{name: np.where(known, values, np.nan) for name, values in found.items()})
