"""Groups of responses: choosing, joining, and what a checkpoint holds of them."""

import dataclasses

import numpy as np
import pytest

from dapo_jax.data.experience import Experience, concatenate, from_arrays, to_arrays, with_records
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import character_tokenizer


def plain(first: int, num_groups: int, **scores) -> Experience:
    """Groups of two samples of at most three tokens whose every value says which group it belongs to."""
    numbers = np.arange(first, first + num_groups)
    tokens = np.broadcast_to(numbers[:, None, None], (num_groups, 2, 3))
    return Experience(
        numbers=numbers,
        rows=numbers + 100,
        prompts=[[number] for number in numbers.tolist()],
        responses=tokens.astype(np.int32),
        mask=tokens % 2 == 0,
        logprobs=-tokens.astype(np.float32),
        finished=tokens[..., 0] % 3 == 0,
        texts=[[str(number)] * 2 for number in numbers.tolist()],
        scores={"score": tokens[..., 0] / 2, **scores},
        versions=numbers // 2,
        failed=tokens[..., 0] % 4 == 1,
    )


def with_kl(first: int, num_groups: int) -> Experience:
    groups = plain(first, num_groups)
    return dataclasses.replace(groups, kl=groups.responses / 10)


def with_environment(first: int, num_groups: int) -> Experience:
    """Their second tokens were written by an environment."""
    groups = plain(first, num_groups)
    return dataclasses.replace(groups, by_policy=groups.mask & [True, False, True])


def with_experts(first: int, num_groups: int) -> Experience:
    """Records of experts whose lengths and values name their group; some responses have none."""

    def record(tokens, value):
        return np.full((tokens, 4, 2), value, np.int8)

    numbers = range(first, first + num_groups)
    return dataclasses.replace(
        plain(first, num_groups),
        prompt_experts=[record(number + 1, number) for number in numbers],
        experts=[[record(number % 3, number), record(0, 0)] for number in numbers],
    )


def assert_equal(found: Experience, expected: Experience) -> None:
    for field in dataclasses.fields(Experience):
        np.testing.assert_equal(getattr(found, field.name), getattr(expected, field.name), field.name)


def restored(known: Experience) -> Experience:
    """What the arrays of a checkpoint give back."""
    arrays = to_arrays(known)
    assert all(isinstance(values, np.ndarray) for values in arrays.values())
    prompts = {row: prompt for row, prompt in zip(known.rows.tolist(), known.prompts, strict=True)}
    tokens = [prompts.get(row, []) for row in range(max(prompts) + 1)]
    return from_arrays(arrays, PromptSet([], tokens), character_tokenizer())


@pytest.mark.parametrize("make", [plain, with_kl, with_environment, with_experts])
def test_parts_make_up_the_whole_and_selected_groups_keep_all_that_is_known_of_them(make):
    whole = make(0, 5)
    assert_equal(concatenate([make(0, 2), make(2, 3)]), whole)
    assert_equal(whole.select(np.array([1, 2, 3])), make(1, 3))
    assert_equal(whole.select(np.array([4, 0])), concatenate([make(4, 1), make(0, 1)]))
    assert len(whole) == 5 and whole.num_errors == 2
    assert whole.num_tokens == (18 if whole.by_policy is None else 12)


@pytest.mark.parametrize("make", [plain, with_environment, with_experts])
def test_a_checkpoint_restores_tokens_scores_and_writers(make):
    whole = make(4, 3).with_scores(acc=np.eye(3)[:, :2])
    decode = character_tokenizer().decode
    texts = [
        [decode(tokens[mask].tolist()) for tokens, mask in zip(*group, strict=True)]
        for group in zip(whole.responses, whole.mask, strict=True)
    ]
    found = restored(whole)
    assert_equal(found, dataclasses.replace(whole, texts=texts, failed=np.zeros_like(whole.failed)))
    if found.experts is not None and found.prompt_experts is not None:
        assert to_arrays(whole)["experts"].dtype == found.prompt_experts[0].dtype == np.int8


def test_a_checkpoint_restores_prompts_that_an_environment_has_added_to():
    whole = plain(4, 3)
    of_rows = PromptSet([], [[row - 100] for row in range(107)])
    longer = dataclasses.replace(whole, prompts=[[4], [5, 8, 9], [6]])
    assert set(to_arrays(longer, of_rows)) - set(to_arrays(whole, of_rows)) == {"prompts", "prompt_tokens"}
    for known in (whole, longer):
        assert from_arrays(to_arrays(known, of_rows), of_rows, character_tokenizer()).prompts == known.prompts


def test_a_checkpoint_holds_what_it_has_always_held():
    names = {"numbers", "rows", "responses", "mask", "logprobs", "finished", "versions", "score score"}
    assert set(to_arrays(plain(4, 3))) == names


def test_what_a_part_lacks_the_whole_lacks_or_has_as_nan():
    assert concatenate([with_kl(0, 2), plain(2, 1)]).kl is None
    joined = concatenate([plain(0, 1), plain(1, 1, length=np.ones((1, 2)))])
    np.testing.assert_array_equal(joined.scores["length"], [[np.nan, np.nan], [1.0, 1.0]])
    np.testing.assert_array_equal(joined.scores["score"], [[0.0, 0.0], [0.5, 0.5]])
    one = plain(0, 1)
    assert set(one.with_scores(acc=np.zeros((1, 2))).scores) == {"score", "acc"} and set(one.scores) == {"score"}


def test_tokens_are_the_policys_unless_an_environment_wrote_them():
    groups = plain(0, 4)
    mixed = dataclasses.replace(groups, by_policy=np.broadcast_to([True, False, True], groups.mask.shape))
    assert groups.policy_mask is groups.mask
    np.testing.assert_array_equal(mixed.policy_mask, groups.mask & [True, False, True])
    assert mixed.num_tokens == mixed.policy_mask.sum() < groups.num_tokens == groups.mask.sum()
    np.testing.assert_array_equal(mixed.outcomes.lengths, mixed.policy_mask.sum(axis=-1))
    joined = concatenate([mixed, plain(4, 2)])
    np.testing.assert_array_equal(joined.policy_mask, np.concatenate([mixed.policy_mask, plain(4, 2).mask]))


def test_groups_without_records_may_follow_groups_that_have_some():
    """Those of a checkpoint from before the option was on."""
    joined = concatenate([plain(0, 1), with_experts(1, 2)])
    assert joined.prompt_experts is not None and joined.experts is not None
    assert [len(record) for record in joined.prompt_experts] == [0, 2, 3]
    assert [[len(record) for record in group] for group in joined.experts] == [[0, 0], [1, 0], [2, 0]]
    assert joined.experts[0][0].shape == (0, 4, 2) and "experts" in to_arrays(joined)


def test_empty_records_need_not_know_the_layers_and_experts_of_the_others():
    """Partial rollouts continue responses of a checkpoint from before the option was on."""
    (old,) = with_records([plain(0, 2)])
    assert old.experts is not None and old.prompt_experts is not None
    assert to_arrays(old)["experts"].size == 0
    continued = dataclasses.replace(old, experts=[[old.experts[0][0], np.full((2, 4, 2), 7, np.int8)], old.experts[1]])
    whole = concatenate([continued, with_experts(2, 1)])
    found = restored(whole)
    assert found.experts is not None and found.prompt_experts is not None
    np.testing.assert_equal(found.experts[0][1], continued.experts[0][1])
    np.testing.assert_equal(found.prompt_experts[2], whole.prompt_experts[2])
    assert [[len(record) for record in group] for group in found.experts] == [[0, 2], [0, 0], [2, 0]]
