"""What validation says of a config that differs from a valid one.

`python tests/config_problems.py` writes command/messages.yaml again: look at the difference before you commit it.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dapo_jax.command.option_uses import READS
from dapo_jax.command.validation import BOUNDS, CHOICES, validate
from dapo_jax.command.warnings import warnings
from dapo_jax.config.aliases import ALIASES
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, MAY_BE_INFINITE, PATHS, flat, resolve_aliases, with_values
from dapo_jax.errors import InputError

MESSAGES = Path(__file__).parent / "command" / "messages.yaml"
HEAD = """\
# To add a case, write its options below. `python tests/config_problems.py` renews what is said of the cases.
# options: the type, the bounds and the readers of each option (NAMES: those of a table of functions).
# cases: changes of a config that is valid (model.path: random, data.task: arithmetic), and what is said of it.
"""
VERDICTS = ("refused", "warned", "accepted", "sets")
VALID = with_values(Config(), {"model.path": "random", "data.task": "arithmetic"})
WRONG = b""  # of no option's type
TABLES = yaml.safe_load(MESSAGES.with_name("option_values.yaml").read_text())
VALUES, COMPANIONS = TABLES["values"], TABLES["companions"]
SETTINGS = {setting: (pair.get("unread", {}), pair.get("read", {})) for setting, pair in TABLES["settings"].items()}


def config_with(changes: dict[str, Any]) -> Config:
    """A valid config with `changes`, by their dotted keys."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    return resolve_aliases(with_values(VALID, values))


def problems(changes: dict[str, Any] | Config) -> list[str]:
    """What `validate` says, one line a problem."""
    try:
        validate(changes if isinstance(changes, Config) else config_with(changes))
    except InputError as error:
        first, *lines = str(error).split("\n")
        assert not lines or first == "the config has problems:"
        return [line.removeprefix("  - ") for line in lines] or [first]
    return []


def assert_one(found: list[str], message: str) -> None:
    assert len(found) == 1 and re.search(message, found[0]), (message, found)


def verdict(changes: dict[str, Any]) -> dict[str, Any]:
    """The end of a case: which problems refuse the config, or of what it warns; and what options its aliases set."""
    if refused := problems(changes):
        return {"refused": refused}
    config, before = config_with(changes), flat(VALID)
    assert resolve_aliases(config) == config
    warned, values = warnings(config), flat(config).items()
    sets = {key: value for key, value in values if value != before[key]} if {*ALIASES} & changes.keys() else {}
    return ({"warned": warned} if warned else {"accepted": True}) | ({"sets": sets} if sets else {})


def changes_of(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in VERDICTS}


def options() -> dict[str, str]:
    """Of each option the type, the bounds, and with which settings it is read if not always."""
    return {key: "; ".join(_traits(key)) for key in DEFAULTS}


def _traits(key: str) -> Iterator[str]:
    yield types()[key]
    yield from ("NAMES" if key in CHOICES else bound.rule for name, bound in BOUNDS if name == key)
    yield from ["may be infinite"] * (key in MAY_BE_INFINITE) + ["of places"] * (key in PATHS)
    yield from (f"read with {one.setting}" for one in READS.get(key, ()))


@functools.cache
def types() -> dict[str, str]:
    """The type of each option, in the words of the message about a wrong one."""
    found = problems(with_values(VALID, dict.fromkeys(DEFAULTS, WRONG)))
    lines = (line.removesuffix(": correct it").partition(f"={WRONG!r} must be ") for line in found)
    return {key: kind for key, _, kind in lines}


def other_value(key: str, *, allowed: Any = None) -> Any:
    """A valid value that is not the default, and not among those that `allowed` names."""
    default = flat(VALID)[key]
    if key in VALUES:
        return tuple(VALUES[key]) if isinstance(VALUES[key], list) else VALUES[key]
    if isinstance(default, bool):
        return not default
    if choices := [choice for name, bound in BOUNDS if name == key for choice in bound.choices]:
        return next(choice for choice in choices if choice not in (default, *(allowed or ())))
    if isinstance(default, int):
        return default * 2 if default > 1 else default + 1
    if isinstance(default, float):
        return default / 2 or 0.25
    return ("other",) if isinstance(default, tuple) else "other"


@functools.cache
def off_and_on(setting: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes with which the options of a setting are not read, and with which they are."""
    if setting in SETTINGS:
        return SETTINGS[setting]
    key, _, text = setting.partition("=")
    default, names = flat(VALID)[key], text.split(" or ")
    if str(default) in names:
        other = other_value(key, allowed=names)
        return {key: other} | COMPANIONS.get(f"{key}={other}", {}), {}
    value = {"True": True, "False": False, "1": 1}.get(names[0], names[0])
    return {}, {key: value} | COMPANIONS.get(f"{key}={value}", {})


def messages() -> dict[str, Any]:
    return yaml.load(MESSAGES.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def write() -> None:
    given = messages()["cases"]
    cases = {name: [changes | verdict(changes) for changes in map(changes_of, group)] for name, group in given.items()}
    text = yaml.safe_dump({"options": options(), "cases": cases}, sort_keys=False, width=10**6, allow_unicode=True)
    MESSAGES.write_text(HEAD + text)


if __name__ == "__main__":
    write()
