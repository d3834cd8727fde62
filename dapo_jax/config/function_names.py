"""Host: a function that a config file gives, as the name by which another process finds it."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from dapo_jax.errors import InputError


class Section(ConfigDict):
    """A section of the config. A function that is assigned to a key becomes its name."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, FieldReference) and callable(value):
            value = name_of(value)
        super().__setitem__(key, value)


def name_of(function: Callable[..., Any]) -> str:
    """The name by which another process finds `function`.

    Raises:
        ValueError: there is none: it is a lambda, a method, or defined inside another function.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if name.isidentifier():
        if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is function:
            return f"{module}.{name}"
        file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
        if file is not None and file.endswith(".py") and Path(file).is_file():
            return f"{file}:{name}"
    raise InputError(
        f"{function!r} has no name by which a process of its own could find it: define it with `def` at the top level "
        "of a Python file, and give that function, package.module.function or FILE.py:function"
    )
