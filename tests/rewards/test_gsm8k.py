import pytest

from dapo_jax.rewards import gsm8k


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score", "pred"),
    [
        ("so\n#### 34", "34", 1.0, "34"),
        ("#### 35\n#### 34", "34", 1.0, "34"),
        ("#### -1,234", "-1234", 1.0, "-1234"),
        ("#### 1234", "1,234", 1.0, "1234"),
        ("#### 34.", "34", 0.0, "34."),
        ("#### 34\n#### 35", "34", 0.0, "35"),
        ("It is 34", "34", 0.0, ""),
        ("####34", "34", 0.0, ""),
        ("", "", 0.0, ""),
    ],
)
def test_strict_reads_the_last_marked_number(solution, ground_truth, score, pred):
    assert gsm8k.score("", solution, ground_truth, {}) == {"score": score, "acc": score == 1.0, "pred": pred}


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score", "pred"),
    [
        ("It is 34.", "34", 1.0, "34"),
        ("It is $1,234, I think ...", "1234", 1.0, "1234"),
        ("From 35 to -34", "-34", 1.0, "-34"),
        ("#### 34 then 35", "34", 0.0, "35"),
        ("none, at all.", "34", 0.0, ""),
    ],
)
def test_flexible_reads_the_last_number(solution, ground_truth, score, pred):
    result = gsm8k.score_flexible("", solution, ground_truth, {})
    assert result == {"score": score, "acc": score == 1.0, "pred": pred}


def test_only_the_last_300_characters_count():
    for score in (gsm8k.score, gsm8k.score_flexible):
        assert score("", "#### 34" + " " * 293, "34", {})["acc"]
        assert not score("", "#### 34" + " " * 299, "34", {})["acc"]
