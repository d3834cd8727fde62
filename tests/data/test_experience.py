"""Groups of responses: choosing, joining, and what a checkpoint holds of them."""

import dataclasses

import numpy as np

from dapo_jax.data.experience import Experience, concatenate, from_arrays, to_arrays, with_records
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import character_tokenizer


def experience(first: int, num_groups: int, *, kl: bool = True, **scores) -> Experience:
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
        kl=tokens / 10 if kl else None,
    )


def assert_equal(found: Experience, expected: Experience) -> None:
    for field in dataclasses.fields(Experience):
        np.testing.assert_equal(getattr(found, field.name), getattr(expected, field.name))


def test_parts_of_consecutive_groups_make_up_the_whole():
    whole = experience(0, 5)
    joined = concatenate([experience(0, 2), experience(2, 3)])
    assert_equal(joined, whole)
    assert len(joined) == 5 and joined.num_tokens == whole.num_tokens == 18 and joined.num_errors == 2


def test_selected_groups_keep_all_that_is_known_of_them():
    whole = experience(0, 5)
    assert whole.kl is not None
    assert_equal(whole.select(np.array([1, 2, 3])), experience(1, 3))
    swapped = whole.select(np.array([4, 0]))
    np.testing.assert_array_equal(swapped.kl, whole.kl[[4, 0]])
    assert swapped.texts == [["4", "4"], ["0", "0"]]


def test_a_divergence_that_was_not_measured_stays_so():
    assert experience(0, 3, kl=False).select(np.array([0])).kl is None
    assert concatenate([experience(0, 2, kl=False), experience(2, 1, kl=False)]).kl is None
    assert concatenate([experience(0, 2), experience(2, 1, kl=False)]).kl is None


def test_a_score_that_a_part_lacks_is_nan_there():
    joined = concatenate([experience(0, 1), experience(1, 1, length=np.ones((1, 2)))])
    np.testing.assert_array_equal(joined.scores["length"], [[np.nan, np.nan], [1.0, 1.0]])
    np.testing.assert_array_equal(joined.scores["score"], [[0.0, 0.0], [0.5, 0.5]])


def test_further_scores_leave_the_old_object_as_it_was():
    plain = experience(0, 1)
    assert set(plain.with_scores(acc=np.zeros((1, 2))).scores) == {"score", "acc"} and set(plain.scores) == {"score"}


def with_environment(experience: Experience) -> Experience:
    """The same, whose second tokens were written by an environment."""
    return dataclasses.replace(experience, by_policy=np.broadcast_to(np.arange(3) != 1, experience.mask.shape))


def test_tokens_are_the_policys_unless_an_environment_wrote_them():
    plain = experience(0, 4)
    assert plain.policy_mask is plain.mask
    mixed = with_environment(plain)
    np.testing.assert_array_equal(mixed.policy_mask, plain.mask & [True, False, True])
    assert mixed.num_tokens == plain.num_tokens
    np.testing.assert_array_equal(mixed.outcomes.lengths, plain.outcomes.lengths)
    np.testing.assert_array_equal(mixed.select(np.array([2])).policy_mask, mixed.policy_mask[[2]])
    joined = concatenate([mixed, experience(4, 2)])
    np.testing.assert_array_equal(joined.policy_mask, np.concatenate([mixed.policy_mask, experience(4, 2).mask]))
    assert concatenate([plain, plain]).by_policy is None


def restored(arrays, known: Experience) -> Experience:
    prompts = {row: prompt for row, prompt in zip(known.rows.tolist(), known.prompts, strict=True)}
    tokens = [prompts.get(row, []) for row in range(max(prompts) + 1)]
    return from_arrays(arrays, PromptSet([], tokens), character_tokenizer())


def test_a_checkpoint_restores_tokens_scores_and_writers():
    whole = with_environment(experience(4, 3, acc=np.eye(3)[:, :2]))
    arrays = to_arrays(whole)
    assert all(isinstance(values, np.ndarray) for values in arrays.values())
    found = restored(arrays, whole)
    decode = character_tokenizer().decode
    texts = [
        [decode(tokens[mask].tolist()) for tokens, mask in zip(*group, strict=True)]
        for group in zip(whole.responses, whole.mask, strict=True)
    ]
    assert_equal(found, dataclasses.replace(whole, texts=texts, failed=np.zeros_like(whole.failed)))


def test_a_checkpoint_that_does_not_say_who_wrote_the_tokens_means_the_policy():
    whole = experience(4, 3, kl=False)
    arrays = to_arrays(whole)
    names = {"numbers", "rows", "responses", "mask", "logprobs", "finished", "versions", "score score"}
    assert set(arrays) == names  # what checkpoints have always held
    found = restored(arrays, whole)
    assert found.by_policy is None and found.kl is None
    np.testing.assert_array_equal(found.policy_mask, whole.mask)


def with_experts(experience: Experience) -> Experience:
    """The same with records of experts whose lengths and values name their group; some responses have none."""

    def record(tokens, value):
        return np.full((tokens, 4, 2), value, np.int8)

    numbers = experience.numbers.tolist()
    return dataclasses.replace(
        experience,
        prompt_experts=[record(number + 1, number) for number in numbers],
        experts=[[record(number % 3, number), record(0, 0)] for number in numbers],
    )


def test_records_of_experts_go_with_their_groups_and_into_checkpoints():
    whole = with_experts(experience(3, 4))
    assert_equal(whole.select(np.array([1, 2])), with_experts(experience(4, 2)))
    assert_equal(concatenate([with_experts(experience(3, 1)), with_experts(experience(4, 3))]), whole)
    arrays = to_arrays(whole)
    assert all(isinstance(values, np.ndarray) for values in arrays.values()) and arrays["experts"].dtype == np.int8
    found = restored(arrays, whole)
    assert found.prompt_experts is not None and found.experts is not None and whole.prompt_experts is not None
    np.testing.assert_equal((found.prompt_experts, found.experts), (whole.prompt_experts, whole.experts))
    assert found.prompt_experts[0].dtype == np.int8


def test_groups_without_records_may_follow_groups_that_have_some():
    """Those of a checkpoint from before the option was on."""
    joined = concatenate([experience(0, 1), with_experts(experience(1, 2))])
    assert joined.prompt_experts is not None and joined.experts is not None
    assert [len(record) for record in joined.prompt_experts] == [0, 2, 3]
    assert [[len(record) for record in group] for group in joined.experts] == [[0, 0], [1, 0], [2, 0]]
    assert joined.experts[0][0].shape == (0, 4, 2) and "experts" in to_arrays(joined)
    assert concatenate([experience(0, 1), experience(1, 1)]).experts is None


def test_empty_records_need_not_know_the_layers_and_experts_of_the_others():
    """Partial rollouts continue responses of a checkpoint from before the option was on."""
    (old,) = with_records([experience(0, 2)])
    assert old.experts is not None and old.prompt_experts is not None
    assert to_arrays(old)["experts"].size == 0
    continued = dataclasses.replace(old, experts=[[old.experts[0][0], np.full((2, 4, 2), 7, np.int8)], old.experts[1]])
    whole = concatenate([continued, with_experts(experience(2, 1))])
    found = restored(to_arrays(whole), whole)
    assert found.experts is not None and found.prompt_experts is not None
    np.testing.assert_equal(found.experts[0][1], continued.experts[0][1])
    np.testing.assert_equal(found.prompt_experts[2], whole.prompt_experts[2])
    assert [[len(record) for record in group] for group in found.experts] == [[0, 2], [0, 0], [2, 0]]
