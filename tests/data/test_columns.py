"""Rows of any columns: which of them is the prompt, the answer and the rest."""

import json

import pytest

from dapo_jax.data.columns import Columns, template_parts
from dapo_jax.data.prompt_files import read_prompt_files, source_names

ANSWERED = Columns(prompt_template="{question}", answer_key="answer")


@pytest.fixture
def file(tmp_path):
    def write(content, name="sums.jsonl"):
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_a_template_and_a_dotted_answer_make_a_row_and_the_rest_goes_to_extra_info(file):
    record = {"q": {"text": "3 + 4", "parts": [3, 4.50]}, "set": {"answer": 7.0}, "level": 2, "ability": "math"}
    columns = Columns(prompt_template="{q.text} of {q.parts.1} is \\boxed{{}}", answer_key="set.answer")
    [row] = read_prompt_files([file([record])], columns, names_sources=True)
    assert row.question == "3 + 4 of 4.5 is \\boxed{}" and row.ground_truth == "7"
    assert row.data_source == "sums" and row.extra_info == {key: record[key] for key in ("q", "set", "level")}


def test_messages_are_a_prompt_and_one_with_the_answer_is_refused(file):
    messages = [{"role": "user", "content": "3 + 4 ="}]
    columns = Columns(answer_key="")
    [row] = read_prompt_files([file([{"messages": messages, "data_source": "a"}])], columns)
    assert row.prompt == tuple(messages) and row.ground_truth is None and row.extra_info == {}
    answered = [*messages, {"role": "assistant", "content": "7"}]
    with pytest.raises(ValueError, match="messages is .* must not end with a message of the assistant"):
        read_prompt_files([file([{"messages": answered, "data_source": "a"}])], columns)


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_are_text_by_their_header(name, comma, file):
    content = comma.join(["question", "answer", "level"]) + f'\r\n"1 {comma} ""2"""{comma}033{comma}\r\n'
    [row] = read_prompt_files([file("\ufeff" + content, name)], ANSWERED, names_sources=True)
    assert (row.question, row.ground_truth) == (f'1 {comma} "2"', "033") and row.extra_info["level"] == ""
    for bad, message in (
        ("question,answer\n1,2,3\n", "row 1: has 3 cells, the header has 2: put cells"),
        ("a,a\n1,2\n", "has several columns a: rename them"),
        ('question,answer\n"1,2\n', "is no row of a CSV file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_prompt_files([file(bad, "bad.csv")], ANSWERED, names_sources=True)


def test_what_a_template_lacks_is_named_by_row_and_column(file):
    rows = [{"question": "1", "answer": 1}, {"question": None, "answer": 2}, {"question": ["2"], "answer": 3}]
    with pytest.raises(ValueError, match=r"row 2: question is missing.*\n.*row 3: question is \"\['2'\]\" \(list\)"):
        read_prompt_files([file(rows)], ANSWERED, names_sources=True)


def test_a_template_reaches_columns_alone():
    for template, message in {
        "Solve it.": "has none, so that all prompts would be the same",
        "{question": "write {{ and }} for braces",
        "{} is": "each a name without a format",
        "{question!r}": "each a name without a format",
        "{question:>1000000000}": "each a name without a format",
    }.items():
        with pytest.raises(ValueError, match=message):
            template_parts(template)
    assert template_parts("{a.__class__}") == [("", "a.__class__")], "the name of a column, which no row has"


def test_sources_are_named_after_files(file):
    entries = ["x/a.csv", "y/a.jsonl", "hf://openai/gsm8k/main/train", "b-00001-of-00002.parquet"]
    assert source_names(entries) == ["a_1", "a_2", "openai/gsm8k", "b"]
    assert source_names(["x/a.csv", "y/a.jsonl", "a_1.csv"]) == ["a_1", "a_2", "a_1_3"], "no name twice"
    with pytest.raises(ValueError, match="data_source is missing"):
        read_prompt_files([file([{"question": "1", "answer": 1}])], ANSWERED)
