"""Host: the equivalents of verl's options, for the command line's messages and for `from_verl`."""

import itertools
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from dapo_jax.errors import InputError, did_you_mean
from dapo_jax.verl.table import EASYR1, HERE, NOT_HERE, NOT_NEEDED, Entry
from dapo_jax.verl.values import as_type_of, parsed

PREFIXES = ("actor_rollout_ref.", "worker.")  # our names lack them
OFF = (None, False, 0, "", "null", {}, [], ())  # values of an option that ask for nothing
TABLE = (*HERE, *NOT_NEEDED, *NOT_HERE, *EASYR1)


def expanded(pattern: str) -> list[str]:
    """The keys that a pattern with `{a,b}` matches, in its order; spaces separate several patterns."""
    if " " in pattern:
        return [key for part in pattern.split() for key in expanded(part)]
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    parts = (pattern[: found.start()] + part + pattern[found.end() :] for part in found[1].split(","))
    return list(dict.fromkeys(itertools.chain.from_iterable(map(expanded, parts))))


BY_KEY: Mapping[str, Entry] = {key: entry for entry in TABLE for key in expanded(entry.verl)}
STARS = {  # the longest, which is the most specific, first
    re.compile(re.escape(key).replace(r"\*", ".*")): entry
    for key, entry in sorted(BY_KEY.items(), key=lambda item: -len(item[0]))
    if "*" in key
}


def find(key: str) -> Entry | None:
    """The entry of a verl option: by its name, else by the longest pattern that matches."""
    return BY_KEY.get(key) or next((entry for pattern, entry in STARS.items() if pattern.fullmatch(key)), None)


def ours_of(key: str) -> list[str]:
    """Our keys for a verl option: its own if the entry pairs them, else all keys of the entry."""
    entry = find(key)
    if entry is None or not entry.ours:
        return []
    theirs, ours = expanded(entry.verl), expanded(entry.ours)
    return [ours[theirs.index(key)]] if len(theirs) == len(ours) and key in theirs else ours


def converted(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Our values for a verl option that has an equivalent.

    Args:
        given: all given options, by verl's names.

    Raises:
        InputError: the value has no equivalent.
    """
    entry = find(key)
    assert entry is not None and entry.ours, key
    if entry.convert is None:
        return as_type_of(ours_of(key)[0], value)
    try:
        return entry.convert(value, given)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{value!r} is not a valid value") from error


def is_off(entry: Entry, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether a value of an option without equivalent asks for what happens anyway.

    Args:
        given: all given options, by verl's names; "${KEY}" in the entry is the value of KEY.
    """
    same = (given.get(off[2:-1]) if str(off).startswith("${") else off for off in entry.same)
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in (*OFF, *same))


def flag(key: str, value: Any) -> str:
    """One option of a command line, quoted for a shell."""
    text = f"--config.{key}={_tuple(value) if isinstance(value, tuple) else value}"
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


def _tuple(values: tuple[Any, ...]) -> str:
    return f"({','.join(map(repr, values))}{',' if len(values) == 1 else ''})"


def hint(option: str, keys: Collection[str]) -> str | None:
    """What to write instead of an option with verl's name or in hydra's syntax; None for any other option.

    Args:
        option: an argument on the command line.
        keys: all existing keys.
    """
    given = re.fullmatch(
        r"(?:--?(?:no)?config\.)?(?P<plus>\+{0,2}|~)(?P<key>[A-Za-z_][\w.]*)(?:=(?P<value>.*))?", option, re.DOTALL
    )
    if not given or (not option.startswith("-") and given["value"] is None and not given["plus"]):
        return None
    key, text = given["key"], given["value"]
    if key in keys:
        if option.startswith("-") and not given["plus"]:
            return None
        return f"{option}: options are written KEY=VALUE: write {_with_value(key, text)}"
    about = _about(key, text, keys)
    if about:
        return f"{option}: {about}"
    if option.startswith("-") and not given["plus"]:
        return None
    return f"{option}: there is no key {key}: {did_you_mean(key, keys) or 'docs/configuration.md lists them'}"


def _about(key: str, text: str | None, keys: Collection[str]) -> str | None:
    """The equivalent of a verl option; None if it is not one."""
    stripped = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    names = (key, *(() if stripped in keys else (f"{PREFIXES[0]}{stripped}", *_ending(key))))
    name = next(filter(find, names), None)
    if name is None and stripped in keys:
        return f"{key} is {stripped} here: write {_with_value(stripped, text)}"
    if name is None:
        meant = did_you_mean(stripped, keys) if stripped != key else ""
        return f"there is no key {key}: {meant}" if meant else None
    entry, ours = find(name), ours_of(name)
    assert entry is not None
    whose = "EasyR1's" if entry in EASYR1 else "verl's"
    if not ours:
        return f"{whose} {name} is not {'here' if entry.lost else 'needed here'}: {entry.note or 'leave it out'}"
    return f"{whose} {name} is {' and '.join(ours)} here" + _note(entry) + _advice(name, text, ours)


def _note(entry: Entry) -> str:
    return f" ({entry.note})" if entry.note else ""


def _advice(name: str, text: str | None, ours: list[str]) -> str:
    if text is None:
        return f": write {' '.join(f'--config.{key}=VALUE' for key in ours)}"
    try:
        values = converted(name, parsed(text), {name: parsed(text)})
    except InputError as error:
        return f": {error}"
    return f": write {' '.join(flag(key, value) for key, value in values.items())}" if values else ""


def _with_value(key: str, text: str | None) -> str:
    return (
        f"--config.{key}=VALUE"
        if text is None
        else " ".join(flag(ours, value) for ours, value in as_type_of(key, parsed(text)).items())
    )


def _ending(end: str) -> list[str]:
    """A verl option whose name ends with `end`, if all such options have the same equivalent."""
    names = [key for key in BY_KEY if key.endswith(f".{end}") and "*" not in key]
    return names[:1] if len({tuple(ours_of(name)) or id(BY_KEY[name]) for name in names}) == 1 else []
