"""Host: what TensorBoard is given: charts of metrics that exist, histograms, options; all at once on disk."""

import json
import math
from contextlib import closing

import numpy as np
import pytest
from event_files import values_of
from flax import traverse_util
from tensorboardX.proto.layout_pb2 import Layout
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from dapo_jax.monitor.tensorboard import EVENTS, LAYOUT, MAIN_CURVES, TensorBoard, counted, histogram


@pytest.fixture
def board(tmp_path):
    board = TensorBoard(tmp_path, first_step=0)
    yield board
    board.close()
    board.close()


def test_a_step_is_on_disk_before_the_next_begins(board, tmp_path):
    for step in range(3):
        board.add_scalars(step, {"a": float(step), "b@4": 0.5})
        points = [(at, value) for at, value in values_of(tmp_path) if not value.HasField("tensor")]
        found = [(at, value.tag, value.simple_value) for at, value in points]
        assert found[-2:] == [(step, "a", step), (step, "b_4", 0.5)]


def test_the_layout_is_written_once_also_where_a_run_begins_again_or_resumes_elsewhere(tmp_path):
    for folder, first_step in (("here", 0), ("here", 3), ("here", 0), ("elsewhere", 8)):
        TensorBoard(tmp_path / folder, first_step=first_step).close()
        [layout] = [value for _, value in values_of(tmp_path / folder) if value.tag == "custom_scalars__config__"]
        parsed = Layout.FromString(layout.tensor.string_val[0])
        assert [category.title for category in parsed.category] == list(LAYOUT)
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_starts_before_the_first_checkpoint_leave_the_next_one_a_name_of_its_own(tmp_path):
    for first_step, kept in ((0, [".0000"]), (0, [".0000"]), (3, [".0000", ".0001"])):
        TensorBoard(tmp_path, first_step=first_step).close()
        assert sorted(path.suffix for path in tmp_path.glob(EVENTS)) == kept


RUNS = {  # in the order of their starts: options unlike those of the first, keys of the command line, what is shown
    "first": ({}, [], {}),
    "same": ({}, [], {}),
    "given": ({"path": "b", "clip": math.inf}, ["path", "workdir", "clip"], {"path": "b", "clip": "Infinity"}),
    "again": ({"path": "b", "clip": math.inf}, [], {"path": "b"}),
    "other": ({"data.files": ("c",), "ask": False}, [], {"data.files": '["c"]', "ask": False, "path": "null"}),
}
NO_RUNS = {"broken": '{"seed": 1', "list": "[1]", "model": '{"vocab_size": 3}', "other/deep": '{"seed": 8}'}


def test_the_table_of_runs_has_what_differs_from_runs_next_to_it_or_was_given(tmp_path):
    usual = {"actor.optim.lr": 1e-6, "seed": 0}
    for name, (changes, given, expected) in RUNS.items():
        config = usual | {"data.files": ("a", "b"), "ask": True, "path": None, "workdir": name} | changes
        for place, text in {name: json.dumps(traverse_util.unflatten_dict(config, sep=".")), **NO_RUNS}.items():
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / place / "config.json").write_text(text)
        for first_step in (0, 5):  # the later start adds nothing
            with closing(TensorBoard(tmp_path / name, first_step=first_step, given=given)) as board:
                board.add_config(config, [])
        plugins = [part for _, part in values_of(tmp_path / name) if part.tag == "_hparams_/session_start_info"]
        assert len(plugins) == 1 == len([part for _, part in values_of(tmp_path / name) if "hparams" in part.tag])
        shown = HParamsPluginData.FromString(plugins[0].metadata.plugin_data.content).session_start_info.hparams
        assert {key: getattr(value, value.WhichOneof("kind")) for key, value in shown.items()} == usual | expected


def test_the_main_curves_come_before_every_other_and_in_their_order(board, tmp_path):
    board.add_config({}, ["eval/x/acc/mean@4", "eval/b/c/acc/mean@1"])
    metrics = dict.fromkeys(filter(None, MAIN_CURVES.values()), 2.0)
    board.add_scalars(0, {"actor/lr": 1e-6, "eval/x/acc/mean@4": 0.5, "eval/x/acc/best@4": 0.75})
    board.add_scalars(1, metrics | {"eval/x/acc/mean@4": 0.75, "eval/b/c/acc/mean@1": 0.25})
    points = [(value.tag, step) for step, value in values_of(tmp_path) if value.HasField("simple_value")]
    assert dict(sorted(points)[:8]) == {
        "Main/1 held-out accuracy, b/c": 1,
        "Main/1 held-out accuracy, x": 1,
        **{f"Main/{number} {title.split(',')[0]}": 1 for number, title in enumerate(list(MAIN_CURVES)[1:], start=2)},
    }
    assert ("Main/1 held-out accuracy, x", 0) in points and ("eval/x/acc/mean_4", 1) in points and len(points) == 18


def test_a_histogram_keeps_counts_ends_and_moments(board, tmp_path):
    samples = np.concatenate([np.random.default_rng(0).normal(size=500), [np.nan, np.inf]]).astype(np.float32)
    parts = json.loads(json.dumps(histogram(samples)))
    board.add_histograms(7, {"advantages": parts, "nothing": histogram(np.full(3, np.nan))})
    [(step, shown)] = [(step, value) for step, value in values_of(tmp_path) if value.HasField("histo")]
    finite = samples[np.isfinite(samples)].astype(np.float64)
    counts, edges = np.histogram(finite, bins=30)
    assert (step, shown.tag, shown.histo.num) == (7, "advantages", 500)
    assert (shown.histo.min, shown.histo.max) == (finite.min(), finite.max())
    np.testing.assert_array_equal(shown.histo.bucket, counts)
    np.testing.assert_allclose(shown.histo.bucket_limit, edges[1:], rtol=1e-12)
    np.testing.assert_allclose([shown.histo.sum, shown.histo.sum_squares], [finite.sum(), (finite**2).sum()])


@pytest.mark.parametrize("equal", [0.0, 512.0])
def test_a_histogram_of_equal_values_has_a_width(equal):
    parts = histogram(np.full((4, 2), equal, np.float32))
    low, high = parts["edges"]
    assert low < equal < high and sum(parts["counts"]) == 8


def test_counts_are_a_histogram_without_their_empty_ends(board, tmp_path):
    counts = np.array([0, 0, 3, 0, 1, 0, 0, 0], np.float32)
    named = {"ratio": counts, "nothing": 0 * counts}
    board.add_histograms(1, {name: counted(values, low=0.0, high=2.0) for name, values in named.items()})
    [shown] = [value for _, value in values_of(tmp_path) if value.HasField("histo")]
    assert shown.tag == "ratio" and (shown.histo.min, shown.histo.max, shown.histo.num) == (0.5, 1.25, 4)
    assert list(shown.histo.bucket_limit) == [0.75, 1.0, 1.25] and list(shown.histo.bucket) == [3, 0, 1]
    assert shown.histo.sum == 3 * 0.625 + 1.125
