"""Host: the problems that a policy trains on and is evaluated on: the held-out ones, and those of evaluate.tasks.

evaluate.tasks is a JSON object, because its names are the user's:

    {"aime": {"files": "data/aime-2024.parquet", "n": 32}, "greedy": {"files": "data/gsm8k.parquet", "temperature": 0}}
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dapo_jax.config.derived import gen_batch_size
from dapo_jax.config.sections import Config, RewardConfig
from dapo_jax.data.arithmetic import arithmetic_rows
from dapo_jax.data.columns import Columns
from dapo_jax.data.order import PromptOrder
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.data.prompts import PromptSet, tokenize_prompts
from dapo_jax.data.reasoning_gym import reasoning_gym_rows
from dapo_jax.data.rows import PromptRow, prompt_identity
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.parallel.processes import check_agreement
from dapo_jax.places import without_tilde
from dapo_jax.rewards.verifiers import verifier_for
from dapo_jax.rewards.weighted import functions_of

logger = logging.getLogger(__name__)

NO_FUNCTIONS = RewardConfig.functions  # "reward.function alone"

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


@dataclass(frozen=True)
class TaskSet:
    """Tokenized problems and the options to evaluate them with."""

    options: TaskOptions
    prompts: PromptSet

    @cached_property
    def by_name(self) -> list[tuple[str, list[list[int]]]]:
        """Metric names, each with its problems: for every distinct prompt, the indices of its rows.

        A prompt that a file repeats is one problem with more samples.
        """
        names: dict[str, dict[tuple[str, str], list[int]]] = {}
        for index, row in enumerate(self.prompts.rows):
            problems = names.setdefault(self.options.name or row.data_source, {})
            problems.setdefault(row.identity, []).append(index)
        return [(name, list(names[name].values())) for name in sorted(names)]


@dataclass(frozen=True)
class Problems:
    """What a policy trains on, and what it is evaluated on."""

    train_set: PromptSet  # empty without training
    task_sets: tuple[TaskSet, ...]
    order: PromptOrder  # of the rows of train_set
    function: str  # the reward function for train_set

    def by_prompts(self) -> list[tuple[PromptSet, str]]:
        """Each set with the name of its reward function; the training set first."""
        measured = [(task.prompts, task.options.reward_function) for task in self.task_sets]
        return [(self.train_set, self.function), *measured]

    def by_function(self) -> list[tuple[Sequence[PromptRow], str]]:
        """The rows of each set with the name of its reward function; the training set first."""
        return [(prompts.rows, function) for prompts, function in self.by_prompts()]

    def checksums(self) -> dict[str, str]:
        """Checksums, by description, of the data that all processes must have read alike."""
        tasks = {
            f"the prompts of {task.options.name or 'evaluation'}": task.prompts.checksum() for task in self.task_sets
        }
        return {"the training prompts": self.train_set.checksum()} | tasks


def held_out_options(config: Config) -> TaskOptions:
    """The options for data.val_files, or for the problems that a generated task holds out."""
    evaluate = config.evaluate
    return TaskOptions(
        name="",
        files=config.data.val_files,
        prompt_key=config.data.prompt_key,
        prompt_template=config.data.prompt_template,
        answer_key=config.data.answer_key,
        n=evaluate.n,
        temperature=evaluate.temperature,
        top_p=evaluate.top_p,
        top_k=evaluate.top_k,
        max_prompts=evaluate.max_prompts,
        batch_size=evaluate.batch_size,
        reward_function=given_function(config),
    )


def parse_tasks(config: Config) -> list[TaskOptions]:
    """The task sets of evaluate.tasks. InputError with the set, the option, the rule and the fix."""
    text = config.evaluate.tasks
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"evaluate.tasks={text!r} must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise InputError(f"evaluate.tasks={text!r} must be a JSON object from the name of a task set to its options")
    default = held_out_options(config)
    return [_parse(name, options, default) for name, options in given.items()]


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


def read_problems(config: Config, tokenizer: Tokenizer, *, training: bool = True) -> Problems:
    """The tokenized problems to train on (none without `training`) and the task sets to evaluate on."""
    train_rows, eval_rows = _read_rows(config, training=training)
    function = reward_function(config)
    sets = {dataclasses.replace(held_out_options(config), reward_function=function): eval_rows}
    sets |= {task: task.read() for task in parse_tasks(config)}
    sets = {task: rows if task.max_prompts < 0 else rows[: task.max_prompts] for task, rows in sets.items() if rows}
    auto = _stands_for_auto([(function, train_rows), *((task.reward_function, rows) for task, rows in sets.items())])

    def chosen(function: str) -> str:
        return auto if function == "auto" else function

    task_sets = tuple(
        TaskSet(
            dataclasses.replace(task, reward_function=chosen(task.reward_function)),
            _tokenize(config, rows, tokenizer, templated=bool(task.prompt_template and task.files)),
        )
        for task, rows in sets.items()
    )
    names = [name for task in task_sets for name, _ in task.by_name]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"evaluate.tasks, {name!r} must not be a data_source of the held-out problems: rename it")
    templated = bool(config.data.task == "files" and config.data.prompt_template)
    train_set = _tokenize(config, train_rows, tokenizer, templated=templated) if training else PromptSet([], [])
    order = _order(config, [row.file for row in train_set.rows])
    problems = Problems(train_set, task_sets, order, chosen(function))
    _warn_of_data(config, problems)
    if tags := tokenizer.tags_without_text:
        logger.warning(
            "no verifier sees %s: they are special tokens of the tokenizer, which have no text in responses; set "
            "reward.keep_special_tokens=True if one reads them",
            ", ".join(tags[:10]),
        )
    if jax.process_count() > 1:
        check_agreement(problems.checksums())
    return problems


def _read_rows(config: Config, *, training: bool) -> tuple[list[PromptRow], list[PromptRow]]:
    """The rows to train on, and those of data.val_files or that a generated task holds out."""
    data = config.data
    if data.task == "arithmetic":
        task = data.arithmetic
        return arithmetic_rows(
            operators=task.operators,
            low=task.low,
            high=task.high,
            num_train=task.num_train,
            num_heldout=task.num_heldout,
            seed=config.seed,
            template=task.template,
        )
    if data.task == "reasoning_gym":
        gym = data.reasoning_gym
        return reasoning_gym_rows(
            gym.datasets,
            num_train=gym.num_train,
            num_heldout=gym.num_heldout,
            seed=config.seed,
            template=gym.template,
        )
    held_out = held_out_options(config)
    train_rows = dataclasses.replace(held_out, files=data.train_files).read() if training else []
    return train_rows, held_out.read() if data.val_files else []


def _order(config: Config, files: Sequence[int]) -> PromptOrder:
    """The order of the training prompts, of which each is in one of `files`, the places of data.train_files."""
    seed, shuffle, weights = config.seed, config.data.shuffle, config.data.mixture
    if not weights or not files:
        return PromptOrder(max(len(files), 1), seed=seed, shuffle=shuffle)
    sizes = np.bincount(files, minlength=len(weights)).tolist()
    if 0 in sizes:
        empty = config.data.train_files[sizes.index(0)]
        raise InputError(f"data.mixture: {empty} must have a prompt to train on, and has none: leave the file out")
    return PromptOrder(len(files), seed=seed, shuffle=shuffle, sizes=sizes, weights=weights)


def _tokenize(config: Config, rows: list[PromptRow], tokenizer: Tokenizer, *, templated: bool) -> PromptSet:
    """The prompts as tokens. What data.prompt_template has made is plain text for a model without a chat template."""
    if templated and tokenizer.chat_template is None:
        rows = [row if row.template_kwargs else dataclasses.replace(row, prompt=row.question) for row in rows]
    return tokenize_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        filter_overlong=config.data.filter_overlong_prompts,
        system_prompt=config.data.system_prompt,
        chat_template_kwargs=json.loads(config.data.chat_template_kwargs),
    )


def given_function(config: Config) -> str:
    """What scores responses: the text of reward.functions if it is given, else reward.function."""
    reward = config.reward
    return reward.function if reward.functions == NO_FUNCTIONS else reward.functions


def reward_function(config: Config) -> str:
    """The function for the training problems: problems of reasoning_gym have its verifier, whatever others have."""
    function = given_function(config)
    return "reasoning_gym" if function == "auto" and config.data.task == "reasoning_gym" else function


def _stands_for_auto(sets: Sequence[tuple[str, list[PromptRow]]]) -> str:
    """The verifier of all rows that `auto` judges, or `auto` itself if there are several.

    A process of the others loads no library for symbolic mathematics, which takes most of its start and memory.

    Args:
        sets: rows with the name of their reward function.

    Raises:
        InputError: a data source has no verifier.
    """
    sources = {row.data_source for name, rows in sets if "auto" in functions_of(name) for row in rows}
    verifiers = {verifier_for(source) for source in sorted(sources)}
    return verifiers.pop() if len(verifiers) == 1 else "auto"


def _warn_of_data(config: Config, problems: Problems) -> None:
    """Warns if there are fewer prompts than a batch needs, or if evaluation problems are also trained on."""
    train_set, task_sets = problems.train_set, problems.task_sets
    most = max(config.data.train_batch_size, gen_batch_size(config))
    option = "train_batch_size" if config.data.train_batch_size == most else "gen_batch_size"
    named = f"data.{option}={most}"
    for file, size in enumerate(problems.order.sizes if len(train_set) else ()):
        wanted = problems.order.counts(most)[file]
        if size < wanted:
            which = f" in {config.data.train_files[file]}" if config.data.mixture else ""
            logger.warning(
                "%d problems to train on%s, fewer than %s: prompts repeat within a batch; lower it or add problems",
                size,
                which,
                f"the {wanted} that {named} takes of it" if which else named,
            )
    trained = {prompt_identity(row.prompt) for row in train_set.rows} if task_sets else set()
    for task in task_sets:
        for name, rows in task.by_name:
            fewest = min(map(len, rows))
            if more := [row for problem in rows for row in problem[fewest:]]:
                logger.warning(
                    "%s repeats an earlier problem of %s (as do %d more rows): metrics are named by the fewest samples "
                    "of a problem, mean@%d; remove the row, or repeat all problems as often",
                    task.prompts.rows[more[0]].origin,
                    name,
                    len(more) - 1,
                    fewest * task.options.n,
                )
        shared = sum(prompt_identity(row.prompt) in trained for row in task.prompts.rows)
        if shared:
            logger.warning(
                "%d of %d prompts of %s are also trained on: their accuracy does not measure generalization; "
                "remove them from one of the two",
                shared,
                len(task.prompts),
                f"evaluate.tasks, {task.options.name!r}" if task.options.name else "data.val_files",
            )
