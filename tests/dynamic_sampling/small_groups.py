"""Made-up groups, and steps that accumulate them without a model."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.config.sections import AdaptiveLimitConfig, FilterGroupsConfig, StreamConfig
from dapo_jax.data.experience import Experience
from dapo_jax.dynamic_sampling.accepted import Accepted
from dapo_jax.dynamic_sampling.accumulation import Found, Sampled
from dapo_jax.dynamic_sampling.prompt_stream import History, PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.training.step import accumulate

NUM_ROWS = 50


def experience(numbers, acc, *, lengths=2, version=0, width=40) -> Experience:
    """Groups of as many samples as `acc` [Q, G] has columns, of `lengths` tokens each."""
    acc = np.asarray(acc, np.float64)
    shape = acc.shape
    mask = np.arange(width) < np.broadcast_to(lengths, shape)[..., None]
    return Experience(
        numbers=np.array(numbers, np.int64),
        rows=np.array(numbers, np.int64) % NUM_ROWS,
        prompts=[[1]] * shape[0],
        responses=np.zeros((*shape, width), np.int32),
        mask=mask,
        logprobs=np.zeros((*shape, width), np.float32),
        finished=np.ones(shape, bool),
        texts=[["x"] * shape[1]] * shape[0],
        scores={"acc": acc, "score": acc},
        versions=np.full(shape[0], version, np.int64),
        failed=np.zeros(shape, bool),
    )


def round_of(numbers, keep, samples, version=0) -> Round:
    """Kept groups are half right; of the others those of odd numbers are all wrong, of even ones all right."""
    keep = np.asarray(keep, bool)
    acc = np.where(keep[:, None], np.arange(samples) % 2, 1 - np.array(numbers)[:, None] % 2)
    groups = experience(list(numbers), acc, version=version)
    return Round(groups, keep, np.where(keep, 0.5, 0.0))


def options_of(*, target=4, size=4, limit=0, adaptive=None, stream=None, **changes) -> dict:
    """The options and sizes of `Found`.

    Args:
        limit: of rounds, 0 = none.
        adaptive: slack of the adaptive limit, None = not adaptive.
        stream: its slack, None = rounds.
        changes: of FilterGroupsConfig.
    """
    options = FilterGroupsConfig(
        max_num_gen_batches=limit,
        adaptive_limit=AdaptiveLimitConfig(enable=adaptive is not None, slack=adaptive or 0.0),
        backfill="stream" if stream else "batch",
        stream=StreamConfig(slack=stream or 1.0),
        **changes,
    )
    return {"options": options, "target": target, "gen_batch_size": size}


def start(first=0, carried=None, keep_rate=0.5) -> StreamState:
    return StreamState(first, keep_rate, History.empty(NUM_ROWS), carried)


class MadeUp:
    """A rollout of rounds that are judged already: each is made when it is waited for."""

    def __init__(self, round_at: Callable[[Sequence[int]], Round]) -> None:
        self.round_at, self.started, self.sampled = round_at, deque[list[int]](), Sampled()

    @property
    def under_way(self) -> bool:
        return bool(self.started)

    def start(self, numbers: Sequence[int]) -> None:
        self.started.append(list(numbers))

    def wait(self) -> Round:
        round_ = self.round_at(self.started.popleft())
        self.sampled.tokens += round_.experience.num_tokens
        return round_

    def close(self) -> None:
        pass


def accumulated(rollout, state, *, source=None, step=1, **sizes) -> Accepted:
    """One step of a rollout that needs no judge, by default over NUM_ROWS rows."""
    source = source or PromptSource(lambda number: number % NUM_ROWS, NUM_ROWS)
    return accumulate(rollout, lambda round_: round_, Found(state, source, step=step, **sizes))


def run(keep_of, *, first=0, samples=2, state=None, step=1, source=None, **options):
    """One step, and the numbers of each round."""
    calls = []

    class Recorded(MadeUp):
        def start(self, numbers):
            calls.append(list(numbers))
            super().start(numbers)

    rollout = Recorded(lambda numbers: round_of(numbers, list(map(keep_of, numbers)), samples, version=step - 1))
    return accumulated(rollout, state or start(first), source=source, step=step, **options_of(**options)), calls


def numbers_of(accepted) -> list[int]:
    return accepted.experience.numbers.tolist()
