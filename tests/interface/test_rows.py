"""Rows of a program as the data of a run."""

import json
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from small_run import rows_without_clock, small_config

import dapo_jax as dx
from dapo_jax.interface.rows import rows_file
from dapo_jax.monitor.records import read_metrics

ROWS = [{"q": f"{number} + 1 =", "a": number + 1} for number in range(6)]
COLUMNS = {"data.prompt_template": "{q}", "data.answer_key": "a", "trainer.total_training_steps": 1}


FRAME = Mock(spec=["iterrows", "notna", "astype"])  # of a pandas.DataFrame, which the tests do not install
FRAME.astype.return_value.where.return_value.to_dict.side_effect = {"records": ROWS}.__getitem__


@pytest.mark.parametrize("rows", [ROWS, iter(ROWS), pa.Table.from_pylist(ROWS), FRAME])
def test_rows_of_any_library_become_the_same_file(rows, tmp_path):
    path = rows_file(str(tmp_path), "data", rows)
    assert [json.loads(line) for line in open(path)] == ROWS and path == str(tmp_path / "rows" / "data.jsonl")
    assert rows_file(str(tmp_path), "data", path) == path


def test_short_floats_of_a_table_read_as_they_were_written(tmp_path):
    path = rows_file(str(tmp_path), "data", pa.table({"q": ["a"], "a": pa.array([0.1], pa.float32())}))
    assert json.loads(Path(path).read_text()) == {"q": "a", "a": 0.1}


def test_what_is_no_row_is_refused(tmp_path):
    for rows, message in (
        ({"q": ["1"]}, "not a dict of q"),
        (3, "not a int"),
        ([], "must have a row"),
        ([{"q": object()}], "row 1 must be a dict that JSON can hold"),
        (["text"], "row 1 must be a dict of columns, not a str"),
    ):
        with pytest.raises(dx.InputError, match=message):
            rows_file(str(tmp_path), "data", rows)
    with pytest.raises(dx.InputError, match="eval_data goes with prompt files, not with data.task=arithmetic"):
        dx.train(small_config(tmp_path), eval_data=ROWS)


def test_rows_may_change_until_their_run_has_begun(tmp_path, monkeypatch):
    path = rows_file(str(tmp_path), "data", ROWS[:3])
    assert rows_file(str(tmp_path), "data", ROWS) == path and len(open(path).readlines()) == len(ROWS)
    monkeypatch.setattr("dapo_jax.interface.rows.read_config", lambda workdir: True)
    with pytest.raises(dx.InputError, match="with which the run in workdir=.* began"):
        rows_file(str(tmp_path), "data", ROWS[:3])
    assert rows_file(str(tmp_path), "data", ROWS) == path and [*tmp_path.rglob("*")][1:] == [
        tmp_path / "rows/data.jsonl"
    ]


@pytest.mark.slow
def test_a_run_on_rows_resumes_with_the_same_and_refuses_others(tmp_path):
    def reward(text: str, truth: str) -> float:
        return float(truth in text)

    def trained(folder, steps, rows=ROWS):
        changes = COLUMNS | {"trainer.total_training_steps": steps}
        seen = []
        config = small_config(tmp_path / folder, **changes)
        dx.train(config, reward, data=rows, eval_data=ROWS[:2], on_step=lambda *row: seen.append(row))
        rows = read_metrics(tmp_path / folder)
        assert [{"step": step, **metrics} for step, metrics in seen] == rows[-len(seen) :]
        return rows_without_clock(tmp_path / folder)

    whole = trained("whole", 2)
    assert any(name.startswith("eval/eval_data/acc/mean@") for name in whole[-1])
    trained("parts", 1)
    assert trained("parts", 2)[-1] == whole[-1]
    with pytest.raises(dx.InputError, match="with which the run in workdir=.* began: give the same, or choose"):
        trained("parts", 3, ROWS[:5])
