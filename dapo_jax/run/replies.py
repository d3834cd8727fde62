"""Host: what environments say, in all processes, and the turns of episodes that are under way.

Every process has the environments of its share of the groups. All know which rows wait, and hear all replies.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.environments.protocol import Fault, Reply
from dapo_jax.parallel.processes import gather

WAIT_S = 0.5  # between two checks for a stop request

Asked = dict[int, list[Future[Reply]]]  # by row that waits for replies; those of other processes have no futures here
Heard = dict[int, list[Reply | Fault]]  # by row


def has_group(number: int) -> bool:
    """Whether this process has the environments of the prompt with this number."""
    return number % jax.process_count() == jax.process_index()


def exchanged(asked: Sequence[Asked], check: Callable[[], None]) -> list[Heard]:
    """Waits for the replies to all that was asked, in all processes. All call it, for the same rows in one order.

    Args:
        check: called while waiting; may raise.
    """
    if not any(asked):
        return [{} for _ in asked]
    futures = list(chain.from_iterable(chain.from_iterable(rows.values()) for rows in asked))
    while True:
        waits = bool(wait(futures, timeout=WAIT_S).not_done)
        found = gather(None if waits else [[list(map(_sent, own)) for own in rows.values()] for rows in asked])
        if None not in found:
            break
        check()
    heard = [
        [list(map(_replied, chain.from_iterable(row))) for row in zip(*rows, strict=True)]
        for rows in zip(*found, strict=True)
    ]
    return [dict(zip(rows, replies, strict=True)) for rows, replies in zip(asked, heard, strict=True)]


def result(reply: Reply | Fault) -> Reply:
    """The reply. Raises the fault."""
    if isinstance(reply, Fault):
        raise reply
    return reply


def _sent(reply: Future[Reply]) -> dict[str, Any]:
    try:
        return dataclasses.asdict(reply.result())
    except Fault as fault:
        return {"fault": str(fault)}


def _replied(found: Mapping[str, Any]) -> Reply | Fault:
    return Fault(found["fault"]) if "fault" in found else Reply(**found)


class Turn(NamedTuple):
    """A turn of the policy, and what the environment has said to it."""

    tokens: list[int]
    answer: list[int]


def answered_turns(begun: Rollout | None, row: int) -> list[Turn]:
    """The turns of a response so far that the environment has answered, from who wrote its tokens."""
    if begun is None or begun.by_policy is None:
        return []
    mask = begun.mask[row]
    tokens, by_policy = begun.responses[row][mask], begun.by_policy[row][mask]
    runs = [run.tolist() for run in np.split(tokens, np.flatnonzero(np.diff(by_policy)) + 1)]
    return [Turn(*pair) for pair in zip(runs[::2], runs[1::2], strict=False)]
