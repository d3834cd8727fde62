"""Host: stop strings, which end a response."""

from collections.abc import Sequence

from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.rollout.responses import StopRule

BROKEN = "\N{REPLACEMENT CHARACTER}"


def check_stop_strings(tokenizer: Tokenizer, strings: Sequence[str]) -> None:
    """Raises ValueError for a string with a special token, which has no text in a response."""
    for string in strings:
        if string.strip() not in tokenizer.decode(tokenizer.encode(string)):
            raise InputError(
                f"rollout.stop has {string!r}, which holds a special token of the model: those have no text in a "
                "response, so none would end there; leave it out (a response ends at the model's end tokens anyway)"
            )


def stop_rule(tokenizer: Tokenizer, strings: Sequence[str]) -> StopRule:
    """Ends a response with the token that completes one of the strings."""
    longest = max(len(string.encode()) for string in strings) + 4  # bytes, of which a token may have just one

    def kept(tokens: list[int], looked_at: int) -> int | None:
        reach, first = longest, max(looked_at - longest, 0)
        while first and len(tokenizer.decode(tokens[first:looked_at])) < longest:  # tokens may have no text
            reach *= 2
            first = max(looked_at - reach, 0)

        def text_until(count: int) -> str:
            return _text(tokenizer, tokens[:count], first)

        def stops(count: int) -> bool:
            text = text_until(count)
            return any(string in text for string in strings)

        if not stops(len(tokens)) and BROKEN not in text_until(len(tokens)):
            return None
        return next((count for count in range(looked_at + 1, len(tokens) + 1) if stops(count)), None)

    return kept


def _text(tokenizer: Tokenizer, tokens: list[int], first: int) -> str:
    """The text from token `first` on, or from up to three tokens earlier, where a character begins.

    A broken character at either end hides more than itself: some tokenizers then replace all bytes next to it.
    """
    starts = range(first, max(first - 4, -1), -1)
    texts = (tokenizer.decode(tokens[start:]) for start in starts)
    return next((text for text in texts if BROKEN not in text), tokenizer.decode(tokens[first:]))
