"""Host: the recipes that come with the package, and the launchers, scripts that start a run on a cluster.

dapo-jax configs           lists the recipes by the hardware that they need, then the launchers
dapo-jax configs NAME      prints the file of one, to read or to copy: dapo-jax configs quickstart > mine.py
"""

import re
from collections.abc import Sequence

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.config.files import LAUNCHERS, closest, docstrings, recipe_file
from dapo_jax.errors import InputError, say


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax configs", __doc__)
    parser.add_argument("name", nargs="?", help="the recipe or launcher to print")
    given = parser.parse_args(arguments)
    with refusals(["configs"]):
        say(text_of(given.name) if given.name else listing())


def listing() -> str:
    """A line for each name and what it does, below the hardware that it needs; the smallest first, launchers last."""
    groups: dict[str, dict[str, str]] = {}
    for name, text in docstrings().items():
        place = re.search(r"Hardware: (.*?)(?: such as| with| and| \(|[;,.]|$)", text)
        groups.setdefault(place[1] if place else "anything", {})[name] = text.partition("\n")[0]
    groups = dict(sorted(groups.items(), key=lambda group: _size(group[0]))) | {"launchers": launchers()}
    width = max(len(name) for group in groups.values() for name in group)
    lines = []
    for place, group in groups.items():
        lines += [f"{place}:", *(f"  {name:<{width}}  {does}" for name, does in group.items())]
    return "\n".join(lines)


def _size(place: str) -> tuple[int, int]:
    """Orders hardware: any, CPUs, one device, then by the number of devices and their memory."""
    devices, memory = re.match(r"(\d+) devices", place), re.search(r"(\d+) GB", place)
    number = int(devices[1]) if devices else 1 if place.startswith("one") else 0
    return (number, int(memory[1]) if memory else int(place != "anything"))


def launchers() -> dict[str, str]:
    """Each launcher's file, with the line that says what it does."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(LAUNCHERS.iterdir()) if file.is_file()}
    return {name: re.findall(r"^# (.*)$", text, re.MULTILINE)[0] for name, text in texts.items()}


def text_of(name: str) -> str:
    """The file of a recipe or a launcher."""
    file = LAUNCHERS / name if name in launchers() else recipe_file(name)
    if file is None:
        raise InputError(f"there is no recipe or launcher {name}{closest(name)}: `dapo-jax configs` lists them")
    return file.read_text(encoding="utf-8").rstrip()
