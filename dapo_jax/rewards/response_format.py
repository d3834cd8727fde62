"""Host: the verifier for the form of a response: a regular expression that all of it must match."""

import re
from collections.abc import Callable
from typing import Any

from dapo_jax.errors import InputError

# <think>...</think> and <answer>...</answer>, with no further tag of either kind (DeepSeek-R1, arXiv:2501.12948).
R1_FORMAT = r"<think>(?:(?!</?think>)(?!</?answer>).)*</think>\s*<answer>(?:(?!</?think>)(?!</?answer>).)*</answer>"


def matching(pattern: str) -> Callable[..., float]:
    """A verifier: 1 if all of the response, without the white space around it, matches the pattern, else 0.

    Args:
        pattern: of reward.format; empty = R1_FORMAT.
    """
    compiled = compiled_pattern(pattern or R1_FORMAT)

    def score(data_source: str, solution: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        return float(compiled.fullmatch(solution.strip()) is not None)

    return score


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern, in which a dot also matches a line's end. InputError if it is none."""
    rule = f"reward.format.pattern={pattern!r} must be a regular expression"
    if "\0" in pattern:
        raise InputError(f"{rule} without a null character: write it as \\0")
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"{rule} ({error}): correct it") from error


def check_prompt(prompt: str, pattern: str) -> None:
    """Raises InputError if a prompt ends with the tag that the pattern wants at the beginning of a response.

    Args:
        prompt: its text, as the chat template writes it.
        pattern: of reward.format; empty = R1_FORMAT.
    """
    tag = re.search(r"<\w+>\Z", prompt.rstrip())
    wanted = re.sub(r"\A(?:\^|\\A|\\s\*|\s)+", "", pattern or R1_FORMAT)
    if tag is not None and wanted.startswith(tag[0]):
        raise InputError(
            f"reward.format.pattern={pattern!r} must match a response, and none begins with {tag[0]}, because the chat "
            f"template ends each prompt with it: set reward.format.pattern to the rest, {wanted.removeprefix(tag[0])!r}"
        )


score = matching("")
