"""Writes docs/configuration.md: every option with its type, default and meaning, from dapo_jax/config/sections.py.

    python scripts/docs/write_configuration_doc.py

A test fails if the page is out of date.
"""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo_jax.command.help import field_comments, literal
from dapo_jax.command.validation import BOUNDS
from dapo_jax.config.sections import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import write_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Written by `scripts/docs/write_configuration_doc.py` from
[`dapo_jax/config/sections.py`](../dapo_jax/config/sections.py): do not edit.

A config file starts from `default_config()` and states what differs, or is a YAML or JSON object of sections that does
(`actor: {optim: {lr: 2e-6}}`). On the command line an option is `--config.actor.optim.lr=2e-6`, a tuple
`"--config.trainer.profile_steps=(10,11)"`. `null` means "not given". A misspelt option is refused with a suggestion,
and all problems of a config are reported together before a device is touched.

An option that the rest of the config leaves unread is refused too, with the setting that would read it
(`READS` in [`sections.py`](../dapo_jax/config/sections.py) lists them). A recipe can still be varied by
one option: what the command line switches off, such as `leftover` by
`--config.algorithm.filter_groups.enable=False`, returns to its default, and a warning names it.
"""


def document() -> str:
    """The whole page."""
    comments = field_comments()
    lines = [line for path, section in sections_of(Config(), "") for line in _section(path, section, comments)]
    return "\n".join([HEAD, *lines]).rstrip() + "\n"


def sections_of(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each section with its dotted path, the outer before the inner."""
    yield path, section
    for name in typing.get_type_hints(type(section)):
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            yield from sections_of(value, f"{path}.{name}".lstrip("."))


def _section(path: str, section: Any, comments: dict[tuple[str, str], str]) -> list[str]:
    kinds = typing.get_type_hints(type(section))
    options = [name for name in kinds if not dataclasses.is_dataclass(getattr(section, name))]
    if not options:
        return []
    lines = [f"## `{path or 'config'}`", ""]
    about = inspect.getdoc(section) or ""
    if not about.startswith(f"{type(section).__name__}("):  # dataclass's own docstring
        lines += [about, ""]
    lines += ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name in options:
        kind = _type(kinds[name])
        option, default = f"{path}.{name}".lstrip("."), literal(getattr(section, name))
        rule = "".join(f", {bound.rule}" for key, bound in BOUNDS if key == option and not bound.choices)
        cells = (f"`{option}`", f"`{kind}`{rule}", f"`{default}`", comments[type(section).__name__, name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _type(kind: Any) -> str:
    """A type as source code."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " | ".join(map(_type, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return "str"
    if kind is types.NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) else str(kind)


if __name__ == "__main__":
    write_page(PAGE, document, __doc__)
