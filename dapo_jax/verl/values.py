"""Host: converts values of verl's options that differ here. table.py says which option uses which conversion.

A conversion takes the value and all given options, and returns values by our keys: none if the option asks for what
happens anyway, or if only the user can choose.
"""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.config.values import DEFAULTS
from dapo_jax.errors import InputError

Values = Mapping[str, Any]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TRACKERS = ("console", "tensorboard", "wandb")
BY_SEQUENCE = "seq-mean-token-mean"
ALWAYS_BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
MEGATRON_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


class ByHand(InputError):
    """Only the user can choose. The message says what verl does."""


def parsed(text: str) -> Any:
    """The value of a hydra override: null, a number, True, a list, a dict, or the text itself."""
    words = {"null": None, "none": None, "true": True, "false": False, "": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (json.loads, ast.literal_eval, _list_of_words):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return text


def _list_of_words(text: str) -> list[Any]:
    """Hydra's list without quotes, such as [console,wandb]."""
    if not (text.startswith("[") and text.endswith("]")) or set("[{") & set(text[1:-1]):
        raise InputError(f"{text} is not a list")
    return [parsed(word.strip().strip("'\"")) for word in text[1:-1].split(",") if word.strip()]


def as_type_of(key: str, value: Any) -> dict[str, Any]:
    """`value` for our `key`, converted to the key's type; nothing for null."""
    default = DEFAULTS[key]
    if value is None:
        return {}
    if isinstance(default, tuple):
        return {key: tuple(value) if isinstance(value, list | tuple) else (value,)}
    if isinstance(default, str) and not isinstance(value, str):
        return {key: json.dumps(value) if isinstance(value, dict) else str(value)}
    if isinstance(default, int) and isinstance(value, float) and value.is_integer():
        return {key: int(value)}
    if isinstance(default, float) and isinstance(value, str):  # such as hydra's inf
        try:
            return {key: float(value)}
        except ValueError:
            return {key: value}
    return {key: value}


def set_by_hand(value: Any, given: Values) -> dict[str, Any]:
    """Nothing: verl's value says nothing about the value to use here."""
    return {}


def only_positive(key: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Unchanged if positive; otherwise the default of `key`, which is also verl's."""
    return lambda value, given: {} if value is None or value <= 0 else as_type_of(key, value)


def at_most_off(key: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Unchanged if positive, otherwise -1."""
    return lambda value, given: {key: value if value > 0 else -1}


def chat_template(value: Any, given: Values) -> dict[str, Any]:
    prefix = "data.apply_chat_template_kwargs"
    whole = given.get(prefix)
    variables = dict(whole) if isinstance(whole, dict) else {}
    variables |= {key.removeprefix(f"{prefix}."): of for key, of in given.items() if key.startswith(f"{prefix}.")}
    return {"data.chat_template_kwargs": json.dumps(variables)} if variables else {}


def lora_modules(value: Any, given: Values) -> dict[str, Any]:
    """By Hugging Face's names."""
    if value in (None, "all-linear"):
        return {}
    names = value if isinstance(value, list | tuple) else (value,)
    return {"model.lora.target_modules": sum((MEGATRON_MODULES.get(name, (name,)) for name in names), ())}


def router_replay(value: Any, given: Values) -> dict[str, Any]:
    """R3 replays what the sampler chose, as here; R2 what a pass before the update chose, which the user must judge."""
    return {"model.router_replay": value == "R3"} if value in ("R3", "disabled") else {}


def both_clip_ratios(value: Any, given: Values) -> dict[str, Any]:
    low = lower_clip(value, given) if given.get(f"{ACTOR}.clip_ratio_low") is None else {}
    both = low | ({"actor.clip_ratio_high": value} if given.get(f"{ACTOR}.clip_ratio_high") is None else {})
    if not both and value != 0.2:
        raise ByHand("verl reads clip_ratio_low and clip_ratio_high instead, as they are not null")
    return both


def lower_clip(value: Any, given: Values) -> dict[str, Any]:
    """At most 1, where that never clips either: no ratio is below 0, and no probability falls by more than 1."""
    by_share = given.get(f"{ACTOR}.policy_loss.loss_mode") not in ("geo_mean", "dppo_kl")  # those bound logarithms
    return as_type_of("actor.clip_ratio_low", 1.0 if value is not None and value > 1 and by_share else value)


def greedy(value: Any, given: Values) -> dict[str, Any]:
    return {} if value else {"evaluate.temperature": 0.0}


def unless_greedy(value: Any, given: Values) -> dict[str, Any]:
    """Unchanged, unless do_sample=False is given, before or after it."""
    off = given.get(f"{ROLLOUT}.val_kwargs.do_sample", True) is False
    return {} if off else as_type_of("evaluate.temperature", value)


def policy_loss(value: Any, given: Values) -> dict[str, Any]:
    """verl aggregates some losses by sequence, whatever loss_agg_mode says."""
    by_sequence = {"actor.loss_agg_mode": BY_SEQUENCE} if value in ALWAYS_BY_SEQUENCE else {}
    return {"actor.policy_loss.loss_mode": value} | by_sequence if value else {}


def unless_by_sequence(value: Any, given: Values) -> dict[str, Any]:
    """Unchanged, unless the policy loss ignores it."""
    loss = given.get(f"{ACTOR}.policy_loss.loss_mode")
    return as_type_of("actor.loss_agg_mode", BY_SEQUENCE if loss in ALWAYS_BY_SEQUENCE else value)


def token_budget(value: Any, given: Values) -> dict[str, Any]:
    """At least one longest sequence; verl would divide it over sequence-parallel devices."""
    longest = given.get("data.max_prompt_length", 1) + given.get("data.max_response_length", 0)
    return {"actor.ppo_max_token_len_per_device": max(value, longest)}


def warm_up_share(name: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Warm-up steps of the "actor" or the "critic" from their share of all steps."""

    def steps(value: Any, given: Values) -> dict[str, Any]:
        optimizer = f"{ACTOR}.optim" if name == "actor" else "critic.optim"
        if not value or (given.get(f"{optimizer}.lr_warmup_steps") or -1) > 0:
            return {}
        total = given.get("trainer.total_training_steps")
        if not total or total < 0:
            raise InputError(
                f"a share of the steps needs trainer.total_training_steps: set {name}.optim.lr_warmup_steps to {value} "
                "x the number of steps"
            )
        return {f"{name}.optim.lr_warmup_steps": int(value * total)}

    return steps


def fsdp_size(value: Any, given: Values) -> dict[str, Any]:
    """Devices along mesh.fsdp, so that each device holds the same share of the parameters as in verl."""
    tensor = given.get(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    devices = value if value > 0 else given["trainer.n_gpus_per_node"] * given["trainer.nnodes"]
    return {"mesh.fsdp": max(devices // tensor, 1)}


def advantage_estimator(value: Any, given: Values) -> dict[str, Any]:
    return {"algorithm.adv_estimator": ESTIMATORS.get(value, value)}


def filter_metric(value: Any, given: Values) -> dict[str, Any]:
    return {} if value is None else {"algorithm.filter_groups.metric": "seq_reward" if value == "reward" else value}


def with_correction(key: str) -> Callable[[Any, Values], dict[str, Any]]:
    """A correction of the sampler-trainer mismatch, which needs recomputed log-probabilities."""

    def converted(value: Any, given: Values) -> dict[str, Any]:
        if not value or value == "none":
            return {}
        parts = value.split(",") if key.endswith("rollout_rs") and isinstance(value, str) else value
        return as_type_of(key, parts) | {"actor.old_logprob": "recompute"}

    return converted


def correction(key: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Unchanged with importance weights, otherwise unread."""
    uses = "algorithm.rollout_correction.rollout_is"
    return lambda value, given: as_type_of(key, value) if given.get(uses) else {}


def thresholds(value: Any, given: Values) -> dict[str, Any]:
    if value is None or not given.get("algorithm.rollout_correction.rollout_rs"):
        return {}
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return {"algorithm.rollout_correction.rollout_rs_threshold": tuple(map(str, parts))}


def bypass(value: Any, given: Values) -> dict[str, Any]:
    prefix = "algorithm.rollout_correction"
    if value and (given.get(f"{prefix}.rollout_is") or given.get(f"{prefix}.rollout_rs")):
        raise InputError("rollout_is and rollout_rs need recomputed log-probabilities: they are computed here")
    return {"actor.old_logprob": "rollout"} if value else {}


def sampled(value: Any, given: Values) -> dict[str, Any]:
    if value is False and given.get(f"{ROLLOUT}.name") == "hf":
        raise InputError("training needs samples, of a rollout.temperature above 0")
    return {}


def critic_warm_up(value: Any, given: Values) -> dict[str, Any]:
    """verl updates the policy from step N on, the first being 1; here after N steps."""
    return {"trainer.critic_warmup": max(value - 1, 0)}


def _either(name: str, given: Values) -> bool:
    """Whether a reward option is given, by its old or its new name."""
    return any(given.get(f"{prefix}{name}") for prefix in ("", "reward."))


def _model_alone(given: Values) -> bool:
    return _either("reward_model.enable", given) and not _either("custom_reward_function.path", given)


def reward_name(value: Any, given: Values) -> dict[str, Any]:
    """Ignored without a path, as in verl."""
    return {"custom_reward_function.name": value} if value and _either("custom_reward_function.path", given) else {}


def overlong_switch(value: Any, given: Values) -> dict[str, Any]:
    """Off for a reward model alone: verl's manager, which has the penalty, returns its score as it is."""
    return {} if _model_alone(given) else as_type_of("reward.overlong_buffer.enable", value)


def reward_manager(value: Any, given: Values) -> dict[str, Any]:
    if value not in (None, "naive", "dapo"):
        raise InputError("the managers here are naive and dapo: write a reward function that does the same")
    return {}


def reward_model_switch(value: Any, given: Values) -> dict[str, Any]:
    return {"reward.function": "none"} if value and _model_alone(given) else {}


def reward_model_path(value: Any, given: Values) -> dict[str, Any]:
    """verl never adds the scores of a model and of a function."""
    if not value or not _either("reward_model.enable", given):
        return {}
    if not _model_alone(given):
        raise ByHand("verl takes the custom_reward_function alone, without use_reward_loop the model alone: choose one")
    return {"reward.model.path": value}


def teacher(value: Any, given: Values) -> dict[str, Any]:
    if not given.get("distillation.enabled", True):
        return {}
    if sum(key.startswith("distillation.teacher_models.") and key.endswith(".model_path") for key in given) > 1:
        raise InputError("there is one teacher: set algorithm.distillation.path to it")
    return as_type_of("algorithm.distillation.path", value)


def teacher_weight(value: Any, given: Values) -> dict[str, Any]:
    alone = given.get("distillation.distillation_loss.use_task_rewards", True) is False  # verl does not read it then
    return {} if alone else as_type_of("algorithm.distillation.weight", value)


def distillation_form(value: Any, given: Values) -> dict[str, Any]:
    if not given.get("distillation.enabled", True):
        return {}
    if value not in ("k1", "kl"):
        raise InputError("form=sampled is k1, and form=top_k the reverse divergence over the policy's own top k")
    return {"algorithm.distillation.form": "sampled"}


def tool_format(value: Any, given: Values) -> dict[str, Any]:
    plays = given.get(f"{ROLLOUT}.multi_turn.enable", True)
    return {"environment.tool_format": value} if plays and value == "hermes" else {}


def resume_mode(value: Any, given: Values) -> dict[str, Any]:
    return {"trainer.resume_mode": value} if value in ("auto", "disable") else {}


def trackers(value: Any, given: Values) -> dict[str, Any]:
    names = value if isinstance(value, list | tuple) else (value,)
    here = tuple(name for name in TRACKERS if name in names)
    return {"trainer.logger": here} if here else {}
