"""Host: generated sums of two and three numbers, to be worked out step by step: `dapo-jax data sums`.

The prompt shows `8 + 5 + 6 = ?` with its answer, `8 + 5 = 13, 13 + 6 = 19`, and asks for another sum. Longer sums are
harder and take longer answers, so a small model gets some always right and some never, and hits a limit of response
length. All orders of the same numbers are in the same split. The verifier is `arithmetic`: the last number counts.
`extra_info.num_terms` is the difficulty.
"""

import itertools

import numpy as np

from dapo_jax.data.published import Row, make_row
from dapo_jax.errors import InputError

LOW, HIGH = 1, 20
NUM_TERMS = (2, 3)
EXAMPLE = (8, 5, 6)
Terms = tuple[int, ...]


def worked_out(terms: Terms) -> str:
    """(8, 5, 6) -> "8 + 5 = 13, 13 + 6 = 19"."""
    totals = list(itertools.accumulate(terms))
    return ", ".join(f"{total} + {term} = {total + term}" for total, term in zip(totals, terms[1:], strict=False))


def sum_row(terms: Terms, split: str) -> Row:
    """A row of verl's schema with the worked example before the question."""
    row = make_row(
        _question(terms),
        data_source="arithmetic",
        ground_truth=str(sum(terms)),
        extra_info={"split": split, "num_terms": len(terms)},
    )
    example = [
        {"role": "user", "content": _question(EXAMPLE)},
        {"role": "assistant", "content": worked_out(EXAMPLE)},
    ]
    return row | {"prompt": example + row["prompt"]}


def _question(terms: Terms) -> str:
    return " + ".join(map(str, terms)) + " = ?"


def sums(num_train: int, num_heldout: int, seed: int) -> dict[str, list[Terms]]:
    """Distinct problems of each split, the same number of each length, in turn.

    Args:
        num_train, num_heldout: problems in all, multiples of the number of lengths.

    Raises:
        InputError: a length has fewer problems than are asked for, or a number is no such multiple.
    """
    wanted = {"heldout": num_heldout, "train": num_train}
    for split, number in wanted.items():
        if number < 1 or number % len(NUM_TERMS):
            raise InputError(f"{number} {split} problems are not a multiple of {len(NUM_TERMS)}: ask for more or fewer")
    by_length: list[dict[str, list[Terms]]] = []
    for num_terms in NUM_TERMS:
        dice = np.random.default_rng([seed, num_terms])
        families = set(itertools.combinations_with_replacement(range(LOW, HIGH + 1), num_terms))
        families = sorted(families - {tuple(sorted(EXAMPLE))})
        families = [families[index] for index in dice.permutation(len(families))]
        num_families = num_heldout // len(NUM_TERMS)  # one order of each is held out
        heldout = [tuple(dice.permutation(family).tolist()) for family in families[:num_families]]
        orders = [order for family in families[num_families:] for order in sorted(set(itertools.permutations(family)))]
        num_orders = num_train // len(NUM_TERMS)
        if len(heldout) < num_families or len(orders) < num_orders:
            raise InputError(f"there are too few sums of {num_terms} numbers: ask for fewer problems")
        train = [orders[index] for index in dice.permutation(len(orders))[:num_orders]]
        by_length.append({"heldout": heldout, "train": train})
    return {
        split: list(itertools.chain.from_iterable(zip(*(found[split] for found in by_length), strict=True)))
        for split in wanted
    }
