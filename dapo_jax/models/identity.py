"""Host: what a model computes with, as plain data that a checkpoint keeps: another model is not taken for it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dapo_jax.models.architecture import Architecture

WEIGHTS = "weights"
Identity = Mapping[str, Any]  # fields of the architecture; the digest of the weights, if a run does not train them


def identity(arch: Architecture, weights: str = "", **others: Any) -> Identity:
    """What a model of this architecture computes with.

    Args:
        weights: their digest; "" if they are trained.
        others: further numbers that its outputs depend on, by the name of their option.
    """
    fields = json.loads(json.dumps(dataclasses.asdict(arch)))
    del fields["initializer_range"]
    return {**fields, **({WEIGHTS: weights} if weights else {}), **others}


def differences(saved: Identity, found: Identity) -> list[str]:
    """What differs, in words. What only one of the two says is not compared: it may be of another version."""
    return [
        "other weights" if name == WEIGHTS else f"{name}={found[name]} (not {saved[name]})"
        for name in saved
        if name in found and not _agree(saved[name], found[name])
    ]


def _agree(saved: Any, found: Any) -> bool:
    """Whether two parts of an identity are equal, in what both of them say."""
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        return all(_agree(saved[key], found[key]) for key in saved.keys() & found.keys())
    if isinstance(saved, list) and isinstance(found, list):
        return len(saved) == len(found) and all(map(_agree, saved, found))
    return bool(saved == found)
