import logging

import pytest
from ends_within import ends_within

from dapo_jax.data.rows import PromptRow
from dapo_jax.rewards import trial
from dapo_jax.rewards.trial import try_function
from dapo_jax.rewards.worker_pool import VerifierPool

ROW = PromptRow("p", "sums", "34", {"numbers": [3, 4]}, "a.jsonl row 1")


def tried(body, tmp_path):
    """The verdicts of a reward function with this body."""
    code = f"import math\ndef score(data_source, solution, ground_truth, extra_info):\n    {body}\n"
    (tmp_path / "own.py").write_text(code)
    name = f"{tmp_path}/own.py:score"
    with VerifierPool(name, num_workers=1, timeout_s=30) as pool:
        return try_function(ROW, name, pool)


def test_a_function_that_works_gives_its_verdicts(tmp_path, caplog):
    body = "return {'score': float(ground_truth in solution), 'sum': sum(extra_info['numbers'])}"
    verdicts = tried(body, tmp_path)
    assert {verdict.numbers["score"] for verdict in verdicts} == {0.0, 1.0}  # one of the responses has no answer
    assert {verdict.numbers["sum"] for verdict in verdicts} == {7.0}
    assert not caplog.records


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("None", "not None"),
        ("math.nan", "not nan"),
        ("{'score': math.nan}", "not 'score': nan"),
        ("'good'", "not 'good'"),
        ("[1.0]", r"not \[1.0\]"),
        ("{'acc': 1.0}", r"a dict with 'score', not \{'acc': 1.0\}"),
        ("1e300", "finite in float32, not 1e\\+300"),
        ("1.0 if solution else None", "not None"),  # even for only one of the responses
    ],
)
def test_an_invalid_result_is_refused(result, found, tmp_path):
    with pytest.raises(
        ValueError, match=rf"own.py:score' returns no verdict on .* to a.jsonl row 1 .*{found}.*it must be"
    ):
        tried(f"return {result}", tmp_path)


def test_a_function_that_always_raises_is_refused_with_its_error(tmp_path):
    with pytest.raises(
        ValueError, match="failed on all 8 made-up responses to a.jsonl row 1, .* KeyError: 'answer': corr"
    ):
        tried("return extra_info['answer']", tmp_path)


@pytest.mark.parametrize(
    "reading",
    [
        "solution.split('Answer:')[1]",
        "solution.split('####')[1]",
        "solution.split('{')[1].rstrip('}')",
        "solution.split('<answer>')[1].split('</answer>')[0]",
        "solution.split('print(')[1].split(')')[0]",
        "solution",
        "__import__('json').loads(solution)['answer']",
    ],
)
def test_a_function_may_raise_for_what_it_cannot_read(reading, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        verdicts = tried(f"return float(int({reading}) == 34)", tmp_path)
    assert {verdict.numbers["acc"] for verdict in verdicts} == {1.0}
    assert "made-up responses" in caplog.text and "counts as wrong" in caplog.text


def test_a_slow_judge_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    with ends_within(60):
        assert tried("import time; time.sleep(3600)", tmp_path) == []
