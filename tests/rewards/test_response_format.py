import pytest
from ends_within import ends_within

from dapo_jax.rewards.response_format import R1_FORMAT, check_prompt, matching, score
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

THOUGHT = "<think>\n3 + 4 < 8\n</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        *[(THOUGHT, 1.0), (f"\n {THOUGHT}\n", 1.0), ("<think></think><answer></answer>", 1.0), (f"So: {THOUGHT}", 0.0)],
        *[(f"{THOUGHT} done", 0.0), (f"{THOUGHT}{THOUGHT}", 0.0)],
        ("<think>a<think>b</think></think><answer>7</answer>", 0.0),
        *[("<think>a</think><answer>7</answer><answer>8</answer>", 0.0), ("<answer>7</answer>", 0.0)],
        *[("<think>7", 0.0), ("", 0.0)],
    ],
)
def test_the_default_is_the_form_of_r1(response, expected):
    assert score("any", response, "7", {}) == expected


def test_a_long_response_takes_no_time():
    with ends_within(20):
        assert score("any", "<think>" + "<" * 500_000 + "</think><answer>7</answer>", "7", {}) == 1.0


def test_the_whole_response_must_match_a_pattern_of_your_own():
    one = matching(r".*\\boxed\{[^{}]*\}\.?")
    assert one("any", "It is\n\\boxed{7}.", "7", {}) == 1.0
    assert one("any", "\\boxed{7} I think", "7", {}) == 0.0


@pytest.mark.parametrize("pattern", ["", r"^\s*<think>.*</think>.*"])
def test_a_tag_that_the_template_opens_cannot_begin_a_response(pattern):
    prompt = "<|im_start|>assistant\n<think>\n"
    with pytest.raises(ValueError, match=r"reward.format.pattern=.* none begins with <think>.*: set reward"):
        check_prompt(prompt, pattern)
    check_prompt("<|im_start|>assistant\n", pattern)
    check_prompt(prompt, R1_FORMAT.removeprefix("<think>"))
    assert matching(R1_FORMAT.removeprefix("<think>"))("any", THOUGHT.removeprefix("<think>"), "7", {}) == 1.0


def test_it_is_one_of_several_rewards_in_worker_processes_with_the_pattern_of_the_run():
    text = '{"correct": "arithmetic", "form": {"function": "format", "weight": 0.25}}'
    with VerifierPool(text, num_workers=1, timeout_s=30, pattern="Answer: [0-9]+") as pool:
        good, bad = pool.score([ScoreRequest("any", text, "8", {}) for text in ("Answer: 7", THOUGHT)])
    assert good.numbers == {"score": 0.25, "acc": 0.0, "correct": 0.0, "form": 1.0}
    assert bad.numbers == {"score": 0.0, "acc": 0.0, "correct": 0.0, "form": 0.0}


@pytest.mark.slow
def test_backtracking_without_end_costs_only_its_sample():
    with ends_within(60), VerifierPool("format", num_workers=1, timeout_s=1, pattern="(a|aa)+b") as pool:
        slow, good = pool.score([ScoreRequest("any", text, "7", {}) for text in ("a" * 60, "aab")])
    assert slow.error == "timeout after 1 s" and slow.numbers == {"score": 0.0, "acc": 0.0}
    assert good.numbers == {"score": 1.0, "acc": 1.0}
