"""Host: one row of prompt data, from a file or a generator."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class PromptRow:
    """A prompt and what the verifier needs to score the responses to it."""

    prompt: tuple[dict, ...] | str  # chat messages with role and content, or plain text
    data_source: str  # names the task; the reward function may dispatch on it
    ground_truth: Any  # text, or plain JSON: a Boolean, list, object or None
    extra_info: dict
    origin: str = field(default="a generated row", compare=False)  # file and row, for messages
    template_kwargs: dict = field(default_factory=dict)  # more variables for the chat template, such as tools
    file: int = field(default=0, compare=False)  # its place in data.train_files
    task: str = field(default="", compare=False)  # names its metrics instead of data_source
    played: bool = False  # an environment reads its columns

    @property
    def columns(self) -> dict:
        """What a reward function gets as extra_info: that of the row, and its prompt."""
        return {**self.extra_info, "prompt": self.prompt}

    @property
    def truth_text(self) -> str:
        """The ground truth as text, of `truth_text`."""
        return truth_text(self.ground_truth)

    @property
    def question(self) -> str:
        """The prompt as text: that of a single message, else each message with its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [
            content if isinstance(content := one.get("content"), str) else json.dumps(content) for one in self.prompt
        ]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(f"{one.get('role')}: {text}" for one, text in zip(self.prompt, texts, strict=True))

    @property
    def identity(self) -> tuple[str, str]:
        """Equal only for rows with the same prompt and ground truth."""
        return self.asked, json.dumps(self.ground_truth, sort_keys=True)

    @property
    def asked(self) -> str:
        """Equal only for rows with the same prompt, and the same columns if an environment reads them."""
        prompt = prompt_identity(self.prompt, self.template_kwargs)
        return json.dumps([prompt, self.extra_info], sort_keys=True, default=repr) if self.played else prompt


def truth_text(truth: Any) -> str:
    """A ground truth as text: itself, or its JSON; empty if there is none."""
    return truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth, default=str)


def prompt_identity(prompt: tuple[dict, ...] | str, template_kwargs: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A string that only equal prompts share."""
    return json.dumps([prompt, dict(template_kwargs)], sort_keys=True, default=repr)


def duplicate_rows(rows: Iterable[PromptRow]) -> int:
    """Number of rows whose (prompt, ground_truth) occurred in an earlier row."""
    seen: set[tuple[str, str]] = set()
    duplicates = 0
    for row in rows:
        duplicates += row.identity in seen
        seen.add(row.identity)
    return duplicates
