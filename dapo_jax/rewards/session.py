"""Host: reward functions that only this Python session has, such as a lambda or one of a notebook.

A config names them python:NAME. They reach a worker as a pickle that this process has written and sends over the
worker's own connection. Nothing else is unpickled: no file, and no byte from a worker.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from dapo_jax.errors import InputError
from dapo_jax.rewards.weighted import functions_of

logger = logging.getLogger(__name__)

OF_SESSION = "python:"  # begins the name of a function of the session
# Options and pickles by name: a run of this session may be resumed or evaluated.
_KEPT: dict[str, tuple[str, bytes]] = {}


def keep(function: Callable[..., Any], label: str = "function", option: str = "reward") -> str:
    """The name of a function of this session, or a class, by which processes then get it.

    Args:
        option: that names it, for messages.

    Raises:
        InputError: it uses something that another process cannot have, or another option has one of this name.
    """
    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # whatever an object that it uses raises
        process = "a verifier" if option == "reward" else "an environment"
        raise InputError(
            f"{option}, {label!r}: {function!r} cannot be sent to {process} process ({type(error).__name__}: {error}): "
            "make what it uses inside the function, or in a module that it imports"
        ) from error
    name = OF_SESSION + label
    other, known = _KEPT.get(name, (option, pickled))
    if known != pickled:
        if other != option:
            raise InputError(f"{option}, {label!r}: {other} has another function of this name: rename one of the two")
        logger.warning("%s is another function from now on, also for earlier runs of this session that name it", name)
    _KEPT[name] = option, pickled
    return name


def of_session(name: str) -> list[str]:
    """The functions of a session among a verifier's, each once."""
    return [function for function in dict.fromkeys(functions_of(name)) if function.startswith(OF_SESSION)]


def pickles(name: str, option: str = "reward.function") -> list[bytes]:
    """What a worker is sent, for each of `of_session`. InputError if this session does not have a function."""
    for function in of_session(name):
        if function not in _KEPT:
            raise InputError(session_problem(function, option))
    return [_KEPT[function][1] for function in of_session(name)]


def session_problem(name: str, option: str = "reward.function") -> str | None:
    """Why the function of another Python session cannot be used, and the cure; None if this session has it."""
    if not name.startswith(OF_SESSION) or name in _KEPT:
        return None
    return (
        f"{option}={name!r} is a function of the Python session that started the run: start it from there with "
        "the same function, or give package.module.function or FILE.py:function"
    )


def received(name: str, sent: Sequence[bytes]) -> dict[str, Callable[..., Any]]:
    """In a worker: the functions that its pool has sent, by name."""
    return dict(zip(of_session(name), map(cloudpickle.loads, sent), strict=True))
