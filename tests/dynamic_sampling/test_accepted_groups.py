"""Recorded runs of dynamic sampling: what each step accepts, and what it leaves to the next one.

They were recorded from an accumulation that had two schedules, waves and a queue. Where these differed, the queue's
numbers stand here: waves waited for all that was under way, so `requeued` was larger with requeue, and what carry and
discard found beyond the batch (`carried`, `discarded`, `next`) was what the last wave held.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from dynamic_sampling.small_groups import NUM_ROWS, run, start
from dynamic_sampling.test_segments import run as run_segments

from dapo_jax.config.sections import SkipUniformConfig
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource

RECORDED = Path(__file__).parent / "data" / "accepted_groups.json"
STEPS = 4
SIZES = {"target": 16, "size": 8}
FEW, LAST = {**SIZES, "rate": 0.2, "limit": 6}, {**SIZES, "rate": 0.3, "first": 30}
SKIP = {**SIZES, "rate": 0.4, "skip": True, "first": 45}
SETTINGS = {
    "batch requeue": {**SIZES, "rate": 0.4},
    "batch carry": {"target": 8, "size": 16, "rate": 0.7, "leftover": "carry", "leftover_max_staleness": 2},
    "batch discard skip": {**SKIP, "leftover": "discard"},
    "batch partial": {**FEW, "on_limit": "partial"},
    "batch fallback adaptive": {**FEW, "limit": 0, "adaptive": 1.0, "on_limit": "fallback_unfiltered"},
    "batch end of epoch": {**LAST, "on_exhausted": "partial"},
    "stream requeue": {**SIZES, "rate": 0.4, "stream": 1.0},
    "stream requeue skip": {**SKIP, "stream": 2.0},
    "stream carry": {**SIZES, "rate": 0.5, "stream": 1.0, "leftover": "carry", "leftover_max_staleness": 0},
    "stream discard": {**SIZES, "rate": 0.5, "stream": 1.5, "leftover": "discard"},
    "stream partial": {**FEW, "stream": 1.0, "on_limit": "partial"},
    "stream fallback": {**FEW, "stream": 1.0, "on_limit": "fallback_unfiltered"},
    "stream error": {**FEW, "rate": 0.3, "stream": 1.0},
    "stream unfiltered": {**FEW, "rate": 0.0, "stream": 1.0, "on_limit": "partial", "on_empty": "train_unfiltered"},
    "stream carry adaptive": {**FEW, "limit": 20, "stream": 1.0, "adaptive": 1.0, "leftover": "carry",
                              "on_limit": "partial", "leftover_max_staleness": 2},
    "stream end of epoch": {**LAST, "stream": 1.0, "on_exhausted": "fallback_unfiltered"},
}  # fmt: skip
SEGMENTS = {"segments": {}, "segments, one round": {"max_num_gen_batches": 1, "leftover_max_staleness": 2}}


def steps_of(*, rate, first=0, skip=False, **options) -> list[dict]:
    """What each of the first steps of a run leaves behind; the last may be an error."""

    def keeps(number):
        return np.random.default_rng([3, number]).random() < rate

    source = None
    if skip:
        source = PromptSource(lambda number: number % NUM_ROWS, NUM_ROWS, SkipUniformConfig(enable=True))
    state, found = start(first), []
    for step in range(1, STEPS + 1):
        try:
            accepted, _ = run(keeps, state=state, step=step, source=source, **options)
        except RuntimeError as error:
            return [*found, {"error": str(error)}]
        found.append(left_behind(accepted))
        state = accepted.state
    return found


def left_behind(accepted) -> dict:
    state = accepted.state
    groups = {"accepted": accepted.experience, "carried": state.carried, "begun": state.begun}
    numbers = {name: [] if one is None else one.numbers.tolist() for name, one in groups.items()}
    counts = ("outcome", "num_stale", "num_skipped", "num_requeued", "num_discarded", "carried_in")
    history = state.history
    sums = [int(history.uniform_in_a_row.sum()), float(history.mixed_rate.sum()), float(np.nansum(history.accuracy))]
    limit = int(min(accepted.limit, 10**6))
    return {**numbers, **{name: getattr(accepted, name) for name in counts}, "next": state.next_prompt,
            "limit": limit, "keep_rate": state.keep_rate, "history": sums}  # fmt: skip


@pytest.mark.parametrize("name", [*SETTINGS, *SEGMENTS])
def test_recorded_runs_accept_the_same_groups(name):
    expected = json.loads(RECORDED.read_text())[name]
    found = (
        steps_of(**SETTINGS[name])
        if name in SETTINGS
        else [left_behind(accepted) for accepted, _ in run_segments(6, **SEGMENTS[name])]
    )
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        for key, value in other.items():
            same = one[key] == (pytest.approx(value, rel=1e-6) if key in ("keep_rate", "history") else value)
            assert same, (step, key)
