"""Host: splits a shell script into commands and words as written: nothing is expanded or run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dapo_jax.errors import InputError

CLOSING = {"(": ")", "{": "}"}
ENDS_WORD = " \t\n;&|()<>"
ASSIGNS = re.compile(r"[A-Za-z_]\w*(\[\w*\])?\+?=$")


@dataclass(frozen=True)
class Command:
    """One simple command."""

    words: tuple[str, ...]  # as written, with quotes, without redirections
    line: int  # from 1
    before: str  # the && or || that it follows, or ""
    end: str  # the operator that ends it, such as ; or && or )


def commands(text: str) -> Iterator[Command]:
    """The commands of a script. InputError if a quote or a bracket is not closed."""
    words: list[str] = []
    at, start, before = 0, 0, ""
    while at < len(text):
        if not words:
            start = at
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in " \t":
            at += 1
        elif text[at] == "#":
            at = _end_of_line(text, at)
        elif text[at] in "<>" or text.startswith("&>", at):
            if words and words[-1].isdigit() and text[at - 1].isdigit():
                words.pop()
            target = re.compile(r"[<>&|]+[ \t]*").match(text, at)
            at = end_of_word(text, target.end() if target else at + 1)
        elif text[at] in "\n;&|()":
            end = re.compile(r"[;&|]+|[()\n]").match(text, at)
            assert end
            if words or end[0] not in ("\n", "("):
                yield Command(tuple(words), text.count("\n", 0, start) + 1, before, end[0])
                words, before = [], end[0] if end[0] in ("&&", "||") else ""
            at = end.end()
        else:
            end_of = end_of_word(text, at)
            words.append(text[at:end_of])
            at = end_of
    if words:
        yield Command(tuple(words), text.count("\n", 0, start) + 1, before, "")


def end_of_word(text: str, at: int) -> int:
    """Where the word that starts at `at` ends."""
    start = at
    while at < len(text) and (text[at] not in ENDS_WORD or (text[at] == "(" and ASSIGNS.match(text[start:at]))):
        at = end_of_part(text, at)
    return at


def end_of_part(text: str, at: int) -> int:
    """Where the quoted text, substitution or single character that starts at `at` ends."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] in "'`":
        return _found(text, text.find(text[at], at + 1), at)
    if text[at] == '"':
        at, start = at + 1, at
        while at < len(text) and text[at] != '"':
            at = end_of_part(text, at) if text[at] in "\\`$" else at + 1
        return _found(text, at if at < len(text) else -1, start)
    if text[at] == "(":
        return _end_of_bracket(text, at)
    if text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return _end_of_bracket(text, at + 1)
    return at + 1


def _end_of_bracket(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    at, end = start + 1, CLOSING[text[start]]
    while at < len(text) and text[at] != end:
        if text[at] == "#" and end == ")" and text[at - 1] in " \t\n(":
            at = _end_of_line(text, at)
        else:
            at = end_of_part(text, at)
    return _found(text, at if at < len(text) else -1, start)


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _found(text: str, end: int, start: int) -> int:
    if end < 0:
        line = text.count("\n", 0, start) + 1
        raise InputError(f"line {line}: the {text[start]} is not closed: correct the script")
    return end + 1
