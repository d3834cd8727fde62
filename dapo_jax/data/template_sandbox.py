"""Host: a sandbox for the Jinja templates of foreign models: no way to Python, and limits of time and size.

Jinja's own sandbox keeps a template from Python's internals and from changing its input, but lets it loop for hours or
build gigabytes of text in one operation. Here, whatever builds large values from small ones is checked first.
"""

import functools
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Concat, Node, Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

TIME_LIMIT_S = 10.0  # for one rendering; real ones take milliseconds
MAX_LENGTH = 10_000_000  # characters of a text, or items of a list
MAX_BITS = 10_000  # of an integer

_SIZED = (str, bytes, list, tuple)
# A width or precision of five digits, or one that is an argument: in %-formats and in brace formats.
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +.\d]*(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r"\{[^{}]*(?:\{|\d{5})")
# Methods of texts and numbers, and filters, that take a size or make a longer text.
_GROWING = {
    "batch",
    "center",
    "expandtabs",
    "indent",
    "ljust",
    "rjust",
    "round",
    "slice",
    "to_bytes",
    "tojson",
    "truncate",
    "urlize",
    "wordwrap",
    "xmlattr",
    "zfill",
}


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises TimeoutError in the body after TIME_LIMIT_S; restores the timer and handler that were set before.

    It works on the main thread alone, where Python delivers signals. On other threads only the size limits hold; a
    template still ends there, since Jinja has no infinite loop, but nested ranges can take long.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"still running after {TIME_LIMIT_S:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S, 1.0)  # again, where a filter swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)


def join(parts: Iterable[str]) -> str:
    """The parts as one text. SecurityError as soon as it is too long."""
    kept, length = [], 0
    for part in parts:
        length += len(part)
        _limit(length)
        kept.append(part)
    return "".join(kept)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which an operation that makes too large a value is a SecurityError, and nothing is random."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join)  # pyright: ignore[reportAssignmentType]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.filters["random"], self.globals["lipsum"]  # the same run must have the same prompts
        self.filters["tojson"] = _to_json
        for name in self.filters.keys() & (_GROWING | {"format", "join", "replace"}):
            self.filters[name] = _asking_first(name, self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **options: Any) -> Any:  # pyright: ignore
        subject = getattr(function, "__self__", None)
        if isinstance(subject, str | bytes | int):
            function = _asking_first(function.__name__, function, subject)
        return super().call(context, function, *arguments, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:
            _check_format(_WIDE_BRACES, value.__self__.replace("{{", "").replace("}}", ""))
        return super().wrap_str_format(value)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark the assistant's text: the text itself."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _asking_first(name: str, function: Callable[..., Any], *subject: Any) -> Callable[..., Any]:
    """The filter or method with its arguments checked first; `subject` is the object of a method."""

    @functools.wraps(function)
    def ask(*arguments: Any, **options: Any) -> Any:
        if name == "join":
            position = next((i for i, value in enumerate(arguments) if hasattr(value, "__iter__")), 0)
            items = list(arguments[position])
            arguments = (*arguments[:position], items, *arguments[position + 1 :])
            between = max(len(text) for text in ("", *_texts([*subject, *arguments, *options.values()])))
            length = 0
            for item in items:
                length += len(str(item)) + between
                _limit(length)
        values = [*subject, *arguments, *options.values()]
        texts = _texts(values)
        if name == "replace" and len(texts) >= 3:
            _limit(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
        elif name == "format" and texts:
            _check_format(_WIDE_PERCENT, texts[0])
        elif name == "translate" and texts and isinstance(arguments[0], dict):
            _limit(len(texts[0]) * max((len(str(value)) for value in arguments[0].values()), default=0))
        elif name in _GROWING:
            for value in values:
                if isinstance(value, int):
                    _limit(abs(value))
        return function(*arguments, **options)

    return ask


def _texts(values: Iterable[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _check_format(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise SecurityError("a format with a width or precision of five digits, or one that is an argument")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise SecurityError(f"an integer of more than {MAX_BITS} bits")
    elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
        _limit(len(left) + len(right))
    elif operator == "*" and isinstance(left, _SIZED) and isinstance(right, int):
        _limit(len(left) * right)
    elif operator == "*" and isinstance(left, int) and isinstance(right, _SIZED):
        _limit(left * len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(_WIDE_PERCENT, left)
        values = right if isinstance(right, tuple) else (right,)
        _limit(len(left) + sum(len(str(value)) for value in values))


def _limit(size: int) -> None:
    if size > MAX_LENGTH:
        raise SecurityError(f"a text, list or number greater than {MAX_LENGTH}")


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return join(json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value))
