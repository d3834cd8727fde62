"""Host: the `--help` of a command: its most used options, with the comments of config/sections.py."""

import argparse
import ast
import dataclasses
import functools
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from dapo_jax.config import sections as config_module
from dapo_jax.config.sections import Config

_MODEL = ("model.path", "workdir")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_MESH = ("mesh.data", "mesh.fsdp", "mesh.expert", "mesh.tensor")
MOST_USED = {
    "train": (
        *_MODEL,
        "data.train_files",
        "data.val_files",
        *_LENGTHS,
        "data.train_batch_size",
        "rollout.n",
        "reward.function",
        "algorithm.filter_groups.enable",
        "actor.optim.lr",
        "actor.ppo_mini_batch_size",
        "actor.ppo_micro_batch_size_per_device",
        "trainer.total_training_steps",
        "trainer.test_freq",
        "trainer.save_freq",
        "mesh.fsdp",
        "mesh.tensor",
        "mesh.train_tensor",
    ),
    "evaluate": (
        *_MODEL,
        "data.val_files",
        "evaluate.tasks",
        "evaluate.n",
        "evaluate.temperature",
        *_LENGTHS,
        "reward.function",
        "rollout.max_num_seqs",
        "rollout.kv_memory_share",
        "model.dtype",
        *_MESH,
    ),
    "export": ("workdir", "trainer.checkpoint_dir", *_MESH),
    "preflight": (
        "model.path",
        "model.dtype",
        *_LENGTHS,
        "data.train_batch_size",
        "data.gen_batch_size",
        "rollout.n",
        "rollout.max_num_seqs",
        "actor.ppo_mini_batch_size",
        "actor.ppo_micro_batch_size_per_device",
        "model.enable_gradient_checkpointing",
        "actor.optim.offload",
        *_MESH,
        "mesh.train_tensor",
    ),
}
WIDTH, INDENT = 100, 4


def about(docstring: str | None) -> str:
    """A command's docstring, as the beginning of its help."""
    text = (docstring or "").removeprefix("Host: ")
    return text[:1].upper() + text[1:]


def command_parser(prog: str, docstring: str | None, options: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command that its module's docstring explains.

    Args:
        options: the command of MOST_USED whose options end the help; None = it takes no config.
    """
    return argparse.ArgumentParser(
        prog=prog,
        description=about(docstring),
        epilog=options_help(options) if options else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
    )


def options_help(command: str) -> str:
    """The end of the help: the options, `--debug` and where to read more."""
    lines = ["most used options, for the config file or the command line (in brackets: the default):"]
    known, indent = {key: (default, comment) for key, default, comment in described(Config())}, " " * 2 * INDENT
    for option in MOST_USED[command]:
        default, comment = known[option]
        lines.append(f"  --config.{option}=... [{literal(default)}]")
        lines += textwrap.wrap(comment, WIDTH, initial_indent=indent, subsequent_indent=indent)
    lines += [
        "",
        "  --debug",
        f"{' ' * 2 * INDENT}show the traceback of a failure",
        "",
        "--config takes a recipe's name (dapo-jax configs lists them), or a Python, JSON or YAML file; it may be left",
        "out before one. All options: docs/configuration.md. First steps: docs/getting_started.md. What messages mean:",
        "docs/troubleshooting.md.",
    ]
    return "\n".join(lines)


def described(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each option of a section of the config: its dotted key, its value, and its comment in config/sections.py."""
    comments = field_comments()
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            yield from described(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, comments[type(section).__name__, name]


@functools.cache
def field_comments() -> dict[tuple[str, str], str]:
    """The trailing comment of each field of config/sections.py, by class and name."""
    source = inspect.getsource(config_module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {
        (owner.name, field.target.id): by_line.get(field.lineno, "")
        for owner in ast.walk(ast.parse(source))
        if isinstance(owner, ast.ClassDef)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def literal(value: Any) -> str:
    """A default as the help and the table of options show it."""
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, str) else repr(value)
