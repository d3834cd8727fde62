"""Host: what is wrong with a config, and what is allowed but rarely meant."""

import json
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from dapo_jax.algorithms import advantages, aggregation, kl, policy_loss
from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.rollout_correction import CRITERIA, WEIGHTS, parse_threshold
from dapo_jax.command.option_uses import unread_problems
from dapo_jax.config.bounds import bounds_of, one_of
from dapo_jax.config.derived import gen_batch_size, micro_batch_size, mini_batch_size, token_budget
from dapo_jax.config.sections import Config
from dapo_jax.config.values import PATHS, type_problems
from dapo_jax.data.experience import OWN_SCORES
from dapo_jax.data.padding import bucket
from dapo_jax.dynamic_sampling.group_filter import RULES
from dapo_jax.dynamic_sampling.rounds import FINAL_REWARD
from dapo_jax.errors import InputError
from dapo_jax.learner.choices import trained
from dapo_jax.models.lora import TARGETS
from dapo_jax.models.remat import POLICIES
from dapo_jax.monitor import console
from dapo_jax.monitor.records import TRACKERS
from dapo_jax.parallel.divisors import divisors, nearest
from dapo_jax.places import address_problem, is_address
from dapo_jax.problems import held_out_options, parse_tasks
from dapo_jax.rewards.verifiers import NUMBERS

CHOICES = {  # names of functions; the other choices are declared in config.py
    "model.remat_policy": tuple(name for name in POLICIES if name != "none"),
    "algorithm.adv_estimator": tuple(advantages.ESTIMATORS),
    "algorithm.kl_penalty": kl.PENALTIES,
    "algorithm.rollout_correction.rollout_is": ("none", *WEIGHTS),
    "algorithm.filter_groups.rule": RULES,
    "algorithm.cpo.wrap_method": advantages.CPO_METHODS,
    "actor.policy_loss.loss_mode": tuple(policy_loss.LOSSES),
    "actor.loss_agg_mode": aggregation.MODES,
    "actor.kl_loss_type": kl.PENALTIES,
    "critic.loss_agg_mode": aggregation.MODES,
    "monitor.console": console.MODES,
}
BOUNDS = (*bounds_of(Config), *((key, one_of(*choices)) for key, choices in CHOICES.items()))
MAX_WORKERS = 1024  # verifier processes of one training process
TEMPLATE_ARGUMENTS = ("template", "messages", "special_tokens", "add_generation_prompt")  # set by this package
NO_POLICY_STEP = "trainer.critic_warmup leaves no step that updates the policy"


def validate(config: Config, *, training: bool = True) -> None:
    """Raises one ValueError with every problem of `config` that can be seen without a device or a file.

    Args:
        training: check what only training reads, too: data to train on, batches, lengths that go with a penalty.
    """
    problems = type_problems(config)
    mistyped = {problem.partition("=")[0] for problem in problems}
    if all(isinstance(_lookup(config, key), int | float) for key in mistyped):  # the others cannot be compared
        others = _range_problems(config) + _decoding_problems(config)
        others += _algorithm_problems(config) + _evaluation_problems(config) + _address_problems(config)
        if training:
            others += _batch_problems(config) + _length_problems(config) + _metric_problems(config)
            if config.data.task == "files" and not config.data.train_files:
                others.append("data.train_files is empty: give parquet or JSONL files, or set data.task=arithmetic")
        problems += [problem for problem in others if problem.partition("=")[0] not in mistyped]
        named = {problem.partition("=")[0] for problem in problems}
        problems += [problem for problem in unread_problems(config) if problem.partition("=")[0] not in named]
    if problems:
        raise InputError("the config has problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _address_problems(config: Config) -> list[str]:
    """Addresses that cannot be used, and options that take none."""
    places: dict[str, Any] = {key: _lookup(config, key) or "" for key in PATHS}
    with suppress(ValueError):  # _evaluation_problems tells
        places |= {f"evaluate.tasks.{task.name}": task.files for task in parse_tasks(config)}
    listed = {key: place if isinstance(place, tuple) else (place,) for key, place in places.items()}
    named = [(key, address_problem(str(path))) for key, paths in listed.items() for path in paths]
    problems = [f"{key}={problem}" for key, problem in named if problem]
    cache = config.trainer.compilation_cache_dir
    if is_address(str(cache)):
        problems.append(f"trainer.compilation_cache_dir={cache} must be a directory of this machine")
    return problems


def _range_problems(config: Config) -> list[str]:
    problems = []
    for key, bound in BOUNDS:
        value = _lookup(config, key)
        if not bound.holds(value):
            problems.append(f"{key}={value!r} must be {bound.rule}")
    for name in ("actor", "critic"):
        optim = getattr(config, name).optim
        if not all(0 <= beta < 1 for beta in optim.betas):
            problems.append(f"{name}.optim.betas={optim.betas} must both be in [0, 1)")
    if config.trainer.process_id < -1:
        problems.append(f"trainer.process_id={config.trainer.process_id} must be 0 or more, or -1 (found by JAX)")
    if config.reward.num_workers > MAX_WORKERS:
        problems.append(f"reward.num_workers={config.reward.num_workers} must be at most {MAX_WORKERS}: lower it")
    sizes = config.model.random
    if sizes.num_kv_heads > 0 and sizes.num_heads % sizes.num_kv_heads:
        problems.append(
            f"model.random.num_heads={sizes.num_heads} must be a multiple of model.random.num_kv_heads="
            f"{sizes.num_kv_heads}"
        )
    if sizes.head_dim % 2:
        problems.append(f"model.random.head_dim={sizes.head_dim} must be even, for rotary embeddings")
    if not config.workdir:
        problems.append("workdir is empty: name the directory that the run writes to")
    if config.trainer.rollout_ahead not in (0, 1):
        problems.append(f"trainer.rollout_ahead={config.trainer.rollout_ahead} must be 0 or 1: batches sampled ahead")
    if not 0 <= config.trainer.stopped_exit_code <= 255:
        problems.append(f"trainer.stopped_exit_code={config.trainer.stopped_exit_code} must be in 0..255")
    profiled, last = config.trainer.profile_steps, config.trainer.total_training_steps
    if any(type(step) is not int or step < 1 or 0 < last < step for step in profiled):
        of = f"1..{last}" if last > 0 else "1 and more"
        problems.append(f"trainer.profile_steps={profiled} must be training steps, of {of}: such as (2,3)")
    logger = config.trainer.logger
    if not {*logger} <= {"console", *TRACKERS} or len({*logger}) < len(logger):
        problems.append(f"trainer.logger={logger} must be some of console, {', '.join(TRACKERS)}, each once")
    if "console" not in logger and config.monitor.console not in ("steps", "quiet"):
        problems.append(f"monitor.console={config.monitor.console} needs 'console' in trainer.logger={logger}: add it")
    if last == -1 and config.trainer.total_epochs is None:
        problems.append("trainer.total_training_steps=-1 needs trainer.total_epochs: give one of them")
    problems += _sampling_problems("rollout", config.rollout)
    if config.rollout.temperature == 0:
        problems.append("rollout.temperature=0 gives equal samples, and no gradient: raise it")
    actor = config.actor
    if not 0 < actor.clip_ratio_low <= 1:
        problems.append(f"actor.clip_ratio_low={actor.clip_ratio_low} must be in (0, 1]; 1 never clips")
    if actor.clip_ratio_c <= 1:
        problems.append(f"actor.clip_ratio_c={actor.clip_ratio_c} must be greater than 1: it bounds the dual clip")
    try:
        variables = json.loads(config.data.chat_template_kwargs)
        if not isinstance(variables, dict):
            raise InputError("not an object")
        taken = sorted(set(variables) & set(TEMPLATE_ARGUMENTS))
        if taken:
            problems.append(
                f"data.chat_template_kwargs={config.data.chat_template_kwargs!r} must not hold {', '.join(taken)}, "
                "which every prompt has of its own: leave them out"
            )
    except (ValueError, RecursionError) as error:
        problems.append(
            f"data.chat_template_kwargs={config.data.chat_template_kwargs[:100]!r} must be a JSON object ({error}): "
            "write it like '{\"enable_thinking\": false}'"
        )
    try:
        if not isinstance(json.loads(config.trainer.compiler_options), dict):
            raise InputError("not an object")
    except (ValueError, RecursionError) as error:
        problems.append(
            f"trainer.compiler_options={config.trainer.compiler_options[:100]!r} must be a JSON object ({error}): "
            "write it like '{\"xla_gpu_enable_latency_hiding_scheduler\": false}'"
        )
    if not config.model.path:
        problems.append("model.path is empty: give a Hugging Face directory, a .gguf file, or 'random'")
    if config.data.task == "reasoning_gym" and not config.data.reasoning_gym.datasets:
        problems.append("data.reasoning_gym.datasets is empty: name data sets of the library reasoning-gym")
    return problems


def _batch_problems(config: Config) -> list[str]:
    """The divisibility rules between prompts, mini-batches and micro-batches."""
    problems = []
    data, n = config.data, config.rollout.n
    batch = data.train_batch_size
    if min(batch, n) < 1:
        return []
    for name in trained(config):
        mini, micro = mini_batch_size(config, name), micro_batch_size(config, name)
        if min(mini, micro) < 1:
            continue
        if batch % mini:
            multiples = [count * mini for count in (batch // mini, batch // mini + 1) if count]
            problems.append(
                f"data.train_batch_size={batch} must be a multiple of {name}.ppo_mini_batch_size={mini} "
                f"(both in prompts): set data.train_batch_size={nearest(multiples, batch)}, or "
                f"{name}.ppo_mini_batch_size={nearest(divisors(batch), mini)}"
            )
        if mini * n % micro and not config.actor.use_dynamic_bsz:
            problems.append(
                f"{name}.ppo_mini_batch_size x rollout.n = {mini} x {n} = {mini * n} responses must be a multiple "
                f"of {name}.ppo_micro_batch_size_per_device={micro}: set "
                f"{name}.ppo_micro_batch_size_per_device={nearest(divisors(mini * n), micro)}"
            )
    return problems


def _length_problems(config: Config) -> list[str]:
    """What prompts and responses of a length need in training."""
    problems, data = [], config.data
    buffer, longest = config.reward.overlong_buffer, data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        problems.append(f"reward.overlong_buffer.len={buffer.len} must be in 1..data.max_response_length={longest}")
    if not 0 <= config.rollout.min_response_length <= longest:
        problems.append(
            f"rollout.min_response_length={config.rollout.min_response_length} must be between 0 and "
            f"data.max_response_length={longest}"
        )
    budget = token_budget(config)
    if budget is not None and min(data.max_prompt_length, longest) > 0:
        needed = bucket(data.max_prompt_length) + longest
        if budget < needed:
            problems.append(
                f"actor.ppo_max_token_len_per_device={budget} must be at least data.max_prompt_length, padded to "
                f"{bucket(data.max_prompt_length)}, + max_response_length = {needed}"
            )
    return problems


def _decoding_problems(config: Config) -> list[str]:
    """What is decoded at once, and where a response ends."""
    problems, at_once, n = [], config.rollout.max_num_seqs, config.rollout.n
    if at_once < 0:
        problems.append(f"rollout.max_num_seqs={at_once} must be 0 (as many as fit the memory) or more")
    if config.rollout.kv_memory_share > 1:
        problems.append(f"rollout.kv_memory_share={config.rollout.kv_memory_share} must be at most 1")
    if any(not string for string in config.rollout.stop):
        problems.append("rollout.stop holds an empty string: every response would end at once")
    if 0 < at_once < n:
        problems.append(f"rollout.max_num_seqs={at_once} must be at least rollout.n={n}: a group is decoded together")
    return problems


def _sampling_problems(name: str, section: Any) -> list[str]:
    """`section` has temperature, top_p and top_k; `name` is how a user finds it."""
    problems = []
    if section.temperature < 0:
        problems.append(f"{name}.temperature={section.temperature} must be 0 (greedy) or more")
    if not 0 < section.top_p <= 1:
        problems.append(f"{name}.top_p={section.top_p} must be in (0, 1]; 1 switches it off")
    if section.top_k == 0 or section.top_k < -1:
        problems.append(f"{name}.top_k={section.top_k} must be positive, or -1 to switch it off")
    return problems


def _evaluation_problems(config: Config) -> list[str]:
    """Those of the held-out problems' settings and of evaluate.tasks."""
    problems, at_once = [], config.rollout.max_num_seqs
    sets = {"evaluate": held_out_options(config)}
    try:
        sets |= {f"evaluate.tasks.{task.name}": task for task in parse_tasks(config)}
    except ValueError as error:
        problems.append(str(error))
    for name, task in sets.items():
        problems += _sampling_problems(name, task)
        if task.n < 1:
            problems.append(f"{name}.n={task.n} must be greater than 0")
        if 0 < at_once < task.n:
            problems.append(f"rollout.max_num_seqs={at_once} must be at least {name}.n={task.n}")
        if task.max_prompts == 0 or task.max_prompts < -1:
            problems.append(f"{name}.max_prompts={task.max_prompts} must be greater than 0, or -1 for all problems")
        if task.batch_size < 0:
            problems.append(f"{name}.batch_size={task.batch_size} must be 0 (all problems at a time) or more")
    return problems


def _algorithm_problems(config: Config) -> list[str]:
    """Options of the algorithm that do not fit together."""
    problems = []
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if algorithm.adv_estimator == "grpo_passk" and config.rollout.n < 2:
        problems.append(f"algorithm.adv_estimator=grpo_passk needs rollout.n of at least 2, not {config.rollout.n}")
    if config.trainer.rollout_ahead and algorithm.use_kl_in_reward:
        problems.append(
            "trainer.rollout_ahead=1 cannot be combined with algorithm.use_kl_in_reward=True, whose reference policy "
            "lies on the devices that train: use actor.use_kl_loss=True"
        )
    if config.trainer.rollout_ahead and algorithm.filter_groups.leftover == "carry":
        problems.append(
            "trainer.rollout_ahead=1 trains on batches that are one step old, and carried groups would be older: set "
            "algorithm.filter_groups.leftover=requeue"
        )
    if config.trainer.rollout_ahead and config.actor.old_logprob == "recompute":
        problems.append(
            "trainer.rollout_ahead=1 trains on what an older policy has sampled, whose log-probabilities cannot be "
            "recomputed: set actor.old_logprob=auto or rollout"
        )
    corrects = correction.rollout_is != "none" or bool(correction.rollout_rs)
    if corrects and config.actor.old_logprob != "recompute":
        problems.append(
            "algorithm.rollout_correction compares the sampler with the training pass: set actor.old_logprob="
            f"recompute, not {config.actor.old_logprob}"
        )
    if config.actor.use_kl_loss and not config.actor.kl_loss_coef > 0:
        problems.append(f"actor.kl_loss_coef={config.actor.kl_loss_coef} must be greater than 0 with use_kl_loss=True")
    if len(correction.rollout_rs) != len(correction.rollout_rs_threshold):
        problems.append(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs as many rollout_rs_threshold, not "
            f"{correction.rollout_rs_threshold}"
        )
    for name in correction.rollout_rs:
        if name not in CRITERIA:
            problems.append(f"algorithm.rollout_correction.rollout_rs={name!r} must be one of {', '.join(CRITERIA)}")
    for threshold in (correction.rollout_is_threshold, *correction.rollout_rs_threshold):
        try:
            parse_threshold(threshold)
        except ValueError as error:
            problems.append(f"algorithm.rollout_correction: {error}")
    lora = config.model.lora
    if lora.rank < 0 or lora.alpha <= 0:
        problems.append(f"model.lora.rank={lora.rank} must be 0 (off) or more, and alpha={lora.alpha} greater than 0")
    targets = lora.target_modules
    if not targets or set(targets) - set(TARGETS) or len(set(targets)) < len(targets):
        problems.append(f"model.lora.target_modules={targets} must be some of {', '.join(TARGETS)}, each once")
    if lora.rank and config.reference.path is not None:
        problems.append(
            f"reference.path={config.reference.path} does not go with model.lora.rank={lora.rank}: the reference is "
            "the model without its adapters; set reference.path=null"
        )
    if config.reward.function == "none" and not config.reward.model.path:
        problems.append("reward.function=none needs a reward model: give reward.model.path")
    if config.reward.function == "none" and algorithm.filter_groups.enable and algorithm.filter_groups.metric == "acc":
        problems.append(
            "algorithm.filter_groups.metric=acc is the verifier's, and reward.function is none: choose score, or "
            "set algorithm.filter_groups.enable=False"
        )
    problems += _filter_problems(config)
    return problems


def _metric_problems(config: Config) -> list[str]:
    """A metric of the group filter that the verifier never returns; what your own does is not known here."""
    groups, reward = config.algorithm.filter_groups, config.reward
    if not groups.enable or reward.function not in NUMBERS:
        return []
    buffer = reward.overlong_buffer
    measured = {"reward_model": bool(reward.model.path), "overlong": buffer.enable and buffer.log}
    there = [*NUMBERS[reward.function], *(name for name in OWN_SCORES if measured.get(name, True))]
    if groups.metric in there or (groups.metric == "acc" and reward.function == "none"):  # the latter is said above
        return []
    close = [name for name in there if groups.metric.startswith(name)] or get_close_matches(groups.metric, there)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return [
        f"algorithm.filter_groups.metric={groups.metric} is no number that reward.function={reward.function} gives: "
        f"choose one of {', '.join(there)}{meant}, or give a function of your own that returns it"
    ]


def _filter_problems(config: Config) -> list[str]:
    groups, problems = config.algorithm.filter_groups, []
    name = "algorithm.filter_groups"
    if not groups.filter_low < groups.filter_high:
        problems.append(f"{name}.filter_low={groups.filter_low} must be less than filter_high={groups.filter_high}")
    if groups.leftover_max_staleness < 1:
        problems.append(f"{name}.leftover_max_staleness={groups.leftover_max_staleness} must be 1 or more")
    if groups.adaptive_limit.slack < 0 or groups.adaptive_limit.min_rounds < 1:
        problems.append(f"{name}.adaptive_limit needs slack >= 0 and min_rounds >= 1")
    target, rounds, size = config.data.train_batch_size, groups.max_num_gen_batches, gen_batch_size(config)
    must_be_full = groups.enable and groups.on_limit == "error" and groups.on_exhausted != "partial"
    if must_be_full and 0 < rounds * size < target:
        problems.append(
            f"data.train_batch_size={target} groups cannot be kept of the {rounds} x {size} = {rounds * size} prompts "
            f"that {name}.max_num_gen_batches={rounds} rounds of data.gen_batch_size={size} sample: raise one of them, "
            f"or set {name}.on_limit=partial"
        )
    return problems


def warnings(config: Config) -> list[str]:
    """What is allowed but rarely meant."""
    found = []
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        found.append(
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: training samples are drawn from a "
            "truncated distribution, but log-probabilities are those of the full one"
        )
    if rollout.min_response_length > 0:
        found.append(
            f"rollout.min_response_length={rollout.min_response_length}: training samples are drawn from a "
            "distribution without an earlier end of sequence, but log-probabilities are those of the full one"
        )
    if rollout.n == 1 and config.algorithm.filter_groups.enable:
        found.append("rollout.n=1: a group of one sample is always kept, and its advantage is its reward")
    if config.evaluate.n == 1 and config.evaluate.temperature > 0:
        found.append("evaluate.n=1 with temperature > 0 is a noisy measure: raise evaluate.n")
    if config.evaluate.n > 1 and config.evaluate.temperature == 0:
        found.append(f"evaluate.n={config.evaluate.n} with temperature=0: all samples of a problem are equal; n=1 does")
    algorithm, mode = config.algorithm, config.actor.policy_loss.loss_mode
    if mode in ("gspo", "geo_mean", "sapo") and config.actor.loss_agg_mode != "seq-mean-token-mean":
        found.append(
            f"actor.policy_loss.loss_mode={mode} is defined with actor.loss_agg_mode=seq-mean-token-mean, "
            f"not {config.actor.loss_agg_mode}"
        )
    if algorithm.adv_estimator == "cpo" and algorithm.filter_groups.enable:
        found.append("algorithm.adv_estimator=cpo has its own contrast: the group filter is normally off with it")
    estimator = advantages.ESTIMATORS.get(algorithm.adv_estimator)
    if estimator is not None and not needs(estimator, "num_groups") and algorithm.filter_groups.enable:
        found.append(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares no samples within a group: it learns from "
            "groups that are all right or all wrong too, which the group filter drops; it is normally off with it"
        )
    groups = algorithm.filter_groups
    shaped = groups.metric in ("seq_reward", *FINAL_REWARD)
    contains = ["the overlong penalty"] * (shaped and config.reward.overlong_buffer.enable)
    contains += ["the KL divergence"] * (groups.metric in FINAL_REWARD and algorithm.use_kl_in_reward)
    if groups.enable and contains:
        found.append(
            f"algorithm.filter_groups.metric={groups.metric} contains {' and '.join(contains)}, for which groups whose "
            "answers are all wrong pass the filter; acc is the paper's"
        )
    signed = ("math_dapo", "math_dapo_lenient", *["auto"] * (config.data.task == "files"))
    by_mean = groups.enable and groups.rule == "mean_range" and (groups.metric == "score" or shaped)
    if by_mean and groups.filter_low >= 0 and config.reward.function in signed:
        found.append(
            f"algorithm.filter_groups.rule=mean_range with metric={groups.metric}: a score of math_dapo is -1 or 1, "
            f"so filter_low={groups.filter_low} drops groups that are mostly wrong; acc is 0 and 1"
        )
    if groups.enable and groups.backfill == "stream" and groups.leftover != "requeue":
        found.append(
            f"algorithm.filter_groups.leftover={groups.leftover} with backfill=stream: which groups are left over "
            "depends on the waves; requeue alone gives the same batches for every schedule"
        )
    if groups.enable and groups.leftover == "carry" and config.actor.old_logprob == "recompute":
        found.append(
            "algorithm.filter_groups.leftover=carry with actor.old_logprob=recompute: carried groups are treated as "
            "if the newer policy had sampled them"
        )
    if config.trainer.critic_warmup >= config.trainer.total_training_steps > 0:
        found.append(NO_POLICY_STEP)
    return found
