"""Host: the problems that a policy is measured on: the held-out ones, and those of evaluate.tasks.

evaluate.tasks is a JSON object, as the names are the user's:

    {"aime": {"files": "data/aime-2024.parquet", "n": 32}, "greedy": {"files": "data/gsm8k.parquet", "temperature": 0}}
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dapo_jax.config.sections import Config
from dapo_jax.data.prompts import PromptSet
from dapo_jax.errors import InputError
from dapo_jax.places import without_tilde

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {  # of a default: what JSON gives for it
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    tuple: ((str, list), "a path or a list of paths"),
}


@dataclass(frozen=True)
class TaskOptions:
    """How a task set is sampled and judged. What is not given is as for the held-out problems."""

    name: str  # of its metrics; "" = each problem's data_source
    files: tuple[str, ...]  # parquet or JSONL; none for the held-out problems
    prompt_key: str
    n: int  # samples per problem
    temperature: float
    top_p: float
    top_k: int
    max_prompts: int  # the first ones; -1 = all
    batch_size: int  # problems sampled at a time; 0 = all
    reward_function: str


@dataclass(frozen=True)
class TaskSet:
    """Problems, as tokens, with what is done with them."""

    options: TaskOptions
    prompts: PromptSet

    def by_name(self) -> Iterator[tuple[str, list[list[int]]]]:
        """The names of the metrics, each with its problems: the rows of every prompt.

        A prompt that a file repeats is one problem with as many more samples.
        """
        names: dict[str, dict[tuple[str, str], list[int]]] = {}
        for index, row in enumerate(self.prompts.rows):
            problems = names.setdefault(self.options.name or row.data_source, {})
            problems.setdefault(row.identity, []).append(index)
        for name in sorted(names):
            yield name, list(names[name].values())


def held_out_options(config: Config) -> TaskOptions:
    """Those of data.val_files or of the problems that a generated task holds out."""
    evaluate = config.evaluate
    return TaskOptions(
        name="",
        files=(),
        prompt_key=config.data.prompt_key,
        n=evaluate.n,
        temperature=evaluate.temperature,
        top_p=evaluate.top_p,
        top_k=evaluate.top_k,
        max_prompts=evaluate.max_prompts,
        batch_size=evaluate.batch_size,
        reward_function=config.reward.function,
    )


def parse_tasks(config: Config) -> list[TaskOptions]:
    """The task sets of evaluate.tasks. ValueError naming the set, the option, the rule and the cure."""
    text = config.evaluate.tasks
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"evaluate.tasks={text!r} must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise InputError(f"evaluate.tasks={text!r} must be a JSON object: task set -> its options")
    default = held_out_options(config)
    return [_parse(name, options, default) for name, options in given.items()]


def _parse(name: str, options: Any, default: TaskOptions) -> TaskOptions:
    where = f"evaluate.tasks, {name!r}"
    if not name or not isinstance(options, dict):
        raise InputError(f"{where} must have a name, and an object of options such as {{'files': 'aime.parquet'}}")
    known = [field.name for field in dataclasses.fields(TaskOptions) if field.name != "name"]
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{where}: {key!r} is no option: choose among {', '.join(known)}")
        kinds, description = _KINDS[type(getattr(default, key))]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InputError(f"{where}: {key}={value!r} must be {description}")
    files = options.get("files", ())
    files = (files,) if isinstance(files, str) else tuple(files)
    if not files or not all(isinstance(file, str) for file in files):
        raise InputError(f"{where}: files={options.get('files')!r} must be a path or a list of paths")
    return dataclasses.replace(default, **options | {"name": name, "files": without_tilde(files)})
