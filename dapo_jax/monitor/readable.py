"""Host: sampled text as people read it: shortened, with nothing invisible, as a table of Markdown."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = "\n\t\u200c\u200d"  # the last two join letters and emoji
BEGIN, END = 900, 500  # characters of a long text that are shown
_KINDS = ("held_out", "best", "worst", "truncated", "any")  # in order of interest
_COLUMNS = {"prompt": "prompt", "response": "response", "right answer": "ground_truth", "score": "score"}
_MARKS = re.compile(r"[\\`*_\[\]<>&|]")  # what Markdown or HTML could read as its own within a line


def shortened(text: str) -> str:
    """The beginning and the end of a long text, where the question and the answer are."""
    left_out = len(text) - BEGIN - END
    return text if left_out <= 0 else f"{text[:BEGIN]}\n[... {left_out:,} characters left out ...]\n{text[-END:]}"


def visible(text: str) -> str:
    """The text with control characters, and those that turn the direction of text, as what they are: <U+202E>."""
    return "".join(
        character
        if character in PLAIN or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else f"<U+{ord(character):04X}>"
        for character in text
    )


def markdown_table(samples: Sequence[Mapping[str, Any]]) -> str:
    """A row per sample: its kind and task, prompt, response, right answer and score; held-out, best and worst first.

    In an episode of several turns, what the policy wrote is bold.
    Whatever a policy writes is shown as it is: it cannot end a cell, and is neither Markdown nor HTML.
    """
    rows = [["kind", *_COLUMNS], ["---"] * (1 + len(_COLUMNS))]
    for sample in sorted(samples, key=lambda sample: (*_KINDS, sample.get("kind")).index(sample.get("kind"))):
        kind = ", ".join(str(sample[key]) for key in ("kind", "task") if key in sample)
        cells = {column: _cell(sample.get(key, "")) for column, key in _COLUMNS.items()}
        if turns := sample.get("turns"):
            cells["response"] = "".join(_turn(turn) for turn in turns)
        rows.append([_cell(kind), *cells.values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _turn(turn: Mapping[str, str]) -> str:
    text = _cell(turn["text"])
    return f"<strong>{text}</strong>" if turn["by"] == "policy" else f"<br>{text}<br>"


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return f"{value:g}"
    marked = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", visible(shortened(value)))
    return marked.replace("\t", "    ").replace("  ", "&nbsp; ").replace("\n", "<br>")
