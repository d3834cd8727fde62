"""Host: the prompts and responses of a benchmark, the same for all its contenders."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from random_models import MOST_POSITIONS, SHAPES

LENGTHS = (
    "tokens of each response: a number; or a distribution, like the preflight's --lengths: "
    "lognormal:median=24,sigma=1,clip=128[,within=0.5], or a run's metrics.jsonl"
)


def make_prompts(args: argparse.Namespace, *, seed: int = 7) -> list[list[int]]:
    """Distinct prompts, each of which is answered args.group times."""
    rng = np.random.default_rng(seed)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    return rng.integers(10, vocabulary, (args.batch // args.group, args.prompt_length)).tolist()


def response_lengths(text: str, args: argparse.Namespace) -> np.ndarray:
    """Tokens of each response [B].

    Args:
        text: as LENGTHS says, or a number for each response, with commas between them.

    Raises:
        ValueError: the text has another form, or a value is out of range.
    """
    if "prompt_" in text:
        raise ValueError(f"--lengths={text} must not say how long prompts are: give --prompt-length")
    if re.fullmatch(r"[\d,]+", text):
        numbers = [int(number) for number in text.split(",") if number]
        if len(numbers) not in (1, args.batch) or min(numbers) < 1:
            raise ValueError(f"--lengths={text} must be one number, or one for each of {args.batch} responses, above 0")
        return np.resize(numbers, args.batch)
    from dapo_jax.config.sections import DataConfig
    from dapo_jax.preflight.lengths import parse_lengths

    longest = DataConfig(max_prompt_length=args.prompt_length, max_response_length=MOST_POSITIONS - args.prompt_length)
    return parse_lengths(text, longest).sample(args.batch // args.group, args.group)[0].ravel()


def rows_of_responses(run: Any, prompts: list[list[int]], responses: Any, mask: Any, logprobs: Any) -> Any:
    """Whole responses to each prompt, [Q, G, R], as rows of the learner."""
    from dapo_jax.data.experience import Experience
    from dapo_jax.learner.batch import rows_of

    count, samples, _ = mask.shape
    experience = Experience(
        numbers=np.arange(count),
        rows=np.arange(count),
        prompts=prompts,
        responses=responses.astype(np.int32),
        mask=mask,
        logprobs=logprobs.astype(np.float32),
        finished=np.ones((count, samples), bool),
        texts=[],
        scores={},
        versions=np.zeros(count, np.int64),
        failed=np.zeros((count, samples), bool),
    )
    return rows_of(experience, num_groups=count, pad_id=run.sampler.tokenizer.pad_id)


def make_lengths(args: argparse.Namespace) -> np.ndarray:
    """Tokens of each response [B] of a benchmark whose responses all calls share."""
    return response_lengths(args.lengths, args)


def as_numbers(text: str, args: argparse.Namespace) -> str:
    """The same lengths as `text`, as a contender reads them whose environment lacks dapo_jax's packages."""
    return text if text.isdigit() else ",".join(map(str, response_lengths(text, args)))


def make_responses(args: argparse.Namespace) -> list[list[int]]:
    """The responses that are trained on."""
    vocabulary, lengths = SHAPES[args.shape]["vocab_size"], make_lengths(args)
    tokens = np.random.default_rng(5).integers(10, vocabulary, (args.batch, int(lengths.max()))).tolist()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def num_tokens(args: argparse.Namespace) -> int:
    """Tokens of a batch, prompts counted in every row, padding in none."""
    return args.batch * args.prompt_length + int(make_lengths(args).sum())


def as_text(token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Each row as the contenders' tokenizers read and write it."""
    return [" ".join(map(str, row)) for row in token_ids]
