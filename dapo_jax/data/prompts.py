"""Host: rows to token ids, where prompts that are too long are refused, dropped or cut; the row of each number."""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.rows import PromptRow, duplicate_rows
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSet:
    """Rows and the token ids of their prompts, in the same order. Equal prompts share one list of ids."""

    rows: list[PromptRow]
    tokens: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[N] tokens of each prompt."""
        return np.array([len(tokens) for tokens in self.tokens])

    def checksum(self) -> str:
        """Equal for the same prompts, with the same data for the verifier, in the same order."""
        found = hashlib.sha256()
        for row, tokens in zip(self.rows, self.tokens, strict=True):
            found.update(np.array([len(tokens), *tokens], np.int32).tobytes())
            verified = [row.data_source, row.ground_truth, row.extra_info]
            found.update(json.dumps(verified, sort_keys=True, default=repr).encode() + b"\0")
        return found.hexdigest()


def tokenize_prompts(rows: Sequence[PromptRow], tokenizer: Tokenizer, data: DataConfig) -> PromptSet:
    """Tokenises all prompts; none of the result is empty or longer than data.max_prompt_length tokens.

    A longer one is dropped with data.filter_overlong_prompts; else data.truncation says what to do: "error", or cut it
    on the "left", on the "right" or in the "middle" (like verl: half of the limit is kept at each end, the odd token on
    the right). Logs how many rows repeat another and how many were too long, dropped or cut.

    Raises:
        InputError: a longer prompt with "error", an empty prompt, or no prompt is left.
    """
    max_prompt_length, filter_overlong = data.max_prompt_length, data.filter_overlong_prompts
    identities = [row.identity[0] for row in rows]
    distinct = dict(zip(identities, rows, strict=True))  # published data sets repeat a prompt up to a hundred times
    tokens = tokenizer.encode_prompts(
        [row.prompt for row in distinct.values()],
        data,
        template_kwargs=[row.template_kwargs for row in distinct.values()],
    )
    known = dict(zip(distinct, tokens, strict=True))
    encoded = [known[identity] for identity in identities]
    overlong = [index for index, tokens in enumerate(encoded) if len(tokens) > max_prompt_length]
    max_length = max(map(len, encoded), default=0)
    if [] in encoded:
        raise InputError(f"the prompt of {rows[encoded.index([])].origin} has no tokens: fill or remove it")
    if overlong and data.truncation == "error" and not filter_overlong:
        raise InputError(
            f"{len(overlong)} of {len(rows)} prompts are longer than max_prompt_length={max_prompt_length} "
            f"tokens (longest {max_length}; the first is {rows[overlong[0]].origin}): raise data.max_prompt_length, "
            "drop them by data.filter_overlong_prompts=True, or cut them by data.truncation=left|right|middle"
        )
    dropped = set(overlong) if filter_overlong else set()
    kept = [index for index in range(len(rows)) if index not in dropped]
    if not kept:
        raise InputError(
            f"no prompt is left: {len(rows)} rows, {len(overlong)} of them longer than "
            f"max_prompt_length={max_prompt_length} and dropped: give rows or raise data.max_prompt_length"
        )
    logger.info(
        "prompts: %d rows, the longest of %d tokens; %d longer than max_prompt_length=%d: %d dropped, %d cut",
        len(rows),
        max_length,
        len(overlong),
        max_prompt_length,
        len(dropped),
        len(overlong) - len(dropped),
    )
    if duplicates := duplicate_rows(rows):
        logger.warning("%d of %d prompts repeat an earlier row's prompt and ground truth", duplicates, len(rows))
    tokens = [truncate(encoded[index], max_prompt_length, data.truncation) for index in kept]
    return PromptSet([rows[index] for index in kept], tokens)


def hinted_prompts(rows: Sequence[PromptRow], tokenizer: Tokenizer, data: DataConfig) -> list[list[int]]:
    """Token ids of the prompts with each row's reference solution at the start of the last user turn.

    The solution is extra_info["solution"], else the ground truth.

    Raises:
        ValueError: a prompt without a user turn.
    """
    return tokenizer.encode_prompts(
        [_with_hint(row, tokenizer.special_tokens.get("bos_token", "")) for row in rows],
        data,
        template_kwargs=[row.template_kwargs for row in rows],
    )


def check_hints(rows: Iterable[PromptRow]) -> None:
    """Raises InputError for a row that can have no hint."""
    for row in rows:
        _with_hint(row, "")


def _with_hint(row: PromptRow, bos_token: str) -> tuple[dict, ...] | str:
    if not row.extra_info.get("solution") and row.ground_truth is None:
        raise InputError(
            f"{row.origin} needs extra_info.solution or a ground truth for the hint of adv_estimator=cpo: add it, or "
            "leave it out"
        )
    hint = str(row.extra_info.get("solution") or row.truth_text)
    if isinstance(row.prompt, str):
        begin = bos_token if row.prompt.startswith(bos_token) else ""
        return f"{begin}{hint}\n{row.prompt.removeprefix(bos_token)}"
    turns = [index for index, message in enumerate(row.prompt) if message["role"] == "user"]
    if not turns:
        roles = ", ".join(str(message["role"]) for message in row.prompt)
        raise InputError(
            f"{row.origin} needs a user turn for the hint of adv_estimator=cpo, and has {roles}: add one, or leave "
            "it out"
        )
    hinted = {**row.prompt[turns[-1]], "content": f"{hint}\n{row.prompt[turns[-1]]['content']}"}
    return (*row.prompt[: turns[-1]], hinted, *row.prompt[turns[-1] + 1 :])


def truncate(tokens: list[int], limit: int, side: str) -> list[int]:
    """`tokens` cut to `limit` on the "left", on the "right" or in the "middle"; unchanged if they fit."""
    if len(tokens) <= limit:
        return tokens
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    tail = limit - head
    return tokens[:head] + tokens[len(tokens) - tail :]


class PromptOrder:
    """An endless order of rows: prompt number q lies in epoch q // num_rows; each epoch has every row once.

    A mixture has such an order for each file, interleaved as evenly as the weights allow; an epoch is num_rows numbers.
    A pure function of the arguments, `parts` and q: any prompt is found directly.

    Args:
        sizes: rows of each file of a mixture, in the order of the rows.
        weights: of each file, above 0.
    """

    def __init__(
        self, num_rows: int, *, seed: int, shuffle: bool, sizes: Sequence[int] = (), weights: Sequence[float] = (1,)
    ):
        if num_rows < 1:
            raise InputError(f"num_rows={num_rows} must be at least 1: give the data set rows")
        self.num_rows, self.sizes = num_rows, tuple(sizes) or (num_rows,)
        self._starts = np.cumsum([0, *self.sizes])
        self._files = [_endless(size, [seed, file], shuffle) for file, size in enumerate(self.sizes)]
        self.parts: list[list[Any]] = [[0, list(weights)]]  # numbers from which on a mixture has these weights

    def row(self, q: int) -> int:
        """The row of prompt number `q`, counted from 0."""
        before, after = self.counts(q), self.counts(q + 1)
        file = next(file for file, count in enumerate(before) if count < after[file])
        return int(self._starts[file]) + int(self._files[file][before[file]])  # pyright: ignore[reportArgumentType]

    def counts(self, q: int) -> list[int]:
        """How many of the first `q` numbers are of each file: its share of those that the files before it leave."""
        counts, ends = [0] * len(self.sizes), [first for first, _ in self.parts[1:]]
        for (first, weights), end in zip(self.parts, [*ends, q], strict=True):
            left = max(min(q, end) - first, 0)
            for file, share in enumerate(_shares(*weights)):
                count = math.floor(left * share)
                counts[file], left = counts[file] + count, left - count
        return counts

    def resumed(self, parts: Sequence[list[Any]], q: int) -> list[list[Any]]:
        """The `parts` of a run that had these before prompt number `q`: each file goes on where it was."""
        if parts and len(parts[-1][1]) == len(self.sizes):
            now = self.parts[-1][1]
            self.parts = [*parts, *([[q, now]] if parts[-1][1] != now else [])]
        return self.parts

    def files(self, rows: np.ndarray) -> np.ndarray:
        """The file of each row."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def epoch(self, q: int) -> float:
        """Passes over the rows before prompt number `q`."""
        return q / self.num_rows


@functools.cache  # asked for each prompt
def _shares(*weights: float) -> list[Fraction]:
    """The share of each file in what the files before it leave."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact[file:]) for file, weight in enumerate(exact)]


def _endless(num_rows: int, address: list[int], shuffle: bool) -> grain.MapDataset:
    """0..num_rows-1 in every epoch, permuted by (address, epoch)."""
    rows = grain.MapDataset.range(num_rows)
    if shuffle:
        # grain permutes epoch e by its seed + e. Hash the seed, or seed 1 would begin with epoch 1 of seed 0.
        rows = rows.shuffle(seed=int(np.random.SeedSequence(address).generate_state(1)[0]))
    return rows.repeat()
