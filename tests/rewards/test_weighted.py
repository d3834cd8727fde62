import json

import pytest

from dapo_jax.data.rows import PromptRow
from dapo_jax.rewards.ground_truths import check_ground_truths
from dapo_jax.rewards.trial import check_rewards
from dapo_jax.rewards.verifiers import load_verifier, wrong_score
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

OWN = """
def brief(data_source, solution, ground_truth, extra_info):
    if "length" in extra_info and not extra_info["length"]:
        raise KeyError("length")
    return {"score": -len(solution), "acc": 1, "pred": "long", "words": len(solution.split())}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weighted") / "own.py"
    path.write_text(OWN)
    return path


def several(file, correct="math_dapo", name="brief"):
    return json.dumps({"correct": correct, "shape": {"function": f"{file}:{name}", "weight": 0.1}})


@pytest.fixture(scope="module")
def pool(file):
    with VerifierPool(several(file), num_workers=1, timeout_s=10) as one:
        yield one


def test_the_score_is_the_weighted_sum_and_acc_and_pred_are_the_first_parts(file):
    score = load_verifier(several(file))
    assert score("any", "Answer: 34", "34", {}) == {
        "score": 1.0 + 0.1 * -10,
        "acc": 1.0,
        "pred": "34",
        "correct": 1.0,
        "shape": -10.0,
        "shape.words": 2.0,
    }
    assert score("any", "Answer: 3", "34", {})["acc"] == 0.0


def test_weights_are_1_unless_given():
    score = load_verifier('{"a": "math_dapo", "b": "arithmetic"}')
    assert score("any", "Answer: 34", "34", {})["score"] == 2.0


def test_a_part_that_fails_fails_the_sum_and_is_named(pool):
    good, bad = pool.score([ScoreRequest("any", "Answer: 34", "34", {"length": length}) for length in (5, 0)])
    assert good.error is None and good.numbers["score"] == 0.0
    assert "KeyError" in str(bad.error) and "'shape' of reward.functions" in str(bad.error)
    assert (
        bad.numbers.items() >= {"score": -1.0, "acc": 0.0, "shape": 0.0}.items()
    )  # math_dapo's lowest, and 0 for a function of one's own


def test_the_score_of_a_failure_is_the_sum_of_the_lowest():
    text = '{"a": {"function": "math_dapo", "weight": 0.5}, "b": "auto", "c": "FILE.py:score"}'
    assert wrong_score(text, "aime_2024") == -1.5
    assert wrong_score(text, "openai/gsm8k") == -0.5


def test_a_part_that_does_not_load_is_named(file):
    with pytest.raises(ValueError, match="reward.functions, 'shape': reward.function=.*has no function 'absent'"):
        load_verifier(several(file, name="absent"))


def test_the_first_part_judges_the_ground_truths(file, pool):
    row = PromptRow("p", "any", "thirty", {}, "a.jsonl row 1")
    check_ground_truths([row], several(file), pool)
    wrong = several(file, correct="arithmetic")
    with VerifierPool(wrong, num_workers=1, timeout_s=10) as other:
        with pytest.raises(ValueError, match="'thirty' is not an answer that arithmetic accepts"):
            check_ground_truths([row], wrong, other)


def test_functions_are_tried_and_must_return_the_filter_metric(file, pool):
    name, row = several(file), PromptRow("p", "any", "34", {}, "a.jsonl row 1")
    for metric in ("shape", "shape.words", "seq_reward"):
        check_rewards([([row], name)], {name: pool}, metric)
    with pytest.raises(ValueError, match="'words' is not among the numbers that reward.functions=.*shape.words"):
        check_rewards([([row], name)], {name: pool}, "words")
