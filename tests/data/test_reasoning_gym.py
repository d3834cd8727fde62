"""Problems of the library reasoning-gym and their verifier."""

import json
import sys

import pytest

from dapo_jax.command.validation import validate
from dapo_jax.config.sections import ReasoningGymConfig
from dapo_jax.config.values import default_config, freeze
from dapo_jax.data import reasoning_gym as verifier
from dapo_jax.data.reasoning_gym import UNREPEATABLE, reasoning_gym_rows
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.rewards.verifiers import VERIFIERS, load_verifier, verifier_for
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool
from dapo_jax.run.problems import read_problems

TEMPLATE = "{question}\nWrite the final answer between <answer> and </answer>."
NAMES = ("leg_counting", "chain_sum", "countdown")


@pytest.fixture
def library():
    return pytest.importorskip("reasoning_gym")


def rows(names=NAMES, *, num_train=6, num_heldout=3, seed=0, template=TEMPLATE):
    return reasoning_gym_rows(ReasoningGymConfig(tuple(names), num_train, num_heldout, template), seed)


def test_without_the_library_its_extra_is_named_and_a_template_needs_the_question(monkeypatch):
    with pytest.raises(ValueError, match="must have the field {question}"):
        rows(template="Answer.")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'dapo_jax\[reasoning-gym\]'"):
        rows()
    with pytest.raises(ValueError, match=r"pip install 'dapo_jax\[reasoning-gym\]'"):
        load_verifier("reasoning_gym")


def test_no_question_is_held_out_and_trained_on(library):
    train, heldout = rows()
    assert (len(train), len(heldout)) == (18, 9)
    prompts = {row.prompt[0]["content"] for row in [*train, *heldout]}
    assert len(prompts) == 27 and all(prompt.endswith(" between <answer> and </answer>.") for prompt in prompts)
    assert {row.data_source for row in train} == {f"reasoning_gym/{name}" for name in NAMES}
    assert {row.extra_info["split"] for row in train} == {"train"}


def test_held_out_problems_are_those_of_the_seed(library):
    _, heldout = rows()
    assert rows(num_train=9)[1] == heldout
    other = {row.prompt[0]["content"] for split in rows(seed=1) for row in split}
    assert not other & {row.prompt[0]["content"] for row in heldout if row.data_source.endswith("countdown")}


def test_the_answers_of_the_library_are_right_and_others_wrong(library):
    train, _ = rows()
    for row in train:
        info = json.loads(json.dumps(row.extra_info))  # as a worker may get it
        score = VERIFIERS[verifier_for(row.data_source)].score
        right = score(row.data_source, f"<answer>7</answer> so <answer> {row.ground_truth} </answer>", "", info)
        assert (right["score"], right["acc"], right["pred"]) == (1.0, True, row.ground_truth)
        assert score(row.data_source, row.ground_truth, "", info)["acc"]
        wrong = score(row.data_source, "<answer>nothing</answer>", "", info)
        assert wrong["score"] < 1 and not wrong["acc"]


def test_a_row_of_another_problem_is_an_error(library):
    train, _ = rows(num_train=2)
    with pytest.raises(ValueError, match="generates different problems in each process"):
        verifier.score(train[0].data_source, "4", "", train[0].extra_info | {"index": train[1].extra_info["index"]})
    with pytest.raises(ValueError, match="lacks 'seed'"):
        verifier.score(train[0].data_source, "4", "", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leg_countin", "did you mean leg_counting"),
        ("composite", "no data set 'composite'"),
        (sorted(UNREPEATABLE)[0], "differ from process to process"),
    ],
)
def test_names_that_cannot_be_used_are_refused(library, name, message):
    with pytest.raises(ValueError, match=message):
        rows([name])


def test_a_run_reads_problems_that_a_process_of_another_hash_seed_makes_again(library, tmp_path, monkeypatch):
    values = default_config()
    values.data.task = "reasoning_gym"
    values.data.reasoning_gym.datasets = NAMES
    values.data.reasoning_gym.num_train, values.data.reasoning_gym.num_heldout = 4, 2
    values.model.path = "random"
    config = freeze(values)
    validate(config)
    problems = read_problems(config, character_tokenizer())
    train, (heldout,) = problems.train_set, problems.task_sets
    assert (len(train), len(heldout.prompts)) == (12, 6)
    assert problems.function == "reasoning_gym"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    (tmp_path / "own.py").write_text(
        "import sys\nfrom dapo_jax.data.reasoning_gym import score as right\n"
        "def score(*arguments): return {**right(*arguments), 'jax': 'jax' in sys.modules}"
    )
    requests = [ScoreRequest(row.data_source, row.ground_truth, "", row.extra_info) for row in train.rows]
    with VerifierPool(f"{tmp_path}/own.py:score", num_workers=1, timeout_s=60) as pool:
        verdicts = pool.score(requests)
    found = [(verdict.error, verdict.numbers["acc"], verdict.numbers["jax"]) for verdict in verdicts]
    assert found == [(None, 1.0, 0.0)] * 12


def test_a_data_set_with_too_few_problems_is_refused(library):
    with pytest.raises(ValueError, match=r"coin_flip has \d+ different problems, fewer than .* = 500: lower"):
        rows(["coin_flip"], num_train=499, num_heldout=1)
