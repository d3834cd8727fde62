"""Host: downloads the models and data that a run names, once per host; names on the hub are pinned to commits."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from dapo_jax.command.tasks import parse_tasks
from dapo_jax.config.sections import Config
from dapo_jax.config.values import MODEL_PATHS, with_values
from dapo_jax.errors import InputError
from dapo_jax.hub.names import HubName, data_name, model_name
from dapo_jax.hub.repositories import fetch_model, fetch_split, pinned_name
from dapo_jax.hub.smollm2 import fetch_smollm2, is_smollm2
from dapo_jax.monitor.bars import shows_progress
from dapo_jax.monitor.records import read_config
from dapo_jax.parallel.processes import first_per_host, gather, is_first
from dapo_jax.run.base_models import first_model, model_paths
from dapo_jax.run.other_runs import find_trained

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
    pins = gather(_pins(config, list(_names(config, training, data))) if is_first() else None)[0]
    config = with_values(config, _replaced(config, pins))
    names = [*_names(config, training, data), *_bases(config)]
    if any(gather(bool(names))):
        first_per_host(lambda: _download(config, names, weights))
    if any(map(is_smollm2, {*model_paths(config, training=training).values(), first_model(config)})):
        first_per_host(fetch_smollm2)
    return config


def _names(config: Config, training: bool, data: bool) -> Iterator[Named]:
    """The names on the hub that a command reads."""
    for key, path in model_paths(config, training=training).items():
        needed = data or key != "reward.model.path"
        if needed and (name := model_name(path)) is not None and find_trained(path) is None:
            yield key, name
    for key, path in _data_paths(config, training) if data else ():
        if (name := data_name(path)) is not None:
            yield key, name


def _data_paths(config: Config, training: bool) -> Iterator[tuple[str, str]]:
    if config.data.task == "files":
        for key in ("data.train_files", "data.val_files")[not training :]:
            yield from ((key, path) for path in attrgetter(key)(config))
    for task in parse_tasks(config):
        yield from ((f"{TASKS}.{task.name}", path) for path in task.files)


def _bases(config: Config) -> Iterator[Named]:
    """The model on the hub that the run in model.path started from, and further back: its files are read as well."""
    trained = find_trained(config.model.path)
    if trained is not None:
        name = model_name(trained.config.model.path)
        yield from [("model.path", name)] if name is not None else _bases(trained.config)


def _pins(config: Config, names: Iterable[Named]) -> dict[str, str]:
    """Each name as it is written, and with its commit."""
    recorded = _recorded(config)
    pins: dict[str, str] = {}

    def pin(name: HubName) -> None:
        if str(name) not in pins:
            pinned = recorded.get(str(name)) or pinned_name(name)
            pins[str(name)] = str(pinned)
            logger.info("%s: commit %s of the Hugging Face hub", name.request(), pinned.commit)

    _for_each(names, lambda _, name: pin(name))
    return pins


def _recorded(config: Config) -> dict[str, HubName]:
    """The pinned names that an earlier start of the run has recorded, by what the user wrote."""
    before = read_config(config.workdir)
    names = _names(before, training=True, data=True) if before else ()
    return {name.request(): name for _, name in names if name.commit}


def _replaced(config: Config, pins: dict[str, str]) -> dict[str, Any]:
    """The options that hold a key of `pins`, with its value instead."""
    values: dict[str, Any] = {}
    for key in MODEL_PATHS:
        path = attrgetter(key)(config)
        values |= {key: pins[path]} if path in pins else {}
    for key in ("data.train_files", "data.val_files"):
        paths = attrgetter(key)(config)
        values |= {key: tuple(pins.get(path, path) for path in paths)} if set(paths) & set(pins) else {}
    tasks = parse_tasks(config)
    if any(set(task.files) & set(pins) for task in tasks):
        given = json.loads(config.evaluate.tasks)
        for task in tasks:
            given[task.name]["files"] = [pins.get(path, path) for path in task.files]
        values[TASKS] = json.dumps(given)
    return values


def _download(config: Config, names: Iterable[Named], weights: bool) -> None:
    shown = shows_progress(config.trainer, config.monitor)
    trained = find_trained(config.model.path)

    def download(key: str, name: HubName) -> None:
        if name.kind == "dataset":
            fetch_split(name, shown=shown)
        else:
            # A run without adapters has all its weights in its checkpoints.
            needed = weights and (trained is None or bool(trained.config.model.lora.rank))
            fetch_model(name, weights=needed or key != "model.path", shown=shown)

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
