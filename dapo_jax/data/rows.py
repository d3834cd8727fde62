"""Host: one row of prompt data, whatever file or generator it came from."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptRow:
    """A prompt and what the verifier needs to score the responses to it."""

    prompt: tuple[dict, ...] | str  # chat messages with role and content, or plain text
    data_source: str  # names the task; the reward function may dispatch on it
    ground_truth: str
    extra_info: dict
    origin: str = field(default="a generated row", compare=False)  # file and row, for messages


def prompt_identity(prompt: tuple[dict, ...] | str) -> str:
    """A string that two prompts share only if they are the same."""
    return json.dumps(prompt, sort_keys=True, default=repr)


def duplicate_rows(rows: Iterable[PromptRow]) -> int:
    """Number of rows whose (prompt, ground_truth) occurred in an earlier row."""
    seen: set[tuple[str, str]] = set()
    duplicates = 0
    for row in rows:
        identity = (prompt_identity(row.prompt), row.ground_truth)
        duplicates += identity in seen
        seen.add(identity)
    return duplicates
