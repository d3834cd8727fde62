"""What the sampler adds to the engine: stop strings, and verdicts while others are still being decoded."""

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from dapo_jax.data.containers import Rollout
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer, character_tokenizer
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.worker_pool import Verdict
from dapo_jax.rollout.engine import GivenUp
from dapo_jax.run.sampler import GroupRollout, Sampler, check_stop_strings, stop_rule

TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))


@pytest.mark.parametrize(
    ("text", "looked_at", "kept"),
    [("a stop b", 0, 6), ("a stop b", 5, 6), ("ab END", 0, 6), ("END stop", 2, 3), ("nothing", 0, None), ("", 0, None)]
    + [("x" * 500 + "stop!", 503, 504)],  # it reaches back into the chunk before
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(text, looked_at, kept):
    assert stop_rule(TOKENIZER, ("stop", "END"))([ord(letter) for letter in text], looked_at) == kept


def end_of(ids, tokenizer, stops, chunk):
    """Where the first of the chunks ends a response in which a stop string is."""
    check_stop_strings(tokenizer, stops)
    rule = stop_rule(tokenizer, stops)
    ends = (rule(ids[: start + chunk], start) for start in range(0, len(ids), chunk))
    return next((end for end in ends if end is not None), None)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_tokens_without_text_do_not_hide_a_stop_string(chunk):
    tokenizer = character_tokenizer()
    ids = [*tokenizer.encode("abcde" * 3), *tokenizer.encode("e"), *[tokenizer.pad_id] * 30, *tokenizer.encode("nd.")]
    assert end_of(ids, tokenizer, ("end",), chunk) == len(ids) - 1


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_stop_string_may_be_spelled_in_bytes(chunk):
    """As with Gemma, whose characters outside the vocabulary are bytes, each a token."""
    backend = tokenizers.Tokenizer(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, eos_ids=(0,), pad_id=0, special_tokens={}, add_bos=False, chat_template=None)
    ids = tokenizer.encode("é€ 数学. 🙂 and more")
    assert end_of(ids, tokenizer, ("🙂", "数学。"), chunk) == len("é€ 数学. 🙂".encode())


def test_a_special_token_is_no_stop_string():
    tokenizer = character_tokenizer()
    check_stop_strings(tokenizer, ("end", "a b", " "))
    with pytest.raises(ValueError, match="rollout.stop has '<eos>', which holds a special token"):
        check_stop_strings(tokenizer, ("end", "<eos>"))


class _Verifiers:
    """Says how long a response is, and when it was asked."""

    def __init__(self, **further):
        self.asked, self.further = [], further

    def submit(self, request):
        self.asked.append(request.solution)
        verdict: Future[Verdict] = Future()
        numbers = {"score": float(len(request.solution)), "truth": float(request.ground_truth)}
        verdict.set_result(Verdict({**numbers, **self.further}, None, None))
        return verdict

    def collect(self, requests, futures):
        return [future.result() for future in futures]


class _Engine:
    """Three prompts with two responses each; the later the row, the earlier it ends."""

    def __init__(self, verifiers):
        self.verifiers = verifiers

    def submit(self, prompts, numbers, request, *, on_finished):
        rows = len(prompts) * request.num_samples
        tokens = np.where(np.arange(9) < np.arange(rows)[:, None] + 1, 97 + np.arange(rows)[:, None], 0)
        rollout = Rollout(tokens, tokens > 0, np.zeros(tokens.shape), np.ones(rows, bool))
        for row in reversed(range(rows)):
            assert len(self.verifiers.asked) == rows - 1 - row
            on_finished(np.array([row]), rollout)
        return SimpleNamespace(wait=lambda: rollout)

    def give_up(self):
        return GivenUp()


def started(verifiers):
    rows = [PromptRow([{"role": "user", "content": str(i)}], "test", str(i), {}) for i in range(4)]
    sampler = Sampler(TOKENIZER, _Engine(verifiers), None, (), lambda _: nullcontext())

    def verify(asked):
        return Verification(verifiers, TOKENIZER, [rows[row] for row in asked], 2, check=lambda: None)

    row_of = {7: 3, 8: 0, 9: 2}.__getitem__
    rollout = GroupRollout(sampler, sampler.request(None, 2, 0, None), PromptSet(rows, [[1]] * 4), row_of, verify, 5)
    rollout.start([7, 8, 9])
    return rollout.wait


@pytest.mark.parametrize(
    "name", ["seq_reward", "seq_final_reward", "overlong_reward", "overlong", "reward_model", "format/acc"]
)
def test_a_verifier_may_not_use_a_name_that_has_a_meaning(name):
    with pytest.raises(ValueError, match=f"the reward function returns '{name}'"):
        started(_Verifiers(**{name: 1.0}))()


def test_responses_are_verified_as_they_end_and_each_verdict_finds_its_response():
    verifiers = _Verifiers()
    wait = started(verifiers)
    assert verifiers.asked[0] == "ffffff" and len(verifiers.asked) == 6
    found = wait()
    assert found.texts == [["a", "bb"], ["ccc", "dddd"], ["eeeee", "ffffff"]]
    np.testing.assert_array_equal(found.scores["score"], [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(found.scores["truth"], [[3, 3], [0, 0], [2, 2]])
    assert found.rows.tolist() == [3, 0, 2] and found.numbers.tolist() == [7, 8, 9] and (found.versions == 5).all()
