"""Host: the recipes that come with the package.

dapo-jax configs           lists them by the hardware that they need
dapo-jax configs NAME      prints the file of one, to read or to copy: dapo-jax configs quickstart > mine.py
"""

import argparse
from collections.abc import Mapping, Sequence

from dapo_jax.command.command_line import refusals
from dapo_jax.config.recipes import closest, hardware, recipe_file, recipes
from dapo_jax.errors import InputError, say


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dapo-jax configs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="the recipe to print")
    given = parser.parse_args(arguments)
    with refusals(["configs"]):
        say(text_of(given.name) if given.name else table(recipes(), hardware()))


def table(found: Mapping[str, str], groups: Mapping[str, Sequence[str]]) -> str:
    """A line for each recipe, its name and what it does, below the hardware that it needs."""
    width = max(map(len, found))
    blocks = [
        [f"{place}:", *(f"  {name:<{width}}  {found[name]}" for name in names)] for place, names in groups.items()
    ]
    return "\n".join(line for block in blocks for line in block)


def text_of(name: str) -> str:
    """The file of a recipe."""
    file = recipe_file(name)
    if file is None:
        raise InputError(f"there is no recipe {name}{closest(name)}: `dapo-jax configs` lists them")
    return file.read_text(encoding="utf-8").rstrip()


if __name__ == "__main__":
    main()
