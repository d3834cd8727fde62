"""Host: the recipes that come with the package, named by their file without .py, and the launchers."""

import ast
import re
from pathlib import Path

from dapo_jax.errors import did_you_mean

_PACKAGE, _CHECKOUT = Path(__file__).parents[1:3]  # setup.py puts configs/ and scripts/launch/ into the package
FOLDER = found if (found := _PACKAGE / "recipes").is_dir() else _CHECKOUT / "configs"
LAUNCHERS = found if (found := _PACKAGE / "launchers").is_dir() else _CHECKOUT / "scripts" / "launch"
SHAPES = FOLDER / "shapes"  # config.json of well-known models, which the preflight reads


def recipes() -> dict[str, str]:
    """Each recipe's name, with the first line of its docstring."""
    files = {file.stem: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.py"))}
    return {name: (ast.get_docstring(file) or "").partition("\n")[0] for name, file in files.items()}


def hardware() -> dict[str, list[str]]:
    """The names of the recipes for each hardware that their docstrings begin to describe, the smallest first."""
    found: dict[str, list[str]] = {}
    for name in recipes():
        text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
        place = re.search(r"Hardware: (.*?)(?: such as| with| and| \(|[;,.]|$)", text)
        found.setdefault(place[1] if place else "anything", []).append(name)
    return dict(sorted(found.items(), key=lambda item: _size(item[0])))


def _size(place: str) -> tuple[int, int]:
    """Orders hardware: any, CPUs, one device, then by the number of devices and their memory."""
    devices, memory = re.match(r"(\d+) devices", place), re.search(r"(\d+) GB", place)
    number = int(devices[1]) if devices else 1 if place.startswith("one") else 0
    return (number, int(memory[1]) if memory else int(place != "anything"))


def launchers() -> dict[str, str]:
    """Each launcher's file, with the line that says what it does."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(LAUNCHERS.iterdir()) if file.is_file()}
    return {name: re.findall(r"^# (.*)$", text, re.MULTILINE)[0] for name, text in texts.items()}


def recipe_file(name: str) -> Path | None:
    """The file of the recipe of that name; None if there is none."""
    return FOLDER / f"{name}.py" if name in {file.stem for file in FOLDER.glob("*.py")} else None


def closest(name: str) -> str:
    """A question in brackets that names the recipes with a similar name; "" if there are none."""
    meant = did_you_mean(name, (file.stem for file in FOLDER.glob("*.py")))
    return f" ({meant})" if meant else ""
