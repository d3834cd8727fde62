import json

import pytest
from config_problems import assert_one, config_with, problems
from small_run import rows_without_clock, small_config

from dapo_jax.command.validation import validate
from dapo_jax.config.sections import RewardConfig
from dapo_jax.rewards.in_process import InProcessVerifiers
from dapo_jax.rewards.opening import open_verifiers
from dapo_jax.rewards.verifiers import load_verifier
from dapo_jax.rewards.worker_pool import ScoreRequest
from dapo_jax.training import train

REQUEST = ScoreRequest("any", "so 34", "34", {"n": 3})


def test_a_function_of_the_session_gives_verdicts_with_one_warning(caplog):
    own = {"right": lambda text, ground_truth: float(ground_truth in text)}
    with InProcessVerifiers("python:right", own) as verifiers:
        good, bad = verifiers.score([REQUEST, ScoreRequest("any", "35", "34", {})])
        verifiers.score([REQUEST])
    assert good.numbers == {"score": 1.0, "acc": 1.0} and bad.numbers == {"score": 0.0, "acc": 0.0}
    assert not good.error and verifiers.take_replaced() == 0
    [warning] = caplog.records
    assert "without a limit of time or memory" in warning.message and "hostile" in warning.message


@pytest.mark.parametrize("result", ["good", float("nan"), {"acc": 1.0}])
def test_a_failure_counts_as_wrong(result):
    with InProcessVerifiers("python:own", {"own": lambda text: result}, error_score=-2.0) as verifiers:
        [verdict] = verifiers.score([REQUEST])
    assert verdict.numbers == {"score": -2.0, "acc": 0.0} and "verifier must return" in str(verdict.error)


def test_none_is_no_verdict():
    with InProcessVerifiers("python:own", {"own": lambda text: None}, error_score=-2.0) as verifiers:
        [verdict] = verifiers.score([REQUEST])
    assert verdict.numbers == {} and verdict.error == "the function returned None: no verdict"


def test_what_a_function_raises_is_the_samples_error():
    def leaves(text):
        raise SystemExit("no")

    with InProcessVerifiers("python:own", {"own": leaves}) as verifiers:
        [verdict] = verifiers.score([REQUEST])
    assert verdict.error == "SystemExit: no"


def test_it_mixes_with_other_functions():
    functions = json.dumps({"correct": "math_dapo", "brief": {"function": "python:brief", "weight": 0.5}})
    with InProcessVerifiers(functions, {"brief": lambda text: -len(text)}) as verifiers:
        [verdict] = verifiers.score([ScoreRequest("any", "Answer: 34", "34", {})])
    assert verdict.numbers == {"score": -4.0, "acc": 1.0, "correct": 1.0, "brief": -10.0}


def test_only_this_session_has_it():
    with pytest.raises(ValueError, match="'python:own' is a function of the Python session.*FILE.py:function"):
        load_verifier("python:own")
    message = "reward.function='python:own' is a function of the Python session"
    for changes in ({"reward.function": "python:own"}, {"reward.functions": '{"a": "gsm8k", "b": "python:own"}'}):
        assert_one(problems(changes), message)
        validate(config_with(changes), own=["own"])


def score(data_source, solution, ground_truth, extra_info):
    return load_verifier("arithmetic")(data_source, solution, ground_truth, extra_info)


def test_the_verdicts_are_those_of_the_same_function_in_worker_processes(tmp_path):
    names = ["python:own", "dapo_jax.rewards.arithmetic.score"]
    requests = [ScoreRequest("sums", text, "34", {}) for text in ("34", "35", "\0")] + [
        ScoreRequest("sums", "34", "", {})
    ]
    with open_verifiers(names, RewardConfig(num_workers=1), {"own": score}, tmp_path) as (opened, judge):
        own, other = (opened[name].score(requests) for name in names)
    assert judge is None and own == other and [verdict.numbers["acc"] for verdict in own] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_run_is_that_of_the_same_function_in_worker_processes_and_each_part_has_its_curve(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def brief(a, text, b, c): return {'score': -len(text), 'words': len(text.split())}"
    )

    def trained(name, function, **keywords):
        functions = {"correct": function, "brief": {"function": f"{tmp_path}/own.py:brief", "weight": 0.01}}
        steps = {"trainer.total_training_steps": 2}
        train(small_config(tmp_path / name, **{"reward.functions": functions}, **steps), **keywords)
        return rows_without_clock(tmp_path / name)

    start, step, _ = rows = trained("a", "python:own", own={"own": score})
    assert capsys.readouterr().err.count("runs in this process") == 1
    assert rows == trained("b", "dapo_jax.rewards.arithmetic.score")
    for name in ("correct", "brief", "brief.words"):
        assert f"eval/arithmetic/{name}/mean@4" in start and f"rollout/{name}/mean" in step
    assert step["rollout/correct/mean"] == step["rollout/acc/mean"]
    shares = step["rollout/correct/mean"] + 0.01 * step["rollout/brief/mean"]
    assert step["rollout/score/mean"] == pytest.approx(shares)
