import dataclasses
import math
import re
import weakref

import numpy as np
import pytest
from dynamic_sampling.small_groups import (
    NUM_ROWS,
    MadeUp,
    accumulated,
    experience,
    numbers_of,
    options_of,
    round_of,
    run,
    start,
)

from dapo_jax.config.sections import CurriculumConfig, SkipUniformConfig
from dapo_jax.dynamic_sampling import schedule
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.dynamic_sampling.schedule import Schedule, block_size, queued_prompts
from dapo_jax.rewards.verification import total_failure
from dapo_jax.training.metrics import sampling_metrics


def kept_counts(counts, size):
    """The first `counts[i]` groups of round i are kept."""
    return lambda number: number % size < counts[number // size]


@pytest.mark.parametrize(
    ("counts", "size", "filtered", "accumulated"),
    [
        ((45, 62, 50), 128, [1328, 1056, 1248], [45, 107, 157]),
        ((424, 420, 415), 1024, [9600, 9664, 9744], [424, 844, 1259]),
    ],
)
def test_the_documents_arithmetic(counts, size, filtered, accumulated, caplog):
    with caplog.at_level("INFO"):
        accepted, calls = run(kept_counts(counts, size), target=size, size=size, samples=16)
    assert calls == [list(range(i * size, (i + 1) * size)) for i in range(3)]
    assert len(accepted.experience) == size
    assert re.findall(r"Generated batch (\d+)", caplog.text) == ["1", "2", "3"]
    assert [int(found) for found in re.findall(r"filtered (\d+) trajectories", caplog.text)] == filtered
    assert [int(found) for found in re.findall(r"num_prompt_in_batch=(\d+)", caplog.text)] == accumulated
    assert f"Taking first {16 * size} trajectories" in caplog.text
    metrics = sampling_metrics(accepted)
    assert metrics["train/num_kept_prompts"] == metrics["dynamic_sampling/num_accumulated_prompts"] == accumulated[-1]
    assert metrics["train/filter_rate"] == pytest.approx(1 - sum(counts) / (3 * size))
    assert metrics["dynamic_sampling/num_gen_batches"] == metrics["train/num_gen_batches"] == 3


def test_metrics_are_over_all_evaluated_groups():
    accepted, _ = run(lambda number: number % 3 == 1, target=3)  # 1, 4 and 7 of 0 to 7
    metrics = sampling_metrics(accepted)
    assert metrics["dynamic_sampling/num_evaluated_prompts"] == 8
    assert metrics["dynamic_sampling/filtered_all_correct"] == 3  # 0, 2 and 6
    assert metrics["dynamic_sampling/filtered_all_wrong"] == 2  # 3 and 5
    assert metrics["dynamic_sampling/filtered_other"] == 0
    assert metrics["train/mean_metric_std"] == pytest.approx(0.5 * 3 / 8)
    assert metrics["dynamic_sampling/generated_tokens"] == 8 * 2 * 2
    assert metrics["dynamic_sampling/trained_tokens"] == 3 * 2 * 2
    assert metrics["dynamic_sampling/overgen_ratio"] == pytest.approx(8 / 3)
    assert metrics["dynamic_sampling/partial_step"] == 0
    dropped_are_thrice_as_long = [
        dataclasses.replace(
            one, outcomes=dataclasses.replace(one.outcomes, lengths=np.where(one.keep, 2, 6)[:, None].repeat(2, 1))
        )
        for one in accepted.rounds
    ]
    metrics = sampling_metrics(dataclasses.replace(accepted, rounds=dropped_are_thrice_as_long))
    assert metrics["dynamic_sampling/accepted_len_over_finished_kept_len"] == 1
    assert metrics["dynamic_sampling/accepted_len_over_judged_len"] == pytest.approx(2 / ((3 * 2 + 5 * 6) / 8))
    carried_alone = sampling_metrics(dataclasses.replace(accepted, rounds=[]))
    assert not {"train/filter_rate", "train/mean_metric_std"} & set(carried_alone), "nothing was sampled: no rates"


def schedules(*sizes):
    for size in sizes:
        yield {"size": size}
        for slack in (0.5, 1.0, 2.0):
            yield {"size": size, "stream": slack}


def batches(keep_of, steps=5, **options):
    """The prompt numbers of the batches of several steps, and the number of groups that were judged."""
    state, found, evaluated = start(), [], 0
    for step in range(1, steps + 1):
        accepted, _ = run(keep_of, state=state, step=step, **options)
        state, evaluated = accepted.state, evaluated + sum(len(round_.keep) for round_ in accepted.rounds)
        found.append(numbers_of(accepted))
    return found, evaluated


def random_keeps(rate):
    return lambda number: np.random.default_rng([3, number]).random() < rate


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_with_requeue_every_schedule_gives_the_same_batches(rate):
    expected, _ = batches(random_keeps(rate), size=4)
    assert sum(expected, []) == [n for n in range(1000) if random_keeps(rate)(n)][: 5 * 4]
    for sizes in schedules(1, 3, 4, 17):
        assert batches(random_keeps(rate), **sizes)[0] == expected, sizes


def test_the_first_prompts_are_taken_not_the_shortest_answers():
    """Which choosing what finishes first would prefer."""

    def round_at(numbers):
        round_ = round_of(numbers, [True] * len(numbers), samples=2)
        mask = np.broadcast_to(np.arange(40) < 40 - np.array(numbers)[:, None, None], round_.experience.mask.shape)
        return dataclasses.replace(round_, experience=dataclasses.replace(round_.experience, mask=mask))

    assert numbers_of(accumulated(MadeUp(round_at), start(), **options_of(size=8))) == [0, 1, 2, 3]


def test_a_queue_holds_what_will_be_needed_and_is_left_once_the_batch_is_certain():
    """64 groups at 0.5: at 153 prompts, 64 are kept two standard deviations below the mean."""
    assert 152 < queued_prompts(64, keep_rate=0.5) < 153 and queued_prompts(0, keep_rate=0.5) == 0
    assert queued_prompts(64, keep_rate=1.0) == 64 and block_size(64) == 8 and block_size(2) == 1
    accepted, calls = run(random_keeps(0.5), target=64, size=16, limit=20, stream=1.0)
    assert calls == [list(range(first, first + 8)) for first in range(0, 160, 8)]
    last = accepted.experience.numbers[-1]
    assert sum(len(round_.keep) for round_ in accepted.rounds) == (last // 8 + 1) * 8 < 160
    assert accepted.state.next_prompt == last + 1


def test_a_queue_that_carries_waits_for_all_that_it_has_begun():
    accepted, calls = run(random_keeps(0.5), target=64, size=16, limit=20, stream=1.0, leftover="carry")
    assert sum(len(round_.keep) for round_ in accepted.rounds) == sum(map(len, calls)) == accepted.state.next_prompt
    assert len(accepted.state.carried) == sum(map(random_keeps(0.5), range(accepted.state.next_prompt))) - 64


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_the_adaptive_limit_of_a_queue_waits_for_as_many_groups_as_that_of_rounds(first):
    options = {"target": 64, "size": 64, "limit": 20, "adaptive": 2.0, "state": start(first, keep_rate=0.3)}
    accepted, _ = run(random_keeps(0.3), stream=1.0, **options)
    assert accepted.outcome == "full" and accepted.sampled.tokens == 4 * sum(len(one.keep) for one in accepted.rounds)


def test_a_queue_is_filled_up_as_verdicts_show_more_need():
    accepted, calls = run(lambda n: n % 8 == 0, target=16, size=16, limit=20, stream=1.0)
    assert numbers_of(accepted) == list(range(0, 128, 8)) and len(calls[0]) == 2
    with pytest.raises(RuntimeError, match="after 2 generation rounds"):
        run(lambda n: n % 8 == 0, target=16, size=16, limit=2, stream=1.0)


def test_carried_groups_are_used_first_and_nothing_is_sampled_twice():
    keeps = random_keeps(0.5)
    found, evaluated = batches(keeps, size=16, leftover="carry", leftover_max_staleness=9)
    kept = [n for n in range(1000) if keeps(n)]
    assert sum(found, []) == kept[: 5 * 4]
    assert evaluated < batches(keeps, size=16)[1]
    first, _ = run(keeps, size=16, leftover="carry")
    surplus = [n for n in range(16) if keeps(n)][4:]
    assert first.state.carried.numbers.tolist() == surplus and first.state.next_prompt == 16
    second, calls = run(keeps, size=16, leftover="carry", state=first.state, step=2)
    assert numbers_of(second)[: len(surplus)] == surplus[:4]
    metrics = sampling_metrics(second)
    assert metrics["train/num_kept_prompts"] == sum(map(keeps, sum(calls, []))), "each group is counted once"
    assert metrics["dynamic_sampling/num_accumulated_prompts"] == len(surplus) + metrics["train/num_kept_prompts"]
    assert metrics["dynamic_sampling/num_carried_in"] == len(surplus)
    assert metrics["dynamic_sampling/num_carried_out"] == len(surplus) + sum(map(keeps, sum(calls, []))) - 4


def test_carried_groups_that_are_too_old_are_dropped():
    state = run(lambda n: True, size=16, leftover="carry")[0].state  # 12 groups
    for step, staleness, stale in ((2, 1, 0), (3, 1, 12), (3, 2, 0)):
        options = {"leftover": "carry", "leftover_max_staleness": staleness}
        later, _ = run(lambda n: True, size=16, state=state, step=step, **options)
        assert sampling_metrics(later)["dynamic_sampling/num_stale"] == stale


def test_groups_that_were_carried_before_a_run_requeues_are_used_up():
    state = run(lambda n: True, size=12, leftover="carry")[0].state
    for step, (numbers, left, cursor) in enumerate([([4, 5, 6, 7], 4, 12), ([8, 9, 10, 11], 0, 12)], start=2):
        accepted, calls = run(lambda n: True, size=12, state=state, step=step, leftover_max_staleness=9)
        state = accepted.state
        assert numbers_of(accepted) == numbers and not calls and state.next_prompt == cursor
        assert left == (len(state.carried) if state.carried else 0)
        metrics = sampling_metrics(accepted)
        assert metrics["dynamic_sampling/num_skipped_uniform"] == 0 == metrics["dynamic_sampling/num_requeued"]
        assert metrics["dynamic_sampling/num_carried_out"] == left
    accepted, calls = run(lambda n: True, size=12, state=state, step=4)
    assert numbers_of(accepted) == [12, 13, 14, 15] and accepted.state.next_prompt == 16


@pytest.mark.parametrize("slack", [1e-6, 0.25, 0.75])
@pytest.mark.parametrize("keep_rate", [1e-6, 0.5, 1.0])  # of earlier steps, right or wrong
def test_a_stream_with_less_slack_than_it_needs_takes_longer_for_the_same_batch(slack, keep_rate):
    kept = lambda number: number % 3 == 0  # noqa: E731
    accepted, blocks = run(kept, target=8, limit=20, stream=slack, state=start(keep_rate=keep_rate))
    assert numbers_of(accepted) == list(range(0, 24, 3)) and accepted.outcome == "full" and all(blocks)
    assert sampling_metrics(accepted)["train/num_gen_batches"] == 6  # 22 prompts


@pytest.mark.parametrize(("rate", "size"), [(0.3, 8), (0.3, 5), (0.6, 16), (0.1, 4)])
def test_a_stream_counts_the_rounds_of_the_same_batch_in_rounds_however_its_prompts_are_begun(
    rate, size, monkeypatch, caplog
):
    def counted(**options):
        caplog.clear()
        with caplog.at_level("INFO"):
            accepted, _ = run(random_keeps(rate), target=16, size=size, limit=50, **options)
        logged = [int(found) for found in re.findall(r"Generated batch (\d+)", caplog.text)]
        assert logged == list(range(1, logged[-1] + 1))
        return numbers_of(accepted), sampling_metrics(accepted)["train/num_gen_batches"], logged[-1]

    expected = counted()
    assert expected[1] == expected[2] == -(-(expected[0][-1] + 1) // size)
    for block in (1, 2, 3, 7, 100):
        monkeypatch.setattr(schedule, "block_size", lambda target, block=block: block)
        assert counted(stream=1.0) == expected


def test_the_adaptive_limit_follows_the_filter_rate():
    with pytest.raises(RuntimeError, match="after 2 generation rounds"):  # 7.5 of 9 kept: int(8 / (4 * 7.5 / 9)) = 2
        run(lambda n: n < 7, target=8, adaptive=0.0)
    slack = r"after 3 generation rounds \(algorithm.filter_groups.adaptive_limit\).*raise adaptive_limit.slack"
    with pytest.raises(RuntimeError, match=slack):  # one more than expected
        run(lambda n: n < 7, target=8, adaptive=1.0)
    accepted, _ = run(lambda n: n % 2 == 0, target=8, adaptive=2.0)
    assert accepted.limit < math.inf and len(accepted.experience) == 8


def lower_end(kept, evaluated, z=3.09):
    """Wilson's, as the root of (kept / evaluated - p)^2 = z^2 p (1 - p) / evaluated."""
    share = kept / evaluated
    roots = np.roots([1 + z**2 / evaluated, -(2 * share + z**2 / evaluated), share**2])
    return float(roots.min())


@pytest.mark.parametrize(("target", "size", "rate"), [(512, 32, 0.3), (128, 16, 0.3), (32, 32, 0.05), (512, 512, 0.05)])
def test_later_rounds_end_no_more_steps_than_the_first_limit_does(target, size, rate):
    """Groups that are kept by chance, at one rate: the limit that falls ends at most 2 of 100 steps more."""
    rng, ended_by_first, ended = np.random.default_rng(0), 0, 0
    plan = Schedule(options_of(adaptive=2.0)["options"], target, size, carried=0, keep_rate=0.5)
    for _ in range(300):
        kept, rounds, limits, ends = 0, 0, [], False
        while kept < target and not (limits and rounds >= limits[0]):
            kept, rounds = kept + rng.binomial(size, rate), rounds + 1
            if rounds >= 2:
                before = limits[-1] if limits else None
                limits.append(plan.adapted_limit(before, kept=kept, evaluated=rounds * size))
                ends |= kept < target and rounds >= limits[-1]
        ended_by_first += kept < target
        ended += ends
    assert ended_by_first <= ended <= ended_by_first + 6


def test_the_adaptive_limit_falls_with_the_keep_rate_and_never_rises():
    never = dict(target=512, size=512, adaptive=2.0, on_limit="partial", on_empty="skip_step")
    hopeless, calls = run(lambda n: False, **never)
    # 10 ln(1000) / (512 x 0.5) and the slack; the rate alone, 0.5 of 1025, would allow 2052 rounds
    assert hopeless.limit == len(calls) == 2
    accepted, _ = run(lambda n: 2048 <= n, **{**never, "size": 8, "target": 8}, state=start(keep_rate=0.01))
    assert accepted.outcome == "skipped" and accepted.limit == int(8 * 17 / (8 * 0.5) + 2)
    late, calls = run(lambda n: n >= 16 and n % 2 == 0, target=8, size=8, adaptive=2.0)  # nothing in the first two
    assert late.outcome == "full" and len(calls) == 4 and late.limit == int(8 / (8 * lower_end(8, 32)) + 2) < 19
    rising, _ = run(lambda n: n < 12, target=16, size=8, adaptive=0.0, on_limit="partial")
    assert rising.limit == int(16 * 17 / (8 * 12.5)) == 2 and len(rising.experience) == 12


@pytest.mark.parametrize("stream", [None, 1.0])
def test_a_step_far_beyond_what_earlier_ones_needed_warns_once_a_round(stream, caplog):
    run(lambda n: n >= 40, target=8, size=8, stream=stream)  # 16 prompts were expected
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = "step 1: 0 of 8 groups are kept after {} rounds, 2 were expected; algorithm.filter_groups."
    assert said == [text.format(rounds) + "max_num_gen_batches is 0" for rounds in (4, 5)]
    caplog.clear()
    run(lambda n: n >= 40, target=8, size=8, stream=stream, limit=6)
    assert [text.endswith("; the limit is 6") for text in caplog.messages if "were expected" in text] == [True] * 2
    caplog.clear()
    run(lambda n: n >= 40, target=8, size=8, stream=stream, state=start(keep_rate=0.15))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("changes", [{}, {"on_limit": "fallback_unfiltered"}, {"leftover": "carry"}])
def test_tokens_of_groups_that_are_not_trained_on_are_freed(changes):
    tokens, alive = [], []

    def round_at(numbers):
        round_ = round_of(numbers, [number % 4 == 0 for number in numbers], samples=2)
        alive.append(sum(reference() is not None for reference in tokens))
        tokens.append(weakref.ref(round_.experience.responses))
        return round_

    accepted = accumulated(MadeUp(round_at), start(), **options_of(size=8, target=8, **changes))
    assert len(accepted.rounds) == 4 and alive == [0] * 4
    assert sum(int(round_.outcomes.lengths.sum()) for round_ in accepted.rounds) == 32 * 2 * 2


def test_the_log_tells_full_partial_and_skipped_steps_apart(caplog):
    enough = "Collected enough data"
    with caplog.at_level("INFO"):
        run(lambda n: True)
    assert enough in caplog.text
    for kept, policy, text in (
        ((0, 4), {"on_limit": "partial"}, "step 1: training on 2 of 4 groups (the limit of rounds is reached)"),
        ((2, 6), {"on_limit": "fallback_unfiltered"}, "step 1: 2 of 4 groups are unfiltered"),
        ((2,), {"on_limit": "fallback_unfiltered", "target": 9}, "step 1: 7 of 8 groups are unfiltered"),
        ((), {"on_limit": "partial", "on_empty": "skip_step"}, "no group was kept, the step trains on nothing"),
        ((), {"on_limit": "partial", "on_empty": "train_unfiltered"}, "no group was kept, training on unfiltered ones"),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            run(lambda n, kept=kept: n in kept, limit=2, **policy)
        assert text in caplog.text and enough not in caplog.text


def every(number):
    return lambda found: found % number == 0


def none(_):
    return False


FILL, TRAIN = {"on_limit": "fallback_unfiltered"}, {"on_empty": "train_unfiltered"}
STEPS = {  # of 2 rounds of 4 prompts at most: which prompts are kept, options; accepted, outcome, the next prompt
    "the first in prompt order": (lambda n: n % 3 == 1, {"first": 10, "limit": 0}, [10, 13, 16, 19], "full", 20),
    "after two empty rounds": (lambda n: n >= 8, {"limit": 3}, [8, 9, 10, 11], "full", 12),
    "as many rounds as allowed": (every(4), {"target": 3, "limit": 3}, [0, 4, 8], "full", 9),
    "surplus is discarded": (every(1), {"size": 16, "leftover": "discard"}, [0, 1, 2, 3], "full", 16),
    "a partial step": (every(4), {"on_limit": "partial"}, [0, 4], "partial", 8),
    "filled up in prompt order": (lambda n: n in (2, 6), FILL, [0, 1, 2, 6], "fallback", 8),
    "in the next epoch": (every(25), {"first": 40, "target": 2, "limit": 0}, [50, 75], "full", 76),
    "end of epoch": (every(25), {"first": 20, "limit": 0, "on_exhausted": "partial"}, [25], "partial", 50),
    "unfiltered instead of none": (none, {"on_limit": "partial", **TRAIN}, [0, 1, 2, 3], "unfiltered", 8),
    "filled up from none": (none, {**FILL, **TRAIN}, [0, 1, 2, 3], "fallback", 8),
}


@pytest.mark.parametrize("case", STEPS)
def test_which_groups_a_step_accepts(case):
    kept, options, numbers, outcome, following = STEPS[case]
    accepted, calls = run(kept, **{"limit": 2, **options})
    assert numbers_of(accepted) == numbers and accepted.outcome == outcome
    assert accepted.state.next_prompt == following and accepted.state.carried is None
    assert case != "end of epoch" or max(sum(calls, [])) == 49
    metrics = sampling_metrics(accepted)
    assert metrics["dynamic_sampling/partial_step"] == (outcome != "full")
    assert metrics["dynamic_sampling/num_discarded_valid"] == (12 if "leftover" in options else 0)


def test_a_step_without_any_group_may_be_skipped():
    skipped, _ = run(none, limit=2, on_limit="partial", on_empty="skip_step")
    assert skipped.experience is None and skipped.outcome == "skipped" and skipped.state.next_prompt == 8
    assert sampling_metrics(skipped)["dynamic_sampling/trained_tokens"] == 0


MEANS = {"rule": "mean_range", "filter_low": 0.2, "filter_high": 0.8}
EPOCH = {"first": 21, "target": 2, "limit": 0, "on_exhausted": "error"}


@pytest.mark.parametrize(
    ("kept", "options", "text"),
    [
        (every(4), {"target": 3}, "only 2 of data.train_batch_size=3 groups kept after 2 generation rounds"),
        (every(100), {}, "of 8 groups 3 were all right, 4 all wrong, 0 uniform otherwise"),
        (every(100), MEANS, r"0 dropped otherwise .mean<=0.2 or mean>=0.8."),
        (every(100), {}, "raise max_num_gen_batches.*lower data.train_batch_size.*on_limit=partial"),
        (every(100), {}, "Change one of these, then rerun: .*change the difficulty of the data"),
        (none, {"limit": 3, "stream": 1.0}, "of 12 groups"),
        (none, {"on_limit": "partial"}, "only 0 of.*or set algorithm.filter_groups.on_empty=skip_step"),
        (every(25), EPOCH, "at the end of the epoch: .*set on_exhausted=next_epoch"),
    ],
)
def test_the_error_of_too_few_groups_counts_them_and_names_the_ways_out(kept, options, text):
    with pytest.raises(RuntimeError, match=text):
        run(kept, **{"limit": 2, **options})


def test_without_verdicts_the_data_are_not_called_too_hard():
    def unjudged(numbers):
        groups = experience(numbers, np.full((len(numbers), 2), np.nan))
        return Round(groups, np.zeros(len(numbers), bool), np.zeros(len(numbers)))

    text = "8 had too few verdicts.*or set .*on_limit=partial; or let the reward function give more verdicts$"
    with pytest.raises(RuntimeError, match=text):
        accumulated(MadeUp(unjudged), start(), **options_of(limit=2))


@pytest.mark.parametrize("stream", [None, 1.0])
@pytest.mark.parametrize(
    ("kept", "options", "outcome"),  # of prompts 0 to 7, of which the dropped ones are right in turn
    [
        ((1, 3), {}, "solved"),  # 4 of 6 are right
        ((), {}, "error"),  # 4 of 8
        ((1, 3, 5, 7), {"target": 9}, "error"),  # 4 of 4, but as many are kept
        ((1, 3), {"on_limit": "partial"}, "partial"),
        ((1, 3), FILL, "fallback"),
        ((), {"first": 2, "size": 5, "limit": 1, "on_limit": "partial"}, "solved"),  # 3 of 5
        ((), {"first": 2, "size": 5, "limit": 1, "on_limit": "partial", "on_empty": "skip_step"}, "skipped"),
        ((43,), {"first": 42, "limit": 0, "on_exhausted": "error"}, "solved"),  # 4 of the last 7 rows
    ],
)
def test_data_is_solved_if_most_dropped_groups_of_a_step_that_would_fail_are_all_right(kept, options, outcome, stream):
    arguments = {"limit": 2, "stream": stream, **options}
    if outcome == "error":
        with pytest.raises(RuntimeError, match="Change one of these"):
            run(lambda number: number in kept, **arguments)
        return
    accepted, _ = run(lambda number: number in kept, **arguments)
    assert accepted.outcome == outcome and (accepted.experience is None) == (outcome in ("solved", "skipped"))


@pytest.mark.short("skip_uniform-3", "curriculum-4")
@pytest.mark.parametrize("size", [1, 3, 4, 17])
@pytest.mark.parametrize("rule", ["skip_uniform", "curriculum"])
def test_prompts_with_a_uniform_history_are_left_out_alike_by_every_schedule(rule, size):
    rules = SkipUniformConfig(enable=rule == "skip_uniform"), CurriculumConfig(enable=rule == "curriculum")
    source = PromptSource(lambda number: number % NUM_ROWS, NUM_ROWS, *rules)
    keep_of = lambda number: number % NUM_ROWS % 5 == 0  # noqa: E731
    expected, sampled = batches(keep_of, steps=20, size=4, source=source)
    assert sampled < batches(keep_of, steps=20, size=4)[1]
    for sizes in schedules(size):
        assert batches(keep_of, steps=20, source=source, **sizes)[0] == expected, sizes


def failing(number, *, size=2, failed=True):
    groups = experience([number] * size, np.zeros((size, 2)))
    error = "KeyError: 'answer'" if failed else ""
    groups = dataclasses.replace(groups, failed=np.full((size, 2), failed), error=error)
    return Round(groups, np.zeros(size, bool), np.zeros(size))


@pytest.mark.parametrize("limit", [0, 1, 10])
@pytest.mark.parametrize("stream", [None, 1.0])
def test_a_step_in_which_every_verdict_failed_ends_with_the_commonest_error(limit, stream):
    judged = []

    def round_at(numbers):
        judged.extend(numbers)
        assert len(judged) <= 4, "as many groups as a batch has are enough to know"
        return failing(numbers[0], size=len(numbers))

    options = options_of(target=4, size=2, limit=limit, stream=stream, on_limit="partial", on_empty="skip_step")
    with pytest.raises(RuntimeError, match="step 1: .* failed on all [48] responses, most often with KeyError"):
        accumulated(MadeUp(round_at), start(), **options)


@pytest.mark.parametrize(
    ("errors", "share", "message"),
    [
        (["judge: no", "judge: no"], 1.0, r"judge gave no verdict on all 8 .* with no: correct reward.judge, or see"),
        (["KeyError", "judge: no"], 1.0, "function failed on all 8 .*KeyError: correct it, and let"),
        (["KeyError", ""], 0.5, None),
        (["KeyError", ""], 0.4, r"failed on 4 of 8 .* with KeyError \(reward.max_error_share=0.4\): correct it"),
    ],
)
def test_a_step_with_too_many_failed_verdicts_ends_with_the_advice_for_what_failed(errors, share, message):
    rounds = [failing(index, failed=bool(error)).experience.outcomes for index, error in enumerate(errors)]
    parts = [dataclasses.replace(round_, error=error) for round_, error in zip(rounds, errors, strict=True)]
    found = total_failure(parts, "step 1", share)
    assert (found is None) if message is None else re.search("step 1: .*" + message, str(found))


def test_too_few_groups_for_failed_verdicts_say_so():
    rounds = iter([failing(0), failing(2, failed=False)])
    with pytest.raises(RuntimeError, match="failed on 4 of 8 responses, most often with KeyError.*Change one"):
        accumulated(MadeUp(lambda numbers: next(rounds)), start(), **options_of(size=2, limit=2))
