"""Host: the user's own reward function: finds it by name and checks its signature."""

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError

RULE = "score(data_source, solution, ground_truth, extra_info) -> float | dict"
_FOLDER = "folder_of_reward_function"  # a package, so that the file can use relative imports
_ALL = ("data_source", "solution", "ground_truth", "extra_info")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")  # verl passes them by name


def file_and_function(name: str) -> tuple[Path, str] | None:
    """The two parts of FILE.py:function; None for a name of another form."""
    file, _, function = name.rpartition(":")
    return (Path(file).expanduser(), function) if file.endswith(".py") else None


def load_function(name: str) -> Callable[..., Any]:
    """The function at package.module.function or FILE.py:function, callable with four positional arguments.

    Raises:
        InputError: it does not exist, its module does not load, or it does not take the four arguments.
        MemoryError: its module needs more memory than the process may use.
    """
    in_file = file_and_function(name)
    rule = f"reward.function={name!r} must be a path package.module.function or FILE.py:function"
    if in_file is None and name.endswith(".py"):
        raise InputError(f"{rule}: add the name of the function, {name}:FUNCTION")
    module_name, function_name = name.rpartition(".")[::2] if in_file is None else (str(in_file[0]), in_file[1])
    if in_file is not None and not in_file[0].is_file():
        raise InputError(f"{rule}, but the file {module_name} does not exist: correct the path")
    try:
        module = importlib.import_module(module_name) if in_file is None else _run_file(in_file[0])
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"reward.function={name!r} does not load: {_import_failure(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        there = f" (it has {', '.join(named[:5])})" if named and in_file is not None else ""
        raise InputError(f"{rule}, but {module_name!r} has no function {function_name!r}{there}: correct the path")
    return called_by_position(name, function)


def _run_file(path: Path) -> types.ModuleType:
    """Imports a file, which may import other files of its folder, by name or relatively."""
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    package = types.ModuleType(_FOLDER)
    package.__path__ = [folder]
    sys.modules[_FOLDER] = package
    spec = importlib.util.spec_from_file_location(f"{_FOLDER}.{path.stem.replace('.', '_')}", path)
    assert spec is not None and spec.loader is not None  # as it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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


def called_by_position(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, or a wrapper that passes the four arguments by verl's names. InputError if it takes neither."""
    must = f"reward.function={name!r} must be {RULE}"
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise InputError(f"{must}, but it is async: write a plain function, for example one that calls asyncio.run")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have none
        return function
    short = name.rpartition(".")[2].rpartition(":")[2]
    if "completions" in signature.parameters:
        raise InputError(
            f"{must}, but it takes {signature}, as TRL's reward functions do: wrap it, for example def score("
            f"data_source, solution, ground_truth, extra_info): return {short}(completions=[[{{'role': 'assistant', "
            "'content': solution}]], ground_truth=[ground_truth])[0]"
        )
    by_name, by_position = _bind_error(signature, by_name=True), _bind_error(signature, by_name=False)
    of_verl = "solution_str" in signature.parameters
    if by_name is not None and by_position is not None:
        called = f"the names {', '.join(_VERL)}, as verl calls it" if of_verl else "four positional arguments"
        raise InputError(
            f"{must}, but it takes {signature} and cannot be called with {called} "
            f"({by_name if of_verl else by_position}): change its parameters"
        )
    if by_position is None and not (of_verl and by_name is None):
        return function

    def score(*values: Any) -> Any:
        return function(**dict(zip(_VERL, values, strict=True)))

    return score


def _bind_error(signature: inspect.Signature, *, by_name: bool) -> TypeError | None:
    """Why the signature does not accept verl's names, or four positional arguments; None if it does."""
    try:
        signature.bind(**dict.fromkeys(_VERL)) if by_name else signature.bind(*_VERL)
    except TypeError as error:
        return error
    return None


def called_with_four(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes the first arguments of `taken`, as one that takes all four. InputError if it cannot."""
    chosen = taken(name, function)
    if len(chosen) == len(_ALL):
        return called_by_position(name, function)
    indices = [_ALL.index(argument) for argument in chosen]
    return lambda *values: function(*(values[index] for index in indices))


def taken(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of the four arguments a function takes: in a session fewer than four will do.

    A parameter with the name of an argument gets that one. Others get, in their order, what is left of solution,
    ground_truth and extra_info. Other parameters with a default keep it.

    Raises:
        InputError: it takes none, or more than four.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some built-in functions have none
        return _ALL
    names = {**dict(zip(_VERL, _ALL, strict=True)), "solution": "solution"}
    read = [one for one in parameters if one.default is one.empty or one.name in names]
    positional = all(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in read)
    if not positional or not 0 < len(read) < len(_ALL) or any(one.name == "completions" for one in read):
        called_by_position(name, function)
        return _ALL
    given = [names.get(one.name) for one in read]
    left = iter([argument for argument in _ALL[1:] if argument not in given])
    return tuple(argument or next(left) for argument in given)
