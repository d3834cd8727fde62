import pytest
from in_process import InThisProcess

from dapo_jax.data.rows import PromptRow
from dapo_jax.rewards import trial
from dapo_jax.rewards.trial import check_ground_truths
from dapo_jax.rewards.verdicts import Verdict
from dapo_jax.rewards.verifiers import VERIFIERS


class Counting(InThisProcess):
    """Counts its questions."""

    def __init__(self, name):
        forms = name in VERIFIERS and VERIFIERS[name].forms
        super().__init__(name if forms or name == "auto" else "none")  # the others are asked nothing
        self.num_asked = 0

    def submit(self, request):
        self.num_asked += 1
        return super().submit(request)


def row(ground_truth, data_source="openai/gsm8k", number=1):
    return PromptRow("p", data_source, ground_truth, {}, f"a.jsonl row {number}")


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("arithmetic", ["34", "-3", "0.5", "1,234", "145.0"], ["five", "1/2", "34 apples 5", "inf"]),
        ("gsm8k", ["34", "-3", "0.5", "1,234"], ["34 apples", "$34", "1/2", "five"]),
        ("gsm8k_flexible", ["34", "-3", "0.5", "1,234", "+3", "033"], ["34.", "1/2", "five"]),
        ("math_dapo", ["34", r"\frac{1}{2}", "$x$", r"\text{(A)}", "two\nlines", "5 dollars"], ["7\n" * 200]),
        ("math_dapo_lenient", ["34", r"\frac{1}{2}", "$x$", "+34"], ["7\n" * 200]),
        ("math_verify", ["34", r"\frac{1}{2}", "1,2", r"\{1,2\}", r"\text{(A)}"], ["", "}"]),
        ("reasoning_gym", ["anything"], []),
        ("none", ["anything"], []),
        ("package.module.function", ["anything"], []),
    ],
)
def test_the_verifier_says_which_ground_truths_it_can_accept(name, accepted, refused):
    pool = Counting(name)
    check_ground_truths([row(ground_truth) for ground_truth in accepted], name, pool)
    for ground_truth in refused:
        with pytest.raises(ValueError, match=f"is not an answer that {name} accepts"):
            check_ground_truths([row("34"), row(ground_truth)], name, pool)


def test_every_verifier_that_compares_with_the_ground_truth_is_asked():
    others = {"none", "reasoning_gym", "auto", "format", "judge"}
    assert {name for name, verifier in VERIFIERS.items() if not verifier.forms} == others


def test_the_rows_are_named_with_value_rule_and_cure():
    rows = [row("34", number=1), row("34 apples", number=2), row("1", number=3), row("34 apples", number=4)]
    with pytest.raises(ValueError) as error:
        check_ground_truths(rows, "auto", Counting("auto"))
    first, *lines = str(error.value).splitlines()
    assert first.startswith(
        "no response can match these ground truths (2 rows): write them as the verifier reads answers"
    )
    assert lines == [
        f"  a.jsonl row {number}: ground_truth='34 apples' is not an answer that gsm8k accepts, "
        "which reads '34' in '#### 34 apples'"
        for number in (2, 4)
    ]


def test_a_verifier_that_does_not_come_to_a_verdict_may_need_more_time_or_memory(monkeypatch):
    pool = Counting("math_verify")
    late = Verdict({"score": 0.0, "acc": 0.0}, None, "timeout after 10 s")
    monkeypatch.setattr(pool, "_score", lambda request: late)
    with pytest.raises(ValueError, match=r"raise reward.timeout_s or reward.memory_limit_mb:(?s:.*)10 s"):
        check_ground_truths([row("34")], "math_verify", pool)
    with pytest.raises(ValueError) as error:
        check_ground_truths([row("34 apples")], "gsm8k", Counting("gsm8k"))
    assert "reward.timeout_s" not in str(error.value)


def test_a_built_in_verifier_refuses_ground_truths_that_are_not_text_or_the_text_of_a_missing_value():
    rules = dict.fromkeys(("None", "nan", " N/A"), "an answer, not the text of a missing")
    not_text = [{"a": 1}, ["34"], None, True]
    for name in ("gsm8k", "math_verify", "math_dapo", "auto"):
        for truth, rule in [*rules.items(), *((truth, "text, because") for truth in not_text)]:
            with pytest.raises(ValueError, match=f"row 2: ground_truth=.* must be {rule}"):
                check_ground_truths([row("34"), row(truth, number=2)], name, Counting(name))
    with pytest.raises(ValueError, match=r"\(9 rows\)(?s:.*)row 0 and 8 more: ground_truth"):
        check_ground_truths([row(None, number=number) for number in range(9)], "gsm8k", Counting("gsm8k"))
    for name in ("none", "reasoning_gym", "package.module.function"):
        check_ground_truths([row(truth) for truth in not_text], name, Counting(name))


def test_leading_zeros_are_named_where_the_spelling_is_compared(caplog):
    rows = [row("34"), row("033", number=2), row("07", number=3), row("0.5", number=4)]
    for name in ("math_dapo_lenient", "gsm8k_flexible", "math_dapo"):
        check_ground_truths(rows, name, Counting(name))
    [said] = [record.getMessage() for record in caplog.records if "begins with 0" in record.getMessage()]
    assert said.startswith("a.jsonl row 2 and 1 more: ground_truth=033") and "choose math_dapo_lenient" in said


def test_equal_ground_truths_are_asked_once_and_few_of_a_slow_verifier(monkeypatch):
    monkeypatch.setattr(trial, "MAX_ASKED", 10)
    for name, expected in {"gsm8k": 45, "math_verify": 9}.items():
        pool = Counting(name)
        check_ground_truths([row(str(index % 45)) for index in range(90)], name, pool)
        assert pool.num_asked == expected
