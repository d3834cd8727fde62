"""Responses to held-out problems that are kept for people to read."""

import dataclasses

import numpy as np
from small_run import small_config

from dapo_jax.command.tasks import held_out_options
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.run.problems import TaskSet
from dapo_jax.training.sample_texts import held_out_texts, turns_of

ROWS = [PromptRow(*row, {}) for row in (("1", "s", "a"), ("2", "t", "b"), ("1", "s", "a"), ("3", "s", "c"))]


def answered(rows) -> Experience:
    """Two responses to each row: `row.sample`, of `row + 1` tokens, of which the second is right."""
    rows = np.array(rows)
    shape = (len(rows), 2)
    return Experience(
        numbers=rows,
        rows=rows,
        prompts=[character_tokenizer().encode(ROWS[row].prompt) for row in rows],
        responses=np.ones((*shape, 4), np.int32),
        mask=np.broadcast_to((np.arange(4) <= rows[:, None])[:, None], (*shape, 4)),
        logprobs=np.zeros((*shape, 4), np.float32),
        finished=np.ones(shape, bool),
        texts=[[f"{row}.{sample}" for sample in range(2)] for row in rows],
        scores={"acc": np.broadcast_to([0.0, 1.0], shape)},
        versions=rows,
        failed=np.zeros(shape, bool),
    )


def kept(*batches, wanted):
    config = small_config("unused")
    task_set = TaskSet(held_out_options(config.data, config.evaluate, config.reward), PromptSet(ROWS, [[1]] * 4))
    tokenizer = character_tokenizer()
    return [text for rows in batches for text in held_out_texts(answered(rows), task_set, tokenizer, wanted=wanted)]


def test_the_first_response_to_the_first_problems_of_each_task_is_kept_whatever_its_score():
    first, second = kept(range(4), wanted=1)
    assert (first["task"], second["task"]) == ("s", "t") and first["kind"] == "held_out"
    assert (first["prompt"], first["response"], first["ground_truth"]) == ("1", "0.0", "a")
    assert (second["length"], second["acc"]) == (2, 0.0)


def test_a_repeated_prompt_is_one_problem_and_batches_change_nothing():
    found = kept(range(4), wanted=2)
    assert [one["response"] for one in found] == ["0.0", "1.0", "3.0"]
    assert found == kept([0, 1], [2, 3], wanted=2) and kept(range(4), wanted=0) == []


def test_the_turns_of_an_episode_are_what_each_wrote_in_order():
    tokenizer, experience = character_tokenizer(), answered([3])
    assert turns_of(experience, (0, 0), tokenizer) == {}
    own = np.array([[[True, False, False, True]] * 2])
    responses = np.array([[tokenizer.encode("1234")] * 2], np.int32)
    for kept, texts in ((4, ["1", "23", "4"]), (3, ["1", "23"]), (1, ["1"]), (0, [])):
        mask = np.broadcast_to(np.arange(4) < kept, own.shape)
        episode = dataclasses.replace(experience, responses=responses, mask=mask, by_policy=own)
        found = turns_of(episode, (0, 1), tokenizer)["turns"]
        assert [turn["text"] for turn in found] == texts
        assert [turn["by"] for turn in found] == ["policy", "environment", "policy"][: len(texts)]
