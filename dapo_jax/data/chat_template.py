"""Host: chat messages to prompt text by a model's Jinja template, in the sandbox in which transformers runs it.

The sandbox keeps a template from Python's internals and from changing its input. docs/data.md says what it does not.
"""

import datetime
import functools
import json
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dapo_jax.data.row_schema import plain
from dapo_jax.errors import InputError

TIME_LIMIT_S = 10.0  # for a conversation
# Today, as templates see it: the same run must have the same prompts tomorrow. It is the fall-back of Llama's own
# templates, which take another day as chat_template_kwargs={"date_string": ...}.
PROMPT_DATE = datetime.datetime(2024, 7, 26)
MAX_LENGTH = 10_000_000  # characters of a text
HERE = "@@here@@ "  # where a message is to be continued; the space shows whether the template trims messages
NO_SYSTEM_ROLE = (
    "If the model has no system role, leave data.system_prompt null, and put the text of system messages at the "
    "beginning of the user's. "
)

logger = logging.getLogger(__name__)


class Conversation(NamedTuple):
    """What a template renders."""

    messages: Sequence[Mapping[str, Any]]
    special_tokens: Mapping[str, str]  # bos_token, eos_token and the like, as the template names them
    arguments: Mapping[str, Any] = {}  # further variables of the template (for example enable_thinking)
    add_generation_prompt: bool = True  # the text ends where the assistant's answer begins
    continues: bool = False  # the text ends within the last message, after its content

    def variables(self) -> dict[str, Any]:
        """All that the template sees besides the messages."""
        given = {"tools": None, "documents": None, **self.special_tokens, **self.arguments}
        return given | {"add_generation_prompt": self.add_generation_prompt}


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark the assistant's text: the text itself."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def render(template: str, conversations: Sequence[Conversation]) -> list[str]:
    """The text of each conversation. Warns, once, of arguments that the template never reads.

    Raises:
        InputError: the template refuses the messages, is broken, reaches for Python, or exceeds a limit.
    """
    texts = []
    for one in conversations:
        try:
            given = json.dumps({"messages": list(one.messages), **one.variables()}, default=plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"chat messages and template arguments must be plain JSON ({error}): correct them"
            ) from error
        try:
            with _time_limit():
                texts.append(_text(template, json.loads(given), one.continues))
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise _error(one.messages, error) from error
    names = frozenset(name for one in conversations for name in one.arguments)
    if names:
        _warn_of_unread(template, names - _variables_read(template))
    return texts


def _text(template: str, variables: dict[str, Any], continues: bool) -> str:
    content, last = "", variables["messages"][-1:]
    if continues:  # Hugging Face's continue_final_message
        content = last[0]["content"]
        last[0]["content"] += HERE
    text = _compiled(template).render(variables)
    if len(text) > MAX_LENGTH:
        raise OverflowError(f"a text of more than {MAX_LENGTH} characters")
    return _until_here(text, content) if continues else text


def _until_here(text: str, content: str) -> str:
    cut = text.rfind(HERE.strip())
    if cut < 0 or content.strip() not in text[:cut]:
        raise jinja2.TemplateRuntimeError(
            "it does not write the assistant's last message as it is, so that message cannot be continued"
        )
    return text[:cut] if text.startswith(HERE, cut) else text[:cut].rstrip()


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises TimeoutError after TIME_LIMIT_S; in the main thread alone, and not within a call into C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"still running after {TIME_LIMIT_S:g} s")

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@functools.lru_cache
def _variables_read(template: str) -> frozenset[str]:
    """The variables that the template reads and does not set."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


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


def _error(messages: Sequence[Mapping[str, Any]], error: Exception) -> InputError:
    roles = [message.get("role") for message in messages]
    refused = type(error) is jinja2.TemplateError and "system" in roles  # by raise_exception
    return InputError(
        f"the chat template failed on messages with roles {roles}: {type(error).__name__}: {str(error)[:1000]}. "
        f"{NO_SYSTEM_ROLE if refused else ''}"
        "Change the messages, data.system_prompt or data.chat_template_kwargs, or the model's template"
    )


@functools.cache
def _warn_of_unread(template: str, names: frozenset[str]) -> None:
    """Says so once for a template and the same names."""
    if names:
        logger.warning(
            "a chat template never reads %s, given by data.chat_template_kwargs, a row's columns tools and "
            "chat_template_kwargs, or the tools of environment, so it changes nothing: correct the name or leave it "
            "out, and tell the model of tools in its prompts",
            ", ".join(sorted(names)),
        )
