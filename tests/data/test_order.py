import pytest
from ends_within import ends_within

from dapo_jax.data.order import PromptOrder


def rows(order, start, stop):
    return [order.row(q) for q in range(start, stop)]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_contains_each_row_once(num_rows, shuffle):
    order = PromptOrder(num_rows, seed=3, shuffle=shuffle)
    for epoch in (0, 1, 2, 1000):
        assert sorted(rows(order, epoch * num_rows, (epoch + 1) * num_rows)) == list(range(num_rows))


def test_row_is_a_pure_function_of_seed_and_number():
    first, second = (PromptOrder(50, seed=3, shuffle=True) for _ in range(2))
    forwards = rows(first, 0, 150)
    assert [second.row(q) for q in reversed(range(150))] == forwards[::-1]
    assert rows(PromptOrder(50, seed=4, shuffle=True), 0, 150) != forwards
    assert all(type(row) is int for row in forwards)


def test_the_order_of_a_seed_is_fixed_for_good():
    first_epochs = [*(5, 3, 6, 7, 4, 2, 1, 0), *(6, 5, 4, 1, 0, 7, 3, 2)]
    assert rows(PromptOrder(8, seed=0, shuffle=True), 0, 16) == first_epochs


def test_epochs_are_permuted_differently_also_from_those_of_neighbouring_seeds():
    orders = [PromptOrder(40, seed=seed, shuffle=True) for seed in range(4)]
    epochs = {tuple(rows(order, start, start + 40)) for order in orders for start in range(0, 160, 40)}
    assert len(epochs) == 16


def test_without_shuffling_the_rows_come_in_order():
    assert rows(PromptOrder(3, seed=0, shuffle=False), 0, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_far_prompts_are_found_at_once_and_epochs_count_passes_through_the_rows():
    order = PromptOrder(17_000, seed=0, shuffle=True)
    with ends_within():
        assert 0 <= order.row(10**12) < 17_000
    assert [PromptOrder(4, seed=0, shuffle=True).epoch(q) for q in (0, 2, 4, 10)] == [0, 0.5, 1, 2.5]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="num_rows=0 must be at least 1"):
        PromptOrder(0, seed=0, shuffle=True)


def test_a_mixture_takes_of_each_file_what_its_weight_says_at_any_point():
    order = PromptOrder(12, seed=3, shuffle=True, sizes=(7, 3, 2), weights=(1, 2.5, 0.5))
    for q in range(200):
        counts = order.counts(q)
        assert sum(counts) == q and all(
            abs(count - q * weight / 4) <= 1 for count, weight in zip(counts, (1, 2.5, 0.5), strict=True)
        )
    drawn = rows(order, 0, 400)
    for file, (start, stop) in enumerate(((0, 7), (7, 10), (10, 12))):
        mine = [row for row in drawn if start <= row < stop]
        assert order.files(drawn).tolist().count(file) == len(mine) == order.counts(400)[file]
        size = stop - start
        epochs = [mine[begin : begin + size] for begin in range(0, len(mine) - size, size)]
        assert all(sorted(epoch) == list(range(start, stop)) for epoch in epochs)
    again = PromptOrder(12, seed=3, shuffle=True, sizes=(7, 3, 2), weights=(1, 2.5, 0.5))
    assert [again.row(q) for q in reversed(range(400))] == drawn[::-1]
    alone = PromptOrder(7, seed=3, shuffle=True)
    assert [row for row in drawn if row < 7][:30] == rows(alone, 0, 30), "the first file's order is that of it alone"
