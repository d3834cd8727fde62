import dataclasses
import logging
import re

import pytest
from ends_within import ends_within

from dapo_jax.config.values import DEFAULTS
from dapo_jax.data.rows import PromptRow
from dapo_jax.rewards import trial
from dapo_jax.rewards.trial import check_rewards, try_function
from dapo_jax.rewards.worker_pool import VerifierPool

ROW = PromptRow("p", "sums", "34", {"numbers": [3, 4]}, "a.jsonl row 1")
OWN = """
import json, math, time
def score(data_source, solution, ground_truth, extra_info):
    return eval(extra_info.pop("result"), {**globals(), **locals()})
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The verdicts of a reward function that returns this expression."""
    file = tmp_path_factory.mktemp("trial") / "own.py"
    file.write_text(OWN)
    name = f"{file}:score"
    with VerifierPool(name, num_workers=1, timeout_s=30) as pool:
        yield lambda result: try_function(
            dataclasses.replace(ROW, extra_info={**ROW.extra_info, "result": result}), name, pool
        )


def test_a_function_that_works_gives_its_verdicts(tried, caplog):
    verdicts = tried("{'score': float(ground_truth in solution), 'sum': sum(extra_info['numbers'])}")
    assert {verdict.numbers["score"] for verdict in verdicts} == {0.0, 1.0}  # one of the responses has no answer
    assert {verdict.numbers["sum"] for verdict in verdicts} == {7.0}
    assert not caplog.records


def test_a_function_that_gives_all_the_same_score_is_warned_of(tried, caplog):
    """Such as one that compares text with a number: its run found no group after all rounds, and blamed the data."""
    assert len(tried("float(solution == 7)")) == 8
    [record] = caplog.records
    assert "gives 0 to all 8 trial responses for a.jsonl row 1" in record.getMessage()


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("{'acc': 1.0}", r"a dict with 'score', not \{'acc': 1.0\}"),
        ("1.0 if solution else math.nan", "not nan"),  # even for only one of the responses
    ],
)
def test_an_invalid_result_is_refused(result, found, tried):
    message = rf"own.py:score' returns no verdict on .* for a.jsonl row 1 .*{found}.*it must be"
    with pytest.raises(ValueError, match=message):
        tried(result)


def test_a_function_that_always_raises_is_refused_with_its_error(tried):
    message = "failed on all 8 trial responses for a.jsonl row 1, .* KeyError: 'answer': corr"
    with pytest.raises(ValueError, match=message):
        tried("extra_info['answer']")


@pytest.mark.parametrize(
    "reading",
    [
        "solution.split('Answer:')[1]",
        "solution.split('####')[1]",
        "solution.split('{')[1].rstrip('}')",
        "solution.split('<answer>')[1].split('</answer>')[0]",
        "solution.split('print(')[1].split(')')[0]",
        "solution",
        "json.loads(solution)['answer']",
    ],
)
def test_a_function_may_raise_for_what_it_cannot_read(reading, tried, caplog):
    with caplog.at_level(logging.WARNING):
        verdicts = tried(f"float(int({reading}) == 34)")
    assert {verdict.numbers["acc"] for verdict in verdicts} == {1.0}
    assert re.search("trial responses.*counts as wrong", caplog.text)


def test_a_function_may_have_no_verdict_but_not_always(tried, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(tried("1.0 if solution else None")) == 7
    assert re.search("failed on 1 of 8 trial responses.*None.*is left out of its group", caplog.text)
    with pytest.raises(ValueError, match="failed on all 8 trial responses .* returned None: no verdict"):
        tried("None")


def test_a_function_that_takes_too_long_each_time_is_refused_though_not_all_are_tried(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ndef score(text):\n    time.sleep(3600)\n")
    name = f"{tmp_path}/slow.py:score"
    with VerifierPool(name, num_workers=1, timeout_s=1) as pool:
        first = trial._verdicts(ROW, ["34"], name, pool)
        assert [verdict.error for verdict in first] and DEFAULTS["reward.timeout_s"] < trial.TRIAL_S
        monkeypatch.setattr(trial, "_verdicts", lambda *_: first)  # then the trial's time is over
        with pytest.raises(ValueError, match="failed on all 1 trial responses"):
            try_function(ROW, name, pool)


def test_a_slow_judge_is_not_waited_for(tried, monkeypatch):
    """The last of this file: its worker sleeps on until the pool is closed."""
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    with ends_within(60):
        assert tried("time.sleep(3600)") == []


def test_a_function_is_tried_on_each_data_source(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def score(data_source, solution, ground_truth, extra_info):\n    return {'score': 1, **extra_info}\n"
    )
    name, other = f"{file}:score", PromptRow("p", "other", "34", {}, "a.jsonl row 3")
    rows = [dataclasses.replace(ROW, extra_info={"words": 2}) for _ in range(2)]
    with VerifierPool(name, num_workers=1, timeout_s=30) as pool:
        check_rewards([(rows, name)], {name: pool}, "words")
        with pytest.raises(ValueError, match="'words' is not among the numbers .* returns for a.jsonl row 3, score"):
            check_rewards([([*rows, other], name)], {name: pool}, "words")
