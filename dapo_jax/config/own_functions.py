"""Host: functions of your own by name, package.module.function or FILE.py:function. Verifier processes load it too."""

import importlib
import importlib.util
import inspect
import sys
import types
import zlib
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError

_FOLDER = "folder_"  # begins the name of the package that a file's folder is


def is_own(name: str) -> bool:
    """Whether a name is a path of your own, FILE.py:NAME or package.module.NAME, and none of this package's names."""
    return "." in name


def file_and_function(name: str) -> tuple[Path, str] | None:
    """The two parts of FILE.py:function; None for a name of another form."""
    file, _, function = name.rpartition(":")
    return (Path(file).expanduser(), function) if file.endswith(".py") else None


def code_of(name: str) -> bytes:
    """The text of the file with the function `name`, which does not run; empty if there is none of your own."""
    module = name.rpartition(".")[0]
    try:
        found = (file_and_function(name) or (None,))[0]
        if found is None and is_own(name) and (spec := importlib.util.find_spec(module)) is not None:
            found = Path(spec.origin or "")
        return found.read_bytes() if found is not None else b""
    except (Exception, SystemExit):  # the packages around a module may raise any: `load_named` says what is wrong
        return b""


def absolute(name: str) -> str:
    """`name`, with the whole path of its file, so that a run finds it from any folder."""
    found = file_and_function(name)
    return f"{found[0].absolute()}:{found[1]}" if found else name


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


def load_named(option: str, name: str, kind: str = "function") -> Callable[..., Any]:
    """The function, or the class, that `option` names, as package.module.function or FILE.py:function.

    Raises:
        InputError: it does not exist, or its module does not load.
        MemoryError: its module needs more memory than the process may use.
    """
    in_file, given = file_and_function(name), f"{option}={name!r}"
    rule = f"{given} must be a path package.module.{kind} or FILE.py:{kind}"
    if in_file is None and name.endswith(".py"):
        raise InputError(f"{rule}: add the name of the {kind}, {name}:{kind.upper()}")
    module_name, function_name = name.rpartition(".")[::2] if in_file is None else (str(in_file[0]), in_file[1])
    if in_file is not None and not in_file[0].is_file():
        raise InputError(
            f"{rule}, but the file {module_name} does not exist: correct the path (functions/ in the "
            "workdir of a run has copies of its own)"
        )
    try:
        module = importlib.import_module(module_name) if in_file is None else _run_file(in_file[0])
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{given} does not load: {_import_failure(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        is_one = inspect.isclass if kind == "class" else inspect.isfunction
        named = [key for key, value in vars(module).items() if is_one(value) and not key.startswith("_")]
        there = f" (it has {', '.join(named[:5])})" if named and in_file is not None else ""
        raise InputError(f"{rule}, but {module_name!r} has no {kind} {function_name!r}{there}: correct the path")
    return function


def _run_file(path: Path) -> types.ModuleType:
    """Imports a file, which may import other files of its folder, by name or relatively."""
    folder = str(path.absolute().parent)
    _import_from(folder)
    package = types.ModuleType(f"{_FOLDER}{zlib.crc32(folder.encode()):08x}")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem.replace('.', '_')}", path)
    assert spec is not None and spec.loader is not None  # as it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _import_from(folder: str) -> None:
    """Puts `folder` first, and forgets the neighbours of other folders' files that have the names of modules here."""
    sys.path[:] = [folder, *(one for one in sys.path if one != folder)]
    packages = [one for name, one in sys.modules.items() if name.startswith(_FOLDER) and "." not in name]
    others = {one.__path__[0] for one in packages} - {folder}

    def is_of_another(module: str) -> bool:
        origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None) or ""
        is_theirs = str(Path(origin.removesuffix("/__init__.py")).parent) in others
        return is_theirs and PathFinder.find_spec(module, [folder]) is not None

    for name in [name for name in sys.modules if is_of_another(name.partition(".")[0])]:
        del sys.modules[name]


def _import_failure(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"module {missing!r} does not exist: correct the path, start the run in the module's directory, or give "
            "its file as FILE.py:function"
        )
    if missing:
        return (
            f"{module_name!r} imports {missing!r}, which is not installed in this environment: install its package "
            f"(often `pip install {missing.partition('.')[0]}`)"
        )
    return f"importing {module_name!r} failed with {type(error).__name__}: {error}: correct the module"
