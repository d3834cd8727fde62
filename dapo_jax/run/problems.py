"""Host: the problems that a policy trains on and is evaluated on: the held-out ones, and those of evaluate.tasks."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.tasks import TaskOptions, given_function, held_out_options, parse_tasks
from dapo_jax.config.derived import gen_batch_size
from dapo_jax.config.sections import Config, DataConfig
from dapo_jax.data.arithmetic import arithmetic_rows
from dapo_jax.data.prompts import PromptOrder, PromptSet, check_hints, tokenize_prompts
from dapo_jax.data.reasoning_gym import reasoning_gym_rows
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.environments.episodes import told
from dapo_jax.environments.protocol import Description
from dapo_jax.errors import InputError
from dapo_jax.parallel.processes import check_agreement
from dapo_jax.rewards.verifiers import verifier_for
from dapo_jax.rewards.weighted import functions_of
from dapo_jax.run.other_runs import find_trained

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSet:
    """Tokenized problems and the options to evaluate them with."""

    options: TaskOptions
    prompts: PromptSet

    def name_of(self, row: PromptRow) -> str:
        """The name of a row's metrics."""
        return self.options.name or row.task or row.data_source

    @cached_property
    def by_name(self) -> list[tuple[str, list[list[int]]]]:
        """Metric names, each with its problems: for every distinct prompt, the indices of its rows.

        A prompt that a file repeats is one problem with more samples.
        """
        names: dict[str, dict[tuple[str, str], list[int]]] = {}
        for index, row in enumerate(self.prompts.rows):
            problems = names.setdefault(self.name_of(row), {})
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


def read_problems(
    config: Config,
    tokenizer: Tokenizer,
    *,
    training: bool = True,
    environments: Mapping[str, Description] | None = None,
) -> Problems:
    """The tokenized problems to train on (none without `training`) and the task sets to evaluate on.

    Without `training`, `config.seed` is for the draws alone: a run at model.path is asked the generated problems that
    it has held out, by its own seed.

    Args:
        environments: those that rows may name; None = responses are one turn.
    """
    data, function = config.data, given_function(config.reward)
    held_out = held_out_options(data, config.evaluate, config.reward)
    tasks = parse_tasks(config.evaluate.tasks, held_out)
    if function == "auto" and data.task == "reasoning_gym":
        function = "reasoning_gym"  # whatever other problems have
    trained = None if training else find_trained(config.model.path)
    run = trained.config if trained else config
    train_rows, eval_rows = _read_rows(data, held_out, run.seed, training=training)
    generated = trained is not None and run.data.task == data.task != "files"
    learned = _read_rows(run.data, held_out, run.seed, training=False)[0] if generated else []
    sets = {dataclasses.replace(held_out, reward_function=function): eval_rows}
    sets |= {task: task.read() for task in tasks}
    if environments is not None:
        train_rows = told(train_rows, environments)
        sets = {task: told(rows, environments) for task, rows in sets.items()}
    sets = {task: _first(task, rows) for task, rows in sets.items() if rows}
    auto = _stands_for_auto([(function, train_rows), *((task.reward_function, rows) for task, rows in sets.items())])

    def chosen(function: str) -> str:
        return auto if function == "auto" else function

    task_sets = tuple(
        TaskSet(
            dataclasses.replace(task, reward_function=chosen(task.reward_function)),
            _tokenize(data, rows, tokenizer, templated=bool(task.prompt_template and task.files)),
        )
        for task, rows in sets.items()
    )
    names = [name for task in task_sets for name, _ in task.by_name]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"evaluate.tasks, {name!r} must not be a data_source of the held-out problems: rename it")
    templated = bool(data.task == "files" and data.prompt_template)
    train_set = _tokenize(data, train_rows, tokenizer, templated=templated) if training else PromptSet([], [])
    if needs(named_estimator(config.algorithm.adv_estimator), "hint_logprobs"):
        check_hints(train_set.rows)
    order = _order(data, config.seed, [row.file for row in train_set.rows])
    problems = Problems(train_set, task_sets, order, chosen(function))
    _warn_of_data(data, problems, {row.question for row in learned})
    if tags := tokenizer.tags_without_text:
        logger.warning(
            "no verifier sees %s: they are special tokens of the tokenizer, which have no text in responses; set "
            "reward.keep_special_tokens=True if one reads them",
            ", ".join(tags[:10]),
        )
    if jax.process_count() > 1:
        check_agreement(problems.checksums())
    return problems


def _read_rows(
    data: DataConfig, held_out: TaskOptions, seed: int, *, training: bool
) -> tuple[list[PromptRow], list[PromptRow]]:
    """The rows to train on, and those of data.val_files or that a generated task holds out."""
    if data.task == "arithmetic":
        return arithmetic_rows(data.arithmetic, seed)
    if data.task == "reasoning_gym":
        return reasoning_gym_rows(data.reasoning_gym, seed)
    train_rows = dataclasses.replace(held_out, files=data.train_files).read() if training else []
    return train_rows, held_out.read() if data.val_files else []


def _first(task: TaskOptions, rows: list[PromptRow]) -> list[PromptRow]:
    """The rows that max_prompts leaves; the log names data sources of which it leaves none."""
    chosen = rows if task.max_prompts < 0 else rows[: task.max_prompts]
    left, sources = {row.data_source for row in chosen}, dict.fromkeys(row.data_source for row in rows)
    if lost := [source for source in sources if source not in left]:
        logger.warning(
            "max_prompts=%d leaves out all rows of %s: raise it, or put them into evaluate.tasks",
            task.max_prompts,
            ", ".join(lost[:10]),
        )
    return chosen


def _order(data: DataConfig, seed: int, files: Sequence[int]) -> PromptOrder:
    """The order of the training prompts, of which each is in one of `files`, the places of data.train_files."""
    shuffle, weights = data.shuffle, data.mixture
    if not weights or not files:
        return PromptOrder(max(len(files), 1), seed=seed, shuffle=shuffle)
    sizes = np.bincount(files, minlength=len(weights)).tolist()
    if 0 in sizes:
        empty = data.train_files[sizes.index(0)]
        raise InputError(f"data.mixture: {empty} must have a prompt to train on, and has none: leave the file out")
    return PromptOrder(len(files), seed=seed, shuffle=shuffle, sizes=sizes, weights=weights)


def _tokenize(data: DataConfig, rows: list[PromptRow], tokenizer: Tokenizer, *, templated: bool) -> PromptSet:
    """The prompts as tokens. What data.prompt_template has made is plain text for a model without a chat template."""
    if templated and tokenizer.chat_template is None:
        rows = [row if row.template_kwargs else dataclasses.replace(row, prompt=row.question) for row in rows]
    return tokenize_prompts(rows, tokenizer, data)


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


def _warn_of_data(data: DataConfig, problems: Problems, learned: set[str]) -> None:
    """Warns if there are fewer prompts than a batch needs, or if evaluation problems are also trained on.

    Args:
        learned: the generated questions on which the run has trained that is evaluated.
    """
    train_set, task_sets = problems.train_set, problems.task_sets
    most = max(data.train_batch_size, gen_batch_size(data))
    option = "train_batch_size" if data.train_batch_size == most else "gen_batch_size"
    named = f"data.{option}={most}"
    for file, size in enumerate(problems.order.sizes if len(train_set) else ()):
        wanted = problems.order.counts(most)[file]
        if size < wanted:
            which = f" in {data.train_files[file]}" if data.mixture else ""
            logger.warning(
                "%d problems to train on%s, fewer than %s: prompts repeat within a batch; lower it or add problems",
                size,
                which,
                f"the {wanted} that {named} takes of it" if which else named,
            )
    trained = {row.asked for row in train_set.rows} if task_sets else set()
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
        shared = sum(row.asked in trained or row.question in learned for row in task.prompts.rows)
        if shared:
            own = "data.val_files" if task.options.files else f"data.{data.task}"
            logger.warning(
                "%d of %d prompts of %s are also trained on: their accuracy does not measure generalization; %s",
                shared,
                len(task.prompts),
                f"evaluate.tasks, {task.options.name!r}" if task.options.name else own,
                "remove them from one of the two" if task.options.files else "give its options as the run had them",
            )
