"""Host: the costs of programs that are not compiled, from those of a few of the same family.

The engine has a program for each number of rows and each window of the cache. They differ only in how much there is of
the same work, so their costs are linear in a few features (`Program.features`). As many programs as there are
independent features are compiled, chosen as far apart as possible; the others are linear combinations of them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.preflight.compiled import TEMPORARIES, Compiled
from dapo_jax.preflight.hlo_costs import Collective, Costs
from dapo_jax.preflight.programs import KINDS, Program

SMALLEST = 1e-3  # part of a program's features, of the largest, that the chosen ones need not explain


def to_compile(programs: Sequence[Program]) -> list[Program]:
    """The programs from which the costs of the others follow: of each family a few, the one with the most cache too."""
    chosen: list[Program] = []
    for family in _families(programs):
        most = int(np.argmax([sum(program.inside.values()) for program in family]))
        chosen += [family[index] for index in _far_apart(_features(family), first=most)]
    return [program for program in programs if program in chosen]


def complete(programs: Sequence[Program], compiled: Sequence[Compiled]) -> list[Compiled]:
    """All programs in their order, if at least those of `to_compile` are compiled."""
    found = {one.program.key: one for one in compiled}
    for family in _families(programs):
        features = _features(family)
        known = [index for index, program in enumerate(family) if program.key in found]
        measured = [found[family[index].key] for index in known]
        for program, own in zip(family, features, strict=True):
            if program.key not in found:
                weights, *_ = np.linalg.lstsq(features[known].T, own)
                found[program.key] = _combined(program, measured, weights)
    return [found[program.key] for program in programs]


def _families(programs: Sequence[Program]) -> list[list[Program]]:
    families: dict[Any, list[Program]] = defaultdict(list)
    for program in programs:
        families[program.family or program.key].append(program)
    return list(families.values())


def _features(family: Sequence[Program]) -> np.ndarray:
    """[N, F], the largest of each feature 1."""
    features = np.array([program.features or (1.0,) for program in family])
    return features / features.max(axis=0)


def _far_apart(features: np.ndarray, *, first: int) -> list[int]:
    """Programs whose features span those of all: in each turn, the one that the chosen explain least.

    This is a QR decomposition with pivoting.

    Args:
        features: [N, F].
        first: the program to begin with.
    """
    left, chosen = features, [first]
    smallest = SMALLEST * np.linalg.norm(left, axis=1).max()
    while len(chosen) <= features.shape[1]:
        direction = left[chosen[-1]] / np.linalg.norm(left[chosen[-1]])
        left = left - np.outer(left @ direction, direction)
        sizes = np.linalg.norm(left, axis=1)
        if sizes.max() <= smallest:
            break
        chosen.append(int(sizes.argmax()))
    return chosen


def _combined(program: Program, compiled: Sequence[Compiled], weights: np.ndarray) -> Compiled:
    """`program` with the weighted costs of the compiled ones."""
    sizes: Mapping[str, float] = {kind: program.inside.get(kind, 0.0) + program.beside.get(kind, 0.0) for kind in KINDS}
    temporaries = max(float(weights @ [one.bytes[TEMPORARIES] for one in compiled]), 0.0)
    costs = [one.costs for one in compiled if one.costs is not None]
    combined = _weighted(costs, weights) if len(costs) == len(compiled) else None
    return Compiled(program, {**sizes, TEMPORARIES: temporaries}, combined, None)


def _weighted(costs: Sequence[Costs], weights: np.ndarray) -> Costs:
    """The weighted sum of costs; what is below zero counts as zero."""
    sums: dict[tuple[str, int, int], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for one, weight in zip(costs, weights, strict=True):
        for part in one.collectives:
            sums[part.kind, part.group, part.per_host] += weight * np.array([part.count, part.bytes])
    return Costs(
        flops=max(float(weights @ [one.flops for one in costs]), 0.0),
        bytes=max(float(weights @ [one.bytes for one in costs]), 0.0),
        collectives=tuple(Collective(*kind, *map(float, found)) for kind, found in sums.items() if found.min() > 0),
        unknown=tuple(sorted({note for one in costs for note in one.unknown})),
    )
