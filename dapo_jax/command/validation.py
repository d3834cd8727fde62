"""Host: the rules of a config that no single option can state. Bounds of one option are declared in config/sections.py.

Each function yields one line per problem: the value, the rule and the fix.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import filterfalse
from operator import attrgetter
from typing import Any

from dapo_jax.algorithms import advantages, aggregation, kl, policy_loss
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.named import ESTIMATOR, LOSS, own_problem, reload
from dapo_jax.algorithms.rollout_correction import WEIGHTS
from dapo_jax.command.algorithm_rules import algorithm_problems
from dapo_jax.command.option_uses import LOSS_OPTIONS, unread_problems
from dapo_jax.command.reward_rules import judge_problems, metric_problems, reward_problems
from dapo_jax.command.tasks import given_function, parse_tasks
from dapo_jax.config.bounds import bounds_of, one_of
from dapo_jax.config.derived import (
    segment_steps,
    trains_on_rewards,
)
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.places import address_problem, is_address
from dapo_jax.config.sections import Config, EvaluateConfig
from dapo_jax.config.values import PATHS, number_problems, type_problems
from dapo_jax.data.columns import Columns, template_parts
from dapo_jax.dynamic_sampling.group_filter import RULES
from dapo_jax.errors import InputError, divisors, nearest
from dapo_jax.hub.names import DATA_FORM, PREFIX, data_name
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.lora import ALL_LINEAR, TARGETS
from dapo_jax.models.remat import POLICIES
from dapo_jax.monitor import console
from dapo_jax.monitor.records import TRACKERS

CHOICES = {  # names of functions; all other choices are declared in config/sections.py
    "model.remat_policy": tuple(name for name in POLICIES if name != "none"),
    ESTIMATOR: tuple(advantages.ESTIMATORS),
    "algorithm.kl_penalty": kl.PENALTIES,
    "algorithm.rollout_correction.rollout_is": ("none", *WEIGHTS),
    "algorithm.filter_groups.rule": RULES,
    "algorithm.cpo.wrap_method": CPO_METHODS,
    LOSS: tuple(policy_loss.LOSSES),
    "actor.loss_agg_mode": aggregation.MODES,
    "actor.kl_loss_type": kl.PENALTIES,
    "critic.loss_agg_mode": aggregation.MODES,
    "monitor.console": console.MODES,
}
BOUNDS = (
    *bounds_of(Config),
    *((key, one_of(*choices, or_own=key in (ESTIMATOR, LOSS))) for key, choices in CHOICES.items()),
)
TEMPLATE_ARGUMENTS = ("template", "messages", "special_tokens", "add_generation_prompt")  # set by this package


def validate(config: Config, *, training: bool = True) -> None:
    """Raises one InputError with every problem of `config` that needs neither a device nor a file to be found.

    Args:
        training: also check what only training reads: its data, its batches, lengths, the filter's metric.
    """
    reload()
    problems = type_problems(config) or [*filter(None, _own_problems(config))]
    others = [] if problems else [_problems(config, training), unread_problems(config)]  # compute with the values
    for found in (number_problems(config), *others):
        named = {_key(problem) for problem in problems}
        problems += [problem for problem in found if _key(problem) not in named]
    if problems:
        raise InputError("the config has problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _own_problems(config: Config) -> Iterator[str]:
    """What is wrong with a loss or an estimator of your own; its parameters decide what else is read."""
    of_losses = {key.rpartition(".")[2]: attrgetter(key)(config) for key in LOSS_OPTIONS}
    options = {LOSS: of_losses, ESTIMATOR: {**vars(config.algorithm), **vars(config.algorithm.cpo)}}
    for option, known in options.items():
        if is_own(name := attrgetter(option)(config)):
            yield own_problem(option, name, known)


def _key(problem: str) -> str:
    return problem.partition("=")[0]


def _problems(config: Config, training: bool) -> Iterator[str]:
    for key, bound in BOUNDS:
        yield from bound.problems(key, attrgetter(key)(config))
    yield from _missing(config, training)
    yield from _row_problems(config, training)
    yield from _trainer_problems(config)
    yield from _model_problems(config)
    yield from _decoding_problems(config)
    yield from _segment_problems(config)
    yield from algorithm_problems(config)
    yield from reward_problems(config)
    yield from judge_problems(config)
    yield from _evaluation_problems(config)
    yield from _address_problems(config)
    if training:
        yield from _batch_problems(config)
        yield from _length_problems(config)
        yield from metric_problems(config)


def _missing(config: Config, training: bool) -> Iterator[str]:
    """Options that are empty but needed, each with what to give."""
    task, generated = config.data.task, config.data.reasoning_gym.datasets
    if not config.workdir:
        yield "workdir is empty: name the directory that the run writes to"
    if not config.model.path:
        yield "model.path is empty: give a Hugging Face directory, OWNER/NAME of the hub, or 'random'"
    if task == "reasoning_gym" and not generated:
        yield "data.reasoning_gym.datasets is empty: name data sets of the library reasoning-gym"
    if training and task == "files" and not config.data.train_files:
        yield "data.train_files is empty: give parquet, JSONL or CSV files, or set data.task=arithmetic"
    unscored = given_function(config) == "none" and not config.reward.model.path
    if unscored and trains_on_rewards(config.algorithm.distillation):
        yield (
            "reward.function=none needs a reward model or a teacher: give reward.model.path, or "
            "algorithm.distillation.path with use_task_rewards=False"
        )
    if config.trainer.total_training_steps == -1 and config.trainer.total_epochs is None:
        yield "trainer.total_training_steps=-1 needs trainer.total_epochs: give one of them"


def _row_problems(config: Config, training: bool) -> Iterator[str]:
    weights, files = config.data.mixture, config.data.train_files
    if training and weights and files and (len(weights) != len(files) or min(weights) <= 0):
        yield (
            f"data.mixture={weights} must have a weight above 0 for each of the {len(files)} files of "
            "data.train_files: give as many, and leave out files that are not wanted"
        )
    if config.data.prompt_template:
        if config.data.prompt_key != Columns.prompt_key:
            yield f"data.prompt_key={config.data.prompt_key} is not read with data.prompt_template: leave one out"
        try:
            template_parts(config.data.prompt_template)
        except InputError as error:
            yield str(error)


def _trainer_problems(config: Config) -> Iterator[str]:
    trainer, algorithm = config.trainer, config.algorithm
    profiled, last = trainer.profile_steps, trainer.total_training_steps
    if any(type(step) is not int or step < 1 or 0 < last < step for step in profiled):
        bounds = f"from 1 to {last}" if last > 0 else "from 1 on"
        yield f"trainer.profile_steps={profiled} must be step numbers {bounds}, e.g. (2,3)"
    logger = trainer.logger
    if not {*filterfalse(is_own, logger)} <= {"console", *TRACKERS} or len({*logger}) < len(logger):
        yield f"trainer.logger={logger} must be some of console, {', '.join(TRACKERS)} or FILE.py:Class, each once"
    if "console" not in logger and config.monitor.console not in ("steps", "quiet"):
        yield f"monitor.console={config.monitor.console} needs 'console' in trainer.logger={logger}: add it"
    yield from _object_problems(
        "trainer.compiler_options", trainer.compiler_options, '{"xla_gpu_enable_latency_hiding_scheduler": false}'
    )
    if not trainer.rollout_ahead:
        return
    if algorithm.use_kl_in_reward:
        yield (
            "trainer.rollout_ahead=1 cannot be combined with algorithm.use_kl_in_reward=True, whose reference policy "
            "is on the training devices: use actor.use_kl_loss=True"
        )
    if algorithm.filter_groups.leftover == "carry":
        yield (
            "trainer.rollout_ahead=1 trains on batches that are one step old, and carried groups would be older: set "
            "algorithm.filter_groups.leftover=requeue"
        )
    if config.actor.old_logprob == "recompute":
        yield (
            "trainer.rollout_ahead=1 trains on samples of an older policy, whose log-probabilities cannot be "
            "recomputed: set actor.old_logprob=auto or rollout"
        )


def _segment_problems(config: Config) -> Iterator[str]:
    """What partial rollouts need."""
    length, groups = config.rollout.segment_length, config.algorithm.filter_groups
    if length <= 0:
        return
    needed = {"enable": True, "leftover": "carry", "backfill": "batch"}
    wrong = [f"{name}={getattr(groups, name)}" for name, value in needed.items() if getattr(groups, name) != value]
    wrong += ["adaptive_limit.enable=True"] * groups.adaptive_limit.enable
    if wrong:
        cure = ", ".join(f"{name}={value}" for name, value in needed.items())
        yield (
            f"rollout.segment_length={length} trains on groups that earlier steps have begun, which does not go with "
            f"algorithm.filter_groups.{', '.join(wrong)}: set {cure} and adaptive_limit.enable=False there"
        )
    steps = segment_steps(config.data, config.rollout)
    if groups.leftover == "carry" and groups.leftover_max_staleness < steps:
        yield (
            f"algorithm.filter_groups.leftover_max_staleness={groups.leftover_max_staleness} must be at least {steps}: "
            f"with rollout.segment_length={length} the longest response takes {steps} training steps"
        )
    if config.actor.old_logprob == "recompute":
        yield (
            f"rollout.segment_length={length} trains on tokens of several policies, whose log-probabilities cannot be "
            "recomputed: set actor.old_logprob=auto or rollout"
        )


def _object_problems(key: str, text: str, example: str, taken: Collection[str] = ()) -> Iterator[str]:
    """What is wrong with the text of a JSON object; `taken` are names that it must not hold."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield f"{key}={text[:100]!r} must be a JSON object ({error}): write it like '{example}'"
        return
    if not isinstance(values, dict):
        yield f"{key}={text[:100]!r} must be a JSON object (not {type(values).__name__}): write it like '{example}'"
    elif held := sorted(values.keys() & set(taken)):
        yield f"{key}={text!r} must not hold {', '.join(held)}, which each prompt sets itself: leave them out"


def _model_problems(config: Config) -> Iterator[str]:
    sizes, lora = config.model.random, config.model.lora
    if sizes.num_kv_heads > 0 and sizes.num_heads % sizes.num_kv_heads:
        yield (
            f"model.random.num_heads={sizes.num_heads} must be a multiple of "
            f"model.random.num_kv_heads={sizes.num_kv_heads}"
        )
    targets = lora.target_modules
    if targets != (ALL_LINEAR,) and (not targets or {*targets} - {*TARGETS} or len({*targets}) < len(targets)):
        yield f"model.lora.target_modules={targets} must be {ALL_LINEAR}, or some of {', '.join(TARGETS)}, each once"
    if lora.rank and config.reference.path is not None:
        yield (
            f"reference.path={config.reference.path} does not go with model.lora.rank={lora.rank}: the reference is "
            "the model without its adapters; set reference.path=null"
        )
    yield from _object_problems(
        "data.chat_template_kwargs", config.data.chat_template_kwargs, '{"enable_thinking": false}', TEMPLATE_ARGUMENTS
    )


def _decoding_problems(config: Config) -> Iterator[str]:
    """What is decoded at once, and where a response ends."""
    at_once, n = config.rollout.max_num_seqs, config.rollout.n
    if any(not string for string in config.rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once: leave it out"
    if 0 < at_once < n:
        yield f"rollout.max_num_seqs={at_once} must be at least rollout.n={n}: a group is decoded together"


def _evaluation_problems(config: Config) -> Iterator[str]:
    """The task sets of evaluate.tasks have the bounds of the options in `evaluate`."""
    sets: dict[str, Any] = {"evaluate": config.evaluate}
    try:
        tasks = {f"evaluate.tasks.{task.name}": task for task in parse_tasks(config)}
    except ValueError as error:
        yield str(error)
        tasks = {}
    for name, task in tasks.items():
        for key, bound in bounds_of(EvaluateConfig):
            yield from bound.problems(f"{name}.{key}", getattr(task, key))
    at_once = config.rollout.max_num_seqs
    for name, task in (sets | tasks).items():
        if 0 < at_once < task.n:
            yield f"rollout.max_num_seqs={at_once} must be at least {name}.n={task.n}"


def _address_problems(config: Config) -> Iterator[str]:
    """Addresses that cannot be used, and options that take none."""
    places: dict[str, Any] = {key: attrgetter(key)(config) or "" for key in PATHS}
    with suppress(ValueError):  # _evaluation_problems reports it
        places |= {f"evaluate.tasks.{task.name}": task.files for task in parse_tasks(config)}
    for key, place in places.items():
        for path in place if isinstance(place, tuple) else (place,):
            if problem := _address_problem(str(path), of_data=isinstance(place, tuple)):
                yield f"{key}={problem}"
    cache = config.trainer.compilation_cache_dir
    if is_address(str(cache)):
        yield f"trainer.compilation_cache_dir={cache} must be a directory on this machine"


def _address_problem(path: str, *, of_data: bool) -> str | None:
    """Why an address cannot be used, and the fix. None if it can, or if `path` is none."""
    if not path.startswith(PREFIX):
        return address_problem(path)
    if of_data:
        return None if data_name(path) else f"{path} must be {DATA_FORM}: correct it"
    return f"{path} must not begin with {PREFIX}, which is for prompt files: write a model as OWNER/NAME"


def _batch_problems(config: Config) -> Iterator[str]:
    """The divisibility rules of prompts, mini-batches and micro-batches."""
    batch, n = config.data.train_batch_size, config.rollout.n
    for name, network in trained(config).items():
        mini, micro = network.mini_batch_size, network.micro_batch_size
        if min(batch, n, mini, micro) < 1:
            continue
        if batch % mini:
            multiples = [count * mini for count in (batch // mini, batch // mini + 1) if count]
            yield (
                f"data.train_batch_size={batch} must be a multiple of {name}.ppo_mini_batch_size={mini} "
                f"(both in prompts): set data.train_batch_size={nearest(multiples, batch)}, or "
                f"{name}.ppo_mini_batch_size={nearest(divisors(batch), mini)}"
            )
        if mini * n % micro and not config.actor.use_dynamic_bsz:
            yield (
                f"{name}.ppo_mini_batch_size x rollout.n = {mini} x {n} = {mini * n} responses must be a multiple "
                f"of {name}.ppo_micro_batch_size_per_device={micro}: set "
                f"{name}.ppo_micro_batch_size_per_device={nearest(divisors(mini * n), micro)}"
            )


def _length_problems(config: Config) -> Iterator[str]:
    longest, shortest = config.data.max_response_length, config.rollout.min_response_length
    buffer, prompt = config.reward.overlong_buffer, config.data.max_prompt_length
    if buffer.enable and not 0 < buffer.len <= longest:
        yield f"reward.overlong_buffer.len={buffer.len} must be in 1..data.max_response_length={longest}"
    if not 0 <= shortest <= longest:
        yield f"rollout.min_response_length={shortest} must be between 0 and data.max_response_length={longest}"
    budget = config.actor.ppo_max_token_len_per_device
    if budget is not None and min(prompt, longest) > 0 and budget < prompt + longest:
        yield (
            f"actor.ppo_max_token_len_per_device={budget} must be at least data.max_prompt_length + "
            f"max_response_length = {prompt + longest}"
        )
