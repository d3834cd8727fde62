"""Host: how long responses and prompts are, for the preflight's expected time.

A distribution is given by its quantiles. `sample` returns exactly these quantiles; only which of them belong to one
prompt is drawn, with a fixed seed, so that a share `within` of the variance lies within a prompt's responses.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from dapo_jax.config.sections import DataConfig
from dapo_jax.errors import InputError
from dapo_jax.monitor.records import METRICS, read_metrics
from dapo_jax.monitor.statistics import LENGTH_PERCENTILES

Quantiles = Callable[[np.ndarray], np.ndarray]  # shares [N] of a distribution, ascending in (0, 1), to tokens [N]
LAST_STEPS = 10  # of a run, whose quantiles are averaged
COUNTS = {"response": "experience_pipeline/experience_count", "prompt": "sample/task_count"}
WITHIN = "response_length/within_prompts"
DEFAULTS = {"within": 0.5, "prompt_median": 200.0, "prompt_sigma": 0.5}
NAMES = ("median", "sigma", "clip", *DEFAULTS)
FORM = "lognormal:median=3000,sigma=1[,clip=20480,within=0.5,prompt_median=200,prompt_sigma=0.5]"


@dataclass(frozen=True)
class Lengths:
    """Distributions of the tokens of responses and of prompts."""

    text: str  # as in a report
    response: Quantiles
    prompt: Quantiles
    within: float  # share of the variance (of logarithms, if lognormal) within a prompt's responses

    def sample(self, num_prompts: int, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of responses [Q, G] and of prompts [Q], int64, at least 1; the same in every call."""
        random = np.random.default_rng(0)
        of_prompt = random.standard_normal((num_prompts, 1))
        own = random.standard_normal((num_prompts, num_samples))
        place = math.sqrt(1 - self.within) * of_prompt + math.sqrt(self.within) * own
        responses = _in_order(self.response, place.ravel()).reshape(place.shape)
        return responses, _in_order(self.prompt, random.standard_normal(num_prompts))


def all_longest(data: DataConfig) -> Lengths:
    """The longest case: each prompt and each response has as many tokens as the config allows."""
    response, prompt = data.max_response_length, data.max_prompt_length
    text = f"{response} tokens each"
    return Lengths(text, lambda shares: np.full(len(shares), response), lambda shares: np.full(len(shares), prompt), 1)


def parse_lengths(text: str, data: DataConfig) -> Lengths:
    """The distribution that `--lengths` names, as `FORM` or as the metrics.jsonl of a run.

    Raises:
        InputError: the text has neither form, a value is out of range, or the file lacks the metrics.
    """
    if text.startswith("lognormal:"):
        return _lognormal(text, data)
    if Path(text).name == METRICS:
        return _recorded(text, data)
    raise InputError(f"--lengths={text} must be {FORM}, or the path of a run's metrics.jsonl")


def _in_order(quantiles: Quantiles, place: np.ndarray) -> np.ndarray:
    """The N quantiles in the order of `place` [N]."""
    lengths = np.empty(len(place), np.int64)
    shares = (np.arange(len(place)) + 0.5) / len(place)
    lengths[np.argsort(place, kind="stable")] = np.maximum(np.rint(quantiles(shares)), 1)
    return lengths


def _lognormal(text: str, data: DataConfig) -> Lengths:
    values = _numbers(text, data)
    within = values["within"]
    response = _lognormal_quantiles(values["median"], values["sigma"], values["clip"])
    prompt = _lognormal_quantiles(values["prompt_median"], values["prompt_sigma"], data.max_prompt_length)
    named = ",".join(f"{name}={values[name]:g}" for name in NAMES)
    return Lengths(f"lognormal:{named}", response, prompt, within)


def _lognormal_quantiles(median: float, sigma: float, most: float) -> Quantiles:
    return lambda shares: np.minimum(median * np.exp(sigma * _normal_scores(shares)), most)


def _numbers(text: str, data: DataConfig) -> dict[str, float]:
    """The values of a lognormal by name, checked."""
    longest, longest_prompt = data.max_response_length, data.max_prompt_length
    values = {"clip": float(longest), **DEFAULTS}
    values["prompt_median"] = min(values["prompt_median"], longest_prompt)
    for part in text.removeprefix("lognormal:").split(","):
        name, _, number = part.partition("=")
        if name not in NAMES:
            raise InputError(f"--lengths={text}: {part!r} must be NAME=NUMBER with a name of {', '.join(NAMES)}")
        try:
            values[name] = float(number)
        except ValueError:
            raise InputError(f"--lengths={text}: {part!r} must be a number: write it like {FORM}") from None
    for name in ("median", "sigma"):
        if name not in values:
            raise InputError(f"--lengths={text} must have a {name}: write it like {FORM}")
    bounds = {
        "median": (1, math.inf, "give it in tokens"),
        "clip": (1, longest, "leave it out, or raise data.max_response_length"),
        "within": (0, 1, "give a share of the variance"),
        "prompt_median": (1, longest_prompt, "lower it, or raise data.max_prompt_length"),
        **dict.fromkeys(("sigma", "prompt_sigma"), (0, 10, "give the standard deviation of the logarithm")),
    }
    for name, (low, high, fix) in bounds.items():
        if not (low <= values[name] <= high and math.isfinite(values[name])):
            rule = f"between {low} and {high}" if math.isfinite(high) else f"at least {low}"
            raise InputError(f"--lengths={text}: {name}={values[name]:g} must be {rule}: {fix}")
    return values


def _recorded(text: str, data: DataConfig) -> Lengths:
    """The lengths of the groups that a run trained on, from what it recorded of them."""
    path = Path(text)
    if not path.exists():
        raise InputError(f"--lengths={text} does not exist: give the metrics.jsonl of a run")
    needed = [*_metrics("response").values(), *_metrics("prompt").values(), *COUNTS.values(), WITHIN]
    rows = [row for row in read_metrics(path.parent) if all(row.get(name) is not None for name in needed)]
    if not rows:
        missing = needed[1]
        raise InputError(
            f"--lengths={text} has no row with {missing} and the other lengths: give the file of a run "
            f"that trained with this version, or {FORM}"
        )
    rows = rows[-LAST_STEPS:]
    seen = {name: float(np.mean([row[name] for row in rows])) for name in needed}
    return Lengths(
        f"{text}, mean of the last {len(rows)} steps",
        _recorded_quantiles(seen, "response", data.max_response_length),
        _recorded_quantiles(seen, "prompt", data.max_prompt_length),
        seen[WITHIN],
    )


def _metrics(name: str) -> dict[str, str]:
    """The metrics that a distribution is read from, by what they say of it."""
    parts = ("min", *(f"p{percent}" for percent in LENGTH_PERCENTILES), "max", "clip_ratio")
    return {part: f"{name}_length/{part}" for part in parts}


def _recorded_quantiles(seen: Mapping[str, float], name: str, most: int) -> Quantiles:
    """Between the recorded quantiles, the logarithm of the length is linear in the normal score of the share.

    So a lognormal distribution is found exactly.

    Args:
        seen: the recorded metrics.
        most: tokens that the config allows.
    """
    metrics, end = _metrics(name), 0.5 / max(seen[COUNTS[name]], 2)
    *lengths, cut_off = (seen[metric] for metric in metrics.values())
    knots = list(zip([end, *(percent / 100 for percent in LENGTH_PERCENTILES), 1 - end], lengths, strict=True))
    if cut_off > 0:
        knots.append((min(max(1 - cut_off, end), 1 - end), seen[metrics["max"]]))
    shares, tokens = zip(*sorted(knots), strict=True)
    # averages over steps, of which some have longer responses, need not ascend
    scores, logs = _normal_scores(shares), np.log(np.maximum.accumulate(np.maximum(tokens, 1)))
    return lambda wanted: np.minimum(np.exp(np.interp(_normal_scores(wanted), scores, logs)), most)


def _normal_scores(shares: Iterable[float]) -> np.ndarray:
    """The quantiles of the standard normal distribution."""
    return np.array([NormalDist().inv_cdf(share) for share in shares])
