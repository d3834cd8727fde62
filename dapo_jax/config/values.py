"""Host: converts configs between ConfigDict, frozen dataclasses and plain values, and checks their types."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from flax import traverse_util
from ml_collections import ConfigDict, FieldReference, config_dict

from dapo_jax.config.aliases import alias_changes
from dapo_jax.config.own_functions import absolute, name_of
from dapo_jax.config.places import without_tilde
from dapo_jax.config.sections import Config
from dapo_jax.errors import InputError

FORMER = ("rollout.engine",)  # options of earlier versions that no longer have an effect
MAY_BE_INFINITE = (  # limits; infinity switches them off
    *("actor.clip_ratio_high", "actor.clip_ratio_c", "actor.policy_loss.clip_cov_ub"),
    *("actor.grad_clip", "critic.grad_clip", "critic.cliprange_value"),
)
MODEL_PATHS = "model.path", "reference.path", "critic.model.path", "reward.model.path", "algorithm.distillation.path"
FUNCTIONS = (  # a name, or FILE.py:function
    *("reward.function", "algorithm.adv_estimator", "actor.policy_loss.loss_mode"),
    *("environment.path", "environment.tools"),
)
PATHS = (  # of files and directories, or gs:// addresses
    *("workdir", "trainer.checkpoint_dir", "trainer.resume_from_path", "data.train_files", "data.val_files"),
    *MODEL_PATHS,
)


class Section(ConfigDict):
    """A section of the config.

    A function assigned to a key is stored by name, one text for several as a tuple, an object for a text as its JSON.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, FieldReference) and callable(value):
            value = name_of(value)
        if isinstance(value, dict) and key in self and self.get_type(key) is str:
            value = json.dumps(value, default=_named)
        if isinstance(value, str) and isinstance(self.get(key), tuple):
            value = (value,)  # as on the command line
        super().__setitem__(key, value)


def default_config() -> Any:
    """The defaults as a locked ConfigDict, for a config file's `get_config()` to change."""
    return _config_dict(Config()).lock()


def _config_dict(section: Any) -> ConfigDict:
    values = Section()
    for name, kind in typing.get_type_hints(type(section)).items():
        default = getattr(section, name)
        if dataclasses.is_dataclass(default):
            values[name] = _config_dict(default)
        elif default is None:
            values[name] = config_dict.placeholder(_optional_type(kind))
        elif default == "{}":  # the text of a JSON object; a file may give the object itself
            values[name] = FieldReference(default, field_type=object)
        else:
            values[name] = default
    return values


def _optional_type(kind: Any) -> type:
    assert _is_optional(kind), kind
    return next(option for option in kind.__args__ if option is not types.NoneType)


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def freeze(values: Any, chosen: Collection[str] = ()) -> Config:
    """The frozen dataclasses of a ConfigDict made by `default_config()`, with its aliases applied.

    Args:
        chosen: keys set on the command line, see `alias_changes`.

    Raises:
        InputError: unknown or missing keys, or aliases that contradict each other (aliases.py).
    """
    return resolve_aliases(_freeze(Config, values), chosen)


def resolve_aliases(config: Config, chosen: Collection[str] = ()) -> Config:
    """`config` with every alias applied and reset to None, see `alias_changes`."""
    return with_values(config, alias_changes(flat(config), DEFAULTS, chosen))


def _freeze(section: Any, values: Any, prefix: str = "") -> Any:
    kinds = typing.get_type_hints(section)
    if not hasattr(values, "keys"):
        raise InputError(f"{section.__name__}={values!r} must be a section of keys: start from default_config()")
    for found, names in {"unknown": set(values) - set(kinds), "missing": set(kinds) - set(values)}.items():
        if names:
            raise InputError(f"{found} config keys {sorted(names)} in {section.__name__}: start from default_config()")
    return section(
        **{
            name: _freeze(kind, values[name], f"{prefix}{name}.")
            if dataclasses.is_dataclass(kind)
            else _freeze_value(prefix + name, values[name])
            for name, kind in kinds.items()
        }
    )


def _freeze_value(key: str, value: Any) -> Any:
    """A list as a tuple, an object as JSON text, a path without ~, the file of a function with its whole path."""
    if isinstance(value, list | tuple):
        value = tuple(value)
    elif isinstance(value, dict | ConfigDict):
        try:
            plain = value.to_dict() if isinstance(value, ConfigDict) else value
            value = json.dumps(plain, default=_named)
        except (TypeError, ValueError) as error:
            raise InputError(f"{key}={value!r} must hold only JSON values ({error}): correct it") from error
    if key in FUNCTIONS and isinstance(value, str | tuple):
        return _with_whole_paths(value) if isinstance(value, str) else tuple(map(absolute, value))
    return without_tilde(value) if key in PATHS else value


def _with_whole_paths(text: str) -> str:
    """The name of a function, or the JSON of several by name, with the whole path of each one's file."""
    if not text.startswith("{"):
        return absolute(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text  # which its reader refuses
    return json.dumps({name: absolute(one) if isinstance(one, str) else one for name, one in found.items()})


def _named(value: Any) -> str:
    """The name of a function in an object, see `name_of`. TypeError for anything else."""
    if callable(value):
        return name_of(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def from_values(values: dict[str, Any]) -> Config:
    """The config that a run wrote to config.json. A key that an older version did not have gets its default."""
    return with_values(_freeze(Config, _completed(dataclasses.asdict(Config()), values)), dict.fromkeys(FORMER))


def _completed(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    for name, default in defaults.items():
        if isinstance(default, dict) != isinstance(values.get(name, default), dict):
            raise InputError(f"{name}={values[name]!r} in config.json was not written by a run: restore the file")
    known = {
        name: _completed(default, values[name]) if isinstance(default, dict) and name in values else default
        for name, default in defaults.items()
    }
    return known | {name: value for name, value in values.items() if not isinstance(defaults.get(name), dict)}


def _options(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each option: its key, its value, its type."""
    for name, kind in typing.get_type_hints(type(config)).items():
        key, value = prefix + name, getattr(config, name)
        if dataclasses.is_dataclass(kind):
            yield from _options(value, key + ".")
        else:
            yield key, value, kind


def type_problems(config: Any) -> list[str]:
    """One line for each value of the wrong type."""
    wrong = [option for option in _options(config) if not _is_of_type(*option[1:])]
    return [f"{key}={value!r} must be {_describe_type(kind)}: correct it" for key, value, kind in wrong]


def number_problems(config: Any) -> Iterator[str]:
    """One line for each number that is not finite, and each that exceeds 32 bits."""
    for key, value, _ in _options(config):
        if isinstance(value, float) and not math.isfinite(value) and not (value > 0 and key in MAY_BE_INFINITE):
            yield f"{key}={value} must be a finite number: correct it"
        elif isinstance(value, int) and abs(value) >= 2**31:
            yield f"{key}={value} must be less than 2**31: lower it"


def _is_of_type(value: Any, kind: Any) -> bool:
    if _is_optional(kind):
        return any(_is_of_type(value, option) for option in kind.__args__)
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str)
    if typing.get_origin(kind) is tuple:
        element, second = kind.__args__
        fits = isinstance(value, tuple) and all(_is_of_type(part, element) for part in value)
        return fits and (second is ... or len(value) == len(kind.__args__))
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _describe_type(kind: Any) -> str:
    if _is_optional(kind):
        return " or ".join(map(_describe_type, kind.__args__))
    if typing.get_origin(kind) is Literal:
        return "text"
    if typing.get_origin(kind) is tuple:
        element, second = kind.__args__
        return f"{'several' if second is ... else len(kind.__args__)} values, each {_describe_type(element)}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "text", types.NoneType: "null"}
    return names[kind]


def flat(config: Config) -> dict[str, Any]:
    """Every option by its dotted key."""
    return flatten(dataclasses.asdict(config))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a nested dict by dotted key."""
    found = traverse_util.flatten_dict(values, keep_empty_nodes=True, sep=".")
    return {key: {} if value is traverse_util.empty_node else value for key, value in found.items()}


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """A config, or a section of it, with values by their dotted keys."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in {key.partition(".")[0] for key in values.keys() - own.keys()}:
        inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = with_values(getattr(section, name), inner)
    return dataclasses.replace(section, **own)


DEFAULTS = flat(Config())
