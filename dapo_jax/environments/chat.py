"""Host: what the environment says, as tokens that follow the policy's own.

The policy's tokens are never encoded again. An observation is encoded once, by itself: the text by which the chat
template goes on after a turn of the assistant. That works for templates which write earlier turns as they were.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_jax.config.sections import DataConfig, EnvironmentConfig
from dapo_jax.data.chat_template import Conversation, render
from dapo_jax.data.prompts import truncate
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.environments.protocol import Messages
from dapo_jax.environments.tool_formats import FORMATS, format_of
from dapo_jax.errors import InputError

OBSERVATION = "{observation}"
BEFORE = "\n"  # what is encoded at the start of a text may get a space, so this stands before a continuation
BROKEN = "\ufffd"  # what is decoded of a part of a character
ASKED = {"role": "user", "content": "?"}
ANSWERED = "It is so."
THOUGHT = f"<think>\nWhy?\n</think>\n\n{ANSWERED}"


@dataclass(frozen=True)
class Chat:
    """Observations as tokens.

    Args:
        tools: schemas that the chat template is given.
        arguments: further variables of the template, of a row; data.chat_template_kwargs unless given.
    """

    tokenizer: Tokenizer
    data: DataConfig
    settings: EnvironmentConfig
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def of(self, row: PromptRow) -> "Chat":
        """That of a row's episodes."""
        return replace(self, arguments=row.template_kwargs)

    @property
    def turn_template(self) -> str:
        """Text after a turn, instead of the chat template's; "" = that of the template."""
        given = self.settings.turn_template
        return given or (OBSERVATION if self.tokenizer.chat_template is None else "")

    def check(self) -> None:
        """Raises InputError if the template does not write earlier turns as they were, or an option does not fit it."""
        if self.tools and not format_of(self.tokenizer.chat_template, self.settings.tool_format):
            raise InputError(
                "environment.tool_format=auto: the chat template teaches a form of calls that is not read here: choose "
                f"{', '.join(FORMATS)}, and show the model how to call in its prompts"
            )
        option = f"environment.turn_template={self.settings.turn_template!r}"
        if self.turn_template:
            if self.turn_template.count(OBSERVATION) != 1:
                raise InputError(f"{option} must have {OBSERVATION} once, in the place of what the environment says")
            return
        said = [{"role": "tool" if self.tools else "user", "name": "tool", "content": "Go on."}]
        for answer in (ANSWERED, THOUGHT):
            turn = {"role": "assistant", "content": answer}
            begins = self._rendered([ASKED]) + answer
            one = self._rendered([ASKED, turn, *said])
            two = self._rendered([ASKED, turn, *said, turn, *said])
            goes_on = one.removeprefix(begins)
            if not one.startswith(begins) or two != one + answer + goes_on:
                own = ", ".join(sorted(self.arguments.keys() - {"tools"}))
                raise InputError(
                    f"environment: the chat template {f'with {own} of a row ' * bool(own)}must write earlier turns of "
                    "the assistant as they were, but changes them once another message follows "
                    f"({answer!r} becomes part of {two!r:.300}): state what follows a turn by "
                    f"environment.turn_template, with {OBSERVATION} where the environment speaks"
                )

    def opened(self, row: PromptRow, said: Messages) -> tuple[PromptRow, int]:
        """The row with what the environment says at the start as the end of its prompt, and how much of it was cut."""
        shortened, longer = self.cut(said)
        if isinstance(row.prompt, str):
            return replace(row, prompt=row.prompt + "".join(message["content"] for message in shortened)), longer
        return replace(row, prompt=(*row.prompt, *shortened)), longer

    def prompt(self, row: PromptRow) -> list[int]:
        """A row's prompt."""
        return self.tokenizer.encode_prompts([row.prompt], self.data, template_kwargs=[row.template_kwargs])[0]

    def continuation(self, said: Messages, *, ended: bool) -> list[int]:
        """The tokens between two turns of the policy, without its end token if it has drawn that."""
        if self.turn_template:
            text = self.turn_template.replace(OBSERVATION, "\n".join(message["content"] for message in said))
        else:
            turn = {"role": "assistant", "content": ANSWERED}
            text = self._rendered([ASKED, turn, *said]).removeprefix(self._rendered([ASKED]) + ANSWERED)
        before, tokens = self.tokenizer.encode(BEFORE), self.tokenizer.encode(BEFORE + text)
        tokens = tokens[len(before) :] if tokens[: len(before)] == before else self.tokenizer.encode(text)
        return tokens[1:] if ended and tokens and tokens[0] in self.tokenizer.eos_ids else tokens

    def cut(self, said: Messages) -> tuple[Messages, int]:
        """Messages of at most environment.max_observation_length tokens each, and how many were longer."""
        limit, found, longer = self.settings.max_observation_length, [], 0
        head = {"left": 0, "right": limit, "middle": limit // 2}[self.settings.observation_truncation]
        for message in said:
            tokens = self.tokenizer.encode(message["content"])
            if len(tokens) > limit:
                longer += 1
                kept = truncate(tokens, head, "right"), truncate(tokens, limit - head, "left")
                text = "".join(self.tokenizer.decode(part, skip_special_tokens=False) for part in kept)
                message = {**message, "content": text.replace(BROKEN, "")}
            found.append(message)
        return found, longer

    def text_of(self, turn: Sequence[int]) -> str:
        """A turn as the environment reads it: with special tokens, but without the end."""
        kept = [token for token in turn if token not in self.tokenizer.eos_ids]
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        arguments = json.loads(self.data.chat_template_kwargs) | ({"tools": list(self.tools)} if self.tools else {})
        chat = Conversation(messages, self.tokenizer.special_tokens, {**arguments, **self.arguments})
        return render(self.tokenizer.chat_template or "", [chat])[0]
