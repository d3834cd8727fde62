import dataclasses
import logging

import pytest
from ends_within import ends_within

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.prompts import PromptOrder, hinted_prompts, tokenize_prompts, truncate
from dapo_jax.data.rows import PromptRow, duplicate_rows
from dapo_jax.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
ROWS = [
    PromptRow(text, "task", "1", {"index": i}, f"b.jsonl row {i + 1}")
    for i, text in enumerate(["abc", "abcdefg", "ab", "abcdefghi"])
]


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.INFO, logger="dapo_jax.data.prompts")


def tokenize(rows, **changes):
    return tokenize_prompts(rows, TOKENIZER, DataConfig(**{"max_prompt_length": 7, **changes}))


def texts(prompts):
    return [TOKENIZER.decode(tokens) for tokens in prompts.tokens]


def test_rows_and_tokens_stay_together_and_only_the_report_which_counts_them_is_logged(caplog):
    prompts = tokenize(ROWS, max_prompt_length=9)
    assert prompts.rows == ROWS and texts(prompts) == [row.prompt for row in ROWS] and len(prompts) == 4
    counts = "4 rows, the longest of 9 tokens; 0 longer than max_prompt_length=9: 0 dropped, 0 cut"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", f"prompts: {counts}")]


@pytest.mark.parametrize(
    "changes", [{"ground_truth": "2"}, {"data_source": "other"}, {"extra_info": {"index": 9}}, {"prompt": "ABC"}]
)
def test_the_checksum_is_of_prompts_and_answers(changes):
    others = [dataclasses.replace(ROWS[0], **changes), *ROWS[1:]]
    checksums = [tokenize(rows, max_prompt_length=9).checksum() for rows in (ROWS, list(ROWS), others)]
    assert checksums[0] == checksums[1] != checksums[2]


def test_overlong_prompts_are_dropped_and_counted(caplog):
    prompts = tokenize(ROWS, max_prompt_length=6, filter_overlong_prompts=True)
    assert [row.extra_info["index"] for row in prompts.rows] == [0, 2] and texts(prompts) == ["abc", "ab"]
    counts = "4 rows, the longest of 9 tokens; 2 longer than max_prompt_length=6: 2 dropped, 0 cut"
    assert caplog.messages[0] == f"prompts: {counts}"


@pytest.mark.parametrize("truncation, kept", [("left", "efghi"), ("right", "abcde"), ("middle", "abghi")])
def test_overlong_prompts_are_cut_to_exactly_the_limit_and_counted(truncation, kept, caplog):
    prompts = tokenize(ROWS, max_prompt_length=5, truncation=truncation)
    assert texts(prompts)[3] == kept and texts(prompts)[0] == "abc" and prompts.rows == ROWS
    assert caplog.messages[0].endswith("; 2 longer than max_prompt_length=5: 0 dropped, 2 cut")
    for limit in range(1, 12):
        assert len(truncate(list(range(10)), limit, truncation)) == min(limit, 10)


def hinted(prompt, ground_truth="7", system_prompt=None, **extra_info):
    """What `hinted_prompts` makes of one row, as text."""
    row = PromptRow(prompt, "task", ground_truth, extra_info)
    return TOKENIZER.decode(hinted_prompts([row], TOKENIZER, DataConfig(system_prompt=system_prompt))[0])


def turn(role, content):
    return {"role": role, "content": content}


def test_messages_and_system_prompt_reach_the_tokenizer():
    assert texts(tokenize([PromptRow((turn("user", "hi"),), "task", "1", {})], system_prompt="be.")) == ["be.\nhi"]


def test_what_a_row_gives_the_template_wins_over_the_configured_and_makes_another_prompt(caplog):
    chat, template = (turn("user", "a"),), "{{ messages[0].content }}{{ x }}{{ tools | length }}"
    tokenizer = dataclasses.replace(TOKENIZER, chat_template=template)
    given = [{"tools": []}, {"x": "c", "tools": [{}]}, {"tools": []}]
    rows = [PromptRow(chat, "task", "1", {}, template_kwargs=kwargs) for kwargs in given]
    data = DataConfig(max_prompt_length=7, chat_template_kwargs='{"x": "b"}')
    found = tokenize_prompts(rows, tokenizer, data)
    assert texts(found) == ["ab0", "ac1", "ab0"] and duplicate_rows(rows) == 1
    hints = hinted_prompts(rows, tokenizer, data)
    assert [TOKENIZER.decode(tokens) for tokens in hints] == ["1\nab0", "1\nac1", "1\nab0"]


def test_the_hint_of_a_text_follows_its_bos_token():
    tokenizer = dataclasses.replace(TOKENIZER, add_bos=True, special_tokens={"bos_token": "<pad>"})
    for prompt in "<pad>3 + 4", "3 + 4":
        found = hinted_prompts([PromptRow(prompt, "t", "7", {})], tokenizer, DataConfig())
        assert tokenizer.decode(found[0], skip_special_tokens=False) == "<pad>7\n3 + 4"


def test_the_hint_is_the_solution_or_else_the_ground_truth():
    assert hinted("3 + 4", solution="add.", index=1) == "add.\n3 + 4"
    assert hinted("3 + 4", index=1) == hinted("3 + 4", solution="") == hinted("3 + 4", solution=None) == "7\n3 + 4"


def test_the_hint_is_at_the_start_of_the_last_user_turn_which_there_must_be():
    messages = (turn("system", "be."), turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("tool", "d"))
    assert hinted(messages) == "be.\na\nb\n7\nc\nd"
    assert messages[3] == turn("user", "c")
    assert hinted(messages[1:2], system_prompt="own") == "own\n7\na"
    with pytest.raises(ValueError, match="needs a user turn for the hint of adv_estimator=cpo.*assistant"):
        hinted((turn("system", "be."), turn("assistant", "b")))


def test_duplicates_are_counted_warned_of_and_share_their_tokens(caplog):
    prompts = tokenize([ROWS[0], ROWS[2], ROWS[0]])
    assert len(prompts) == 3
    assert prompts.tokens[0] is prompts.tokens[2]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "1 of 3 prompts repeat" in caplog.messages[1]


def test_only_later_rows_with_the_same_prompt_and_ground_truth_are_duplicates():
    chat, reordered = (turn("user", "a"),), ({"content": "a", "role": "user"},)
    pairs = [("a", "1"), ("a", "2"), ("b", "1"), (chat, "1"), ("a", "1"), (reordered, "1"), ("a", "1")]
    rows = [PromptRow(prompt, "task", truth, {}) for prompt, truth in pairs]
    assert duplicate_rows(rows) == 3
    assert duplicate_rows(rows[:4]) == 0


OVERLONG = (
    r"2 of 4 prompts are longer than max_prompt_length=3 tokens \(longest 9; the first is b.jsonl row 2\): raise "
    r"data.max_prompt_length, drop them by .*filter_overlong_prompts.*truncation=left"
)
NONE_LEFT = "no prompt is left: 1 rows, 1 of them longer than max_prompt_length=7"


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        (ROWS, {"max_prompt_length": 3}, OVERLONG),
        ([ROWS[0], PromptRow("", "task", "1", {}, "b.jsonl row 2")], {}, "the prompt of b.jsonl row 2 has no tokens"),
        ([], {}, "no prompt is left: 0 rows"),
        ([ROWS[3]], {"filter_overlong_prompts": True}, NONE_LEFT),
    ],
)
def test_what_cannot_be_used_is_an_error(rows, changes, message):
    with pytest.raises(ValueError, match=message):
        tokenize(rows, **changes)


def rows(order, start, stop):
    return [order.row(q) for q in range(start, stop)]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_contains_each_row_once(num_rows, shuffle):
    order = PromptOrder(num_rows, seed=3, shuffle=shuffle)
    for epoch in (0, 1, 2, 1000):
        found = rows(order, epoch * num_rows, (epoch + 1) * num_rows)
        assert sorted(found) == list(range(num_rows)) and (shuffle or found == sorted(found))
        assert all(type(row) is int for row in found)


def test_the_order_of_a_seed_is_fixed_for_good():
    first_epochs = [*(5, 3, 6, 7, 4, 2, 1, 0), *(6, 5, 4, 1, 0, 7, 3, 2)]
    assert rows(PromptOrder(8, seed=0, shuffle=True), 0, 16) == first_epochs


def test_epochs_are_permuted_differently_also_from_those_of_neighbouring_seeds():
    orders = [PromptOrder(40, seed=seed, shuffle=True) for seed in range(4)]
    epochs = {tuple(rows(order, start, start + 40)) for order in orders for start in range(0, 160, 40)}
    assert len(epochs) == 16


def test_far_prompts_are_found_at_once_and_epochs_count_passes_through_the_rows():
    order = PromptOrder(17_000, seed=0, shuffle=True)
    with ends_within(), pytest.raises(ValueError, match="num_rows=0 must be at least 1"):
        assert 0 <= order.row(10**12) < 17_000
        PromptOrder(0, seed=0, shuffle=True)
    assert [PromptOrder(4, seed=0, shuffle=True).epoch(q) for q in (0, 2, 4, 10)] == [0, 0.5, 1, 2.5]


def test_a_mixture_takes_of_each_file_what_its_weight_says_at_any_point():
    order = PromptOrder(12, seed=3, shuffle=True, sizes=(7, 3, 2), weights=(1, 2.5, 0.5))
    for q in range(200):
        counts = order.counts(q)
        assert sum(counts) == q and all(
            abs(count - q * weight / 4) <= 1 for count, weight in zip(counts, (1, 2.5, 0.5), strict=True)
        )
    drawn = rows(order, 0, 160)
    for file, (start, stop) in enumerate(((0, 7), (7, 10), (10, 12))):
        mine = [row for row in drawn if start <= row < stop]
        assert order.files(drawn).tolist().count(file) == len(mine) == order.counts(160)[file]
        size = stop - start
        epochs = [mine[begin : begin + size] for begin in range(0, len(mine) - size, size)]
        assert all(sorted(epoch) == list(range(start, stop)) for epoch in epochs)
    again = PromptOrder(12, seed=3, shuffle=True, sizes=(7, 3, 2), weights=(1, 2.5, 0.5))
    assert [again.row(q) for q in reversed(range(160))] == drawn[::-1]
    alone = PromptOrder(7, seed=3, shuffle=True)
    assert [row for row in drawn if row < 7][:30] == rows(alone, 0, 30), "the first file's order is that of it alone"


def test_with_other_weights_each_file_of_a_mixture_goes_on_where_it_was():
    """It jumped: to where it would be, had the weights always been these."""
    sizes, parts = (7, 30), []
    drawn = []
    for weights, first in (((1, 1), 0), ((5, 1), 23), ((5, 1), 40), ((1, 3), 41)):
        order = PromptOrder(37, seed=3, shuffle=True, sizes=sizes, weights=weights)
        parts = order.resumed(parts, first)
        drawn[first:] = rows(order, first, 80)
    assert [first for first, _ in parts] == [0, 23, 41] and rows(order, 0, 80) == drawn
    first, second = ([row for row in drawn if (row >= 7) == file] for file in (0, 1))
    assert [len(first), len(second)] == order.counts(80) and sum(row < 7 for row in drawn[23:41]) == 15
    assert first == rows(PromptOrder(7, seed=3, shuffle=True), 0, len(first))
    assert len({*second[:30]}) == 30, "each row once in an epoch"
    assert PromptOrder(37, seed=3, shuffle=True).resumed(parts, 80) == [[0, [1]]], "no mixture any more"
