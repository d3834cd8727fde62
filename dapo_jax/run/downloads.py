"""Host: downloads the models and data that a run names, once per host; names on the hub are pinned to commits."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dapo_jax.command.tasks import TaskOptions, held_out_options, parse_tasks
from dapo_jax.config.sections import Config
from dapo_jax.config.values import MODEL_PATHS, flat, with_values
from dapo_jax.errors import InputError
from dapo_jax.hub.names import HubName, data_name, model_name
from dapo_jax.hub.repositories import fetch_model, fetch_split, pinned_name
from dapo_jax.hub.smollm2 import fetch_smollm2, is_smollm2
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.recipe import read_config
from dapo_jax.parallel.processes import first_per_host, gather, is_first
from dapo_jax.run.base_models import model_paths
from dapo_jax.run.other_runs import find_trained, first_model

TASKS = "evaluate.tasks"
Named = tuple[str, HubName]  # an option, and a name on the hub that it holds

logger = logging.getLogger(__name__)


def with_downloads(config: Config, *, training: bool = True, data: bool = True, weights: bool = True) -> Config:
    """`config` with its names on the hub pinned to commits, and their files on this machine.

    A name that an earlier start of the run has recorded keeps its commit. Every process must call it; process 0, which
    has the records, decides. The first process of each host downloads.

    Args:
        training: whether the command trains.
        data: whether it reads prompts and scores responses.
        weights: whether it loads the weights of model.path.

    Raises:
        InputError: one line for each name that the hub does not have or give.
    """
    tasks = parse_tasks(config.evaluate.tasks, held_out_options(config.data, config.evaluate, config.reward))
    pins = gather(_pins(config.workdir, _names(config, training, data)) if is_first() else None)[0]
    config = with_values(config, _replaced(flat(config), tasks, pins))
    names = [*_names(config, training, data), *_bases(config.model.path)]
    if any(gather(bool(names))):
        # A run without adapters has all its weights in its checkpoints.
        trained = find_trained(config.model.path)
        weights = weights and (trained is None or bool(trained.config.model.lora.rank))
        shown = shows_progress(config.trainer, config.monitor)
        first_per_host(lambda: _download(names, weights, shown))
    if any(map(is_smollm2, {*model_paths(config, training=training).values(), first_model(config.model.path)})):
        first_per_host(fetch_smollm2)
    return config


def _names(config: Config, training: bool, data: bool) -> Iterator[Named]:
    """The names on the hub that a command reads."""
    for key, path in model_paths(config, training=training).items():
        needed = data or key != "reward.model.path"
        if needed and (name := model_name(path)) is not None and find_trained(path) is None:
            yield key, name
    if not data:
        return
    files = {"data.train_files": config.data.train_files} if training else {}
    files |= {"data.val_files": config.data.val_files}
    files = files if config.data.task == "files" else {}
    held_out = held_out_options(config.data, config.evaluate, config.reward)
    files |= {f"{TASKS}.{task.name}": task.files for task in parse_tasks(config.evaluate.tasks, held_out)}
    for key, paths in files.items():
        for path in paths:
            if (name := data_name(path)) is not None:
                yield key, name


def _bases(path: str) -> Iterator[Named]:
    """The model on the hub that the run at `path` started from, and further back: its files are read as well."""
    trained = find_trained(path)
    if trained is not None:
        start = trained.config.model.path
        name = model_name(start)
        yield from [("model.path", name)] if name is not None else _bases(start)


def _pins(workdir: str, names: Iterable[Named]) -> dict[str, str]:
    """Each name as it is written, and with the commit that an earlier start of the run has recorded, else the hub's."""
    before = read_config(workdir)
    recorded = {name.request(): name for _, name in _names(before, True, True) if name.commit} if before else {}
    pins: dict[str, str] = {}

    def pin(_: str, name: HubName) -> None:
        if str(name) not in pins:
            pinned = recorded.get(str(name)) or pinned_name(name)
            pins[str(name)] = str(pinned)
            logger.info("%s: commit %s of the Hugging Face hub", name.request(), pinned.commit)

    _for_each(names, pin)
    return pins


def _replaced(options: Mapping[str, Any], tasks: Sequence[TaskOptions], pins: Mapping[str, str]) -> dict[str, Any]:
    """The options that name models and data, with the value of each key of `pins` instead of it."""
    values: dict[str, Any] = {key: pins.get(options[key], options[key]) for key in MODEL_PATHS}
    for key in ("data.train_files", "data.val_files"):
        values[key] = tuple(pins.get(path, path) for path in options[key])
    if any(set(task.files) & set(pins) for task in tasks):
        given = json.loads(options[TASKS])
        for task in tasks:
            given[task.name]["files"] = [pins.get(path, path) for path in task.files]
        values[TASKS] = json.dumps(given)
    return values


def _download(names: Iterable[Named], weights: bool, shown: bool) -> None:
    """Fetches the files of each name, of model.path with or without `weights`."""

    def download(key: str, name: HubName) -> None:
        if name.kind == "dataset":
            fetch_split(name, shown=shown)
        else:
            fetch_model(name, weights=weights or key != "model.path", shown=shown)

    _for_each(names, download)


def _for_each(names: Iterable[Named], action: Callable[[str, HubName], None]) -> None:
    """Calls `action` for each name. Raises one InputError with the problems of all."""
    problems = []
    for key, name in names:
        try:
            action(key, name)
        except InputError as error:
            problems.append(f"{key}={error}")
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
