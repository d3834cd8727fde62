"""Host: verifiers by name, by data source, or by the path of your own function.

A verifier is `score(data_source, solution, ground_truth, extra_info) -> float | dict`; `own_function` makes one of a
function of another form. The dict has "score", and optionally "acc" (1 or 0, which the group filter compares), "pred"
(the answer as text) and other named numbers.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dapo_jax.data import reasoning_gym
from dapo_jax.errors import InputError
from dapo_jax.rewards import math_dapo, math_verifier, numerals, response_format
from dapo_jax.rewards.own_function import called_with_four, load_function
from dapo_jax.rewards.weighted import JUDGE, Part, is_weighted, parse_parts, weighted

Verifier = Callable[[str, str, str, dict[str, Any]], Any]

# As in verl, except for the three MATH sets: verl compares normalised strings, we compare mathematically.
_BY_DATA_SOURCE = {
    "arithmetic": "arithmetic",
    "openai/gsm8k": "gsm8k",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "amc23": "math_dapo",
    "mawps": "arithmetic",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
    "HuggingFaceH4/MATH-500": "math_verify",
}


def verifier_for(data_source: str) -> str:
    """The name of the verifier that `auto` uses for a data source. InputError if there is none."""
    if data_source.startswith("aime"):
        return "math_dapo"
    if data_source.startswith("reasoning_gym/"):
        return "reasoning_gym"
    if data_source not in _BY_DATA_SOURCE:
        raise InputError(
            f"data_source={data_source!r} has no verifier: it must start with 'aime' or be one of "
            f"{', '.join(_BY_DATA_SOURCE)}. Correct data_source in the data, or set reward.function to a verifier's "
            "name or to the path of your own function"
        )
    return _BY_DATA_SOURCE[data_source]


def auto(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """The verdict of the data source's verifier."""
    return VERIFIERS[verifier_for(data_source)].score(data_source, solution, ground_truth, extra_info)


def none(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """No verdict, for runs that use only a reward model."""
    return {"score": 0.0}


def judge(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """InputError: the trainer's process asks the judge (judge.py)."""
    raise InputError("a judge runs in the trainer, not in a verifier process: use it as reward.function")


@dataclass(frozen=True)
class BuiltIn:
    """One verifier of this package."""

    score: Verifier
    forms: tuple[str, ...] = ()  # responses that state the ground truth as it is read; () = not checked at a start
    wrong: float = 0.0  # the lowest score
    numbers: tuple[str, ...] = ("acc", "score")  # what it returns, besides pred


_MATH = ("Answer: {}", r"\boxed{{{}}}")
NO_OWN: Mapping[str, Callable[..., Any]] = MappingProxyType({})
VERIFIERS = {
    "none": BuiltIn(none, numbers=("score",)),
    "arithmetic": BuiltIn(numerals.arithmetic, ("{}",)),
    "math_dapo": BuiltIn(math_dapo.score, _MATH, wrong=-1.0),
    "math_dapo_lenient": BuiltIn(math_dapo.score_lenient, _MATH, wrong=-1.0),
    "gsm8k": BuiltIn(numerals.gsm8k, ("#### {}",)),
    "gsm8k_flexible": BuiltIn(numerals.gsm8k_flexible, ("{}",)),
    "math_verify": BuiltIn(math_verifier.score, (r"\boxed{{{}}}",)),
    "reasoning_gym": BuiltIn(reasoning_gym.score),  # generates its own ground truths
    "format": BuiltIn(response_format.score),
    JUDGE: BuiltIn(judge),
    "auto": BuiltIn(auto),  # each problem's verifier is checked
}


def load_verifier(name: str, own: Mapping[str, Callable[..., Any]] = NO_OWN, *, pattern: str = "") -> Verifier:
    """The verifier with this name, path (`own_function`) or text of several (`weighted`), with its library loaded.

    Args:
        own: functions of the session that started this process, by name (`session`).
        pattern: of the verifier `format`.

    Raises:
        InputError: it does not exist, its module does not load, or it has none of the forms of `own_function`.
        MemoryError: its module needs more memory than the process may use.
    """
    if is_weighted(name):
        parts = parse_parts(name)
        return weighted(parts, [_load_part(part, own, pattern) for part in parts])
    if name == "format":
        return response_format.matching(pattern)
    if name in ("auto", "math_verify"):
        math_verifier.load()
    if name == "reasoning_gym":
        reasoning_gym.load_library()  # which does not count against the first sample's time limit
    if name in VERIFIERS:
        return VERIFIERS[name].score
    if name in own:
        return called_with_four(f"reward.function={name!r}", own[name])
    if "." not in name:
        raise InputError(
            f"reward.function={name!r} must be one of {', '.join(VERIFIERS)}, or the path of your own function, "
            "package.module.function or FILE.py:function: correct the name"
        )
    return load_function(name)


def _load_part(part: Part, own: Mapping[str, Callable[..., Any]], pattern: str) -> Verifier:
    try:
        return load_verifier(part.function, own, pattern=pattern)
    except InputError as error:
        raise InputError(f"reward.functions, {part.name!r}: {error}") from error


def wrong_score(name: str, data_source: str) -> float:
    """The score of a sample on which the verifier failed: the verifier's lowest score, 0 for your own function.

    For several functions it is the weighted sum of these.
    """
    if is_weighted(name):
        return sum(part.weight * wrong_score(part.function, data_source) for part in parse_parts(name))
    if name == "auto":
        with suppress(ValueError):
            name = verifier_for(data_source)
    return VERIFIERS[name].wrong if name in VERIFIERS else 0.0
