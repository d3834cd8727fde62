import json

import pytest
from small_run import small_config

from dapo_jax.data.rows import PromptRow
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rewards.ground_truths import check_ground_truths
from dapo_jax.rewards.trial import check_rewards
from dapo_jax.rewards.verifiers import load_verifier, wrong_score
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool
from dapo_jax.training import train

FORMAT = """
def brief(data_source, solution, ground_truth, extra_info):
    return {"score": -len(solution), "acc": 1, "pred": "long", "words": len(solution.split())}

def fails(data_source, solution, ground_truth, extra_info):
    return len(solution) / extra_info["length"]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FORMAT)
    return path


def several(file, name="brief", weight=0.1):
    return json.dumps({"correct": "math_dapo", "shape": {"function": f"{file}:{name}", "weight": weight}})


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


def test_a_part_that_fails_fails_the_sum_and_is_named(file):
    with VerifierPool(several(file, "fails", weight=0.5), num_workers=1, timeout_s=10) as pool:
        good, bad = pool.score([ScoreRequest("any", "Answer: 34", "34", info) for info in ({"length": 5}, {})])
    assert good.error is None and good.numbers["score"] == 2.0
    assert "KeyError" in str(bad.error) and "'shape' of reward.functions" in str(bad.error)
    assert bad.numbers == {"score": -1.0, "acc": 0.0}  # math_dapo's lowest, and 0 for a function of one's own


def test_the_score_of_a_failure_is_the_sum_of_the_lowest():
    text = '{"a": {"function": "math_dapo", "weight": 0.5}, "b": "auto", "c": "FILE.py:score"}'
    assert wrong_score(text, "aime_2024") == -1.5
    assert wrong_score(text, "openai/gsm8k") == -0.5


def test_a_part_that_does_not_load_is_named(file):
    with pytest.raises(ValueError, match="reward.functions, 'shape': reward.function=.*has no function 'absent'"):
        load_verifier(several(file, "absent"))


def test_the_first_part_judges_the_ground_truths(file):
    row, right = PromptRow("p", "any", "thirty", {}, "a.jsonl row 1"), several(file)
    wrong = json.dumps({**json.loads(right), "correct": "arithmetic"})
    with VerifierPool(right, num_workers=1, timeout_s=10) as pool:
        check_ground_truths([row], right, pool)
    with VerifierPool(wrong, num_workers=1, timeout_s=10) as pool:
        with pytest.raises(ValueError, match="'thirty' is not an answer that arithmetic accepts"):
            check_ground_truths([row], wrong, pool)


def test_functions_are_tried_and_must_return_the_filter_metric(file):
    name, row = several(file), PromptRow("p", "any", "34", {}, "a.jsonl row 1")
    with VerifierPool(name, num_workers=1, timeout_s=10) as pool:
        for metric in ("shape", "shape.words", "seq_reward"):
            check_rewards([([row], name)], {name: pool}, metric)
        with pytest.raises(ValueError, match="'words' is not among the numbers that reward.functions=.*shape.words"):
            check_rewards([([row], name)], {name: pool}, "words")


def test_each_part_has_its_curve(file, tmp_path):
    functions = {"correct": "arithmetic", "brief": {"function": f"{file}:brief", "weight": 0.01}}
    config = small_config(tmp_path / "run", **{"reward.functions": functions, "trainer.total_training_steps": 1})
    train(config)
    start, step = read_metrics(config.workdir)
    for name in ("correct", "brief", "brief.words"):
        assert f"eval/arithmetic/{name}/mean@4" in start and f"rollout/{name}/mean" in step
    assert step["rollout/correct/mean"] == step["rollout/acc/mean"]
    shares = step["rollout/correct/mean"] + 0.01 * step["rollout/brief/mean"]
    assert step["rollout/score/mean"] == pytest.approx(shares)
