"""Host: decides which commands inside a shell script's `if` and `case` run, if that can be known."""

import fnmatch
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo_jax.from_verl.shell_words import Command

UNKNOWN = "\0"  # in a word: a part whose value only a shell could compute
LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "{": "}"}
NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass
class Block:
    """An `if`, a `case`, a loop or a function."""

    end: str  # the word that ends it
    live: bool = False  # its commands run
    decided: bool = False  # a branch was taken, or none can be
    subject: str = ""  # of a case
    at_pattern: bool = False  # of a case: a pattern comes next
    fits: bool = False  # of a case: a pattern before `)` matches


class Blocks:
    """The blocks around a command.

    Args:
        expanded: the value of a word.
    """

    def __init__(self, expanded: Callable[[str], str]) -> None:
        self._expanded = expanded
        self._open: list[Block] = []

    def take(self, command: Command) -> tuple[list[str], str]:
        """The words to run, without the keywords of blocks; and, if one starts here, a block that is skipped."""
        taken = self._take(list(command.words), command)
        block = self._open[-1] if self._open else None
        if block and block.end == "esac" and command.end.startswith(";;"):
            block.at_pattern, block.live, block.fits = True, False, False
        return taken

    def _take(self, words: list[str], command: Command) -> tuple[list[str], str]:
        while True:
            block = self._open[-1] if self._open else None
            if block and block.at_pattern:
                if words and words[0] == "esac":
                    self._open.pop()
                    return [], ""
                self._pattern(block, words, command.end)
                return [], ""
            first = words[0] if words else ""
            if block and first == block.end:
                self._open.pop()
                return [], ""
            if block and block.end == "fi" and first in ("then", "else", "elif"):
                if first != "then":
                    self._other_branch(block, words[1:] if first == "elif" else None, command.end)
                words = [] if first == "elif" else words[1:]
                if words:
                    continue
            elif block and first == "do":
                words = words[1:]
                if words:
                    continue
            elif first == "if" or first == "case" or first in LOOPS:
                return self._begin(words, command)
            return (words if all(block.live for block in self._open) else []), ""

    def _begin(self, words: list[str], command: Command) -> tuple[list[str], str]:
        outer = all(block.live for block in self._open)
        if words[0] == "case":
            subject = self._expanded(words[1]) if outer and len(words) > 1 else UNKNOWN
            block = Block("esac", subject=subject, decided=UNKNOWN in subject, at_pattern=True)
            known = not block.decided
            self._open.append(block)
            if words[3:]:
                self._pattern(block, words[3:], command.end)
        elif words[0] == "if":
            holding = self._condition(words[1:], command.end) if outer else None
            known = holding is not None
            self._open.append(Block("fi", live=bool(holding), decided=holding is not False))
        else:
            known = False
            self._open.append(Block(LOOPS[words[0]], decided=True))
        return [], "" if known or not outer else f"{' '.join(words)} ... {self._open[-1].end}"

    def _condition(self, words: Sequence[str], end: str) -> bool | None:
        return None if end in ("&&", "||", "|") else holds([self._expanded(word) for word in words])

    def _other_branch(self, block: Block, condition: Sequence[str] | None, end: str) -> None:
        block.live = False
        if not block.decided:
            holding = True if condition is None else self._condition(condition, end)
            block.live, block.decided = bool(holding), holding is not False

    def _pattern(self, block: Block, words: Sequence[str], end: str) -> None:
        """One pattern of a case: `a | b )` are two."""
        block.fits = block.fits or (
            not block.decided and any(fnmatch.fnmatchcase(block.subject, self._expanded(word)) for word in words)
        )
        if end == ")":
            block.at_pattern, block.live = False, block.fits
            block.decided = block.decided or block.fits


def holds(words: Sequence[str]) -> bool | None:
    """The truth of `[ ... ]`, `[[ ... ]]` or `test` with expanded words; None if only a shell could tell."""
    if words[:1] == ["!"]:
        inner = holds(words[1:])
        return None if inner is None else not inner
    if not words or any(UNKNOWN in word for word in words):
        return None
    closing = {"[": "]", "[[": "]]", "test": None}
    if words[0] not in closing or (words[0] != "test" and words[-1] != closing[words[0]]):
        return {"true": True, "false": False}.get(words[0]) if len(words) == 1 else None
    inside = list(words[1:] if words[0] == "test" else words[1:-1])
    match inside:
        case ["!", *rest]:
            inner = holds(["test", *rest])
            return None if inner is None else not inner
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatch.fnmatchcase(left, right) if words[0] == "[[" else left == right) == (sign != "!=")
        case [left, sign, right] if sign in NUMBERS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return NUMBERS[sign](int(left), int(right))
    return None
