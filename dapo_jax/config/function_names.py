"""Host: turns a function in a config file into a name by which another process can find it."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from dapo_jax.errors import InputError


class Section(ConfigDict):
    """A section of the config. A function assigned to a key is stored by name, one text for several as a tuple."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, FieldReference) and callable(value):
            value = name_of(value)
        if isinstance(value, str) and isinstance(self.get(key), tuple):
            value = (value,)  # as on the command line
        super().__setitem__(key, value)


def name_of(function: Callable[..., Any]) -> str:
    """The name by which another process can find `function`.

    Raises:
        InputError: there is none, for a lambda, a method, or a function inside another.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if name.isidentifier():
        if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is function:
            return f"{module}.{name}"
        file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
        if file is not None and file.endswith(".py") and Path(file).is_file():
            return f"{file}:{name}"
    raise InputError(
        f"{function!r} has no name by which a verifier process can find it: define it with `def` at the top level of a "
        "Python file, and give that function, package.module.function or FILE.py:function"
    )
