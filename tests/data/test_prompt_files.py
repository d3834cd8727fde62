import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_jax.data import prompt_files
from dapo_jax.data.columns import Columns
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.row_schema import plain
from dapo_jax.data.rows import PromptRow

GOOD = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "tags": ["easy"]},
}


@pytest.fixture
def jsonl(tmp_path):
    """The path of a file with these rows or lines."""

    def write(*records, name="a"):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / f"{name}.jsonl")

    return write


@pytest.fixture
def parquet(tmp_path):
    def write(*records, name="a"):
        pq.write_table(pa.Table.from_pylist(list(records)), tmp_path / f"{name}.parquet")
        return str(tmp_path / f"{name}.parquet")

    return write


def with_truth(value):
    return {**GOOD, "reward_model": {"style": "rule", "ground_truth": value}}


def refusal(path):
    """The lines of the error, without the first."""
    with pytest.raises(ValueError) as error:
        read_prompt_files([path])
    return str(error.value).splitlines()[1:]


def test_parquet_and_jsonl_give_the_same_plain_rows_in_the_order_of_the_files(jsonl, parquet):
    records = [{**GOOD, "data_source": str(i), "extra_info": {"index": i, "tags": ["easy"]}} for i in range(3)]
    rows = read_prompt_files([jsonl(*records), parquet(*records)])
    assert rows[:3] == rows[3:] and [row.data_source for row in rows[:3]] == ["0", "1", "2"]
    expected = PromptRow(({"role": "user", "content": "1 + 1 ="},), "0", "2", {"index": 0, "tags": ["easy"]})
    assert rows[3] == expected
    assert type(rows[3].extra_info["index"]) is int and type(rows[3].extra_info["tags"]) is list


@pytest.mark.parametrize(
    "value, text",
    [
        *[(72, "72"), (0.5, "0.5"), (0, "0"), (145.0, "145"), (-3.0, "-3"), (-0.0, "0"), (1200.0, "1200")],
        *[(12.50, "12.5"), (1e-7, "0.0000001"), (1e22, "1" + "0" * 22), (10**30, "1" + "0" * 30)],
        ("145.0", "145.0"),  # a text is kept as it is spelt
    ],
)
def test_numeric_ground_truth_becomes_text(jsonl, value, text):
    assert read_prompt_files([jsonl(with_truth(value))])[0].ground_truth == text


@pytest.mark.parametrize(
    "kind, value, text",
    [
        *[(pa.decimal128(9, 2), Decimal("7.50"), "7.5"), (pa.decimal128(9, 2), Decimal("145.00"), "145")],
        *[(pa.float64(), 145.0, "145"), (pa.float32(), 0.1, "0.1"), (pa.float32(), 145.0, "145")],
        *[(pa.float16(), np.float16(0.1), "0.1"), (pa.int64(), 2**62 + 1, str(2**62 + 1))],
    ],
)
def test_numeric_ground_truth_of_parquet_becomes_its_shortest_text(tmp_path, kind, value, text):
    columns = {"prompt": ["1 + 1 ="], "data_source": ["sums"]}
    truths = pa.array([{"ground_truth": value}], pa.struct([("ground_truth", kind)]))
    pq.write_table(pa.table({**columns, "reward_model": truths}), tmp_path / "a.parquet")
    assert read_prompt_files([str(tmp_path / "a.parquet")])[0].ground_truth == text
    pq.write_table(pa.table({**columns, "answer": pa.array([value], kind)}), tmp_path / "b.parquet")
    assert read_prompt_files([str(tmp_path / "b.parquet")], Columns(answer_key="answer"))[0].ground_truth == text


def test_numbers_of_few_bits_read_as_written_everywhere(tmp_path, jsonl):
    kind = pa.struct([("x", pa.list_(pa.float32()))])
    pairs = pa.array([[("a", [0.1])]], pa.map_(pa.string(), pa.list_(pa.float32())))
    nested = pa.array([[{"x": [0.1, None]}]], pa.list_(kind))
    table = pa.table({"number": pa.array([0.1], pa.float32()), "nested": nested, "map": pairs})
    pq.write_table(table, tmp_path / "a.parquet")
    columns = Columns(prompt_template="{number} {nested.0.x.0}", answer_key="nested.0.x")
    [row] = read_prompt_files([str(tmp_path / "a.parquet")], columns, names_sources=True)
    assert (row.question, row.ground_truth) == ("0.1 0.1", [0.1, None])
    assert row.extra_info == {"number": 0.1, "nested": [{"x": [0.1, None]}], "map": [("a", [0.1])]}
    given = [np.float32(0.1), np.array([[0.1, np.inf]], np.float16), np.float64(0.1), np.arange(2)]
    assert [plain(value) for value in given] == [0.1, [[0.1, np.inf]], 0.1, [0, 1]]


@pytest.mark.parametrize("column", ["images", "videos"])
def test_rows_with_images_are_refused_not_read_as_text(column, jsonl, parquet):
    for write in (jsonl, parquet):
        assert len(read_prompt_files([write({**GOOD, column: []}, {**GOOD, column: None})])) == 2
        [line] = refusal(write({**GOOD, column: []}, {**GOOD, column: [{"path": "a.png"}]}))
        assert f"row 2: {column} must be empty, as models read text only" in line


def test_a_reward_function_gets_the_prompt_also_where_a_column_has_its_name(jsonl):
    file = jsonl({"prompt": "raw", "question": "1 + 1", "answer": "2", "data_source": "sums"})
    [row] = read_prompt_files([file], Columns(prompt_template="{question} =", answer_key="answer"))
    assert row.columns == {"prompt": ({"role": "user", "content": "1 + 1 ="},), "question": "1 + 1", "answer": "2"}


def test_message_keys_that_parquet_fills_with_null_are_dropped(parquet):
    named = ({"role": "user", "content": "2", "name": "Ann"},)
    rows = read_prompt_files([parquet(GOOD, {**GOOD, "prompt": named})])
    assert [row.prompt for row in rows] == [({"role": "user", "content": "1 + 1 ="},), named]


def test_text_prompts_other_columns_and_absent_extra_info_are_read(jsonl):
    record = {"question": "Why?", "data_source": "task", "reward_model": {"ground_truth": "so"}}
    assert read_prompt_files([jsonl(record)], Columns(prompt_key="question")) == [PromptRow("Why?", "task", "so", {})]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": []}, r"prompt is '\[\]' \(list\)"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "prompt is .* must be non-empty text or a"),
        ({"reward_model": None}, "reward_model.ground_truth is missing"),
        ({"reward_model": {"ground_truth": ""}}, r"ground_truth is '' \(str\)"),
        ({"extra_info": [1]}, "extra_info is .* must be an object"),
        ({"data_source": ""}, r"data_source is '' \(str\), must be non-empty text"),
    ],
)
def test_a_bad_field_is_named_with_file_row_rule_and_cure(jsonl, parquet, change, message):
    write = parquet if "data_source" in change else jsonl
    with pytest.raises(ValueError, match=rf"bad.\w+ row 2: .*{message}.*: \w+"):
        read_prompt_files([write(GOOD, {**GOOD, **change}, name="bad")])


def test_several_problems_are_reported_together_but_not_all_of_a_large_file(jsonl):
    lines = refusal(jsonl("{broken", "[1]", *[{**GOOD, "data_source": ""}] * 50))
    assert len(lines) == 3
    assert "row 1: must be a JSON object, not Expecting property name" in lines[0]
    assert "row 2: must be a JSON object, not a list" in lines[1]
    assert "row 3 and 49 more of 52 rows: data_source is '' (str), must be" in lines[2]
    assert len(refusal(jsonl(*({**GOOD, f"key{i}": "\ud800"} for i in range(50))))) == 10


def test_the_same_fault_of_all_rows_is_reported_once_with_the_columns(jsonl, monkeypatch):
    path = jsonl(*[{"text": "1 + 1", "target": "2"}] * 20, name="bad")
    lines = refusal(path)
    starts = ["prompt is m", "data_source", "reward_mode", "set data.pr"]
    assert [line.partition(": ")[2][:11] for line in lines] == starts
    assert all("bad.jsonl, all 20 rows: " in line for line in lines[:-1])
    assert "bad.jsonl has the columns text, target: set data.prompt_template='{text}', " in lines[-1]
    monkeypatch.setattr(prompt_files, "MAX_BAD_ROWS", 5)
    assert "all 5 rows: prompt is missing" in refusal(path)[0]


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        ({"question": "How many?", "answer": "2\n#### 2"}, "GSM8K as published, which hf://openai/gsm8k/main/train re"),
        ({"input": "How many?", "target": 2.0}, "set data.prompt_template='{input}', data.answer_key=target "),
        ({"ID": "I-1", "Problem": "Find x.", "Answer": 204}, "='{Problem}', data.answer_key=Answer .*reward.function="),
        ({"prompt": "Find x.", "solution": "34"}, "set data.answer_key=solution "),
        ({"of": {"problem": "1 + 1"}, "key": 2}, "set data.prompt_template='{of.problem}', data.answer_key=COLUMN "),
    ],
)
def test_rows_of_another_schema_are_named_with_the_options_that_read_them(record, hint, parquet):
    with pytest.raises(ValueError, match=f"has the columns .*{hint}"):
        read_prompt_files([parquet(*[record] * 3)])


def test_chat_messages_as_json_text_are_messages_and_that_is_said(jsonl, caplog):
    as_text = {**GOOD, "prompt": json.dumps(GOOD["prompt"])}
    rows = read_prompt_files([jsonl(as_text, as_text, GOOD)])
    assert [row.prompt for row in rows] == [({"role": "user", "content": "1 + 1 ="},)] * 3
    assert caplog.text.count("a.jsonl: prompt of 2 rows holds chat messages as JSON text") == 1


def test_other_text_stays_text_unless_it_looks_like_messages(jsonl, caplog):
    def read(texts):
        return [row.prompt for row in read_prompt_files([jsonl(*({**GOOD, "prompt": text} for text in texts))])]

    others = ["[1, 2] sums to", "[]", "[1]", '[{"role": "user"}]', "[" * 10_000, '{"role": "u"}']
    similar = [str(GOOD["prompt"]), repr(np.array(GOOD["prompt"])), "({'content': 'a', 'role': 'user'},)"]
    similar += ['[{"from": "human", "value": "a"}]', '[{"role": "user", "content": null}]']
    others += [f"{text} What does it print?" for text in similar]
    assert read(others) == others and not caplog.records
    for text in similar:
        [line] = refusal(jsonl({**GOOD, "prompt": text}))
        assert "must be a list of messages" in line and "or json.dumps of it" in line


def test_tools_and_variables_of_the_chat_template_are_read_and_parquet_fills_them_with_no_null(jsonl, parquet):
    def called(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {**GOOD, "prompt": [*GOOD["prompt"], turn], "tools": [call], "chat_template_kwargs": {"x": arguments}}

    records = [called(a=1), called(b=[2, None]), {**GOOD, "tools": None}]
    rows = read_prompt_files([parquet(*records), jsonl(*records)])
    assert rows[:3] == rows[3:]
    assert rows[1].prompt[1]["tool_calls"] == rows[1].template_kwargs["tools"] == records[1]["tools"]
    assert rows[1].template_kwargs["x"] == {"b": [2, None]} and rows[2].template_kwargs == {}
    as_text = {**records[0], "tools": json.dumps(records[0]["tools"]), "chat_template_kwargs": '{"x": {"a": 1}}'}
    assert read_prompt_files([jsonl(as_text)])[0] == rows[0]
    assert len({row.identity for row in rows}) == 3


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"tools": "add"}, "tools is 'add' (str), must be a list of objects"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is '[1]' (list), must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "must be an object without messages"),
        ({"prompt": "1 + 1 =", "tools": [{}]}, "tools is '[{}]' (list), needs a prompt of messages"),
    ],
)
def test_tools_and_variables_that_no_template_can_read_are_refused(columns, message, jsonl):
    [line] = refusal(jsonl({**GOOD, **columns}))
    assert message in line


@pytest.mark.parametrize("truth", [True, None, ["1", 2], [], {"a": [1, None], "b": {"c": 0.5}}])
def test_other_ground_truths_are_carried_as_they_are(jsonl, parquet, truth):
    assert read_prompt_files([jsonl(with_truth(truth))])[0].ground_truth == truth
    if truth != ["1", 2]:  # Parquet has no lists of several types
        assert read_prompt_files([parquet(with_truth(truth))])[0].ground_truth == truth


def test_keys_of_a_ground_truth_that_parquet_fills_with_null_stay(parquet):
    truths = [{"a": "x"}, {"b": Decimal("1.50")}, None]
    rows = read_prompt_files([parquet(*map(with_truth, truths))])
    assert [row.ground_truth for row in rows] == [{"a": "x", "b": None}, {"a": None, "b": "1.50"}, None]
    assert rows[1].truth_text == '{"a": null, "b": "1.50"}' and len({row.identity for row in rows}) == 3


def test_another_encoding_is_named_once_with_the_cure(tmp_path):
    file = tmp_path / "a.jsonl"
    for encoding in ("utf-16-le", "utf-16-be", "utf-32"):  # without a byte order mark
        file.write_bytes((json.dumps(GOOD) + "\n").encode(encoding))
        with pytest.raises(ValueError, match="a.jsonl is UTF-16 text: save it as UTF-8 "):
            read_prompt_files([str(file)])
    file.write_bytes(json.dumps({**GOOD, "prompt": "caf\u00e9"}, ensure_ascii=False).encode("latin-1") + b"\n")
    file.write_bytes(file.read_bytes() * 3)
    [line] = refusal(str(file))
    assert line.endswith("a.jsonl, all 3 rows: is not UTF-8 text (byte 0xe9; Latin-1?): save the file as UTF-8")


def test_what_is_no_prompt_file_is_named_with_the_cure(tmp_path, parquet, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parquet(GOOD, name="train")
    (tmp_path / "saved" / "to_disk").mkdir(parents=True)
    (tmp_path / "saved" / "to_disk" / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "saved" / "to_disk" / "dataset_info.json").write_text("{}")
    (tmp_path / "a.arrow").write_bytes(b"")
    for path, message in {
        str(tmp_path): "is a directory: name its files, train.parquet",
        "saved/to_disk": r"is a directory of the library datasets: .* datasets.load_from_disk\(path\).to_parquet",
        "a.arrow": r"must end in one of .*: convert it by datasets.Dataset.from_file\(path\).to_parquet",
        "rows.jsonl.gz": "unpack it",
        "someone/some-set": r"name a split of it, hf://someone/some-set/SPLIT.* in data.train_files",
        "openai/gsm8k": "`dapo-jax data gsm8k` writes.* data.train_files or data.val_files",
        "saved/train": "does not exist: correct the path",
    }.items():
        with pytest.raises(ValueError, match=f"prompt file {path} .*{message}"):
            read_prompt_files([path])
