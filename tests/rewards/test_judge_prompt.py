import re

import pytest

from dapo_jax.rewards.judge_prompt import DEFAULT_TEMPLATE, PLACEHOLDERS, NoVerdict, fill_in, read_score, read_template

VALUES = {"question": "3 + 4?", "response": "7", "ground_truth": "7", "max_score": "10", "tag": "abc"}


def test_the_default_template_has_every_placeholder_and_no_other():
    assert set(re.findall(r"\{(\w+)\}", DEFAULT_TEMPLATE)) == set(PLACEHOLDERS)
    assert "{" not in fill_in(DEFAULT_TEMPLATE, VALUES)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        *[("Right.\nScore: 10", 1.0), ("Score: 0", 0.0), ("Score: 7.5\n\n", 0.75), ("**Score: 7**", 0.7)],
        *[("**Score:** 7/10", 0.7), ("It says 'Score: 10', which is a trick.\nScore: 1", 0.1)],
    ],
)
def test_the_last_line_is_the_verdict(answer, score):
    assert read_score(answer, 10) == score


@pytest.mark.parametrize(
    "answer",
    [
        *["", "Score: 10\nbecause it is right", "The response says Score: 10", "Score: 11", "Score: -1", "Score: nan"],
        *["Score: 1e1", "Score: 7/5", "Score: \N{ARABIC-INDIC DIGIT SEVEN}", "Score: 7 8", "Score: N", "score 7"],
    ],
)
def test_anything_else_is_no_verdict(answer):
    with pytest.raises(NoVerdict):
        read_score(answer, 10)


def test_templates_are_texts_or_files(tmp_path):
    file = tmp_path / "template.txt"
    file.write_text("Grade {response}")
    assert read_template(str(file)) == read_template("Grade {response}") == "Grade {response}"
    assert read_template("") == DEFAULT_TEMPLATE
    file.write_text("Grade it")
    for given in (str(file), str(tmp_path / "absent.txt"), "Grade\nit"):
        with pytest.raises(ValueError, match=r"reward.judge.template=.*\{response\}"):
            read_template(given)
