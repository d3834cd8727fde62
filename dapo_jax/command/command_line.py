"""Host: a command's config, from `--config FILE --config.key=value ... [--debug]`, and how the command fails."""

import dataclasses
import errno
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from dapo_jax.command.interrupts import EXIT_CODE, finish, sentence, undone
from dapo_jax.command.option_uses import default_text, switched_off
from dapo_jax.config.aliases import FROM_MEMORY, former_options
from dapo_jax.config.files import EXAMPLE, read_config_file, recipe_file
from dapo_jax.config.sections import Config, TrainerConfig
from dapo_jax.config.values import DEFAULTS, flatten, freeze, with_values
from dapo_jax.errors import InputError, did_you_mean, say
from dapo_jax.monitor.recipe import Recipe
from dapo_jax.parallel.endings import is_jax_failure
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.parallel.platforms import start_failure
from dapo_jax.parallel.processes import is_first, joined_processes
from dapo_jax.verl.options import hint

WRONG_INPUT, FAILED = 2, 1  # exit codes; interrupts.py has the third
DEBUG = "--debug"
Adapt = Callable[[Config, Collection[str]], tuple[Config, tuple[str, ...]]]
BOOLEANS = {name: "true" for name in ("true", "t", "yes", "y", "on", "1")}
BOOLEANS |= {name: "false" for name in ("false", "f", "no", "n", "off", "0")}
OPTIONAL = {key for key, value in DEFAULTS.items() if value is None}
STORE = ("gcsfs", "google", "aiohttp")  # packages whose errors are those of an object store
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def refusals(arguments: Sequence[str]) -> Iterator[None]:
    """Ends a failing command with a message on stderr and an exit code, without a traceback.

    2: wrong input (InputError). 1: the run cannot continue (RuntimeError, OSError, MemoryError, a missing package).
    130: an interrupt. Anything else is a bug: 1, with the traceback.

    Args:
        arguments: the command line, beginning with the command's name; `--debug` shows every traceback.
    """
    try:
        with undone():
            yield
    except (Exception, KeyboardInterrupt) as error:
        code, message = _ending(error, arguments[0])
        if DEBUG in arguments or message is None:
            say("".join(traceback.format_exception(error)), file=sys.stderr)
        process = f" (process {jax.process_index()})" if jax.distributed.is_initialized() else ""
        message = message or "this is a bug in dapo_jax: please report it with the command and the traceback above"
        say(f"dapo_jax: {message}{process}", file=sys.stderr)
        if code == EXIT_CODE and not process:  # one of several processes notifies the others first
            finish()
        raise SystemExit(code) from error


def _ending(error: BaseException, command: str) -> tuple[int, str | None]:
    """The exit code and the message of a failure; a bug has no message."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_CODE, sentence(command)
    if isinstance(error, InputError):
        return WRONG_INPUT, str(error)
    if (missing := start_failure(error)) is not None:
        return WRONG_INPUT, missing
    if isinstance(error, NotImplementedError | RecursionError):
        return FAILED, None
    if is_jax_failure(error):
        first = str(error).partition("\n")[0]
        if "RESOURCE_EXHAUSTED" not in first:
            return FAILED, f"JAX cannot continue: {first}"
        return FAILED, (
            f"a device ran out of memory ({first}): lower actor.ppo_micro_batch_size_per_device, "
            "rollout.kv_memory_share (rollout.max_num_seqs if set) or data.max_response_length, or raise mesh.fsdp or "
            "mesh.train_tensor; "
            "`python -m dapo_jax.preflight` with the same options and --topology gpu, tpu or a slice shows what fits"
        )
    if isinstance(error, MemoryError):
        return FAILED, f"this machine ran out of memory ({error}): use a smaller model or less data, or free memory"
    if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
        return FAILED, f"{error}: free some space, then rerun the same command to resume from the newest checkpoint"
    if isinstance(error, PermissionError):
        return FAILED, f"{error}: let this user read and write there, or choose another path"
    if type(error).__module__.partition(".")[0] in STORE:
        return FAILED, (
            f"a gs:// address cannot be reached ({type(error).__name__}: {error}): check the bucket's name, the "
            "network and the credentials (on Google Cloud the machine's service account, elsewhere `gcloud auth "
            "application-default login`)"
        )
    if isinstance(error, RuntimeError | OSError | ImportError):
        return FAILED, str(error)
    return FAILED, None


def processes_of(trainer: TrainerConfig) -> AbstractContextManager[None]:
    """Joins the processes that the options describe. Enter it before using JAX."""
    return joined_processes(
        coordinator=trainer.coordinator,
        num_processes=trainer.num_processes,
        process_id=trainer.process_id,
        heartbeat_timeout_s=trainer.heartbeat_timeout_s,
    )


@contextmanager
def command(arguments: Sequence[str], adapt: Adapt | None = None) -> Iterator[tuple[Config, Recipe]]:
    """The config of a command and its origin, with its processes joined. A failure inside ends it as `refusals` says.

    Args:
        arguments: the command line, beginning with the command's name.
        adapt: takes the config and the keys that the command line sets; returns the config that the command uses, and
            lines for the user about what it changed.
    """
    with refusals(arguments):
        config, origin = read_options(arguments)
        if adapt is not None:
            config, more = adapt(config, origin.given)
            origin = origin._replace(lines=(*origin.lines, *more))
        reserve_gpu_memory(config.trainer.gpu_memory_fraction)
        with processes_of(config.trainer), refusals(arguments):
            if origin.lines and (not jax.distributed.is_initialized() or is_first()):
                _tell(origin.lines)
            yield config, origin


def read_config(arguments: Sequence[str]) -> Config:
    """The frozen config that the command line describes; `arguments` begins with the command's name.

    Prints on stderr which options `without_switched_off` resets, and which have no effect any more.

    Raises:
        InputError: no config file or one that fails, an unknown or misspelt key (with a suggestion), or a value of the
            wrong type.
    """
    config, origin = read_options(arguments)
    _tell(origin.lines)
    return config


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        say(f"dapo_jax: {line}", file=sys.stderr)


def read_options(arguments: Sequence[str]) -> tuple[Config, Recipe]:
    """The config of `read_config`, and where it came from, with a line for each option reset or without effect."""
    first = flags.FlagValues()
    flags.DEFINE_string("config", None, "Python file with get_config()", flag_values=first)
    values = flags.FlagValues()
    for parser in (first, values):
        flags.DEFINE_bool(DEBUG.strip("-"), False, "show the traceback of a failure", flag_values=parser)
    try:
        overrides = first(_with_config_option(arguments), known_only=True)
        path = first["config"].value
        if not path:
            raise InputError(f"--config is missing: {EXAMPLE} (-h: help)")
        chosen = read_config_file(path)
        overrides = [re.sub(r"^(--?)?(?=([a-z_.\d]+)=)", _prefix, one) for one in overrides]
        keys = _chosen_keys(overrides, chosen)
        recipe = _recipe(chosen)
        overrides = _with_null(_with_booleans(overrides, chosen), chosen)
        chosen = config_flags.DEFINE_config_dict("config", chosen, flag_values=values, sys_argv=overrides)
        rest = values(overrides)
        config = freeze(chosen.value, keys)
    except (flags.Error, AttributeError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{error}: correct the command") from error
    if len(rest) > 1:
        raise InputError(f"unexpected arguments {rest[1:]}: options are written KEY=VALUE")
    lines = former_options(chosen.value)
    if recipe is None:
        return config, Recipe(path, sorted(keys), None, lines)
    off = switched_off(recipe, config, keys)
    lines += tuple(
        f"{key} is not read without {setting}: it is back at its default, {default_text(key)}"
        for key, setting in off.items()
    )
    config = with_values(config, {key: DEFAULTS[key] for key in off})
    return config, Recipe(path, sorted(keys), dataclasses.asdict(recipe), lines)


def _prefix(found: re.Match[str]) -> str:
    """`--config.` before an option that is written KEY=VALUE or --KEY=VALUE."""
    return "--config." if found[2] in DEFAULTS else found[0]


def _with_config_option(arguments: Sequence[str]) -> list[str]:
    """The command line with a bare recipe, `FILE.py`, `FILE.yaml` or `FILE.json` as `--config=FILE.py`."""
    if any(re.match(r"--?config(=|$)", argument) for argument in arguments):
        return list(arguments)
    for index, (before, argument) in enumerate(itertools.pairwise(arguments), start=1):
        is_value = re.match(r"--?config\.[^=]*$", before)  # as in --config.data.train_files FILE.json
        if not is_value and (re.match(r"[^-=][^=]*\.(py|json|ya?ml)$", argument) or recipe_file(argument)):
            return [*arguments[:index], f"--config={argument}", *arguments[index + 1 :]]
    return list(arguments)


def _with_booleans(overrides: Sequence[str], config: ConfigDict) -> list[str]:
    """The options with true for yes and on, false for no and off. InputError for other values of a switch."""
    switches = {key for key, value in flatten(config.to_dict()).items() if isinstance(value, bool)}
    found, problems = [], []
    for option in overrides:
        given = re.match(r"(--?config\.([^=]*))=(.*)$", option, re.DOTALL)
        if given and given[2] in switches:
            value = BOOLEANS.get(given[3].lower())
            option = f"{given[1]}={value}"
            if value is None:
                problems.append(f"{given[0]} must be true or false: write {given[1]}=true or {given[1]}=false")
        found.append(option)
    if problems:
        raise InputError("\n".join(problems))
    return found


def _with_null(overrides: Sequence[str], config: ConfigDict) -> list[str]:
    """The options without those set to null or None where that means "not given"; `config` gets these."""
    rest = []
    for option in overrides:
        given = re.match(r"--?config\.([^=]*)=(null|none)$", option, re.IGNORECASE)
        if given and given[1] in OPTIONAL:
            config.update_from_flattened_dict({given[1]: None})
            rest = [one for one in rest if not re.match(rf"--?config\.{re.escape(given[1])}=", one)]  # the last wins
        else:
            rest.append(option)
    return rest


def _chosen_keys(overrides: Sequence[str], config: ConfigDict) -> set[str]:
    """Each key of `--config.key`. InputError lists those that `config` does not have, and what to write instead."""
    keys = [*flatten(config.to_dict())]
    sections = {key[:end] for key in keys for end in range(len(key)) if key[end] == "."}
    problems, chosen = [], set()
    for option in overrides:
        given = re.match(r"--?(?:no)?config\.([^=]*)", option)
        if remembered := re.match(rf"(?:--?)?(?:config\.)?({'|'.join(FROM_MEMORY)})=(.*)", option, re.DOTALL):
            problems.append(f"{option}: write {FROM_MEMORY[remembered[1]].format(remembered[2])}")
        elif of_verl := hint(option, {*keys, *sections}):
            problems.append(of_verl)
        elif given and given[1] not in keys and given[1] not in sections:
            cure = did_you_mean(given[1], keys) or "dapo_jax/config/sections.py lists the keys"
            problems.append(f"{option}: there is no key {given[1]}: {cure}")
        elif given:
            chosen.add(given[1])
    if problems:
        raise InputError("\n".join(problems))
    return chosen


def _recipe(file: ConfigDict) -> Config | None:
    """The config of a file alone; None if one of its aliases needs an option of the command line."""
    try:
        return freeze(file)
    except ValueError:
        return None
