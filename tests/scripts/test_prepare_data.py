"""The scripts that prepare data sets, on a few rows of the public files."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import data_preparation
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_mawps import split_of, template_of

from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for

DATA = Path(__file__).parent / "data"
NAMES = ["prepare_gsm8k", "prepare_math_dapo", "prepare_aime", "prepare_mawps"]


def run(name: str, *arguments: object) -> None:
    data_preparation.command(importlib.import_module(name).main, [str(argument) for argument in arguments])


def refusal(capsys, name: str, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        run(name, *arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def problems(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def published_dapo(path: Path, rows: list[tuple[str, str]]) -> Path:
    """A file as BytedTsinghua-SIA/DAPO-Math-17k is: (problem, answer) in rows of small row groups."""
    table = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": data_preparation.DAPO_PROMPT.format(problem=problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{number:08x}"},
        }
        for number, (problem, answer) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=7)
    return path


def judged_right(row, response: str) -> bool:
    verifier = VERIFIERS[verifier_for(row.data_source)].score
    return bool(verifier(row.data_source, response, row.ground_truth, row.extra_info)["acc"])


def test_gsm8k_asks_and_answers_as_verl_without_training_questions_of_the_test_split(tmp_path, capsys):
    source, test = (problems(DATA / f"gsm8k_{split}.jsonl") for split in ("train", "test"))
    file = write_lines(tmp_path / "train.jsonl", [*source, test[1]])
    options = "--train", file, "--test", DATA / "gsm8k_test.jsonl"
    run("prepare_gsm8k", *options, "--output", tmp_path / "{split}.parquet")
    out = capsys.readouterr().out
    assert "written      4" in out and "1 questions of the test split" in out
    train, heldout = (read_prompt_files([str(tmp_path / f"{split}.parquet")]) for split in ("train", "test"))
    assert len(train) == 4 and len(heldout) == 2
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert train[0].prompt == ({"role": "user", "content": f"{source[0]['question']} {instruction}"},)
    assert [row.ground_truth for row in train] == ["72", "10", "5", "1080"]  # the last is 1,080 in the file
    for row, record in zip(train, source, strict=True):
        assert row.extra_info["question"] == record["question"] and row.extra_info["solution"] == record["answer"]
        assert judged_right(row, record["answer"])


def test_dapo_keeps_one_of_a_hundred_copies_and_no_prompt_with_two_answers(tmp_path, capsys):
    rows = [(f"What is {k} + 1?", str(k + 1)) for k in range(5)] * 20 + [("What is 3 + 1?", "5")] * 2
    published = published_dapo(tmp_path / "published.parquet", rows)
    run("prepare_math_dapo", published, "--output", tmp_path / "out.parquet")
    out = capsys.readouterr().out
    assert all(line in out for line in ("read         102", "duplicates   76", "conflicting  22", "written      4"))
    prepared = read_prompt_files([str(tmp_path / "out.parquet")])
    kept = [(row.ground_truth, row.extra_info["index"], row.data_source) for row in prepared]
    assert kept == [(str(k + 1), f"{k:08x}", "math_dapo") for k in (0, 1, 2, 4)]
    [message] = prepared[0].prompt
    assert message["content"] == (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 0 + 1?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    plain = {"prompt": "What is 0 + 1?", "reward_model": {"ground_truth": "1"}}  # a problem gets this prompt
    run("prepare_math_dapo", write_lines(tmp_path / "plain.jsonl", [plain]), "--output", tmp_path / "plain.parquet")
    assert read_prompt_files([str(tmp_path / "plain.parquet")])[0].prompt == prepared[0].prompt


@pytest.mark.parametrize(
    ("file", "data_source", "answers"),
    [("aime24", "aime2024", ["25", "80", "540"]), ("amc23", "amc23", ["8", "3159"])],
)
def test_competitions_are_written_once_with_answers_as_the_verifier_compares_them(tmp_path, file, data_source, answers):
    source = problems(DATA / f"{file}.jsonl")
    repeated = write_lines(tmp_path / "repeated.jsonl", source * 32)
    run("prepare_aime", repeated, "--data-source", data_source, "--output", tmp_path / "out.parquet")
    rows = read_prompt_files([str(tmp_path / "out.parquet")])
    assert [row.ground_truth for row in rows] == answers
    assert [row.extra_info["id"] for row in rows] == [str(record["id"]) for record in source]
    for row, record in zip(rows, source, strict=True):
        assert record["problem"] in row.prompt[0]["content"]
        assert judged_right(row, f"Answer: {row.ground_truth}")


def test_no_template_of_mawps_is_in_both_splits(tmp_path, capsys):
    run("prepare_mawps", DATA / "mawps.jsonl", "--heldout-share", 0.4, "--output", tmp_path / "{split}.jsonl")
    out = capsys.readouterr().out
    assert all(line in out for line in ("read         31", "duplicates   5", "1 answers with more than 3 decimals"))
    train, heldout = (problems(tmp_path / f"{split}.jsonl") for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 25 and train and heldout
    templates = [{template_of(row["prompt"][-1]["content"]) for row in rows} for rows in (train, heldout)]
    assert not templates[0] & templates[1]
    assert templates[0] == {row["extra_info"]["template"] for row in train}
    assert [message["role"] for message in train[0]["prompt"]] == ["user", "assistant"] * 3 + ["user"]


def test_problems_that_tell_the_same_story_have_one_template():
    rows = [record["input"] for record in problems(DATA / "mawps.jsonl")]
    cards, marbles, oranges = rows[4:7]
    assert template_of(cards) == "@ are # * # * more are added @ many are there total"
    assert template_of(cards) == template_of(marbles) == template_of(oranges)
    assert template_of(rows[7]) == template_of(rows[10])  # Carol's peanuts, Bobby's blocks
    assert template_of(rows[12]) == template_of(rows[17])  # walnut trees, maple trees
    other = "Jo starts with two pens. He buys 1,000 more. How many pens does Jo end with?"
    assert template_of(rows[3]) == template_of(other)
    assert template_of(rows[13]) != template_of(rows[12])  # what is planted is asked for, or given


def test_a_thing_is_the_same_in_singular_and_plural():
    forms = "card cards candy candies cookie cookies box boxes glass glasses house houses leaf leaves knife knives"
    words = f"{forms} glove gloves toy toys".split()
    for one, many in zip(words[::2], words[1::2], strict=True):
        problem = f"There are 30 {many} in Kathy's {one} collection. She gives 2 to Ann. How many {many} are left?"
        assert template_of(problem) == "@ are # * in @ * collection @ gives # to @ many * are left", many


def test_the_split_of_a_problem_does_not_depend_on_the_others(tmp_path):
    rows, splits = problems(DATA / "mawps.jsonl"), []
    for name, some in (("all", rows), ("reversed", rows[::-1][3:])):
        file = write_lines(tmp_path / f"{name}.jsonl", some)
        run("prepare_mawps", file, "--heldout-share", 0.4, "--output", tmp_path / name / "{split}.jsonl")
        found = {split: problems(tmp_path / name / f"{split}.jsonl") for split in ("train", "heldout")}
        splits.append({row["prompt"][-1]["content"]: split for split, kept in found.items() for row in kept})
    assert splits[1].items() <= splits[0].items() and 1 < len(splits[1]) < len(splits[0])
    held = sum(split_of(str(number), 0.15) == "heldout" for number in range(4000))
    assert 500 < held < 700


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_same_file_gives_the_same_bytes(tmp_path, suffix):
    outputs = [tmp_path / str(number) / f"out.{suffix}" for number in range(2)]
    for output in outputs:
        run("prepare_aime", DATA / "aime24.jsonl", "--output", output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert list(outputs[0].parent.iterdir()) == outputs[:1], "nothing unfinished is left"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "1 + 1?"}', "answer must be non-empty text"),
        ('{"question": 3, "answer": "#### 3"}', "question='3'"),
        ('{"question": "1?", "answer": "two"}', "answer must end in '#### <number>', not 'two': correct the row"),
        ('{"question": ', "must be a JSON object"),
        ("[1]", "must be a JSON object, not a list"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_field(tmp_path, capsys, row, message):
    file = write_lines(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "2\n#### 2"}, row])
    error = refusal(capsys, "prepare_gsm8k", "--train", file, "--output", tmp_path / "{split}.parquet")
    assert message in error.partition(f"{file} row 2: ")[2]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("aime missing.jsonl", "does not exist"),
        ("aime file.txt", "must end in one of"),
        (f"aime {DATA}/gsm8k_test.jsonl", "answer or Answer must be a number"),
        (f"aime {DATA}/aime24.jsonl --data-source olympics", "has no verifier"),
        (f"aime {DATA}/aime24.jsonl --output out.csv", "must end in one of .parquet, .jsonl"),
        ("aime", "give either files or --download"),
        (f"aime {DATA}/aime24.jsonl --download", "give either files or --download"),
        ("gsm8k", "--train and --test"),
        (f"gsm8k --test {DATA}/gsm8k_test.jsonl --output out.jsonl", "must hold {split}"),
        (f"math_dapo {DATA}/aime24.jsonl", "ground_truth must be non-empty text"),
        (f"mawps {DATA}/mawps.jsonl --heldout-share 1.5", "must be between 0 and 1"),
        (f"mawps {DATA}/mawps.jsonl --heldout-share 1e-9", "the heldout split has no row"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    assert message in refusal(capsys, f"prepare_{name}", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_without_the_hub_package_or_a_network_files_are_asked_for(monkeypatch, capsys):
    def unreachable(repository, **_):
        raise ConnectionError(f"{repository} cannot be reached")

    hub = SimpleNamespace(snapshot_download=unreachable)
    for module, messages in ((None, ["pip install 'dapo_jax[hub]'"]), (hub, ["cannot be reached", "give the file"])):
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        for name in NAMES:
            error = refusal(capsys, name, "--download")
            assert all(message in error for message in messages)


def test_what_the_hub_has_is_prepared(tmp_path, monkeypatch):
    def download(repository, *, repo_type, allow_patterns):
        assert (repository, repo_type) == ("BytedTsinghua-SIA/DAPO-Math-17k", "dataset")
        (tmp_path / "hub/data").mkdir(parents=True)
        published_dapo(tmp_path / "hub/data/dapo-math-17k.parquet", [("What is 0 + 1?", "1")] * 3)
        return str(tmp_path / "hub")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    run("prepare_math_dapo", "--download", "--output", tmp_path / "out.parquet")
    assert len(read_prompt_files([str(tmp_path / "out.parquet")])) == 1


def test_numbers_have_one_spelling():
    plain_number = data_preparation.plain_number
    spelled = {27.0: "27", 3: "3", "073": "73", "1,080": "1080", "-0.50": "-0.5", 0.0: "0", "100": "100", "1e3": "1000"}
    assert {value: plain_number(value) for value in spelled} == spelled
    assert [plain_number(value) for value in ("x", "", None, True, "nan", float("inf"), "1e999", [1])] == [None] * 8
