from dapo_jax.data.rows import PromptRow, duplicate_rows


def row(prompt, ground_truth="1"):
    return PromptRow(prompt, "task", ground_truth, {})


def test_only_later_rows_with_the_same_prompt_and_ground_truth_are_duplicates():
    chat = ({"role": "user", "content": "a"},)
    reordered = ({"content": "a", "role": "user"},)
    rows = [row("a"), row("a", "2"), row("b"), row(chat), row("a"), row(reordered), row("a")]
    assert duplicate_rows(rows) == 3
    assert duplicate_rows(rows[:4]) == 0
