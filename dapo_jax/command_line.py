"""Host: the config of a command from `--config FILE --config.key=value ...`."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from absl import flags
from ml_collections import config_flags

from dapo_jax.aliases import resolve_aliases
from dapo_jax.config import Config, freeze
from dapo_jax.parallel.processes import joined_processes

logger = logging.getLogger(__name__)


@contextmanager
def refusals() -> Iterator[None]:
    """Ends a command with the message of a ValueError, without its traceback."""
    try:
        yield
    except ValueError as error:
        logger.debug("refused", exc_info=True)
        sys.exit(f"dapo_jax: {error}")


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
