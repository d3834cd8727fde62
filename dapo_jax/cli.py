"""Host: the console command `dapo-jax`: every command of the package by its name.

dapo-jax COMMAND [options]     (or: python -m dapo_jax.cli COMMAND [options])
"""

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from dapo_jax import __version__
from dapo_jax.command.interrupts import end_at_once
from dapo_jax.errors import did_you_mean, say

WRONG_INPUT = 2  # as in command/command_line.py, which takes seconds to import
COMMANDS = {  # name: the module whose main(arguments) it is, and what it does
    "train": ("dapo_jax.training.loop", "train a policy: --config RECIPE [--config.key=value ...]"),
    "sweep": ("dapo_jax.tools.sweep", "train several settings with several seeds each, and compare them"),
    "evaluate": ("dapo_jax.evaluate.evaluate", "measure a model, or the checkpoints of a run"),
    "export": ("dapo_jax.export.export", "write a checkpoint as a Hugging Face model directory"),
    "preflight": ("dapo_jax.preflight.__main__", "compile a step for hardware you do not have: memory, costs, advice"),
    "configs": ("dapo_jax.tools.configs", "list the recipes and the launchers, or print one"),
    "data": ("dapo_jax.tools.data", "write gsm8k, dapo-math-17k, aime-2024 or sums as prompt files"),
    "report": ("dapo_jax.tools.report.report", "explain a run, or several side by side, in one HTML page"),
    "plot": ("dapo_jax.tools.plot", "draw the curves of runs into one picture"),
    "monitor": ("dapo_jax.tools.monitor", "how the group filter of a run is doing"),
    "replay": ("dapo_jax.tools.replay", "compute a step of a run again, and say which number differs"),
    "plan": ("dapo_jax.tools.plan", "the expected cost of dynamic sampling, before a run"),
    "env": ("dapo_jax.tools.env", "print what a bug report needs: versions, devices, packages that do not fit"),
    "from-verl": ("dapo_jax.tools.from_verl.from_verl", "translate a verl script into a command"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name; they default to those of this process."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--version", "-V"):
        say(f"dapo_jax {__version__}")
    elif name in ("--help", "-h"):
        say(help_text())
    elif name in COMMANDS:
        if arguments is None:  # this process is the command's own
            end_at_once(name)
        _imported(COMMANDS[name][0]).main(rest)
    else:
        meant = " ".join(filter(None, [did_you_mean(name, COMMANDS), "dapo-jax --help lists them"]))
        say(f"dapo-jax: there is no command {name}: {meant}", file=sys.stderr)
        sys.exit(WRONG_INPUT)


def _imported(module: str) -> ModuleType:
    """The module. If it does not import, the command ends and names the packages that do not fit each other, if any."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        from dapo_jax.parallel.conflicts import conflicts_here  # its imports are most of what --help would wait for

        if not (unfit := conflicts_here(os.environ)):
            raise
        for line in (f"{type(error).__name__}: {error}", *unfit):
            say(f"dapo-jax: {line}", file=sys.stderr)
        sys.exit(WRONG_INPUT)


def help_text() -> str:
    """What `dapo-jax --help` prints."""
    width = max(map(len, COMMANDS))
    listed = [f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dapo-jax COMMAND [options]",
            "",
            *listed,
            "",
            "dapo-jax COMMAND --help lists a command's options; dapo-jax --version prints the version.",
            "First run, half a minute on any machine: dapo-jax train --config tiny",
        ]
    )


if __name__ == "__main__":
    main()
