"""`dapo-jax data`, on a few rows of the public files."""

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Hub, serving, unplug, use

from dapo_jax import cli
from dapo_jax.config.files import read_config_file, recipes
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.published import FILES
from dapo_jax.hub.names import model_name
from dapo_jax.hub.smollm2 import SMOLLM2
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for
from dapo_jax.tools.data import DAPO_PROMPT

DATA = Path(__file__).parents[1] / "scripts/data"
GSM8K = [DATA / "gsm8k_train.jsonl", DATA / "gsm8k_test.jsonl"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(name: str, *arguments: object) -> None:
    cli.main(["data", name, *map(str, arguments)])


def refusal(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        make(*map(str, arguments))
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
            "prompt": [{"content": DAPO_PROMPT.format(problem=problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{number:08x}"},
        }
        for number, (problem, answer) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=7)
    return path


def publish(hub: Hub) -> None:
    """Puts a few rows of each data set on the hub, where its publisher has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = published_dapo(Path(folder) / "dapo.parquet", [("What is 0 + 1?", "1")] * 3).read_bytes()
    gsm8k = {f"main/{file.stem.removeprefix('gsm8k_')}-00000.jsonl": file.read_bytes() for file in GSM8K}
    hub.repository("datasets/openai/gsm8k").commit(gsm8k)
    for name in ("DAPO-Math-17k", "AIME-2024"):
        hub.repository(f"datasets/BytedTsinghua-SIA/{name}").commit({f"data/{name.lower()}.parquet": file})


def judged_right(row, response: str) -> bool:
    verifier = VERIFIERS[verifier_for(row.data_source)].score
    return bool(verifier(row.data_source, response, row.ground_truth, row.extra_info)["acc"])


def test_gsm8k_asks_and_answers_as_verl_without_training_questions_of_the_test_split(capsys):
    source, test = map(problems, GSM8K)
    make("gsm8k", "--input", write_lines(Path("train.jsonl"), [*source, test[1]]), GSM8K[1])
    assert "train.parquet\n  read         5\n  left out     1\n" in capsys.readouterr().out
    train, heldout = (read_prompt_files([f"data/gsm8k/{split}.parquet"]) for split in ("train", "test"))
    assert len(train) == 4 and len(heldout) == 2
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert train[0].prompt == ({"role": "user", "content": f"{source[0]['question']} {instruction}"},)
    assert [row.ground_truth for row in train] == ["72", "10", "5", "1080"]  # the last is 1,080 in the file
    for row, record in zip(train, source, strict=True):
        assert row.extra_info["question"] == record["question"] and row.extra_info["solution"] == record["answer"]
        assert judged_right(row, record["answer"])


def test_dapo_keeps_one_of_a_hundred_copies_and_no_prompt_with_two_answers(capsys):
    rows = [(f"What is {k} + 1?", str(k + 1)) for k in range(5)] * 20 + [("What is 3 + 1?", "5")] * 2
    make("dapo-math-17k", "--input", published_dapo(Path("published.parquet"), rows))
    out = capsys.readouterr().out
    assert all(line in out for line in ("read         102", "repeated     97", "conflicting  1", "written      4"))
    prepared = read_prompt_files(["data/dapo-math-17k.parquet"])
    kept = [(row.ground_truth, row.extra_info["index"], row.data_source) for row in prepared]
    assert kept == [(str(k + 1), f"{k:08x}", "math_dapo") for k in (0, 1, 2, 4)]
    [message] = prepared[0].prompt
    assert message["content"] == (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 0 + 1?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    plain = {"prompt": "What is 0 + 1?", "reward_model": {"ground_truth": "1"}}  # a problem gets this prompt
    make("dapo-math-17k", "--input", write_lines(Path("plain.jsonl"), [plain]), "--output", "plain")
    assert read_prompt_files(["plain/dapo-math-17k.parquet"])[0].prompt == prepared[0].prompt


@pytest.mark.parametrize(
    ("name", "file", "data_source", "answers"),
    [("aime-2024", "aime24", "aime2024", ["25", "80", "540"]), ("amc-2023", "amc23", "amc23", ["8", "3159"])],
)
def test_competitions_are_written_once_with_answers_as_the_verifier_compares_them(name, file, data_source, answers):
    source = problems(DATA / f"{file}.jsonl")
    make(name, "--input", write_lines(Path("repeated.jsonl"), source * 32))
    rows = read_prompt_files([f"data/{name}.parquet"])
    assert [(row.data_source, row.ground_truth) for row in rows] == [(data_source, answer) for answer in answers]
    assert [row.extra_info["index"] for row in rows] == [str(record["id"]) for record in source]
    for row, record in zip(rows, source, strict=True):
        assert record["problem"] in row.prompt[0]["content"]
        assert judged_right(row, f"Answer: {row.ground_truth}")


def test_the_same_file_gives_the_same_bytes_and_what_exists_is_kept(capsys):
    for output in ("first", "second"):
        make("aime-2024", "--input", DATA / "aime24.jsonl", "--output", output)
    first, second = (Path(output) / "aime-2024.parquet" for output in ("first", "second"))
    assert first.read_bytes() == second.read_bytes() and list(first.parent.iterdir()) == [first]
    make("aime-2024", "--input", "nowhere.jsonl", "--output", "first")
    assert "first/aime-2024.parquet exists: to make it again, delete it first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "1 + 1?"}', "answer must be non-empty text"),
        ('{"question": 3, "answer": "#### 3"}', "question must be non-empty text, and it is 3"),
        ('{"question": "1?", "answer": "two"}', "answer must end in '#### <number>', not 'two': correct the row"),
        ('{"question": ', "must be an object"),
        ("[1]", "must be an object, not [1]"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_field(capsys, row, message):
    file = write_lines(Path("train.jsonl"), [{"question": "1 + 1?", "answer": "2\n#### 2"}, row])
    error = refusal(capsys, "gsm8k", "--input", file, file)
    assert message in error.partition(f"{file} row 2: ")[2] and list(Path().iterdir()) == [file]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("aime-2024 --input missing.jsonl", "does not exist"),
        ("aime-2024 --input file.txt", "must end in one of"),
        (f"aime-2024 --input {GSM8K[1]}", "answer must be a number, not 'Janet sells"),
        (f"dapo-math-17k --input {GSM8K[1]}", "ground_truth must be non-empty text, and the row has question, answer"),
        ("aime-2025", "no files on the hub that are known here: give its file by --input FILE"),
        (f"gsm8k --input {GSM8K[1]}", "name one for each of data/gsm8k/train.parquet, data/gsm8k/test.parquet"),
        ("mawps", "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(capsys, command, message):
    assert message in refusal(capsys, *command.split())
    assert list(Path().iterdir()) == []


def test_what_the_hub_has_is_made_and_without_it_files_are_asked_for(tmp_path, monkeypatch, capsys):
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        publish(hub)
        for name in ("gsm8k", "dapo-math-17k"):
            make(name)
            assert all(read_prompt_files([f"data/{file}"]) for file in FILES[name])
        del hub.repositories["datasets/BytedTsinghua-SIA/AIME-2024"]
        assert "neither there nor at" in refusal(capsys, "aime-2024")
    unplug(monkeypatch)
    assert "cannot be reached" in (error := refusal(capsys, "aime-2024")) and "give its path" in error


def test_recipes_name_what_the_hub_has_or_a_command_makes():
    hub, made = set(FILES["gsm8k"].values()), {f"data/{file}" for files in FILES.values() for file in files}
    for name in {*recipes()} - {
        "sums",
        "mawps",
        "calculator",
        "frozen_lake",
    }:  # whose data scripts make, or they themselves
        config = read_config_file(name)
        assert {*config.data.train_files, *config.data.val_files} <= made | hub
        assert config.model.path in ("random", SMOLLM2) or model_name(config.model.path) is not None, name
    with pytest.raises(ValueError, match=r"data/aime-2024.parquet does not exist: `dapo-jax data aime-2024` writes it"):
        read_prompt_files(["data/aime-2024.parquet"])
