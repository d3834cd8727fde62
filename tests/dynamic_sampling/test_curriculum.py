"""Which prompts past groups leave out (skip_uniform, data.curriculum), and what is remembered of each row."""

import dataclasses

import numpy as np
import pytest
from dynamic_sampling.small_groups import NUM_ROWS, MadeUp, accumulated, experience, numbers_of, start
from dynamic_sampling.test_segments import run as run_segments
from small_run import resumed

from dapo_jax.config.sections import CurriculumConfig, FilterGroupsConfig, SkipUniformConfig
from dapo_jax.data.prompts import PromptSet
from dapo_jax.dynamic_sampling.prompt_stream import History, PromptSource, curriculum_metrics
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.monitor.records import read_metrics
from dapo_jax.training.state import RunState, restored_arrays, saved_arrays

NO_FILTER = FilterGroupsConfig(enable=False)
FILTER = "algorithm.filter_groups"


def source_of(*, num_rows=NUM_ROWS, **options) -> PromptSource:
    return PromptSource(lambda number: number % num_rows, num_rows, **options)


def history_of(**changes) -> History:
    size = len(next(iter(changes.values())))
    return dataclasses.replace(History.empty(size), **{name: np.array(values) for name, values in changes.items()})


def assert_same_history(one: History, other: History) -> None:
    for name, values in vars(one).items():
        assert values.dtype == getattr(other, name).dtype
        np.testing.assert_array_equal(values, getattr(other, name), err_msg=name)


def test_the_history_follows_the_groups_in_prompt_order():
    rows, mixed, accuracy = [0, 1, 0, 2, 1], [False, False, False, True, True], [0.0, 1.0, 1.0, 0.5, 0.25]
    history = History.empty(4).updated(np.array(rows), np.array(mixed), np.array(accuracy), decay=0.5)
    assert history.uniform_in_a_row.tolist() == [2, 0, 0, 0]
    assert history.mixed_rate.tolist() == [0.25, 0.75, 1.0, 1.0]
    np.testing.assert_array_equal(history.accuracy, [1.0, 0.25, 0.5, np.nan])
    assert_same_history(History.empty(4), history_of(uniform_in_a_row=np.zeros(4, np.int32)))


@pytest.mark.parametrize(
    ("rules", "history", "rates"),
    [
        (
            {"skip": SkipUniformConfig(enable=True, floor=0.2)},
            history_of(uniform_in_a_row=np.array([0, 1, 2, 40])),
            [1.0, 0.5, 0.25, 0.2],
        ),
        (
            {"curriculum": CurriculumConfig(enable=True, floor=0.1)},
            history_of(mixed_rate=np.array([1.0, 0.6, 0.3, 0.001], np.float32)),
            [1.0, 0.6, 0.3, 0.1],
        ),
        ({}, history_of(mixed_rate=np.zeros(4, np.float32)), [1.0] * 4),
    ],
)
def test_rows_are_drawn_as_often_as_their_rate_says_in_the_same_order(rules, history, rates):
    source, wanted = source_of(**rules, num_rows=4), 4000
    numbers, after = source.numbers(history, 0, 10 * wanted, 4 * wanted)
    assert after == 4 * wanted and numbers == sorted(set(numbers))
    found = np.bincount(np.array(numbers) % 4) / wanted
    np.testing.assert_allclose(found, rates, atol=0.03)
    assert found[np.array(rates) == 1].tolist() == [1.0] * rates.count(1.0)
    middle = source.numbers(history, 1000, 50, np.inf)
    assert middle == ([number for number in numbers if number >= 1000][:50], middle[0][-1] + 1), "draws have addresses"
    other = source_of(**rules, num_rows=4, seed=1).numbers(history, 0, 10 * wanted, 4 * wanted)[0]
    assert (other == numbers) == (not rules)


def judged_by_accuracy(numbers) -> Round:
    """Without a filter all groups are kept: rows 0 mod 3 are mixed, 1 mod 3 all wrong, 2 mod 3 all right."""
    kind = np.array(numbers)[:, None] % NUM_ROWS % 3
    acc = np.where(kind == 0, np.arange(2), kind - 1)
    return Round(experience(list(numbers), acc), np.ones(len(numbers), bool), np.zeros(len(numbers)))


def steps_without_filter(steps, state, first, source):
    found = []
    for step in range(first, first + steps):
        sizes = {"options": NO_FILTER, "target": 10, "gen_batch_size": 10, "step": step}
        accepted = accumulated(MadeUp(judged_by_accuracy), state, source=source, **sizes)
        state = accepted.state
        found.append(accepted)
    return found


def test_without_a_filter_groups_are_mixed_whose_accuracy_differs():
    found = steps_without_filter(40, start(), 1, source_of(curriculum=CurriculumConfig(enable=True, floor=0.2)))
    assert all(len(accepted.experience) == 10 and accepted.outcome == "full" for accepted in found)
    history, rows = found[-1].state.history, np.arange(NUM_ROWS)
    assert (history.mixed_rate[rows % 3 == 0] == 1).all() and (history.mixed_rate[rows % 3 != 0] < 0.2).all()
    metrics = curriculum_metrics(CurriculumConfig(enable=True, floor=0.2), history)
    assert metrics["curriculum/normal_share"] == 17 / 50 and metrics["curriculum/floor_share"] == 33 / 50
    assert metrics["curriculum/hard_share"] == 17 / 50 and metrics["curriculum/easy_share"] == 16 / 50
    assert metrics["curriculum/rate"] == pytest.approx((17 + 33 * 0.2) / 50)
    late = np.concatenate([accepted.experience.rows for accepted in found[20:]])
    assert np.mean(late % 3 == 0) == pytest.approx(17 / (17 + 33 * 0.2), abs=0.08)
    assert sum(accepted.num_skipped for accepted in found) == found[-1].state.next_prompt - 400
    plain = steps_without_filter(40, start(), 1, source_of())
    assert [numbers_of(accepted) for accepted in plain] == np.arange(400).reshape(40, 10).tolist()


def test_a_restart_between_two_steps_keeps_prompts_and_history():
    source, prompts = source_of(curriculum=CurriculumConfig(enable=True)), PromptSet([None] * 50, [[1]] * 50)
    whole = steps_without_filter(20, start(), 1, source)
    before = steps_without_filter(8, start(), 1, source)[-1].state
    arrays = saved_arrays(RunState(None, None, before, {}))
    state, _ = restored_arrays(arrays, prompts, None)
    rest = steps_without_filter(12, state, 9, source)
    assert [numbers_of(accepted) for accepted in rest] == [numbers_of(accepted) for accepted in whole[8:]]
    assert_same_history(rest[-1].state.history, whole[-1].state.history)
    for name in ("mixed_rate", "accuracy"):  # older checkpoints have neither
        del arrays[name]
    state, _ = restored_arrays(arrays, prompts, None)
    assert_same_history(state.history, history_of(uniform_in_a_row=before.history.uniform_in_a_row))


def test_segments_remember_groups_when_they_have_ended():
    found = [accepted for accepted, _ in run_segments(5, source=source_of(curriculum=CurriculumConfig(enable=True)))]
    judged = {row for accepted in found for round_ in accepted.rounds for row in round_.outcomes.rows}
    history = found[-1].state.history
    assert np.flatnonzero(~np.isnan(history.accuracy)).tolist() == sorted(judged) and history.mixed_rate.min() < 1


CURRICULUM = {"data.curriculum.enable": True, "data.arithmetic.num_train": 8, "trainer.test_freq": -1}


@pytest.mark.full
def test_a_killed_run_of_pools_alone_resumes_to_the_same_history(tmp_path, monkeypatch):
    pools = {f"{FILTER}.enable": False, "data.gen_batch_size": 4, "trainer.total_training_steps": 6}
    resumed(tmp_path, monkeypatch, CURRICULUM | pools, killed_in=6)
    rows = read_metrics(tmp_path / "a")[1:]
    assert rows[-1]["dynamic_sampling/num_skipped_uniform"] + rows[-2]["dynamic_sampling/num_skipped_uniform"] > 0
    assert rows[0]["curriculum/rate"] > rows[-1]["curriculum/rate"] >= 0.1
    shares = [sum(row[f"curriculum/{pool}_share"] for pool in ("easy", "normal", "hard")) for row in rows]
    assert shares[0] == 0.5 and shares[-1] == 1


SKIP = {"data.curriculum.enable": False, f"{FILTER}.skip_uniform.enable": True, "trainer.total_training_steps": 8}


@pytest.mark.slow
@pytest.mark.long("skip_uniform")
@pytest.mark.parametrize(
    "changes",
    [{}, {f"{FILTER}.leftover": "carry"}, {f"{FILTER}.backfill": "stream"}, SKIP],
    ids=["requeue", "carry", "stream", "skip_uniform"],
)
def test_a_killed_run_of_pools_and_filter_resumes_to_the_same_history(tmp_path, monkeypatch, changes):
    resumed(tmp_path, monkeypatch, CURRICULUM | changes)
    assert sum(row.get("dynamic_sampling/num_skipped_uniform", 0) for row in read_metrics(tmp_path / "a")) > 0


def test_a_run_without_curriculum_has_none_of_its_metrics(whole):
    assert not [name for row in read_metrics(whole[0]) for name in row if name.startswith("curriculum/")]
