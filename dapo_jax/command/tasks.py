"""Host: the task sets of evaluate.tasks, and how the held-out problems are sampled and scored.

evaluate.tasks is a JSON object, because its names are the user's:

    {"aime": {"files": "data/aime-2024.parquet", "n": 32}, "greedy": {"files": "data/gsm8k.parquet", "temperature": 0}}
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapo_jax.config.places import without_tilde
from dapo_jax.config.sections import DataConfig, EvaluateConfig, RewardConfig
from dapo_jax.data.columns import Columns
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.rewards.weighted import functions_of

NO_FUNCTIONS = RewardConfig.functions  # reward.function alone
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {  # type of an option: its types in JSON, and their description
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    tuple: ((str, list), "a path or a list of paths"),
}


@dataclass(frozen=True)
class TaskOptions:
    """How a task set is sampled and scored. Options that are not given are those of the held-out problems."""

    name: str  # of its metrics; "" = each problem's data_source
    files: tuple[str, ...]  # Parquet, JSONL or CSV; empty = a generated task's problems
    prompt_key: str
    prompt_template: str
    answer_key: str
    n: int  # samples per problem
    temperature: float
    top_p: float
    top_k: int
    max_prompts: int  # only the first ones; -1 = all
    batch_size: int  # problems sampled at once; 0 = all
    reward_function: str

    def read(self) -> list[PromptRow]:
        """The rows of its files. Only `auto` needs to know the data_source of each."""
        columns = Columns(self.prompt_key, self.prompt_template, self.answer_key)
        return read_prompt_files(self.files, columns, names_sources="auto" not in functions_of(self.reward_function))


def given_function(reward: RewardConfig) -> str:
    """What scores responses: the text of reward.functions if it is given, else reward.function."""
    return reward.function if reward.functions == NO_FUNCTIONS else reward.functions


def held_out_options(data: DataConfig, evaluate: EvaluateConfig, reward: RewardConfig) -> TaskOptions:
    """The options for data.val_files, or for the problems that a generated task holds out."""
    return TaskOptions(
        name="",
        files=data.val_files,
        prompt_key=data.prompt_key,
        prompt_template=data.prompt_template,
        answer_key=data.answer_key,
        n=evaluate.n,
        temperature=evaluate.temperature,
        top_p=evaluate.top_p,
        top_k=evaluate.top_k,
        max_prompts=evaluate.max_prompts,
        batch_size=evaluate.batch_size,
        reward_function=given_function(reward),
    )


def parse_tasks(text: str, held_out: TaskOptions) -> list[TaskOptions]:
    """The task sets of evaluate.tasks, `text`. InputError with the set, the option, the rule and the fix."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"evaluate.tasks={text!r} must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise InputError(f"evaluate.tasks={text!r} must be a JSON object from the name of a task set to its options")
    return [_parse(name, options, held_out) for name, options in given.items()]


def _parse(name: str, options: Any, default: TaskOptions) -> TaskOptions:
    where = f"evaluate.tasks, {name!r}"
    if not name or not isinstance(options, dict):
        raise InputError(f"{where} must have a name, and an object of options such as {{'files': 'aime.parquet'}}")
    known = [field.name for field in dataclasses.fields(TaskOptions) if field.name != "name"]
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{where}: {key!r} is not an option: choose one of {', '.join(known)}")
        kinds, description = _KINDS[type(getattr(default, key))]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InputError(f"{where}: {key}={value!r} must be {description}")
    if "prompt_key" in options and options.get("prompt_template", default.prompt_template):
        raise InputError(
            f"{where}: prompt_key is not read with a prompt_template: leave it out, or add 'prompt_template': ''"
        )
    files = options.get("files", ())
    files = (files,) if isinstance(files, str) else tuple(files)
    if not files or not all(isinstance(file, str) for file in files):
        raise InputError(f"{where}: files={options.get('files')!r} must be a path or a list of paths")
    return dataclasses.replace(default, **options | {"name": name, "files": without_tilde(files)})


def measured_sets(data: DataConfig, evaluate: EvaluateConfig, reward: RewardConfig) -> list[TaskOptions]:
    """What the policy is evaluated on: the held-out problems, if any, and evaluate.tasks."""
    held_out = held_out_options(data, evaluate, reward)
    has_held_out = {
        "files": bool(data.val_files),
        "arithmetic": data.arithmetic.num_heldout > 0,
        "reasoning_gym": data.reasoning_gym.num_heldout > 0,
    }
    try:
        tasks = parse_tasks(evaluate.tasks, held_out)
    except ValueError:  # validate reports it; nobody knows what the sets would read
        tasks = [held_out]
    return [held_out] * has_held_out.get(data.task, True) + tasks


def verifiers_of(reward: RewardConfig, measured: Sequence[TaskOptions]) -> set[str] | None:
    """The verifiers that score training problems and `measured` ones; None if reward.functions cannot be read."""
    functions = {given_function(reward), *(task.reward_function for task in measured)}
    try:
        return {name for function in functions for name in functions_of(function)}
    except InputError:  # validate reports it
        return None
