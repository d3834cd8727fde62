"""Every verifier on texts that blow up parsers, in batches with right answers."""

import pytest
from ends_within import ends_within

from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

RIGHT = r"Answer: 34" "\n" r"\boxed{34}" "\n#### 34"
TEXTS = {
    "nested braces": r"\boxed{" + "{" * 100_000 + "7" + "}" * 100_000 + "}",
    "nested fractions": "$" + r"\frac{1}{" * 5000 + "2" + "}" * 5000 + "$",
    "nested roots": "$" + r"\sqrt{" * 5000 + "2" + "}" * 5000 + "$",
    "parentheses": "(" * 100_000 + "1" + ")" * 100_000,
    "expression in parentheses": "1+" + "(" * 150 + "1" + ")" * 150,
    "signs": "1" + "-" * 100_000 + "1",
    "tower": "The answer is 9**9**9**9",
    "tower in LaTeX": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{99999!!!!}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^7}}",
    "digits": "The answer is " + "9" * 1_000_000,
    "digits in a box": r"\boxed{" + "9" * 1_000_000 + "}",
    "decimals": "Answer: 0." + "3" * 1_000_000,
    "thousands": "1" + ",111" * 250_000 + "1",
    "megabyte of LaTeX": "$" + "x+" * 500_000 + "1$",
    "boxes that do not close": r"\boxed{" * 100_000,
    "dollars": "$" * 100_000,
    "answers": "answer: " * 100_000,
    "equals": "answer" + "=" * 100_000,
    "blanks": "answer" + " " * 1_000_000 + ":",
    "stars": "answer" + "*" * 1_000_000,
    "dots": "." * 1_000_000 + "-" * 1_000_000,
    "matrix": r"\boxed{\begin{pmatrix}" + "1&" * 20_000 + r"\end{pmatrix}}",
    "code": "Answer: __import__('os').system('exit')\n" r"\boxed{__import__('os').abort()}",
    "NUL": "\0" * 1_000_000,
    "lone surrogates": "\ud800" * 1_000_000,
    "right to left": "\u202e" * 100_000 + "43\u202c",
    "other digits": "Answer: \uff13\uff14 \u0663\u0664",
}


@pytest.mark.parametrize("verifier", ["arithmetic", "math_dapo", "math_dapo_lenient", "gsm8k", "gsm8k_flexible"])
def test_hostile_texts_are_wrong_at_once_and_right_answers_right(verifier):
    requests = [ScoreRequest("", text, "34", {}) for hostile in TEXTS.values() for text in (hostile, RIGHT)]
    with ends_within(), VerifierPool(verifier, num_workers=2, timeout_s=10, memory_limit_mb=500) as pool:
        verdicts = pool.score(requests)
    assert pool.num_replaced == 0
    assert [verdict.error for verdict in verdicts] == [None] * len(requests)
    assert [verdict.numbers["acc"] for verdict in verdicts] == [0.0, 1.0] * len(TEXTS)


def test_hostile_mathematics_is_wrong_within_the_time_limit_and_right_answers_are_right():
    names = (
        "nested fractions",
        "expression in parentheses",
        "signs",
        "tower",
        "tower in LaTeX",
        "factorials",
        "digits",
        "boxes that do not close",
        "code",
        "lone surrogates",
    )
    requests = [ScoreRequest("", text, "34", {}) for name in names for text in (TEXTS[name], RIGHT)]
    with ends_within(), VerifierPool("math_verify", num_workers=2, timeout_s=3, memory_limit_mb=500) as pool:
        verdicts = pool.score(requests)
        assert pool.num_replaced == sum(verdict.error is not None for verdict in verdicts)
    assert [verdict.numbers["acc"] for verdict in verdicts] == [0.0, 1.0] * len(names)
    errors = {verdict.error for verdict in verdicts}
    assert errors <= {None, "timeout after 3 s", "MemoryError: the verifier needs more than reward.memory_limit_mb=500"}


def test_mathematics_after_hostile_text_is_right():
    prefixes = ["\0" * 1000, "\ud800" * 1000, "\u202e" * 1000, "{" * 1000, r"\boxed{" * 1000, "9" * 5000]
    requests = [ScoreRequest("", f"{prefix}\n{RIGHT}", "34", {}) for prefix in prefixes]
    with ends_within(), VerifierPool("math_verify", num_workers=2, timeout_s=60, memory_limit_mb=500) as pool:
        verdicts = pool.score(requests)
    assert [verdict.numbers["acc"] for verdict in verdicts] == [1.0] * len(prefixes)
