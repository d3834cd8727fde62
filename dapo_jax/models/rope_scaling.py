"""Host: rotary embeddings that are scaled for long contexts: their frequencies, and Hugging Face's spelling of them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import numpy as np

from dapo_jax.data.model_files import is_positive_number


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies [H // 2], scaled."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 (long wavelengths are stretched by `factor`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies [H // 2], scaled."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        smooth = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (smooth + (1 - smooth) / self.factor)


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv:2309.00071): low frequencies are divided by `factor`, high ones stay, cosine and sine grow."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # of cosine and sine
    beta_fast: float = 32.0  # turns in the original length from which a frequency stays
    beta_slow: float = 1.0  # turns up to which it is divided
    truncate: bool = True  # the ramp between them begins and ends at whole dimensions

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies [H // 2], scaled (equation 23)."""
        pairs = len(frequencies)
        log_theta = -math.log(frequencies[1]) * pairs if pairs > 1 else 1.0

        def pair_with(turns: float) -> float:
            length = self.original_max_position_embeddings
            return pairs * math.log(length / (turns * 2 * math.pi)) / log_theta

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0.0, 1.0)
        return frequencies * (1 - ramp + ramp / self.factor)


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling
SCALINGS: dict[str, type[RopeScaling]] = {  # by Hugging Face's rope_type
    "linear": LinearRopeScaling,
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
}
ORDERED = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}  # the lesser first


def hf_scaling(scaling: RopeScaling, written: Collection[str] = ()) -> dict[str, Any]:
    """`rope_scaling` of a config.json, without what is understood and not among the keys `written`."""
    values = {"rope_type": next(name for name, kind in SCALINGS.items() if type(scaling) is kind), **asdict(scaling)}
    for name in ("attention_factor", "beta_fast", "beta_slow", "truncate"):
        rest = {key: value for key, value in values.items() if key != name}
        values = rest if name not in written and scaling_from_hf(rest, None) == scaling else values
    return values


def scaling_from_hf(rope: Mapping[str, Any], max_position_embeddings: Any) -> RopeScaling | None:
    """The scaling of a `rope_scaling` or `rope_parameters` without problems; None if there is none.

    Args:
        max_position_embeddings: of the config: the original length of YaRN if `rope` does not name it.
    """
    kind = SCALINGS.get(rope_type(rope))
    if kind is None:
        return None
    values = {field.name: rope[field.name] for field in fields(kind) if rope.get(field.name) is not None}
    if kind is YarnRopeScaling:
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
        values.setdefault("attention_factor", _attention_factor(rope))
    return kind(**values)


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """YaRN's, from the factor (equation 22) or from DeepSeek's mscale and mscale_all_dim."""

    def grown(strength: float) -> float:
        return 0.1 * strength * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def rope_problems(rope: Mapping[str, Any], max_position_embeddings: Any, *, partial: bool = False) -> list[str]:
    """What is wrong with, or not supported of, a `rope_scaling` or `rope_parameters`.

    Args:
        partial: whether a part of a head's numbers may carry positions.
    """
    name = rope_type(rope)
    if name != "default" and name not in SCALINGS:
        return [f"rope_type={name!r}: only {sorted(('default', *SCALINGS))} are supported"]
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not (partial and is_positive_number(share) and share < 1):
        rule = "must be above 0 and at most 1" if partial else "only 1.0 is supported in this family"
        return [f"partial_rotary_factor={share}: {rule}"]
    theta = rope.get("rope_theta", 1.0)
    problems = [] if is_positive_number(theta) else [f"rope_theta={theta!r}: must be a positive number"]
    given = dict(rope)
    if name == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            if (scale := rope.get(key)) and not is_positive_number(scale):
                problems.append(f"{key}={scale!r} of its rope scaling: must be a positive number")
        given.setdefault("attention_factor", None)
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    for field in fields(SCALINGS[name]) if name in SCALINGS else ():
        value = given.get(field.name)
        if field.name == "truncate":
            if not isinstance(value, bool | None):
                problems.append(f"truncate={value!r} of its rope scaling: must be true or false")
        elif field.name not in given and field.default is MISSING:
            problems.append(f"no {field.name} for its {name} rope scaling")
        elif field.name in given and not is_positive_number(value) and not (value is None and name == "yarn"):
            problems.append(f"{field.name}={value!r} of its rope scaling: must be a positive number")
    if name == "yarn" and given["original_max_position_embeddings"] is None:
        problems.append("no original_max_position_embeddings for its yarn rope scaling")
    if name in ORDERED and not problems:
        low, high = ((key, given.get(key) or getattr(SCALINGS[name], key)) for key in ORDERED[name])
        if low[1] >= high[1]:
            problems.append(f"{low[0]}={low[1]} of its rope scaling: must be below {high[0]}={high[1]}")
    return problems


def rope_type(rope: Mapping[str, Any]) -> str:
    """Hugging Face's name of the scaling of a `rope_scaling` or `rope_parameters`; "default" is none."""
    return rope.get("rope_type", rope.get("type", "default"))
