"""Host: the settings of an engine, and its sizes: slots, pages, stretches and calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from dapo_jax.models.architecture import Architecture, Choices
from dapo_jax.models.layers import matrix_dtype
from dapo_jax.models.transformer import Params

SCRATCH_STATE = 1  # the place of states that is written where there is no row
RESERVED_STATES = 2  # places that no prompt and no row has: 0, which stays empty, and that one


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know before its first call."""

    arch: Architecture
    mesh: Mesh
    eos_ids: tuple[int, ...]  # each of them ends a response
    pad_id: int  # token where nothing was sampled; may equal an end-of-sequence token
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens
    max_num_seqs: int  # rows decoded at once; 0 = as many as fit the memory
    memory_share: float  # of the free memory that keys and values may take where max_num_seqs is 0
    chunk_length: int  # tokens between two looks for responses that have ended; 0 = the engine chooses
    lookahead: int  # chunks dispatched before the result of one is read
    seed: int
    least_page: int = 1  # tokens of a page, at least, ...
    least_chunk: int = 1  # ... and of a chunk that is a part of one
    choices: Choices | None = None  # how the experts of tokens are recorded; None = they are not


def cache_dtype(params: Params) -> np.dtype:
    """Keys and values have the dtype of the matrices."""
    return matrix_dtype(params["layers"][0])


class Shape(NamedTuple):
    """That of a program that decodes."""

    slots: int  # of a shard
    stretch: int = 0  # tokens that a slot holds of what is drawn; 0 = pages


class PrefillSize(NamedTuple):
    """The shape of a call of prefill."""

    width: int  # tokens of a prompt, with padding: whole pages
    at_once: int  # prompts of each shard


class ReadSize(NamedTuple):
    """The shape of a call that reads tokens of an environment."""

    tokens: int  # of a row, that follow each other: at most a page
    rows: int  # of a shard


@dataclass(frozen=True)
class Layout:
    """Sizes of the slots, the pages and the calls."""

    num_samples: int  # of a prompt
    shards: int
    ladder: tuple[int, ...]  # slots of a shard, and in the programs for the last rows, descending
    pages: int  # of a shard, with page 0, a scratch page
    page_length: int  # tokens of a page, some whole chunks; with stretches of a whole prompt
    chunk: int  # tokens that are drawn between two looks at what has ended
    row_pages: int  # of a prompt and a response, at most
    prefills: tuple[PrefillSize, ...]  # the widest last
    stretches: tuple[int, ...] = ()  # tokens that a row draws of which a slot may hold the keys, ascending; () = pages
    window_pages: int = 0  # of a shard and a layer with a window, with page 0; 0 = no layer has one
    reach: int = 0  # pages that a window reaches behind a chunk
    # of a shard, for prompts' states, with RESERVED_STATES: that of prompts without tokens, and a scratch place; 0 = no
    # layer has states, or stretches
    states: int = 0
    row_states: int = 0  # places behind these, for the states of rows
    together: int = 0  # rows of a prompt that may read it together; 0 = stretches, or a prompt has one row
    returns: bool = False  # rows may wait for tokens that the policy does not write, and return
    keeps_states: bool = False  # rows that wait keep their states, besides pages
    reads: tuple[tuple[ReadSize, ...], ...] = ()  # of answers: of pages, then of chunks, of most rows first

    @property
    def slots(self) -> int:
        """Of a shard."""
        return self.ladder[0]

    @property
    def first_shape(self) -> Shape:
        """With all slots."""
        return Shape(self.slots, self.stretches[0] if self.stretches else 0)

    @property
    def ends_early(self) -> bool:
        """Whether a chunk ends once some rows have, as their next tokens may go anywhere in a stretch."""
        return self.returns and bool(self.stretches)

    @property
    def go_on_anywhere(self) -> bool:
        """Whether the chunks of a row may begin anywhere in a page, as they follow the ends of its turns."""
        return self.returns and not self.stretches

    @property
    def open_prompts(self) -> int:
        """Prompts of a shard that have pages, at most: one for each slot, and those that wait."""
        return open_prompts(self.slots, self.prefills)

    def prompt_pages(self, length: int) -> int:
        """Pages of a prompt, whose last token is not prefilled."""
        return 1 if self.stretches else -(-(length - 1) // self.page_length)

    @property
    def prefilled(self) -> int:
        """Tokens of each row that prefill draws."""
        return int(bool(self.stretches))

    def rows(self, prompt: int) -> np.ndarray:
        """[G] of a prompt."""
        return np.arange(prompt * self.num_samples, (prompt + 1) * self.num_samples)

    def own_pages(self, limit: int) -> int:
        """Pages of a response of `limit` tokens."""
        return 0 if self.stretches else own_pages(limit, self.chunk, self.page_length, self.returns)


def own_pages(limit: int, chunk: int, page_length: int, returns: bool) -> int:
    """Pages of a response of `limit` tokens, in chunks of which the last is read only if a row returns."""
    kept = limit if returns else max(limit - 1, 0) // chunk * chunk
    return -(-kept // page_length)


def open_prompts(slots: int, prefills: Sequence[PrefillSize]) -> int:
    """As in `Layout`."""
    return slots + 2 * prefills[0].at_once
