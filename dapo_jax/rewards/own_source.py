"""Host: a name by which a verifier process finds a function of this session, if need be in a file written for it."""

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_jax.config.function_names import name_of
from dapo_jax.errors import InputError
from dapo_jax.rewards.own_function import called_with_four

_DEF = "def ", "async def "


def reward_name(function: Callable[..., Any], folder: str | Path, label: str = "function") -> str | None:
    """The name of `function`, of any form, for reward.function; None if only this process can call it.

    - A function of a module or file: package.module.NAME or FILE.py:NAME.
    - One of a notebook, a script or the prompt: FILE.py:NAME of a file `folder`/reward_{label}.py, which is written. It
      holds the source, with what that uses of its namespace: imports, plain values and functions of the same kind.
    - None for a lambda, a method, or a function that uses anything else.

    Raises:
        InputError: it has none of the forms.
    """
    called_with_four("reward", function)
    if getattr(function, "__module__", None) != "__main__" and (named := _name(function)):
        return named
    code = self_contained(function)
    if code is None:
        return None
    file = Path(folder).absolute() / f"reward_{label}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")
    return f"{file}:{function.__name__}"


def _name(function: Callable[..., Any]) -> str | None:
    try:
        return name_of(function)
    except InputError:
        return None


def self_contained(function: Callable[..., Any]) -> str | None:
    """A file that defines `function` and all that it uses; None if that cannot be written down."""
    imports: dict[str, None] = {}
    parts: dict[str, str] = {}  # plain values and functions by name
    return _file(imports, parts) if _add(function, imports, parts) else None


def _file(imports: dict[str, None], parts: dict[str, str]) -> str:
    values = [part for part in parts.values() if not part.startswith(_DEF)]
    functions = [part for part in parts.values() if part.startswith(_DEF)]
    return "\n\n".join(filter(None, ["\n".join([*imports, *values]), *functions]))


def _add(function: Any, imports: dict[str, None], parts: dict[str, str]) -> bool:
    """Adds what a function needs and then itself. False if something cannot be written down."""
    if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
        return False
    source = _source(function)
    if source is None:
        return False
    parts[function.__name__] = source  # now, for functions that call each other
    globals_ = function.__globals__
    for name in _global_names(source):
        if name in parts or (name not in globals_ and hasattr(builtins, name)):
            continue
        if name not in globals_ or not _add_value(name, globals_[name], globals_, imports, parts, source):
            return False
    parts[function.__name__] = parts.pop(function.__name__)  # after what its defaults may use
    return True


def _add_value(
    name: str, value: Any, globals_: dict[str, Any], imports: dict[str, None], parts: dict[str, str], source: str
) -> bool:
    if isinstance(value, types.FunctionType) and value.__globals__ is globals_:
        return value.__name__ == name and _add(value, imports, parts)
    if isinstance(value, re.Pattern):
        imports["import re"] = None
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        return True
    line = _import_line(name, value)
    if line is not None:
        imports[line] = None
        if isinstance(value, types.ModuleType):
            imports |= dict.fromkeys(_imports_of_submodules(name, value, source))
        return True
    if _is_plain(value):
        parts[name] = f"{name} = {value!r}"
        return True
    return False


def _source(function: types.FunctionType) -> str | None:
    """The source of an undecorated function made by `def`, without `global`; None if it is not known."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        [node] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if (
        not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or node.decorator_list
        or node.name != function.__name__
    ):
        return None
    if any(isinstance(part, ast.Global) for part in ast.walk(node)):
        return None
    return source


def _global_names(source: str) -> list[str]:
    """The names that a function, and the functions in it, read from their namespace, in alphabetical order."""
    names: set[str] = set()

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or top):
                names.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(source, "<reward>", "exec"), True)
    return sorted(names)


def _import_line(name: str, value: Any) -> str | None:
    """The import that makes `name` mean `value` in another process; None if none does."""
    if isinstance(value, types.ModuleType):
        found = value.__name__ != "__main__" and sys.modules.get(value.__name__) is value
        return f"import {value.__name__} as {name}" if found else None
    module, own_name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    if not isinstance(module, str) or module == "__main__" or not own_name.isidentifier():
        return None
    found = getattr(sys.modules.get(module), own_name, None) is value
    return f"from {module} import {own_name} as {name}" if found else None


def _imports_of_submodules(name: str, module: types.ModuleType, source: str) -> list[str]:
    """The imports of a package's modules that the source reaches through it: `import a` alone may not load a.b."""
    dotted = re.findall(rf"\b{re.escape(name)}((?:\.\w+)+)", source)
    paths = {module.__name__ + path[:end] for path in dotted for end in range(len(path) + 1)}
    loaded = sorted(path for path in paths if path in sys.modules and path != module.__name__)
    return [f"import {path}" for path in loaded]


def _is_plain(value: Any) -> bool:
    """Whether the text of a value says all of it."""
    try:
        return type(ast.literal_eval(repr(value))) is type(value) and ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
