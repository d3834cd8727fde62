import re

import numpy as np
import pytest

from dapo_jax.dynamic_sampling.accumulation import accumulate_groups, sampling_metrics
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.rollout.experience import Experience, concatenate


def experience(numbers, acc) -> Experience:
    """Groups of as many samples as `acc` [Q, G] has columns, of two tokens each."""
    acc = np.asarray(acc, np.float64)
    shape = acc.shape
    mask = np.broadcast_to([True, True, False, False], (*shape, 4))
    return Experience(
        np.array(numbers), np.array(numbers) % 50, [[1]] * shape[0], np.zeros((*shape, 4), np.int32), mask,
        np.zeros((*shape, 4), np.float32), np.ones(shape, bool), [["x"] * shape[1]] * shape[0],
        {"acc": acc, "score": acc}, 0,
    )  # fmt: skip


def round_of(numbers, keep, samples) -> Round:
    """Kept groups are half right; of the others those of odd numbers are all right, of even ones all wrong."""
    keep = np.asarray(keep, bool)
    acc = np.where(keep[:, None], np.arange(samples) % 2, np.array(numbers)[:, None] % 2)
    return Round(experience(list(numbers), acc), keep, np.where(keep, 0.5, 0.0))


def run(keep_of, *, first=0, target=4, size=4, limit=0, samples=2):
    calls = []

    def generate_round(numbers):
        calls.append(numbers)
        return round_of(numbers, [keep_of(number) for number in numbers], samples)

    accepted = accumulate_groups(
        generate_round, first_prompt=first, target=target, gen_batch_size=size, max_num_gen_batches=limit, step=1,
        metric="acc",
    )  # fmt: skip
    return accepted, calls


def kept_counts(counts, size):
    """keep(q) that keeps the first `counts[i]` prompts of round i."""
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
    assert calls == [range(0, size), range(size, 2 * size), range(2 * size, 3 * size)]
    assert len(accepted.experience) == size
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
    assert metrics["dynamic_sampling/filtered_all_correct"] == 2  # 3 and 5
    assert metrics["dynamic_sampling/filtered_all_wrong"] == 3  # 0, 2 and 6
    assert metrics["dynamic_sampling/filtered_other"] == 0
    assert metrics["train/mean_metric_std"] == pytest.approx(0.5 * 3 / 8)
    assert metrics["dynamic_sampling/generated_tokens"] == 8 * 2 * 2
    assert metrics["dynamic_sampling/trained_tokens"] == 3 * 2 * 2
    assert metrics["dynamic_sampling/overgen_ratio"] == pytest.approx(8 / 3)


def test_the_first_kept_groups_in_prompt_order_are_accepted():
    accepted, _ = run(lambda number: number % 3 == 1, first=10)
    assert accepted.experience.numbers.tolist() == [10, 13, 16, 19] and accepted.next_prompt == 20
    assert sampling_metrics(accepted)["dynamic_sampling/num_requeued"] == 2  # 20 and 21 are sampled again


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_the_round_size_never_changes_the_batches(size):
    keep = np.random.default_rng(0).random(1000) < 0.3
    batches, cursors = [], [0, 0]
    for _ in range(8):
        pair = []
        for index, gen_batch_size in enumerate((size, 4)):
            accepted, _ = run(lambda number: keep[number], first=cursors[index], size=gen_batch_size)
            cursors[index] = accepted.next_prompt
            pair.append(accepted.experience.numbers.tolist())
        batches.append(pair)
    assert all(first == second for first, second in batches)


def test_exactly_as_many_rounds_as_allowed_may_run():
    accepted, calls = run(lambda number: number % 4 == 0, target=3, limit=3)
    assert len(calls) == 3 and len(accepted.experience) == 3
    with pytest.raises(RuntimeError, match="only 2 of data.train_batch_size=3 groups kept after 2 generation rounds"):
        run(lambda number: number % 4 == 0, target=3, limit=2)


def test_the_error_counts_right_and_wrong_groups_and_names_three_ways_out():
    with pytest.raises(RuntimeError) as caught:
        run(lambda number: number == 0, target=2, limit=2)
    for text in (
        "of 8 groups 4 were all right, 3 all wrong, 0 uniform",
        "raise max_num_gen_batches",
        "lower data.train_batch_size",
        "change the difficulty of the data",
    ):
        assert text in str(caught.value)


def test_an_empty_round_is_not_an_error():
    accepted, calls = run(lambda number: number >= 8, limit=3)
    assert len(calls) == 3 and accepted.experience.numbers.tolist() == [8, 9, 10, 11]


def test_experiences_join_and_select():
    joined = concatenate([experience([0], [[0, 1]]).with_scores(more=np.ones((1, 2))), experience([1], [[1, 1]])])
    assert len(joined) == 2 and np.isnan(joined.scores["more"][1]).all()
    assert joined.select(np.array([1])).numbers.tolist() == [1] and joined.num_tokens == 8
