"""Host: expands the commands of a shell script without running anything.

It reads the usual contents of training scripts: assignments, arrays, `export`, quotes, `${NAME:-default}`,
`$((a * b))`, and `if` and `case` that compare texts or numbers. It never guesses: a command substitution leaves
UNKNOWN in its word, and any other `if`, a loop or a function is skipped.
"""

import ast
import operator
import re
from collections.abc import Mapping, Sequence

from dapo_jax.from_verl.shell_blocks import UNKNOWN, Blocks, holds
from dapo_jax.from_verl.shell_words import Command, commands, end_of_part

DECLARING = ("export", "readonly", "declare", "typeset", "local")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!])(\[(?:[@*]|\d+)\])?(:?[-=+?])?(.*)", re.DOTALL)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Script:
    """A script, read once from the first line to the last.

    Attributes:
        commands: the expanded words of each command that is not an assignment.
        skipped: one line per part that was not evaluated.
    """

    def __init__(self, text: str, *, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        """InputError if a quote or a bracket is not closed."""
        self.commands: list[list[str]] = []
        self.skipped: list[str] = []
        self._variables = {**environment, **{str(place): value for place, value in enumerate(arguments, 1)}}
        self._arrays: dict[str, list[str]] = {"@": list(arguments), "*": list(arguments)}
        self._line = 0
        self._status: bool | None = None  # of the last command, if known
        blocks = Blocks(lambda word: " ".join(self._fields(word, split=False)))
        for command in commands(text):
            self._line = command.line
            words, left_out = blocks.take(command)
            if left_out:
                self._skip(left_out)
            if words:
                self._carry_out(words, command)

    def _carry_out(self, words: list[str], command: Command) -> None:
        runs = {"": True, "&&": self._status, "||": None if self._status is None else not self._status}[command.before]
        if runs is False:
            return
        self._status = None
        given = [ASSIGNMENT.fullmatch(word) for word in words]
        if words[0] in DECLARING or all(given):
            for match in filter(None, given):
                if runs is None:
                    self._skip(match[0])
                else:
                    self._assign(match[1], match[3], append=bool(match[2]))
            return
        while ASSIGNMENT.fullmatch(words[0]):  # environment variables of this command only
            words.pop(0)
        if words[0] in ("[", "[[", "test") and command.end in ("&&", "||"):
            self._status = holds([" ".join(self._fields(word, split=False)) for word in words])
            return
        if words[0] in ("source", ".", "eval"):
            self._skip(" ".join(words))
        self.commands.append([field for word in words for field in self._fields(word)])

    def _assign(self, name: str, value: str, *, append: bool) -> None:
        if value.startswith("("):
            words = [word for command in commands(value[1:-1]) for word in command.words]
            items = [field for word in words for field in self._fields(word)]
            self._arrays[name] = (self._array(name) if append else []) + items
            return
        text = " ".join(self._fields(value, split=False))
        self._arrays.pop(name, None)
        self._variables[name] = (self._variables.get(name, "") if append else "") + text

    def _array(self, name: str) -> list[str]:
        return self._arrays.get(name, [self._variables[name]] if name in self._variables else [])

    def _skip(self, what: str) -> None:
        first, *rest = what.splitlines() or [""]
        self.skipped.append(f"line {self._line}: {first}{' ...' if rest else ''}")

    def _fields(self, word: str, *, split: bool = True) -> list[str]:
        """The fields that a word expands to: one, or more for an array or an unquoted value."""
        done: list[str] = []
        current: str | None = None
        at = 0
        while at < len(word):
            end = end_of_part(word, at)
            part = word[at:end]
            if part[0] == "'":
                values, more = [part[1:-1]], False
            elif part[0] == '"':
                values, more = self._quoted(part[1:-1]), False
            elif part[0] == "\\":
                values, more = [part[1:].replace("\n", "")], False
            elif part[0] in "$`":
                end = end if part != "$" else at + len((re.match(r"\$(\w+|[@*#?$!])?", word[at:]) or [""])[0])
                values, more = self._substituted(word[at:end]), split
            elif part == "~" and at == 0 and word[1:2] in ("", "/"):
                values, more = [self._variables.get("HOME", "~")], False
            else:
                values, more = [part], False
            if more:
                values = [field for value in values for field in value.split()]
            if values:
                *before, last = [(current or "") + values[0], *values[1:]]
                done += before
                current = last
            at = end
        return done if current is None else [*done, current]

    def _quoted(self, text: str) -> list[str]:
        """The fields of a double-quoted text: one, except for the items of an array."""
        fields, at = [""], 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                fields[-1] += text[at + 1].replace("\n", "")
                at += 2
                continue
            end = end_of_part(text, at) if text[at] in "$`" else at + 1
            if text[at:end] == "$":
                end = at + len((re.match(r"\$(\w+|[@*#?$!])?", text[at:]) or [""])[0])
            values = self._substituted(text[at:end]) if text[at] in "$`" else [text[at:end]]
            if values:
                fields[-1] += values[0]
                fields += values[1:]
            elif text[at:end] == text:
                return []  # "${ARRAY[@]}" of an empty array is not even an empty word
            at = end
        return fields

    def _substituted(self, part: str) -> list[str]:
        """The value of `$...`, or the items of an array."""
        if part == "$":
            return ["$"]
        if part.startswith("$((") and part.endswith("))"):
            return [self._number(part[3:-2])]
        if part[0] == "`" or part.startswith("$("):
            self._skip(f"{part} is not run")
            return [UNKNOWN]
        match = PARAMETER.fullmatch(part[2:-1] if part[1] == "{" else part[1:])
        if match is None or (match[5] and not match[4]):
            self._skip(f"{part} is not computed")
            return [UNKNOWN]
        counts, name, items, cure, rest = match.groups()
        if name == "#":
            return [str(len(self._array("@")))]
        values = (
            self._array(name) if items or name in "@*" else [self._variables[name]] if name in self._variables else []
        )
        if items and items[1].isdigit():
            items, values = "", values[int(items[1:-1]) :][:1]
        elif not values and name in self._arrays:
            values = self._arrays[name][:1]
        if counts:
            return [str(len(values) if items else len("".join(values)))]
        absent = not any(values) if cure and cure.startswith(":") else not values
        if cure and cure[-1] == "+":
            return [] if absent else self._fields(rest, split=False)
        if absent and cure and cure[-1] in "-=":
            values = [" ".join(self._fields(rest, split=False))]
            if cure[-1] == "=":
                self._variables[name] = values[0]
        elif absent and not items and name not in "@*" and name not in self._arrays and name.isidentifier():
            self._skip(f"{name} is not set: read as empty")
            values = [""]
        return values

    def _number(self, expression: str) -> str:
        """The value of an integer expression."""
        text = "".join(self._quoted(expression))
        try:
            return str(self._value(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            self._skip(f"$(({expression})) is not computed")
            return UNKNOWN

    def _value(self, node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(self._variables.get(node.id) or 0)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        raise SyntaxError("not an integer expression")
