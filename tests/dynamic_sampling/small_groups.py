"""Made-up groups, and steps that accumulate them without a model."""

import numpy as np

from dapo_jax.config.sections import AdaptiveLimitConfig, FilterGroupsConfig, StreamConfig
from dapo_jax.data.experience import Experience
from dapo_jax.dynamic_sampling.accumulation import accumulate_groups
from dapo_jax.dynamic_sampling.prompt_stream import History, PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round

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
    """The options and sizes of `accumulate_groups`.

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


def run(keep_of, *, first=0, samples=2, state=None, step=1, source=None, **options):
    """One step, and the numbers of each round."""
    calls = []

    def start_round(numbers):
        calls.append(list(numbers))
        keep = [keep_of(number) for number in numbers]
        return lambda: round_of(numbers, keep, samples, version=step - 1)

    source = source or PromptSource(lambda number: number % NUM_ROWS, NUM_ROWS)
    accepted = accumulate_groups(start_round, state or start(first), source, step=step, **options_of(**options))
    return accepted, calls


def numbers_of(accepted) -> list[int]:
    return accepted.experience.numbers.tolist()
