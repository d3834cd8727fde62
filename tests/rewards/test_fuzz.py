"""Random texts for every verifier, random bytes for the pool: no hang, only documented errors, finite results.

The same cases in every run: 600 texts as solution and 200 as ground truth to five verifiers, 270 to math_verify; 900
results, requests, answers and messages between the pool and a worker.
"""

import atexit
import importlib
import json
import math
import re
import shutil
import socket
import tempfile
import time

import pytest
from ends_within import ends_within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from sympy.parsing.sympy_parser import parse_expr

from dapo_jax.rewards import math_verifier
from dapo_jax.rewards.messages import (
    MAX_ANSWER,
    Answer,
    MalformedAnswer,
    decode_answer,
    decode_request,
    decode_start,
    encode_answer,
    encode_request,
    receive,
    send,
)
from dapo_jax.rewards.results import normalize_result
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.worker import answer
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

_HOME = tempfile.mkdtemp(prefix="hypothesis_")  # hypothesis writes tables there even without a database
set_hypothesis_home_dir(_HOME)
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)

TEXT_VERIFIERS = ["arithmetic", "math_dapo", "math_dapo_lenient", "gsm8k", "gsm8k_flexible"]
RIGHT = "\n#### 34\nAnswer: 34"  # for each of them


def cases(number):
    return settings(
        max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


CHARACTERS = st.text(st.characters(exclude_categories=()), max_size=100)  # lone surrogates too
NUMBERS = (st.integers() | st.floats()).map(str) | st.sampled_from(["1,234", "1,234,5678", "034.", "-3,4", "9" * 30])
FRAGMENTS = st.lists(
    st.one_of(
        NUMBERS,
        st.sampled_from(
            r"\boxed{ \frac{ \sqrt{ \text{ \left( \right) \begin{pmatrix} \end{pmatrix} \( \) \[ \] \cdot \pi \infty "
            r"\sum_{ \int_0^ \mathrm{ \circ \% \$ $ $$ { } ( ) [ ] & \\ \ , . ; : = < > + - * / ^ ! _ ~ | ' x i e "
            r"answer Answer: **Answer:** #### final is and or 34 0 1/2 .5 1e9 1_000 __import__('os') \x00 "
            "\N{MINUS SIGN} \N{MULTIPLICATION SIGN} \u202e \ud800 \uff13".split(" ")
        ),
        st.sampled_from(["\n", " ", "\0", "\t", "final answer is ", "I hope it is correct", "Answer: "]),
    ),
    max_size=30,
).map("".join)


@st.composite
def mutations(draw):
    """A right answer with parts doubled, removed, moved and inserted."""
    text = draw(st.sampled_from([RIGHT, r"\boxed{34}", r"The final answer is $\boxed{\frac{68}{2}}$.", "12 + 22 = 34"]))
    for _ in range(draw(st.integers(1, 6))):
        start, end = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        put_in = draw(st.one_of(st.just(""), st.just(text[start:end] * 2), FRAGMENTS.map(lambda new: new[:50])))
        text = text[:start] + put_in + text[end:]
    return text


TEXTS = st.one_of(CHARACTERS, FRAGMENTS, mutations())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | CHARACTERS | st.complex_numbers() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(CHARACTERS | st.integers(), inner, max_size=4),
    max_leaves=10,
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | CHARACTERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(CHARACTERS, inner, max_size=4),
    max_leaves=10,
)


def assert_verdict(numbers, pred):
    assert numbers.keys() >= {"score", "acc"} and numbers["acc"] == (numbers["score"] > 0)
    assert all(type(value) is float and math.isfinite(value) for value in numbers.values())
    assert pred is None or len(pred) <= 1000
    assert decode_answer(encode_answer(Answer(numbers, pred, None))) == Answer(numbers, pred, None)


@cases(600)
@given(text=TEXTS)
def test_every_text_gets_a_verdict_and_a_right_answer_after_it_is_right(text):
    with ends_within():
        for name in TEXT_VERIFIERS:
            assert_verdict(*normalize_result(VERIFIERS[name].score("", text, "34", {})))
            assert VERIFIERS[name].score("", text + RIGHT, "34", {})["acc"], name


@cases(200)
@given(ground_truth=TEXTS)
def test_any_ground_truth_gets_a_verdict_or_a_value_error(ground_truth):
    with ends_within():
        for name in TEXT_VERIFIERS:
            try:
                assert_verdict(*normalize_result(VERIFIERS[name].score("", RIGHT, ground_truth, {})))
            except ValueError as error:
                assert name == "arithmetic" and "must be a number" in str(error)


@pytest.fixture(scope="module")
def mathematics():
    with VerifierPool("math_verify", num_workers=2, timeout_s=3, memory_limit_mb=500) as pool:
        yield pool


@cases(20)
@given(texts=st.lists(TEXTS, min_size=10, max_size=10))
def test_every_text_gets_a_verdict_as_mathematics(mathematics, texts):
    requests = [ScoreRequest("", text, "34", {}) for text in (*texts, r"\boxed{34}")]
    with ends_within():
        verdicts = mathematics.score(requests)
    for verdict in verdicts:
        assert_verdict(verdict.numbers, verdict.pred)
        assert verdict.error in (None, "timeout after 3 s") or verdict.error.startswith("MemoryError")
    assert verdicts[-1].numbers["acc"] == 1.0


def test_only_numbers_and_arithmetic_are_evaluated(monkeypatch):
    """SymPy's parse_expr leads to Python's eval."""
    importlib.import_module("sympy.physics.units")  # parses its own units on import
    parsed = []

    def record(text, *arguments, **options):
        parsed.append(text)
        return parse_expr(text, *arguments, **options)

    monkeypatch.setattr("sympy.parsing.sympy_parser.parse_expr", record)
    monkeypatch.setattr("math_verify.parser.parse_expr", record)
    for text in (
        r"\boxed{__import__('os').abort()}",
        "$x_{__import__('os').abort()}$",
        "The answer is exec('1')",
        r"$\mathrm{os.abort}()$",
        r"$\text{1.__class__}$",
        "The answer is 1.__class__",
        "$1{,}234.5e9$",
        r"$0.\bar{3}$",
        "$1e5$",
        "$1E+5$",
        "$1,234$",
        "1,234.5",
        r"12\%",
        "(1+2)^3",
        "$f(x, y)$",
        r"$\operatorname{eval}(1, 2)$",
    ):
        math_verifier.score("", text, "34", {})

    @cases(50)
    @given(text=mutations().filter(lambda text: not re.search(r"\^|\*\*|!|[0-9]{20}|\\sum|\\int", text)))
    def feed(text):
        with ends_within():
            math_verifier.score("", text, "34", {})

    feed()
    assert len(parsed) > 20
    assert [text for text in parsed if not re.fullmatch(r"(?:[\d\s.+*/×÷()-]|(?<=[\d.])[eE](?=[\d+-]))*", text)] == []


@cases(150)
@given(value=VALUES)
def test_any_result_is_normalised_or_a_value_error(value):
    try:
        numbers, pred = normalize_result(value)
    except ValueError as error:
        assert str(error).startswith("verifier must return")
        return
    assert all(type(number) is float and math.isfinite(number) for number in numbers.values())
    assert decode_answer(encode_answer(Answer(numbers, pred, None))).numbers == numbers


@cases(150)
@given(value=VALUES, raises=st.booleans())
def test_any_outcome_is_an_answer_that_the_pool_accepts(value, raises):
    def verifier(*arguments):
        if raises:
            raise RuntimeError(value)
        return value

    sent = answer(verifier, encode_request(("", "", "", {})))
    assert decode_answer(encode_answer(sent)) == sent and (sent.error is not None) >= raises


@cases(100)
@given(text=CHARACTERS, extra_info=st.dictionaries(CHARACTERS, JSON_VALUES, max_size=4))
def test_requests_arrive_as_they_were_sent(text, extra_info):
    arguments = (text, text, text, extra_info)
    joined = json.loads(json.dumps(arguments))  # two lone surrogates that form a pair become one character
    assert list(decode_request(encode_request(arguments))) == joined


@cases(200)
@given(message=st.one_of(st.binary(max_size=200), JSON_VALUES.map(lambda value: json.dumps(value).encode())))
def test_random_bytes_are_no_answer(message):
    with pytest.raises(MalformedAnswer):
        decode_answer(message)
    try:
        start = decode_start(message)
        assert start is None or isinstance(start, str)
    except MalformedAnswer:
        pass


@cases(200)
@given(sent=st.binary(max_size=100), claimed=st.integers(0, 2**64 - 1) | st.integers(0, 100))
def test_random_bytes_neither_hang_nor_fill_the_pool(sent, claimed):
    here, there = socket.socketpair()
    with here, there, ends_within():
        there.sendall(claimed.to_bytes(8, "big") + sent)
        there.close()
        try:
            assert receive(here, time.monotonic() + 20, limit=MAX_ANSWER) == sent[:claimed]
        except (EOFError, MalformedAnswer):
            assert claimed > len(sent)


@cases(100)
@given(messages=st.lists(st.binary(max_size=1000), max_size=5))
def test_messages_arrive_whole_and_in_order(messages):
    here, there = socket.socketpair()
    with here, there, ends_within():
        for message in messages:
            send(there, message)
        assert [receive(here, time.monotonic() + 20, limit=1000) for _ in messages] == messages
