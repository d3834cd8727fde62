"""Host: the command that translates verl's training scripts.

    dapo-jax from-verl SCRIPT.sh [ARGUMENTS OF THE SCRIPT] [--env NAME=VALUE ...] [--output run.py]

Prints a command, with comments on options that were left out or have no equivalent; --output writes a config file
instead. A bash expands the script that can start no program, open no file and see no environment variables but HOME,
PWD and those of --env.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import InputError, say
from dapo_jax.tools.from_verl.shell import Script
from dapo_jax.tools.from_verl.translate import command, config_file, overrides, remarks, translate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax from-verl", __doc__)
    parser.add_argument("script", help="a shell script that starts verl's trainer")
    parser.add_argument("arguments", nargs="*", help="the script's own arguments")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of the script's environment"
    )
    parser.add_argument("--output", help="write a config file instead of printing the command")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    chosen = parser.parse_intermixed_args(arguments)
    with refusals(["from_verl", *["--debug"][: chosen.debug]]):
        script = Script(_text(chosen.script), environment=_environment(chosen.env), arguments=chosen.arguments)
        result = translate(overrides(script))
        about = list(remarks(result, script.skipped))
        head = [
            f"# {chosen.script} for dapo_jax. Options that it does not set have verl's defaults.",
            "# docs/coming_from_verl.md lists the equivalent of each option and what behaves differently.",
        ]
        if chosen.output:
            _write(chosen.output, config_file(result.values, [*head, *about]))
            say("\n".join(about))
            say(f"python -m dapo_jax.train --config {chosen.output}")
        else:
            say("\n".join([*head, "", command(result.values), "", *about]))
        if result.problems:
            raise InputError(f"the config has {len(result.problems)} problems, listed above: correct the options")


def _environment(given: Sequence[str]) -> dict[str, str]:
    """What the script sees of the environment. InputError if a name is not a variable's."""
    values = {"HOME": str(Path.home()), "PWD": str(Path.cwd())}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not (equals or name in os.environ):
            raise InputError(f"--env={text} must be NAME=VALUE, or the NAME of a variable that is set: correct it")
        values[name] = value if equals else os.environ[name]
    return values


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): give a shell script that starts verl's trainer") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--output={path} cannot be written ({error}): choose a file in an existing directory"
        ) from error
