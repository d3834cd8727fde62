import pytest

from dapo_jax.rewards import verifiers


def test_every_name_loads_and_scores():
    others = {"none", "reasoning_gym", "format", "judge"}  # which do not read this ground truth
    for name in verifiers.VERIFIERS.keys() - others:
        result = verifiers.load_verifier(name)("arithmetic", "Answer: 34\n#### 34", "34", {})
        assert result["acc"], name


def test_none_always_scores_zero():
    none = verifiers.load_verifier("none")
    assert none("arithmetic", "34", "34", {}) == none("unknown", "", "", {"a": 1}) == {"score": 0.0}
    assert verifiers.wrong_score("none", "math_dapo") == 0.0


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


def test_a_dotted_path_is_your_own_function():
    own, built_in = verifiers.load_verifier("dapo_jax.rewards.gsm8k.score"), verifiers.VERIFIERS["gsm8k"].score
    for solution in ("#### 34", "34"):
        assert own("any", solution, "34", {}) == built_in("any", solution, "34", {})


def test_a_verifier_that_cannot_be_loaded_is_named_with_the_reason():
    with pytest.raises(
        ValueError, match="reward.function='nothing' must be one of none, arithmetic, .*correct the name"
    ):
        verifiers.load_verifier("nothing")
    with pytest.raises(ValueError, match=r"reward\.function='math.pi' must be a path"):
        verifiers.load_verifier("math.pi")


def test_a_failed_sample_gets_the_lowest_score():
    assert verifiers.wrong_score("math_dapo", "any") == -1.0
    assert verifiers.wrong_score("math_dapo_lenient", "any") == -1.0
    assert verifiers.wrong_score("auto", "aime_2024") == -1.0
    assert verifiers.wrong_score("auto", "openai/gsm8k") == 0.0
    assert verifiers.wrong_score("auto", "unknown") == 0.0
    assert verifiers.wrong_score("my.own.function", "math_dapo") == 0.0
