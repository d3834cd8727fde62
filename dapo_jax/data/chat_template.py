"""Host: chat messages to prompt text by a model's Jinja template, in a sandbox."""

import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2

from dapo_jax.data.template_sandbox import Generation, Sandbox, time_limit
from dapo_jax.errors import InputError

# Today, as templates see it: the same run must have the same prompts tomorrow. It is the fall-back of Llama's own
# templates, which take another day as chat_template_kwargs={"date_string": ...}.
PROMPT_DATE = datetime.datetime(2024, 7, 26)
NO_SYSTEM_ROLE = (
    "If the model has no system role, leave data.system_prompt null, and put the text of system messages at the "
    "beginning of the user's. "
)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    **chat_template_kwargs: Any,
) -> str:
    """The text of `messages`, by default up to where the assistant's answer begins.

    Args:
        special_tokens: bos_token, eos_token and the like, as the template names them.
        chat_template_kwargs: further variables of the template (for example enable_thinking=False).

    Raises:
        ValueError: the template refuses the messages, is broken, reaches for Python, or exceeds the limits of
            template_sandbox.py.
    """
    variables = {"tools": None, "documents": None, **special_tokens, **chat_template_kwargs}
    variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        with time_limit():
            return _compiled(template).render(variables)
    except Exception as error:  # a template is a foreign program: it may raise anything
        roles = [message.get("role") for message in messages]
        refuses_system = type(error) is jinja2.TemplateError and "system" in roles
        raise InputError(
            f"the chat template failed on messages with roles {roles}: {type(error).__name__}: {error}. "
            f"{NO_SYSTEM_ROLE if refuses_system else ''}"
            "Change the messages, data.system_prompt or data.chat_template_kwargs, or the model's template"
        ) from error


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = PROMPT_DATE.strftime
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
