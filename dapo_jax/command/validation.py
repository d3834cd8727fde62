"""Host: the rules of a config that no single option can state. Bounds of one option are declared in config/sections.py.

Each function yields one line per problem: the value, the rule and the fix.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import filterfalse
from operator import attrgetter

from dapo_jax.algorithms import advantages, aggregation, kl, policy_loss
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.named import ESTIMATOR, LOSS, named_estimator, own_problem, reload
from dapo_jax.algorithms.rollout_correction import WEIGHTS
from dapo_jax.command import algorithm_rules, batch_rules, reward_rules
from dapo_jax.command.option_uses import LOSS_OPTIONS, default_text, unread
from dapo_jax.command.tasks import (
    TaskOptions,
    given_function,
    held_out_options,
    measured_sets,
    parse_tasks,
    verifiers_of,
)
from dapo_jax.config.bounds import bounds_of, one_of
from dapo_jax.config.derived import plays_episodes, trains_on_rewards
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.places import address_problem, is_address
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    ReferenceConfig,
    RolloutConfig,
    TrainerConfig,
)
from dapo_jax.config.values import PATHS, number_problems, type_problems
from dapo_jax.data.columns import Columns, template_parts
from dapo_jax.dynamic_sampling.group_filter import RULES
from dapo_jax.errors import InputError
from dapo_jax.hub.names import DATA_FORM, PREFIX, data_name
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.lora import ALL_LINEAR, TARGETS
from dapo_jax.models.remat import POLICIES
from dapo_jax.monitor import console
from dapo_jax.monitor.kept_batches import chosen_steps
from dapo_jax.monitor.records import TRACKERS
from dapo_jax.parallel.compilation import ORDERED
from dapo_jax.rewards.weighted import JUDGE

CHOICES = {  # names of functions; all other choices are declared in config/sections.py
    "model.remat_policy": ("auto", *(name for name in POLICIES if name != "none")),
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
    problems, numbers = type_problems(config), number_problems(config)
    problems = problems or [*filter(None, _own_problems(config.algorithm, config.actor))]
    others = [] if problems else [_problems(config, training), _unread_problems(config)]  # compute with the values
    for found in (numbers, *others):
        named = {_key(problem) for problem in problems}
        problems += [problem for problem in found if _key(problem) not in named]
    if problems:
        raise InputError("the config has problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _own_problems(algorithm: AlgorithmConfig, actor: ActorConfig) -> Iterator[str]:
    """What is wrong with a loss or an estimator of your own; its parameters decide what else is read."""
    of_losses = {key.rpartition(".")[2]: attrgetter(key.removeprefix("actor."))(actor) for key in LOSS_OPTIONS}
    if is_own(actor.policy_loss.loss_mode):
        yield own_problem(LOSS, actor.policy_loss.loss_mode, of_losses)
    if is_own(algorithm.adv_estimator):
        yield own_problem(ESTIMATOR, algorithm.adv_estimator, {**vars(algorithm), **vars(algorithm.cpo)})


def _unread_problems(config: Config) -> Iterator[str]:
    for key, setting in unread(config).items():
        yield (
            f"{key}={attrgetter(key)(config)!r} is not read without {setting}: set that, or leave it at its default, "
            f"{default_text(key)}"
        )


def _key(problem: str) -> str:
    return problem.partition("=")[0]


def _problems(config: Config, training: bool) -> Iterator[str]:
    """Every rule, with the sections that it reads."""
    data, model, rollout, evaluate = config.data, config.model, config.rollout, config.evaluate
    algorithm, reward, actor, trainer = config.algorithm, config.reward, config.actor, config.trainer
    environment = config.environment
    function, estimator = given_function(reward), named_estimator(algorithm.adv_estimator)
    numbers = reward_rules.measured_numbers(reward, function)
    for key, bound in BOUNDS:
        yield from bound.problems(key, attrgetter(key)(config))
    if not config.workdir:
        yield "workdir is empty: name the directory that the run writes to"
    yield from _model_problems(model, config.reference)
    yield from _data_problems(data, training)
    yield from batch_rules.rollout_problems(rollout)
    yield from batch_rules.segment_problems(rollout, algorithm.filter_groups, actor, data)
    yield from _trainer_problems(trainer)
    if trainer.rollout_ahead:
        yield from batch_rules.ahead_problems(algorithm, actor, config.mesh)
    yield from algorithm_rules.loss_problems(actor, algorithm)
    yield from algorithm_rules.estimator_problems(algorithm, estimator, rollout, function)
    if needs(estimator, "reward_parts"):
        yield from algorithm_rules.reward_parts_problems(algorithm, reward, function, numbers)
    if not trains_on_rewards(algorithm.distillation):
        yield from algorithm_rules.distillation_problems(algorithm, estimator)
    yield from algorithm_rules.correction_problems(algorithm.rollout_correction, actor)
    yield from algorithm_rules.filter_problems(algorithm, data, function)
    if data.curriculum.enable:
        yield from algorithm_rules.curriculum_problems(algorithm.filter_groups, rollout, function)
    yield from reward_rules.reward_problems(reward, algorithm.distillation, function)
    if plays_episodes(environment):
        yield from reward_rules.environment_problems(environment, reward)
        yield from batch_rules.episode_problems(environment, rollout, algorithm, estimator)
    if JUDGE in (verifiers_of(reward, measured_sets(data, evaluate, reward)) or ()):
        yield from reward_rules.judge_problems(reward.judge)
    tasks, problem = _tasks(evaluate.tasks, held_out_options(data, evaluate, reward))
    yield from filter(None, [problem])
    yield from _evaluation_problems(evaluate, tasks, rollout)
    places = {key: attrgetter(key)(config) or "" for key in PATHS}
    yield from _address_problems(places | {f"evaluate.tasks.{task.name}": task.files for task in tasks})
    if is_address(trainer.compilation_cache_dir):
        yield f"trainer.compilation_cache_dir={trainer.compilation_cache_dir} must be a directory on this machine"
    if trainer.deterministic == "on" and is_address(config.workdir):
        yield f"trainer.deterministic=on keeps programs in workdir={config.workdir}: choose a folder of this machine"
    if training:
        yield from batch_rules.batch_problems(trained(config), data, rollout)
        yield from batch_rules.length_problems(data, rollout, reward.overlong_buffer, actor)
        if algorithm.filter_groups.enable and numbers is not None and not environment.path:
            yield from reward_rules.metric_problems(algorithm.filter_groups.metric, numbers, function)


def _tasks(text: str, held_out: TaskOptions) -> tuple[list[TaskOptions], str]:
    """The task sets of evaluate.tasks, or what is wrong with them."""
    try:
        return parse_tasks(text, held_out), ""
    except ValueError as error:
        return [], str(error)


def _model_problems(model: ModelConfig, reference: ReferenceConfig) -> Iterator[str]:
    sizes, lora = model.random, model.lora
    if not model.path:
        yield "model.path is empty: give a Hugging Face directory, OWNER/NAME of the hub, or 'random'"
    if sizes.num_kv_heads > 0 and sizes.num_heads % sizes.num_kv_heads:
        yield (
            f"model.random.num_heads={sizes.num_heads} must be a multiple of "
            f"model.random.num_kv_heads={sizes.num_kv_heads}"
        )
    targets = lora.target_modules
    if targets != (ALL_LINEAR,) and (not targets or {*targets} - {*TARGETS} or len({*targets}) < len(targets)):
        yield f"model.lora.target_modules={targets} must be {ALL_LINEAR}, or some of {', '.join(TARGETS)}, each once"
    if lora.rank and reference.path is not None:
        yield (
            f"reference.path={reference.path} does not go with model.lora.rank={lora.rank}: the reference is "
            "the model without its adapters; set reference.path=null"
        )


def _data_problems(data: DataConfig, training: bool) -> Iterator[str]:
    if data.task == "reasoning_gym" and not data.reasoning_gym.datasets:
        yield "data.reasoning_gym.datasets is empty: name data sets of the library reasoning-gym"
    weights, files = data.mixture, data.train_files
    if training and data.task == "files" and not files:
        yield "data.train_files is empty: give parquet, JSONL or CSV files, or set data.task=arithmetic"
    if training and weights and files and (len(weights) != len(files) or min(weights) <= 0):
        yield (
            f"data.mixture={weights} must have a weight above 0 for each of the {len(files)} files of "
            "data.train_files: give as many, and leave out files that are not wanted"
        )
    if data.prompt_template:
        if data.prompt_key != Columns.prompt_key:
            yield f"data.prompt_key={data.prompt_key} is not read with data.prompt_template: leave one out"
        try:
            template_parts(data.prompt_template)
        except InputError as error:
            yield str(error)
    yield from _object_problems(
        "data.chat_template_kwargs", data.chat_template_kwargs, '{"enable_thinking": false}', TEMPLATE_ARGUMENTS
    )


def _trainer_problems(trainer: TrainerConfig) -> Iterator[str]:
    profiled, last = trainer.profile_steps, trainer.total_training_steps
    if last == -1 and trainer.total_epochs is None:
        yield "trainer.total_training_steps=-1 needs trainer.total_epochs: give one of them"
    bounds = f"from 1 to {last}" if last > 0 else "from 1 on"
    if (kept := chosen_steps(trainer.keep_batches)) is None or 0 < last < max(kept, default=1):
        yield f"trainer.keep_batches={trainer.keep_batches} must be alarm or step numbers {bounds}, e.g. 2,3"
    if any(type(step) is not int or step < 1 or 0 < last < step for step in profiled):
        yield f"trainer.profile_steps={profiled} must be step numbers {bounds}, e.g. (2,3)"
    logger = trainer.logger
    if not {*filterfalse(is_own, logger)} <= {"console", *TRACKERS} or len({*logger}) < len(logger):
        yield f"trainer.logger={logger} must be some of console, {', '.join(TRACKERS)} or FILE.py:Class, each once"
    if trainer.deterministic == "on" and ORDERED in trainer.compiler_options:
        yield f"trainer.compiler_options has {ORDERED}, which trainer.deterministic=on sets: leave one of them out"
    yield from _object_problems(
        "trainer.compiler_options", trainer.compiler_options, '{"xla_gpu_enable_latency_hiding_scheduler": false}'
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


def _evaluation_problems(
    evaluate: EvaluateConfig, tasks: Sequence[TaskOptions], rollout: RolloutConfig
) -> Iterator[str]:
    """The task sets of evaluate.tasks have the bounds of the options in `evaluate`."""
    samples = {"evaluate": evaluate.n}
    for task in tasks:
        samples[f"evaluate.tasks.{task.name}"] = task.n
        for key, bound in bounds_of(EvaluateConfig):
            yield from bound.problems(f"evaluate.tasks.{task.name}.{key}", getattr(task, key))
    for name, n in samples.items():
        if 0 < rollout.max_num_seqs < n:
            yield f"rollout.max_num_seqs={rollout.max_num_seqs} must be at least {name}.n={n}"


def _address_problems(places: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    """Addresses that cannot be used; `places` are paths by their options."""
    for key, place in places.items():
        for path in place if isinstance(place, tuple) else (place,):
            if problem := _address_problem(path, of_data=isinstance(place, tuple)):
                yield f"{key}={problem}"


def _address_problem(path: str, *, of_data: bool) -> str | None:
    """Why an address cannot be used, and the fix. None if it can, or if `path` is none."""
    if not path.startswith(PREFIX):
        return address_problem(path)
    if of_data:
        return None if data_name(path) else f"{path} must be {DATA_FORM}: correct it"
    return f"{path} must not begin with {PREFIX}, which is for prompt files: write a model as OWNER/NAME"
