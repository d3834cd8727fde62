"""Texts that blow up parsers, random texts and random bytes: no hang, only documented errors, finite results.

The random cases are the same in every run.
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
from damaged_bytes import fuzz
from ends_within import ends_within
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from sympy.parsing.sympy_parser import parse_expr

from dapo_jax.rewards import math_verifier, messages
from dapo_jax.rewards.messages import Answer, MalformedAnswer, decode_answer, encode_answer, normalize_result
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.worker import answer
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

_HOME = tempfile.mkdtemp(prefix="hypothesis_")  # hypothesis writes tables there even without a database
set_hypothesis_home_dir(_HOME)
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)

TEXT_VERIFIERS = ["arithmetic", "math_dapo", "math_dapo_lenient", "gsm8k", "gsm8k_flexible"]
RIGHT = "\n#### 34\nAnswer: 34"  # for each of them
RIGHT_IN_LATEX = r"Answer: 34" "\n" r"\boxed{34}" "\n#### 34"
TEXTS = {
    "nested braces": r"\boxed{" + "{" * 100_000 + "7" + "}" * 100_000 + "}",
    "nested fractions": "$" + r"\frac{1}{" * 5000 + "2" + "}" * 5000 + "$",
    "nested roots": "$" + r"\sqrt{" * 5000 + "2" + "}" * 5000 + "$",
    "parentheses": "(" * 100_000 + "1" + ")" * 100_000,
    "expression in parentheses": "1+" + "(" * 150 + "1" + ")" * 150,
    "signs": "1" + "-" * 100_000 + "1",
    "tower": "The answer is 9**9**9**9",
    "tower in LaTeX": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{99999!!!!}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^7}}",
    "digits": "The answer is " + "9" * 1_000_000,
    "digits in a box": r"\boxed{" + "9" * 1_000_000 + "}",
    "decimals": "Answer: 0." + "3" * 1_000_000,
    "thousands": "1" + ",111" * 250_000 + "1",
    "megabyte of LaTeX": "$" + "x+" * 500_000 + "1$",
    "boxes that do not close": r"\boxed{" * 100_000,
    "dollars": "$" * 100_000,
    "answers": "answer: " * 100_000,
    "equals": "answer" + "=" * 100_000,
    "blanks": "answer" + " " * 1_000_000 + ":",
    "stars": "answer" + "*" * 1_000_000,
    "dots": "." * 1_000_000 + "-" * 1_000_000,
    "matrix": r"\boxed{\begin{pmatrix}" + "1&" * 20_000 + r"\end{pmatrix}}",
    "code": "Answer: __import__('os').system('exit')\n" r"\boxed{__import__('os').abort()}",
    "NUL": "\0" * 1_000_000,
    "lone surrogates": "\ud800" * 1_000_000,
    "right to left": "\u202e" * 100_000 + "43\u202c",
    "other digits": "Answer: \uff13\uff14 \u0663\u0664",
}
REPEATED = ["1", "-", "1,111", "111,", "0 ", "\0\ud800", "{", "Answer:", "Answer:*", "$", "1,", "\n", "=", r"\boxed{"]


def test_hostile_texts_are_wrong_at_once_and_right_answers_right():
    """Also as short texts: most verifiers read the last 300 characters, where a long one no longer begins."""
    short = [text[:250] for text in TEXTS.values()]
    texts = [*TEXTS.values(), *short, *(text * (400_000 // len(text)) for text in REPEATED)]
    requests = [ScoreRequest("", text, "34", {}) for hostile in texts for text in (hostile, RIGHT_IN_LATEX)]
    together = json.dumps({name: name for name in TEXT_VERIFIERS})
    with ends_within(), VerifierPool(together, num_workers=1, timeout_s=10, memory_limit_mb=500) as pool:
        verdicts = pool.score(requests)
    assert pool.take_replaced() == 0
    assert [verdict.error for verdict in verdicts] == [None] * len(requests)
    for name in TEXT_VERIFIERS:
        assert [verdict.numbers[name] > 0 for verdict in verdicts] == [False, True] * len(texts), name


@pytest.fixture(scope="module")
def mathematics():
    with VerifierPool("math_verify", num_workers=1, timeout_s=3, memory_limit_mb=500) as pool:
        yield pool


@pytest.mark.parametrize(
    "names",
    [
        ["expression in parentheses", "signs", "code"],
        pytest.param(["nested fractions", "tower in LaTeX", "lone surrogates"], marks=pytest.mark.slow),
        pytest.param(["tower", "factorials", "digits", "boxes that do not close"], marks=pytest.mark.full),
    ],
)
def test_hostile_mathematics_is_wrong_within_the_time_limit_and_right_answers_are_right(mathematics, names):
    requests = [ScoreRequest("", text, "34", {}) for name in names for text in (TEXTS[name], RIGHT_IN_LATEX)]
    mathematics.take_replaced()
    with ends_within():
        verdicts = mathematics.score(requests)
    assert mathematics.take_replaced() == sum(verdict.error is not None for verdict in verdicts)
    assert [verdict.numbers["acc"] for verdict in verdicts] == [0.0, 1.0] * len(names)
    errors = {verdict.error for verdict in verdicts}
    assert errors <= {None, "timeout after 3 s", "MemoryError: the verifier needs more than reward.memory_limit_mb=500"}


def test_mathematics_after_hostile_text_is_right(mathematics):
    prefixes = ["\0" * 1000, "\ud800" * 1000, "\u202e" * 1000, "{" * 1000, r"\boxed{" * 1000, "9" * 5000]
    verdicts = mathematics.score([ScoreRequest("", f"{text}\n{RIGHT_IN_LATEX}", "34", {}) for text in prefixes])
    assert [verdict.numbers["acc"] for verdict in verdicts] == [1.0] * len(prefixes)


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


SOLUTIONS = st.one_of(CHARACTERS, FRAGMENTS, mutations())


def values(leaves, keys):
    """Lists and dicts of `leaves`."""

    def extended(inner):
        return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)

    return st.recursive(leaves, extended, max_leaves=10)


LEAVES = st.none() | st.booleans() | st.integers() | CHARACTERS
JSON_VALUES = values(LEAVES | st.floats(allow_nan=False), CHARACTERS)
RESULTS = values(LEAVES | st.floats() | st.complex_numbers() | st.binary(max_size=9), CHARACTERS | st.integers())


def assert_verdict(numbers, pred):
    assert numbers.keys() >= {"score", "acc"} and numbers["acc"] == (numbers["score"] > 0)
    assert all(type(value) is float and math.isfinite(value) for value in numbers.values())
    assert pred is None or len(pred) <= 1000
    assert decode_answer(encode_answer(Answer(numbers, pred, None))) == Answer(numbers, pred, None)


@pytest.mark.parametrize("examples", [100, pytest.param(600, marks=pytest.mark.slow)])
def test_every_text_gets_a_verdict_and_a_right_answer_after_it_is_right(examples):
    @fuzz(examples)
    @given(text=SOLUTIONS)
    def check(text):
        with ends_within():
            for name in TEXT_VERIFIERS:
                assert_verdict(*normalize_result(VERIFIERS[name].score("", text, "34", {})))
                assert VERIFIERS[name].score("", text + RIGHT, "34", {})["acc"], name

    check()


@fuzz(200)
@given(ground_truth=SOLUTIONS)
def test_any_ground_truth_gets_a_verdict_or_a_value_error(ground_truth):
    with ends_within():
        for name in TEXT_VERIFIERS:
            try:
                assert_verdict(*normalize_result(VERIFIERS[name].score("", RIGHT, ground_truth, {})))
            except ValueError as error:
                assert name == "arithmetic" and "must be a number" in str(error)


@fuzz(20)
@given(texts=st.lists(SOLUTIONS, min_size=10, max_size=10))
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
        r"\boxed{__import__('os').abort()} | $x_{__import__('os').abort()}$ | The answer is exec('1') | "
        r"$\mathrm{os.abort}()$ | $\text{1.__class__}$ | The answer is 1.__class__ | $1{,}234.5e9$ | $0.\bar{3}$ | "
        r"$1e5$ | $1E+5$ | $1,234$ | 1,234.5 | 12\% | (1+2)^3 | $f(x, y)$ | $\operatorname{eval}(1, 2)$"
    ).split(" | "):
        math_verifier.score("", text, "34", {})

    @fuzz(50)
    @given(text=mutations().filter(lambda text: not re.search(r"\^|\*\*|!|[0-9]{20}|\\sum|\\int", text)))
    def feed(text):
        with ends_within():
            math_verifier.score("", text, "34", {})

    feed()
    assert len(parsed) > 20
    assert [text for text in parsed if not re.fullmatch(r"(?:[\d\s.+*/×÷()-]|(?<=[\d.])[eE](?=[\d+-]))*", text)] == []


@fuzz(150)
@given(value=RESULTS, raises=st.booleans())
def test_any_result_is_an_answer_that_the_pool_accepts_or_a_value_error(value, raises):
    def verifier(*arguments):
        if raises:
            raise RuntimeError(value)
        return value

    sent = answer(verifier, messages.encode_request(("", "", "", {})))
    assert decode_answer(encode_answer(sent)) == sent and (sent.error is not None) >= raises
    try:
        numbers, _ = normalize_result(value)
    except ValueError as error:
        assert str(error).startswith("verifier must return") and sent.error is not None
        return
    assert all(type(number) is float and math.isfinite(number) for number in numbers.values())
    assert raises or sent.numbers == numbers


@fuzz(100)
@given(text=CHARACTERS, extra_info=st.dictionaries(CHARACTERS, JSON_VALUES, max_size=4))
def test_requests_arrive_as_they_were_sent(text, extra_info):
    arguments = (text, text, text, extra_info)
    joined = json.loads(json.dumps(arguments))  # two lone surrogates that form a pair become one character
    assert list(messages.decode_request(messages.encode_request(arguments))) == joined


@fuzz(200)
@given(message=st.one_of(st.binary(max_size=200), JSON_VALUES.map(lambda value: json.dumps(value).encode())))
def test_random_bytes_are_no_answer(message):
    with pytest.raises(MalformedAnswer):
        decode_answer(message)
    try:
        start = messages.decode_start(message)
        assert start is None or isinstance(start, str)
    except MalformedAnswer:
        pass


@fuzz(200)
@given(
    whole=st.lists(st.binary(max_size=1000), max_size=5),
    sent=st.binary(max_size=100),
    claimed=st.integers(0, 2**64 - 1) | st.integers(0, 100),
)
def test_messages_arrive_whole_and_in_order_and_random_bytes_neither_hang_nor_fill_the_pool(whole, sent, claimed):
    here, there = socket.socketpair()
    with here, there, ends_within():
        for message in whole:
            messages.send(there, message)
        there.sendall(claimed.to_bytes(8, "big") + sent)
        there.close()
        assert [messages.receive(here, time.monotonic() + 20, limit=1000) for _ in whole] == whole
        try:
            assert messages.receive(here, time.monotonic() + 20, limit=messages.MAX_ANSWER) == sent[:claimed]
        except (EOFError, MalformedAnswer):
            assert claimed > len(sent)
