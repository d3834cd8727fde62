"""Host: sampled text is shown as it is, short, and harmless whatever it contains."""

import html
import re

import pytest

from dapo_jax.monitor.readable import BEGIN, END, markdown_table, shortened, visible


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = "a" * BEGIN + "b" * 5000 + "c" * END
    assert shortened(text) == f"{'a' * BEGIN}\n[... 5,000 characters left out ...]\n{'c' * END}"
    assert shortened("short") == "short"


def test_what_cannot_be_seen_is_written_out():
    assert visible("é\n\t\u200d漢 ok") == "é\n\t\u200d漢 ok"
    assert visible("\x00\r\u202e\u200b") == "<U+0000><U+000D><U+202E><U+200B>"


HOSTILE = {
    "ends a cell": "a | b\n| c |\n\n| --- |",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)> &lt;b&gt; &#42; </td></table><!--",
    "markdown": "# no\n* [x](javascript:alert(1)) ![y](z) **b** `c` ~~~\n    four\n> q\n1. one\n[r]: http://x\n\\",
    "invisible": "\x02klzzwxh:0001\x03 \x00 \u202e \r\n \ud800",
    "space": "  if x:\n\treturn  1",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_cell_shows_what_was_sampled_and_runs_nothing(text):
    [*_, row] = markdown_table([{"kind": "any", "prompt": text, "response": text, "score": 1.0}]).splitlines()
    assert row.count("|") == 6
    prompt, response = re.split(r" ?\| ?", row)[2:4]
    assert prompt == response and not re.search(r"[*_`\[\]\\<>]", prompt.replace("<br>", ""))
    shown = html.unescape(prompt.replace("<br>", "\n").replace("&nbsp; ", "  "))
    assert shown == visible(text).replace("\t", "    ")
    [*_, last] = markdown_table([{"response": text * 1000}]).splitlines()
    assert "characters left out" in last and len(last) < 10 * (BEGIN + END)


def test_the_policys_turns_are_bold_and_run_nothing_either():
    turns = [{"by": by, "text": text} for by, text in (("policy", "a*b"), ("environment", "c|d"), ("policy", "e"))]
    [*_, row] = markdown_table([{"response": "all", "turns": turns}]).splitlines()
    assert "| <strong>a&#42;b</strong><br>c&#124;d<br><strong>e</strong> |" in row
