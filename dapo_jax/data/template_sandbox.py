"""Host: a model's chat template as text to text, in Jinja's immutable sandbox.

The sandbox keeps a template from Python's internals and from changing its input. It may still loop for hours or build
gigabytes: `template_worker.py` runs it in a process with limits.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Today, as templates see it: the same run must have the same prompts tomorrow. It is the fall-back of Llama's own
# templates, which take another day as chat_template_kwargs={"date_string": ...}.
PROMPT_DATE = datetime.datetime(2024, 7, 26)
MAX_LENGTH = 10_000_000  # characters of a text
HERE = "@@here@@ "  # where a message is to be continued; the space shows whether the template trims messages


class Failure(NamedTuple):
    """Why a template gave no text."""

    kind: str  # name of the exception's class
    reason: str
    refused: bool  # True if the template itself raised it, by raise_exception


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark the assistant's text: the text itself."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], continues: bool
) -> str | Failure:
    """The text of `messages`, or why there is none.

    Args:
        variables: what the template sees besides the messages.
        continues: the text ends within the last message, after its content (Hugging Face's continue_final_message).
    """
    content = messages[-1]["content"] if continues else ""
    shown = [*messages[:-1], {**messages[-1], "content": content + HERE}] if continues else list(messages)
    try:
        text = _compiled(template).render({**variables, "messages": shown})
        if len(text) > MAX_LENGTH:
            raise OverflowError(f"a text of more than {MAX_LENGTH} characters")
        return _until_here(text, content) if continues else text
    except Exception as error:  # a template is a foreign program: it may raise anything
        return Failure(type(error).__name__, str(error)[:1000], type(error) is jinja2.TemplateError)


def variables_read(template: str) -> list[str]:
    """The variables that the template reads and does not set; none if it cannot be parsed."""
    try:
        return sorted(jinja2.meta.find_undeclared_variables(_environment().parse(template)))
    except Exception:  # rendering it gives the reason
        return []


def _until_here(text: str, content: str) -> str:
    cut = text.rfind(HERE.strip())
    if cut < 0 or content.strip() not in text[:cut]:
        raise jinja2.TemplateRuntimeError(
            "it does not write the assistant's last message as it is, so that message cannot be continued"
        )
    return text[:cut] if text.startswith(HERE, cut) else text[:cut].rstrip()


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    del environment.filters["random"], environment.globals["lipsum"]  # the same run must have the same prompts
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = PROMPT_DATE.strftime
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
