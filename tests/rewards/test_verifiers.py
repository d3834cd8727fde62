"""Verifiers by name, by data source and several together, and the form of a response."""

import json

import pytest
from ends_within import ends_within

from dapo_jax.data.rows import PromptRow
from dapo_jax.rewards import verifiers
from dapo_jax.rewards.response_format import R1_FORMAT, check_prompt, matching, score
from dapo_jax.rewards.trial import check_ground_truths, check_rewards
from dapo_jax.rewards.verifiers import load_verifier, wrong_score
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

OWN = """
def brief(data_source, solution, ground_truth, extra_info):
    if "length" in extra_info and not extra_info["length"]:
        raise KeyError("length")
    return {"score": -len(solution), "acc": 1, "pred": "long", "words": len(solution.split())}
"""
THOUGHT = "<think>\n3 + 4 < 8\n</think>\n<answer>7</answer>"


def test_every_name_loads_and_scores():
    others = {"none", "reasoning_gym", "format", "judge"}  # which do not read this ground truth
    for name in verifiers.VERIFIERS.keys() - others:
        result = load_verifier(name)("arithmetic", "Answer: 34\n#### 34", "34", {})
        assert result["acc"], name


def test_none_always_scores_zero():
    none = load_verifier("none")
    assert none("arithmetic", "34", "34", {}) == none("unknown", "", "", {"a": 1}) == {"score": 0.0}


@pytest.mark.parametrize(
    ("data_source", "name"),
    [
        *[("arithmetic", "arithmetic"), ("openai/gsm8k", "gsm8k"), ("math", "math_dapo"), ("math_dapo", "math_dapo")],
        *[("math_dapo_reasoning", "math_dapo"), ("aime_2024", "math_dapo"), ("lighteval/MATH", "math_verify")],
        *[("DigitalLearningGmbH/MATH-lighteval", "math_verify"), ("HuggingFaceH4/MATH-500", "math_verify")],
    ],
)
def test_auto_goes_by_the_data_source(data_source, name):
    assert verifiers.verifier_for(data_source) == name
    solution = r"Answer: 34, so \boxed{0.25} #### 7"
    for ground_truth in ("34", "7", "0.25"):
        result = verifiers.auto(data_source, solution, ground_truth, {})
        assert result == verifiers.VERIFIERS[name].score(data_source, solution, ground_truth, {})


def test_auto_names_an_unknown_data_source_and_the_cures():
    with pytest.raises(ValueError, match="data_source='chess' has no verifier.*set reward.function"):
        verifiers.auto("chess", "", "", {})
    with pytest.raises(ValueError, match="reward.function='nothing' must be one of none, arithmetic, .*correct the na"):
        load_verifier("nothing")


@pytest.mark.parametrize(
    ("name", "data_source", "lowest"),
    [
        *[("none", "math_dapo", 0.0), ("math_dapo", "any", -1.0), ("math_dapo_lenient", "any", -1.0)],
        *[("auto", "aime_2024", -1.0), ("auto", "openai/gsm8k", 0.0), ("auto", "unknown", 0.0)],
        ("my.own.function", "math_dapo", 0.0),
        ('{"a": {"function": "math_dapo", "weight": 0.5}, "b": "auto", "c": "FILE.py:score"}', "aime_2024", -1.5),
        ('{"a": {"function": "math_dapo", "weight": 0.5}, "b": "auto"}', "openai/gsm8k", -0.5),
    ],
)
def test_a_failed_sample_gets_the_lowest_score_or_the_sum_of_the_lowest(name, data_source, lowest):
    assert wrong_score(name, data_source) == lowest


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weighted") / "own.py"
    path.write_text(OWN)
    return path


def several(file, correct="math_dapo", name="brief"):
    return json.dumps({"correct": correct, "shape": {"function": f"{file}:{name}", "weight": 0.1}})


@pytest.fixture(scope="module")
def pool(file):
    with VerifierPool(several(file), num_workers=1, timeout_s=10) as one:
        yield one


def test_the_score_is_the_weighted_sum_and_acc_and_pred_are_the_first_parts(file):
    summed = load_verifier(several(file))
    own = {"correct": 1.0, "shape": -10.0, "shape.words": 2.0}
    assert summed("any", "Answer: 34", "34", {}) == {"score": 1.0 + 0.1 * -10, "acc": 1.0, "pred": "34", **own}
    assert summed("any", "Answer: 3", "34", {})["acc"] == 0.0
    assert load_verifier('{"a": "math_dapo", "b": "arithmetic"}')("any", "Answer: 34", "34", {})["score"] == 2.0


def test_a_part_that_fails_fails_the_sum_and_is_named(pool):
    good, bad = pool.score([ScoreRequest("any", "Answer: 34", "34", {"length": length}) for length in (5, 0)])
    assert good.error is None and good.numbers["score"] == 0.0
    assert "KeyError" in str(bad.error) and "'shape' of reward.functions" in str(bad.error)
    lowest = {"score": -1.0, "acc": 0.0, "shape": 0.0}  # math_dapo's, and 0 for a function of one's own
    assert bad.numbers.items() >= lowest.items()


def test_a_part_that_does_not_load_is_named(file):
    with pytest.raises(ValueError, match="reward.functions, 'shape': reward.function=.*has no function 'absent'"):
        load_verifier(several(file, name="absent"))


def test_the_first_part_judges_the_ground_truths(file, pool):
    row = PromptRow("p", "any", "thirty", {}, "a.jsonl row 1")
    check_ground_truths([row], several(file), pool)
    wrong = several(file, correct="arithmetic")
    with VerifierPool(wrong, num_workers=1, timeout_s=10) as other:
        with pytest.raises(ValueError, match="'thirty' is not an answer that arithmetic accepts"):
            check_ground_truths([row], wrong, other)


def test_functions_are_tried_and_must_return_the_filter_metric(file, pool):
    name, row = several(file), PromptRow("p", "any", "34", {}, "a.jsonl row 1")
    for metric in ("shape", "shape.words", "seq_reward"):
        check_rewards([([row], name)], {name: pool}, metric)
    with pytest.raises(ValueError, match="'words' is not among the numbers that reward.functions=.*shape.words"):
        check_rewards([([row], name)], {name: pool}, "words")


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


def test_a_long_response_takes_no_time_and_all_of_it_must_match_a_pattern_of_your_own():
    with ends_within(20):
        assert score("any", "<think>" + "<" * 500_000 + "</think><answer>7</answer>", "7", {}) == 1.0
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
