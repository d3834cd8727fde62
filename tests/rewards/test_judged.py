"""The judge as a verifier: alone, as one of several rewards, and in a whole run."""

import json
import re
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from ends_within import ends_within
from in_process import InThisProcess
from judge_server import Answer, judge_server
from metrics_page import find
from small_run import Killed, at_call, kill, rows_without_clock, small_config

from dapo_jax.config.sections import JudgeConfig, RewardConfig
from dapo_jax.data.rows import PromptRow
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.monitor.records import read_metrics
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rewards import pipeline, verification
from dapo_jax.rewards.pipeline import open_verifiers
from dapo_jax.rewards.trial import check_rewards
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict
from dapo_jax.rewards.verifiers import wrong_score
from dapo_jax.rewards.weighted import without_judge
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

SEVERAL = json.dumps(
    {
        "correct": "arithmetic",
        "helpful": {"function": "judge", "weight": 0.5},
        "form": {"function": "format", "weight": 0.25},
    }
)
ROW = PromptRow("3 + 4?", "sums", "7", {}, "a.jsonl row 1")


@pytest.fixture
def server():
    with judge_server() as one, ends_within(120):
        yield one


@contextmanager
def opened(server, folder, name, own=None, **changes):
    settings = JudgeConfig(base_url=server.base_url, model="grader", backoff_s=0.01, **changes)
    reward = RewardConfig(judge=settings, num_workers=1)
    here = mock.patch.object(pipeline, "VerifierPool", partial(InThisProcess, own=own)) if own else nullcontext()
    with here, open_verifiers([name, name], reward, folder) as (verifiers, judge):
        assert judge is not None
        yield verifiers[name]


def request(text):
    return ScoreRequest("sums", text, "7", {}, "3 + 4?")


def test_the_judge_is_summed_with_what_runs_in_processes(server, tmp_path):
    server.rule = lambda prompt: Answer("Score: 6")
    with opened(server, tmp_path, SEVERAL) as verifiers:
        right, wrong = verifiers.score([request("<think>a</think><answer>7</answer>"), request("8")])
    assert right.numbers == {"score": 1.55, "acc": 1.0, "correct": 1.0, "helpful": 0.6, "form": 1.0}
    assert wrong.numbers == {"score": 0.3, "acc": 0.0, "correct": 0.0, "helpful": 0.6, "form": 0.0}
    assert (right.pred, wrong.pred) == ("7", "8")


# The others run in this process.
OWN = {"python:right": lambda text, truth: float(truth in text), "python:fails": lambda a, b, c, d: d["absent"]}
FIRST = '{"helpful": "judge", "correct": {"function": "python:right", "weight": 2}}'
LAST = '{"correct": {"function": "python:right", "weight": 2}, "helpful": "judge"}'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (FIRST, {"score": 0.6, "acc": 1.0, "helpful": 0.6, "correct": 0.0}),  # the first part says what is right
        (LAST, {"score": 0.6, "acc": 0.0, "helpful": 0.6, "correct": 0.0}),
        ("judge", {"score": 0.6, "acc": 1.0}),
        ('{"helpful": {"function": "judge", "weight": -2}}', {"score": -1.2, "acc": 1.0, "helpful": 0.6}),
    ],
)
def test_the_score_is_the_weighted_sum_and_the_judge_alone_needs_no_process(server, tmp_path, name, expected):
    server.rule = lambda prompt: Answer("Score: 6")
    with opened(server, tmp_path, name, OWN) as verifiers:
        [verdict] = verifiers.score([request("8")])
        assert verifiers.take_replaced() == 0 and (verifiers.rest is None) == ("python" not in name)
    assert verdict.numbers == expected and verdict.pred is None


def test_a_function_that_fails_fails_the_sum_with_the_lowest_scores(server, tmp_path):
    server.rule = lambda prompt: Answer("Score: 7")
    name = '{"correct": "python:fails", "form": "math_dapo", "helpful": "judge"}'
    with opened(server, tmp_path, name, OWN) as verifiers:
        [verdict] = verifiers.score([request("Answer: 7")])
    assert verdict.numbers == {"score": -1.0, "acc": 0.0, "correct": 0.0, "form": -1.0, "helpful": 0.0}
    assert "'correct' of reward.functions" in str(verdict.error) and wrong_score(name, "any") == -1.0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ('{"correct": "math_dapo", "helpful": "judge", "own": "python:right"}', "judge: "),
        ('{"correct": "python:fails", "helpful": "judge"}', "judge: "),
        ('{"correct": "python:unsure", "helpful": "judge", "own": "python:right"}', "returned None: no verdict"),
    ],
)
def test_a_part_without_a_verdict_leaves_the_sum_without_one(server, tmp_path, name, error):
    server.rule = lambda prompt: Answer("Score: 7" if "unsure" in name else "no verdict")
    with opened(server, tmp_path, name, OWN | {"python:unsure": lambda text: None}) as verifiers:
        [verdict] = verifiers.score([request("Answer: 7")])
    assert verdict.numbers == {} and error in str(verdict.error)


def test_taking_a_request_back_takes_back_its_parts(server, tmp_path):
    server.rule = lambda prompt: Answer(wait_s=0.5)
    with opened(server, tmp_path, LAST, OWN, max_concurrency=1) as verifiers:
        first, second = verifiers.submit(request("a")), verifiers.submit(request("b"))
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result()
        assert first.result().error is None
    assert server.responses == ["a"]


def test_a_limit_ends_the_sum_with_its_error(server, tmp_path):
    with opened(server, tmp_path, LAST, OWN, max_requests=1) as verifiers:
        with pytest.raises(RuntimeError, match="reward.judge.max_requests=1"):
            verifiers.score([request("a"), request("b")])


def test_the_parts_without_the_judge():
    assert without_judge("judge") == without_judge('{"a": "judge"}') == ""
    assert without_judge("gsm8k") == "gsm8k" and without_judge('{"a": "gsm8k"}') == '{"a": "gsm8k"}'
    assert json.loads(without_judge(SEVERAL)).keys() == {"correct", "form"}


def test_the_trial_asks_the_judge_once_and_checks_the_other_parts(server, tmp_path):
    own = {"python:brief": lambda text: {"score": -len(text), "words": 1}}
    name = json.dumps({"correct": "arithmetic", "helpful": "judge", "brief": "python:brief"})
    with opened(server, tmp_path, name, own) as verifiers:
        for metric in (None, "helpful", "brief.words", "acc"):
            check_rewards([([ROW], name), ([ROW], name)], {name: verifiers}, metric)
        with pytest.raises(ValueError, match="metric='words' is not among the numbers"):
            check_rewards([([ROW], name)], {name: verifiers}, "words")
        bad = PromptRow("3 + 4?", "sums", "seven", {}, "a.jsonl row 2")
        with pytest.raises(ValueError, match="'seven' is not an answer that arithmetic accepts"):
            check_rewards([([ROW, bad], name)], {name: verifiers}, None)
    assert server.responses == ["7"]


def test_ground_truths_need_not_suit_the_parts_after_a_judge(server, tmp_path):
    name = '{"helpful": "judge", "correct": "arithmetic"}'
    row = PromptRow("Write a poem", "poems", "", {}, "a.jsonl row 1")
    with opened(server, tmp_path, name) as verifiers:
        check_rewards([([row], name)], {name: verifiers}, "acc")


def judged(server, workdir, **changes):
    functions = {"correct": "arithmetic", "helpful": {"function": "judge", "weight": 0.5}}
    options = {
        "reward.functions": functions,
        "reward.judge.base_url": server.base_url,
        "reward.judge.model": "grader",
        "reward.judge.price_per_million_input_tokens": 1.0,
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
    }
    return small_config(workdir, **options | changes)


def without_judge_counts(workdir):
    return [{key: row[key] for key in row if "judge/" not in key} for row in rows_without_clock(workdir)]


@pytest.mark.slow
def test_a_killed_run_resumes_without_asking_twice(server, tmp_path, monkeypatch):
    server.rule = lambda prompt: Answer(f"Score: {len(prompt) % 11}")
    train(judged(server, tmp_path / "a"))
    asked = sorted(server.responses)
    server.asked.clear()
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "update", 2, kill)
        with pytest.raises(Killed):
            train(judged(server, tmp_path / "b"))
    train(judged(server, tmp_path / "b"))
    assert sorted(server.responses) == asked and len(asked) > 20
    rows, killed = (read_metrics(tmp_path / name) for name in "ab")
    assert {find(name) is not None for row in rows for name in row if name != "step"} == {True}
    assert rows[-1]["reward/judge/total_cost"] == pytest.approx(sum(row["reward/judge/cost"] for row in rows[1:]))
    assert killed[-1]["reward/judge/total_cost"] == pytest.approx(rows[-1]["reward/judge/total_cost"])
    for row in rows[1:]:
        assert row["reward/judge/requests"] + row["reward/judge/cached"] > 0
        assert row["rollout/score/mean"] == pytest.approx(row["rollout/correct/mean"] + row["rollout/helpful/mean"] / 2)

    assert without_judge_counts(tmp_path / "a") == without_judge_counts(tmp_path / "b") and len(killed) == len(rows)


@pytest.mark.slow
def test_a_run_whose_judge_dies_saves_its_state_and_resumes_as_if_nothing_had_been(server, tmp_path):
    healthy, broken = (lambda prompt: Answer(f"Score: {len(prompt) % 11}")), Answer(status=503, body="no GPU")
    changes = {"trainer.save_freq": -1, "reward.judge.patience_s": 0.5}
    server.rule = healthy
    train(judged(server, tmp_path / "a", **changes))
    server.rule = lambda prompt: healthy(prompt) if len(server.asked) < 2.5 * asked else broken
    asked = len(server.asked) / 3
    server.asked.clear()
    config = judged(server, tmp_path / "b", **changes)
    with pytest.raises(SharedFailure, match="has not answered for reward.judge.patience_s=0.5 s"):
        train(config)
    assert re.search("the run ends after step [12]; rerun the same", (tmp_path / "b/train.log").read_text())
    server.rule = healthy
    train(config)
    assert without_judge_counts(tmp_path / "a") == without_judge_counts(tmp_path / "b")


@pytest.mark.parametrize(
    ("own", "error", "told"),
    [(True, RuntimeError("no judge"), "no judge"), (False, None, "no judge"), (True, OSError(), "OSError")],
    ids=["own", "another", "no worker"],
)
def test_a_judge_that_is_dead_for_one_process_ends_all_alike(monkeypatch, own, error, told):
    future = Future()
    verifiers = SimpleNamespace(submit=lambda request: future, collect=lambda _, futures: [futures[0].result()])
    future.set_exception(error) if own else future.set_result(Verdict({"score": 1.0}, None, None))
    other = ["", []] if own else ["no judge", []]
    monkeypatch.setattr(verification, "gather", lambda value: [value] if value is False else [value, other])
    tokenizer = SimpleNamespace(decode=lambda tokens: "7")
    waiting = verification.Verification(verifiers, tokenizer, [ROW], 1, check=lambda: None)
    waiting.begin(np.array([0]), SimpleNamespace(responses=np.ones((1, 1)), mask=np.ones((1, 1), bool)))
    with pytest.raises(SharedFailure, match=told):
        waiting.wait()


@pytest.mark.slow
def test_an_evaluation_asks_the_judge(server, tmp_path):
    config = judged(server, tmp_path / "run", **{"reward.functions": "{}", "reward.function": "judge"})
    [result] = bench(config, tmp_path / "bench")
    assert result["metrics"]["bench/arithmetic/score/mean@4"] == pytest.approx(0.7)
    assert (tmp_path / "run/judge/answers_0.sqlite").exists()


def test_a_run_whose_judge_refuses_the_key_does_not_start(server, tmp_path):
    server.rule = lambda prompt: Answer(status=401, body="who are you?")
    with pytest.raises(ValueError, match="refuses a request .*who are you"):
        train(judged(server, tmp_path / "run"))
    assert len(server.asked) == 1
