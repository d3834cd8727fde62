"""What the sampler adds to the engine: stop strings, and verdicts while others are still being decoded."""

from types import SimpleNamespace

import pytest

from dapo_jax.rollout.sampler import stop_rule

TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))


@pytest.mark.parametrize(
    ("text", "looked_at", "kept"),
    [("a stop b", 0, 6), ("a stop b", 5, 6), ("ab END", 0, 6), ("END stop", 2, 3), ("nothing", 0, None), ("", 0, None)],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(text, looked_at, kept):
    assert stop_rule(TOKENIZER, ("stop", "END"))([ord(letter) for letter in text], looked_at) == kept
