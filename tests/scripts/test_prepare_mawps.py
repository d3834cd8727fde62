"""scripts/data/prepare_mawps.py, on a few rows of MAWPS."""

from pathlib import Path

import prepare_mawps
import pyarrow.parquet as pq
import pytest
from prepare_mawps import split_of, template_of
from script_ends import command
from tools.test_data import problems, write_lines

FILE = Path(__file__).parent / "data/mawps.jsonl"


def prepare(*arguments: object) -> None:
    command(prepare_mawps.main, [str(argument) for argument in arguments])


def written(folder: Path) -> list[list[dict]]:
    """The rows of both splits."""
    return [pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "heldout")]


def test_no_template_of_mawps_is_in_both_splits(tmp_path, capsys):
    prepare(FILE, "--heldout-share", 0.4, "--output", tmp_path)
    assert "read 31, left out 1, repeated 5, conflicting 0, written 25" in capsys.readouterr().out
    train, heldout = written(tmp_path)
    assert len(train) + len(heldout) == 25 and train and heldout
    templates = [{template_of(row["prompt"][-1]["content"]) for row in rows} for rows in (train, heldout)]
    assert not templates[0] & templates[1]
    assert templates[0] == {row["extra_info"]["template"] for row in train}
    assert [message["role"] for message in train[0]["prompt"]] == ["user", "assistant"] * 3 + ["user"]


def test_problems_that_tell_the_same_story_have_one_template():
    rows = [record["input"] for record in problems(FILE)]
    cards, marbles, oranges = rows[4:7]
    assert template_of(cards) == "@ are # * # * more are added @ many are there total"
    assert template_of(cards) == template_of(marbles) == template_of(oranges)
    assert template_of(rows[7]) == template_of(rows[10])  # Carol's peanuts, Bobby's blocks
    assert template_of(rows[12]) == template_of(rows[17])  # walnut trees, maple trees
    other = "Jo starts with two pens. He buys 1,000 more. How many pens does Jo end with?"
    assert template_of(rows[3]) == template_of(other)
    assert template_of(rows[13]) != template_of(rows[12])  # what is planted is the question, or given


def test_a_thing_is_the_same_in_singular_and_plural():
    forms = "card cards candy candies cookie cookies box boxes glass glasses house houses leaf leaves knife knives"
    words = f"{forms} glove gloves toy toys".split()
    for one, many in zip(words[::2], words[1::2], strict=True):
        problem = f"There are 30 {many} in Kathy's {one} collection. She gives 2 to Ann. How many {many} are left?"
        assert template_of(problem) == "@ are # * in @ * collection @ gives # to @ many * are left", many


def test_the_split_of_a_problem_does_not_depend_on_the_others(tmp_path):
    rows, splits = problems(FILE), []
    for name, some in (("all", rows), ("reversed", rows[::-1][3:])):
        file = write_lines(tmp_path / f"{name}.jsonl", some)
        prepare(file, "--heldout-share", 0.4, "--output", tmp_path / name)
        found = dict(zip(("train", "heldout"), written(tmp_path / name), strict=True))
        splits.append({row["prompt"][-1]["content"]: split for split, kept in found.items() for row in kept})
    assert splits[1].items() <= splits[0].items() and 1 < len(splits[1]) < len(splits[0])
    held = sum(split_of(str(number), 0.15) == "heldout" for number in range(4000))
    assert 500 < held < 700


@pytest.mark.parametrize(("share", "message"), [(1.5, "must be between 0 and 1"), (1e-9, "heldout split has no row")])
def test_a_share_that_leaves_a_split_empty_is_refused(tmp_path, capsys, share, message):
    with pytest.raises(SystemExit) as ended:
        prepare(FILE, "--heldout-share", share, "--output", tmp_path / "out")
    assert ended.value.code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_whole(tmp_path, monkeypatch):
    def full(table, file):
        file.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(SystemExit):
        prepare(FILE, "--output", tmp_path)
    assert not list(tmp_path.iterdir())
