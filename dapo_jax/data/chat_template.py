"""Host: chat messages to prompt text by a model's Jinja template: a foreign program, in a process with limits."""

import functools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.data import template_sandbox
from dapo_jax.data.json_values import plain
from dapo_jax.data.template_sandbox import Failure
from dapo_jax.errors import InputError

# The default limits of a verifier: for each conversation, and for the process.
TIME_LIMIT_S, MEMORY_LIMIT_MB = 10.0, 4096
AT_ONCE = 10_000  # conversations for one process
NO_SYSTEM_ROLE = (
    "If the model has no system role, leave data.system_prompt null, and put the text of system messages at the "
    "beginning of the user's. "
)
# All that the process gets of the environment: what an interpreter may need to start.
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")

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


def render(template: str, conversations: Sequence[Conversation], *, isolated: bool = True) -> list[str]:
    """The text of each conversation. Warns, once, of arguments that the template never reads.

    Args:
        isolated: in a process with limits; False for templates of this package alone.

    Raises:
        ValueError: the template refuses the messages, is broken, reaches for Python, or exceeds the limits.
    """
    texts: list[str] = []
    for start in range(0, len(conversations), AT_ONCE):
        part = conversations[start : start + AT_ONCE]
        read, found = (_in_process_of_its_own if isolated else _here)(template, part)
        if isinstance(found[-1], Failure):
            raise _error(part[len(found) - 1].messages, found[-1])
        _warn_of_unread(template, frozenset(name for one in part for name in one.arguments) - set(read))
        texts += found
    return texts


def _here(template: str, conversations: Sequence[Conversation]) -> tuple[list[str], list[Any]]:
    found: list[str | Failure] = []
    for one in conversations:
        found.append(template_sandbox.render(template, one.messages, one.variables(), one.continues))
        if isinstance(found[-1], Failure):
            break
    return template_sandbox.variables_read(template), found


def _in_process_of_its_own(template: str, conversations: Sequence[Conversation]) -> tuple[list[str], list[Any]]:
    """The variables that the template reads, and the texts; the last of them may be a Failure."""
    request = {
        "template": template,
        "time_limit_s": TIME_LIMIT_S,
        "memory_limit_mb": MEMORY_LIMIT_MB,
        "conversations": [
            {"messages": list(one.messages), "variables": one.variables(), "continues": one.continues}
            for one in conversations
        ],
    }
    try:
        message = json.dumps(request, default=plain).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"chat messages and template arguments must be plain JSON ({error}): correct them") from error
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    process = subprocess.run(
        [sys.executable, "-m", "dapo_jax.data.template_worker"],
        input=message,
        capture_output=True,
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
    )
    lines = process.stdout.split(b"\n")[:-1]  # what follows the last line's end is no whole line
    if not lines and process.returncode not in (-signal.SIGALRM, -signal.SIGSEGV):
        raise RuntimeError(f"no process renders chat templates: {process.stderr.decode(errors='replace')[-1000:]}")
    read, *found = [json.loads(line) for line in lines] or [[]]
    if found and not isinstance(found[-1], str):
        found[-1] = Failure(*found[-1])
    elif len(found) < len(conversations):
        found.append(_ending(process.returncode))
    return read, found


def _ending(code: int) -> Failure:
    if code == -signal.SIGALRM:
        return Failure("TimeoutError", f"still running after {TIME_LIMIT_S:g} s", False)
    if code == 0:
        return Failure("OverflowError", "all texts together are too long", False)
    return Failure("RuntimeError", f"its process ended with code {code}", False)


def _error(messages: Sequence[Mapping[str, Any]], failure: Failure) -> InputError:
    roles = [message.get("role") for message in messages]
    return InputError(
        f"the chat template failed on messages with roles {roles}: {failure.kind}: "
        f"{failure.reason or f'it needs more than {MEMORY_LIMIT_MB} MiB'}. "
        f"{NO_SYSTEM_ROLE if failure.refused and 'system' in roles else ''}"
        "Change the messages, data.system_prompt or data.chat_template_kwargs, or the model's template"
    )


@functools.cache
def _warn_of_unread(template: str, names: frozenset[str]) -> None:
    """Says so once for a template and the same names."""
    if names:
        logger.warning(
            "a chat template never reads %s, given by data.chat_template_kwargs or a row's columns tools and "
            "chat_template_kwargs, so it changes nothing: correct the name or leave it out",
            ", ".join(sorted(names)),
        )
