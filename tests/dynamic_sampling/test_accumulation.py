import jax
import numpy as np
import pytest

from dapo_jax.dynamic_sampling.accumulation import accumulate_groups, sampling_metrics
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups, keep_all, shape_rewards
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rollout.experience import Experience, concatenate


def experience(numbers, acc, *, lengths=2) -> Experience:
    """Groups of as many samples as `acc` [Q, G] has columns."""
    acc = np.asarray(acc, np.float64)
    shape = acc.shape
    mask = np.arange(4) < np.broadcast_to(lengths, shape)[..., None]
    return Experience(
        np.array(numbers), np.array(numbers) % 50, [[1]] * shape[0], np.zeros((*shape, 4), np.int32), mask,
        np.zeros((*shape, 4), np.float32), np.ones(shape, bool), [["x"] * shape[1]] * shape[0],
        {"acc": acc, "score": acc}, 0,
    )  # fmt: skip


def round_of(numbers, keep) -> Round:
    keep = np.asarray(keep, bool)
    acc = np.where(keep[:, None], [0.0, 1.0], np.array([n % 2 for n in numbers])[:, None])
    return Round(experience(list(numbers), acc), keep, np.where(keep, 0.5, 0.0))


def run(keep_of, *, first=0, target=4, size=4, limit=0):
    calls = []

    def generate_round(numbers):
        calls.append(numbers)
        return round_of(numbers, [keep_of(number) for number in numbers])

    accepted = accumulate_groups(
        generate_round, first_prompt=first, target=target, gen_batch_size=size, max_num_gen_batches=limit, step=1,
        metric="acc",
    )  # fmt: skip
    return accepted, calls


def kept_counts(counts, size):
    """keep(q) that keeps the first `counts[i]` prompts of round i."""
    return lambda number: number % size < counts[number // size]


@pytest.mark.parametrize(
    ("counts", "size", "target"), [((45, 62, 50), 128, 128), ((424, 420, 415), 1024, 1024)]
)
def test_the_documents_arithmetic(counts, size, target):
    accepted, calls = run(kept_counts(counts, size), target=target, size=size)
    metrics = sampling_metrics(accepted)
    assert len(calls) == 3 and len(accepted.experience) == target
    assert metrics["dynamic_sampling/num_accumulated_prompts"] == sum(counts)
    assert metrics["train/filter_rate"] == pytest.approx(1 - sum(counts) / (3 * size))
    assert metrics["dynamic_sampling/num_gen_batches"] == metrics["train/num_gen_batches"] == 3


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
    for text in ("of 8 groups 4 were all right, 3 all wrong, 0 uniform", "max_num_gen_batches", "train_batch_size"):
        assert text in str(caught.value)


def test_an_empty_round_is_not_an_error():
    accepted, calls = run(lambda number: number >= 8, limit=3)
    assert len(calls) == 3 and accepted.experience.numbers.tolist() == [8, 9, 10, 11]


def test_the_filter_marks_mixed_groups_on_any_number_of_rows():
    mesh = make_mesh(8, 1, 1)
    groups = experience(range(5), [[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]])
    with jax.set_mesh(mesh):
        found = filter_groups(groups, "acc", mesh)
    assert found.keep.tolist() == [False, True, False, True, False]
    np.testing.assert_allclose(found.metric_std, [0, 2**0.5 / 3, 0, 2**0.5 / 3, 0], rtol=1e-6)


def test_a_missing_metric_lists_what_there_is():
    mesh = make_mesh(8, 1, 1)
    groups = experience([0], [[0, 1]])
    with pytest.raises(ValueError, match=r"metric='quality'.*\['acc', 'score'\]"):
        filter_groups(groups, "quality", mesh)
    half = groups.with_scores(quality=np.array([[1.0, np.nan]]))
    with pytest.raises(ValueError, match="not measured for every sample"):
        filter_groups(half, "quality", mesh)


def test_shaping_adds_the_penalty_to_the_score_but_not_to_acc():
    mesh = make_mesh(8, 1, 1)
    groups = experience([0], [[1, 1]], lengths=[[2, 4]])
    with jax.set_mesh(mesh):
        shaped = shape_rewards(
            groups, max_response_length=4, overlong_buffer_length=2, overlong_penalty_factor=1.0, mesh=mesh
        )
        assert not filter_groups(shaped, "acc", mesh).keep[0] and filter_groups(shaped, "seq_reward", mesh).keep[0]
    np.testing.assert_allclose(shaped.scores["seq_reward"], [[1.0, 0.0]])


def test_without_a_filter_all_groups_are_kept():
    assert keep_all(experience([0, 1], [[0, 0], [1, 1]])).keep.all()


def test_experiences_join_and_select():
    joined = concatenate([experience([0], [[0, 1]]).with_scores(more=np.ones((1, 2))), experience([1], [[1, 1]])])
    assert len(joined) == 2 and np.isnan(joined.scores["more"][1]).all()
    assert joined.select(np.array([1])).numbers.tolist() == [1] and joined.num_tokens == 8
