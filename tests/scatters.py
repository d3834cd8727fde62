"""The scatters of a lowered program."""

import re


def scatters(text: str) -> list[str]:
    """Each scatter of a lowered program, with what it does where two updates meet."""
    return re.findall(r'"stablehlo\.scatter".*?stablehlo\.return.*?$', text, flags=re.DOTALL | re.MULTILINE)


def unordered(text: str) -> list[str]:
    """The first lines of those whose updates may meet, as far as a compiler knows, and whose result then has an order.

    A GPU has atomics for these: slow in 16 bits, and in another order each time. The order matters to sums, which it
    rounds differently, but not to whole numbers, nor to the highest and lowest.
    """
    found = []
    for scatter in scatters(text):
        first, *body = scatter.splitlines()
        any_order = re.search(r"stablehlo\.(maximum|minimum)|stablehlo\.add .*tensor<u?i\d+>", "".join(body))
        if "unique_indices = true" not in first and not any_order:
            found.append(first.strip())
    return found
