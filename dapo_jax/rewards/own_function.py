"""Host: the user's own reward function in any of its forms, as one that takes four arguments."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from dapo_jax.config.own_functions import load_named
from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import WRONG_RESULT

RULE = (
    "f(text, truth), f(data_source, solution, ground_truth, extra_info) as verl's, or f(completions, **columns) as "
    "TRL's, and return a number or a dict with 'score' (TRL's: a list of one)"
)
PROMPT = "prompt"  # in extra_info: the row's chat messages, or its text
_ALL = ("data_source", "solution", "ground_truth", "extra_info")
_NAMES = {**{name: name for name in _ALL}, "text": "solution", "solution_str": "solution", "truth": "ground_truth"}
_MEANT = {"prompt": "", "prompts": "", "question": "", "response": "solution", "completion": "solution"}  # "": none
_TRUTHS = ("ground_truth", "answer", "solution")  # columns that mean the ground truth to TRL's users, unless they exist
_TOKENS = ("prompt_ids", "completion_ids")  # what TRL also passes, and no function gets here
_LOOPS = threading.local()  # one per thread: clients that a function keeps stay usable from call to call


def load_function(name: str) -> Callable[..., Any]:
    """The function at package.module.function or FILE.py:function, callable with four positional arguments.

    Raises:
        InputError: it does not exist, its module does not load, or it has none of the forms.
        MemoryError: its module needs more memory than the process may use.
    """
    return called_with_four(f"reward.function={name!r}", load_named("reward.function", name))


def called_with_four(given: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of any form, as one of four positional arguments whose result has been awaited.

    Args:
        given: how the user named it, for messages.

    Raises:
        InputError: it has none of the forms.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # some built-in functions have none
        return lambda *values: awaited(function(*values))
    if "completions" in parameters:
        return _of_trl(given, function, parameters)
    if any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        try:
            inspect.signature(function).bind(*_ALL)
        except TypeError as error:
            _refuse(given, function, f"takes {inspect.signature(function)} ({error}): change its parameters")
        return lambda *values: awaited(function(*values))
    chosen = taken(given, function)
    by_order = [
        name for name in chosen if name in parameters and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY
    ]

    def score(*values: Any) -> Any:
        found = {name: values[_ALL.index(argument)] for name, argument in chosen.items()}
        first = [found.pop(name) for name in by_order]
        return awaited(function(*first, **found))

    return score


def taken(given: str, function: Callable[..., Any]) -> dict[str, str]:
    """Which of the four arguments each parameter gets.

    A parameter with the name of an argument (or text, truth, verl's solution_str) gets that one. Others get, in their
    order, what is left of solution, ground_truth and extra_info, or of all four if there are four. Other parameters
    with a default keep it, but for the fourth of three that are needed.

    Raises:
        InputError: it takes none, more than four, or one twice.
    """
    parameters = list(inspect.signature(function).parameters.values())
    plain = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    read = [one for one in plain if one.default is one.empty or one.name in _NAMES]
    if read == plain[:3] and len(plain) > 3 and _NAMES.get(plain[0].name, "data_source") == "data_source":
        read = plain[:4]
    if not read and len(parameters) > len(plain):
        return {"data_source": "data_source", "solution_str": "solution", **{name: name for name in _ALL[2:]}}
    known = [_NAMES[one.name] for one in read if one.name in _NAMES]
    left = iter([argument for argument in _ALL[len(read) < 4 :] if argument not in known])
    found = {one.name: _NAMES.get(one.name) or next(left, None) for one in read}
    if not read or None in found.values() or len({*found.values()}) < len(found):
        _refuse(given, function, f"takes {inspect.signature(function)}: change its parameters")
    if wrong := [name for name, argument in found.items() if _MEANT.get(name, argument) != argument]:
        reason = f"takes {inspect.signature(function)}, of which {wrong[0]} would get the {found[wrong[0]]}"
        _refuse(given, function, f"{reason}: use these names; the prompt is extra_info['prompt']")
    return {name: argument for name, argument in found.items() if argument is not None}


def _of_trl(given: str, function: Callable[..., Any], parameters: Any) -> Callable[..., Any]:
    """A function of TRL's form: it gets lists of one, and each column of the row that it names, or all by **columns."""
    for name in _TOKENS:
        if name in parameters and parameters[name].default is inspect.Parameter.empty:
            _refuse(given, function, f"takes {name}, and no token ids are passed here: leave the parameter out")
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def score(data_source: str, solution: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
        prompt = extra_info.get(PROMPT, "")
        completion = solution if isinstance(prompt, str) else [{"role": "assistant", "content": solution}]
        columns = dict.fromkeys(_TRUTHS, ground_truth) | {"data_source": data_source, "extra_info": extra_info}
        columns |= {**extra_info, "prompts": prompt, "completions": completion}
        chosen = {name: [value] for name, value in columns.items() if takes_all or name in parameters}
        missing = [name for name, one in parameters.items() if one.default is one.empty and name not in chosen]
        if missing := [name for name in missing if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD]:
            raise TypeError(
                f"TRL's form gets columns by name, and the row has no {missing[0]}, only {', '.join(columns)}"
            )
        found = awaited(function(**chosen))
        if isinstance(found, str | dict) or not hasattr(found, "__len__") or len(found) != 1:
            raise TypeError(
                f"{WRONG_RESULT} a list of one score for a list of one completion, as in TRL, not {found!r:.80}"
            )
        return found[0]

    return score


def awaited(result: Any) -> Any:
    """The result of a call, of an async function too."""
    if not inspect.isawaitable(result):
        return result
    if not hasattr(_LOOPS, "runner"):
        _LOOPS.runner = asyncio.Runner()

    async def wait() -> Any:
        return await result

    return _LOOPS.runner.run(wait())


def _refuse(given: str, function: Callable[..., Any], reason: str) -> None:
    raise InputError(f"{given} must be {RULE}, but it {reason}")
