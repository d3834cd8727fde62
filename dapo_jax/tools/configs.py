"""Host: the recipes that come with the package, and the launchers, scripts that start a run on a cluster.

dapo-jax configs           lists the recipes by the hardware that they need, then the launchers
dapo-jax configs NAME      prints the file of one, to read or to copy: dapo-jax configs quickstart > mine.py
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence

from dapo_jax.command.command_line import refusals
from dapo_jax.config.recipes import LAUNCHERS, closest, hardware, launchers, recipe_file, recipes
from dapo_jax.errors import InputError, say


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dapo-jax configs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="the recipe or launcher to print")
    given = parser.parse_args(arguments)
    with refusals(["configs"]):
        scripts = {"launchers": launchers()}
        say(text_of(given.name) if given.name else table({**recipes(), **scripts["launchers"]}, hardware() | scripts))


def table(found: Mapping[str, str], groups: Mapping[str, Iterable[str]]) -> str:
    """A line for each name and what it does, below the hardware that it needs or what it is."""
    width = max(map(len, found))
    blocks = [
        [f"{place}:", *(f"  {name:<{width}}  {found[name]}" for name in names)] for place, names in groups.items()
    ]
    return "\n".join(line for block in blocks for line in block)


def text_of(name: str) -> str:
    """The file of a recipe or a launcher."""
    file = LAUNCHERS / name if name in launchers() else recipe_file(name)
    if file is None:
        raise InputError(f"there is no recipe or launcher {name}{closest(name)}: `dapo-jax configs` lists them")
    return file.read_text(encoding="utf-8").rstrip()


if __name__ == "__main__":
    main()
