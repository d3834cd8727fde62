r"""Host: symbolic comparison of mathematical answers with the library math-verify."""

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Any

from dapo_jax.rewards.math_dapo import end_of_braces
from dapo_jax.rewards.numerals import NUMBER, SPACE

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN_LISTED = re.compile(r"\s*(?:[,;]|[,;]?\s*(?:and|or))\s*")  # two boxes that are one answer
_NAMED = r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it))(?![A-Za-z])"
_LAYOUT = re.compile(rf"\\q?quad|\\angle|\\triangle|{_NAMED}|\\[()\[\],;:! ]|[${{}}]")
_SENTENCE = re.compile(r"[$]|\\[(\[]|(?<![A-Za-z])[A-Za-z]{2,}(?::|,? [A-Za-z]{2,})")
_CHINESE = re.compile(r"[\u3000-\u303f\u3400-\u9fff\uff01-\uff0c\uff1a-\uff1f]")
_MINUS = str.maketrans("\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}", "---")
_GROUPED = re.compile(rf"(?<![\w.])[1-9][0-9]{{0,2}}(?P<space>{SPACE})[0-9]{{3}}(?:(?P=space)[0-9]{{3}})*(?![0-9])")
_WORDS = re.compile(r"[A-Za-z]+(?:[ '-][A-Za-z]+)*")
_MORE_THAN_TEXT = re.compile(r"inf|.*\b(?:and|or)\b")  # infinity, a list
_BASE = re.compile(rf"(?<=[0-9])_(\{{\s*({_NAMED}\s*\{{\s*)?)?(?P<base>[0-9]+|[a-z]+)(?(2)\s*\}})(?(1)\s*\}})")
_BASES = {name: str(base) for base, name in enumerate("two three four five six seven eight nine ten".split(), 2)}
_HALF_DAY = re.compile(rf"(?<=[0-9])((?:{_NAMED}|\\[,;:! ]|[~{{\s])*)([ap])\.?\s?m\b\.?", re.IGNORECASE)
_DECIMALS, _DIGITS = 6, 15  # the library's defaults: floats are rounded to so many decimals, others have so many digits


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    r"""1 if the last answer in the solution (LaTeX or plain) is mathematically equal to the ground truth, else 0.

    The answer is the last box (`\boxed`, `\fbox`), or what a later `<answer>...</answer>` holds; boxes separated only
    by a comma, a semicolon, "and" or "or" form one answer, a list. Without either, the library finds the answer. As in
    verl, the ground truth is read as `\boxed{...}`. Beyond the library:

    - Words are compared as text, whatever their case; three or more letters in a row are a word (`CAB` is not `ABC`).
    - Floats are equal up to 6 decimals, or up to 6 digits if they are smaller; `1\,000` and `1 000` are 1000.
    - An answer may leave out AM, PM or the base of a number, as it may a unit, but not give another one.

    The library's time limits are off, because they need signals in the main thread: the caller bounds time and memory,
    as the pool does. No text is executed. LaTeX is parsed by a grammar. Plain expressions reach Python's `eval` through
    SymPy, but the library only passes digits, blanks and `. + - * / ^ ( )`, which cannot form a name.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about disabled time limits
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    truth, answer = _plain(rf"\boxed{{{ground_truth}}}"), _plain(_last_answer(solution))
    contradicts = not _bases(answer) <= {*_bases(truth), "10"}
    if halves := {half for text in (truth, answer) for _, half in _HALF_DAY.findall(text.lower())}:
        truth, answer, contradicts = _clock(truth), _clock(answer), contradicts or len(halves) > 1
    truth, answer = _BASE.sub("", truth), _BASE.sub("", answer)
    gold = parse(truth, extraction_config=[latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"ground_truth={ground_truth!r} must be mathematics in LaTeX: correct the data row")
    answers = parse(answer, extraction_config=[plain, latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    words = _words(truth), _words(answer)
    if contradicts or all(words):
        correct = not contradicts and words[0] == words[1]
    else:
        more = _further_decimals((*gold, *answers))
        correct = verify(gold, answers, _DECIMALS + more, _DIGITS + more, timeout_seconds=None)
    return {"score": float(correct), "acc": correct, "pred": str(answers[-1]) if answers else ""}


def _last_answer(solution: str) -> str:
    """Only the last box, a list of boxes as one, or the content of a later tag; the whole solution if it has neither.

    The library would join boxes across up to 70 characters of any text with a comma in it, and prefer "final answer
    is ..." to an earlier box.
    """
    before_end, end_tag, after = solution.rpartition("</answer>")
    _, tag, tagged = before_end.rpartition("<answer>")
    if tag and end_tag and not _BOX.search(after):
        solution = tagged.strip()
    *before, tail = _BOX.split(solution)
    end = end_of_braces(tail)
    if not before:
        return _boxed(solution) if tag else _CHINESE.sub(" ", solution.replace("答案", " answer "))
    if end is None:
        return r"\boxed" + tail
    contents = [tail[1 : end - 1]]
    for part in reversed(before[1:]):
        part_end = end_of_braces(part)
        if part_end is None or not _BETWEEN_LISTED.fullmatch(_LAYOUT.sub(" ", part[part_end:])):
            break
        contents.insert(0, part[1 : part_end - 1])
    return rf"\boxed{{{','.join(contents)}}}"


def _boxed(tagged: str) -> str:
    """The content of a tag as that of a box, unless it is a sentence or a number with a unit."""
    number = NUMBER.match(tagged)
    with_unit = number is not None and re.fullmatch(r" ?[A-Za-z]{2,}\.?", tagged[number.end() :])
    is_text = with_unit or (_SENTENCE.search(tagged) and not _words(tagged))
    return tagged if is_text else rf"\boxed{{{tagged}}}"


def _plain(text: str) -> str:
    """`text` with "-" for every minus sign, without spaces between groups of three digits and without a full stop."""
    text = _GROUPED.sub(lambda found: found[0].replace(found["space"], ""), text.translate(_MINUS))
    return re.sub(r"(?<!\.)\.\s*\}\Z", "}", text)


def _words(text: str) -> str:
    """The text of an answer that is only words, in lower case; "" for any other."""
    words = " ".join(_LAYOUT.sub(" ", _BOX.sub("", text)).replace("(", " ").replace(")", " ").split()).rstrip(".")
    is_word = re.search("[A-Za-z]{3}", words) or (len(words) > 1 and re.search(_NAMED, text))  # xy is a product
    return words.lower() if is_word and _WORDS.fullmatch(words) and not _MORE_THAN_TEXT.match(words.lower()) else ""


def _bases(text: str) -> set[str]:
    return {_BASES.get(found["base"], found["base"]) for found in _BASE.finditer(text)}


def _clock(text: str) -> str:
    """Times without AM and PM, and as pairs: the library would read 2:20 as a ratio, which is 1:10."""
    text = re.sub(rf"{_NAMED}\s*\{{([^{{}}]*)\}}", r"\1", _HALF_DAY.sub(r"\1", text)).replace(":00", "")
    return re.sub(r"(?<![0-9])([0-9]{1,2}):([0-9]{2})(?![0-9])", r"(\1,\2)", text)


def _further_decimals(expressions: Iterable[Any]) -> int:
    """Decimals beyond the first six that the smallest number in SymPy's expressions needs for six digits of its own.

    Rounded to a fixed number of decimals, as in the library, all tiny numbers would be equal.
    """
    sizes, waiting = [0], list(expressions)
    while waiting:
        expression = waiting.pop()
        if not getattr(expression, "is_number", False):
            waiting.extend(getattr(expression, "args", ()))
        elif not expression.is_Integer:
            with suppress(Exception):  # what SymPy cannot evaluate is not compared by its decimals either
                sizes.append(-1 - Decimal(str(abs(expression).evalf(3))).adjusted())
    return max(sizes)


def load() -> None:
    """Loads the library, so that loading does not count against the first sample's time limit."""
    score("", r"\boxed{\frac{1}{2}}", "0.5", {})
