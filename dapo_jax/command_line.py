"""Host: a command's config, from `--config FILE --config.key=value ... [--debug]`, and how it ends when it fails."""

import errno
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import jax
from absl import flags
from ml_collections import config_flags

from dapo_jax.aliases import resolve_aliases
from dapo_jax.config import Config, freeze
from dapo_jax.parallel.processes import joined_processes

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
DEBUG = "--debug"
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def refusals(arguments: Sequence[str]) -> Iterator[None]:
    """Ends a command that fails with a message on stderr and an exit code, without the traceback.

    2: wrong input (ValueError). 1: the run cannot go on (RuntimeError, OSError, MemoryError, a missing package).
    130: an interrupt. Anything else is a bug: 1, with the traceback.

    Args:
        arguments: the command line; `--debug` in it shows the traceback of every failure.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code, message = _ending(error)
        if DEBUG in arguments or message is None:
            traceback.print_exception(error)
        process = f" (process {jax.process_index()})" if jax.distributed.is_initialized() else ""
        message = message or "this is a bug of dapo_jax: please report it with the command and the traceback above"
        print(f"dapo_jax: {message}{process}", file=sys.stderr, flush=True)
        raise SystemExit(code) from error


def _ending(error: BaseException) -> tuple[int, str | None]:
    """The exit code and the message of a failure; None for the message of a bug."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted: the same command goes on after the newest checkpoint"
    if isinstance(error, ValueError):
        return WRONG_INPUT, str(error)
    if isinstance(error, NotImplementedError | RecursionError):
        return FAILED, None
    if isinstance(error, jax.errors.JaxRuntimeError):
        first = str(error).partition("\n")[0]
        if "RESOURCE_EXHAUSTED" not in first:
            return FAILED, f"JAX cannot go on: {first}"
        return FAILED, (
            f"a device has too little memory ({first}): lower actor.ppo_micro_batch_size_per_device, "
            "rollout.max_num_seqs or data.max_response_length, or raise mesh.fsdp; `python -m dapo_jax.preflight` "
            "with the same options says what fits"
        )
    if isinstance(error, MemoryError):
        return FAILED, f"this machine has too little memory ({error}): use a smaller model or data, or free memory"
    if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
        return FAILED, f"{error}: make room, then the same command goes on after the newest checkpoint"
    if isinstance(error, PermissionError):
        return FAILED, f"{error}: let this user read and write there, or choose another place"
    if isinstance(error, RuntimeError | OSError | ImportError):
        return FAILED, str(error)
    return FAILED, None


def processes_of(config: Config) -> AbstractContextManager[None]:
    """The processes that the config describes, joined: to be entered before JAX is used."""
    trainer = config.trainer
    return joined_processes(
        coordinator=trainer.coordinator,
        num_processes=trainer.num_processes,
        process_id=trainer.process_id,
        heartbeat_timeout_s=trainer.heartbeat_timeout_s,
    )


def read_config(arguments: Sequence[str]) -> Config:
    """The frozen config that the command line describes.

    Raises:
        ValueError: no config file, an unknown or misspelt key (with a suggestion), or a value of the wrong type.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool(DEBUG.strip("-"), False, "show the traceback of a failure", flag_values=values)
    config_flags.DEFINE_config_file(
        "config", None, "Python file with get_config()", flag_values=values, sys_argv=list(arguments)
    )
    try:
        rest = values(list(arguments))
        chosen = values["config"].value
        if chosen is None:
            raise ValueError("--config is missing: give a config file, for example --config configs/tiny.py")
        config = resolve_aliases(freeze(chosen))
    except (flags.Error, AttributeError, KeyError, TypeError, OSError) as error:
        raise ValueError(str(error.args[0] if error.args else error).strip("\"'")) from error
    if len(rest) > 1:
        raise ValueError(f"unexpected arguments {rest[1:]}: options are written --config.key=value")
    return config
