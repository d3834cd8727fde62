"""Host: numbers to suggest in a message when one number does not divide another."""

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in ascending order; only 1 from a million on."""
    return [one for one in range(1, number + 1) if number % one == 0] if number < 10**6 else [1]


def nearest(numbers: Iterable[int], wanted: int, *, most: int = 3) -> str:
    """The numbers closest to `wanted`, at most `most` of them, as in "8, 12 or 24"; "" if there are none."""
    chosen = sorted(sorted(set(numbers), key=lambda one: (abs(one - wanted), one))[:most])
    if not chosen:
        return ""
    *first, last = map(str, chosen)
    return f"{', '.join(first)} or {last}" if first else last
