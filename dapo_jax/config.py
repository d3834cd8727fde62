"""Host: every option of a run, its default, unit and meaning; `validate` reports all problems together.

A config file returns a locked ConfigDict from `default_config()`; `freeze` turns it into the dataclasses below.
Names are verl's where verl has the option. The defaults are DAPO's (arXiv:2503.14476, section 4.1).
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from ml_collections import config_dict


@dataclass(frozen=True)
class ArithmeticConfig:
    """Generated problems "a operator b", read when data.task is "arithmetic"."""

    operators: str = "+"  # any of + - *
    low: int = 0  # smallest operand
    high: int = 50  # largest operand
    num_train: int = 0  # problems to train on; 0 = all that are not held out
    num_heldout: int = 64  # problems to evaluate on, never trained on
    template: str = "{a} {operator} {b} ="  # text of the user's message


@dataclass(frozen=True)
class DataConfig:
    task: str = "files"  # files | arithmetic
    train_files: tuple[str, ...] = ()  # parquet or JSONL in verl's schema
    val_files: tuple[str, ...] = ()  # the same, for evaluation
    prompt_key: str = "prompt"  # column with chat messages or text
    train_batch_size: int = 512  # prompts per training step, after the group filter
    gen_batch_size: int | None = None  # prompts per generation round; null = train_batch_size
    max_prompt_length: int = 1024  # tokens
    max_response_length: int = 1024  # tokens, end-of-sequence token included
    truncation: str = "error"  # over-long prompts: error | left | right | middle (which part is cut)
    filter_overlong_prompts: bool = False  # drop over-long prompts instead
    shuffle: bool = True  # permute the rows anew in every epoch
    system_prompt: str | None = None  # put before prompts that have none; null = the chat template decides
    chat_template_kwargs: str = "{}"  # JSON object of further variables of the chat template
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)


@dataclass(frozen=True)
class RandomModelConfig:
    """Sizes of a freshly initialised model over a character tokenizer, read when model.path is "random"."""

    hidden_size: int = 48
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    initializer_range: float = 0.02  # standard deviation of the weights


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # Hugging Face directory, .gguf file, or "random"
    dtype: str = "auto"  # of matrix products: float32 | bfloat16 | auto (float32 on CPU, else bfloat16)
    enable_gradient_checkpointing: bool = True  # recompute each layer in the backward pass: less memory
    random: RandomModelConfig = field(default_factory=RandomModelConfig)


@dataclass(frozen=True)
class RolloutConfig:
    n: int = 16  # samples per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = -1  # -1 = off
    max_num_seqs: int = 1024  # responses decoded at once, over all devices
    decode_chunk_length: int = 32  # tokens between two looks at what has finished


@dataclass(frozen=True)
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO, equation 13)."""

    enable: bool = False
    len: int = 256  # tokens before max_response_length over which the penalty grows
    penalty_factor: float = 1.0  # penalty of a response of max_response_length tokens


@dataclass(frozen=True)
class RewardConfig:
    function: str = "auto"  # auto (by data_source), a verifier's name, or a dotted path to your function
    num_workers: int = 2  # verifier processes
    timeout_s: float = 10.0  # seconds that one sample's verification may take
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, section 3.2): groups whose metric is the same for all samples are dropped."""

    enable: bool = True  # verl: False; DAPO needs it
    metric: str = "acc"  # acc | score | any number that the reward function returns
    max_num_gen_batches: int = 10  # generation rounds per training step at most; <= 0 = no limit


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # grpo | dapo (the same)
    norm_adv_by_std_in_grpo: bool = True  # False: Dr. GRPO (arXiv:2503.20783)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (arXiv:1711.05101)."""

    lr: float = 1e-6
    lr_warmup_steps: int = 20  # training steps; the first has lr / lr_warmup_steps (verl: 0)
    lr_scheduler_type: str = "constant"  # after the warm-up: constant | cosine, down to lr * min_lr_ratio
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.1  # verl's framework: 0.01; its DAPO scripts: 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: int = 32  # prompts per optimizer step
    ppo_micro_batch_size_per_device: int = 8  # responses per forward and backward pass on one device
    ppo_epochs: int = 1  # passes over a training batch
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28  # clip-higher (DAPO, section 3.1); verl's framework: 0.2
    clip_ratio_c: float = 10.0  # dual clip, the largest |loss| of a token as a multiple of |advantage|
    loss_agg_mode: str = "token-mean"  # see dapo_jax/algorithms/aggregation.py
    loss_scale_factor: float | None = None  # of seq-mean-token-sum-norm; null = max_response_length
    count_empty_sequences: bool = False  # True: sequence means divide by the configured size, as verl
    old_logprob: str = "auto"  # rollout | recompute | auto (rollout, unless it differs from the training pass)
    logprob_chunk_size: int = 4096  # tokens per device whose logits exist at a time
    grad_clip: float = 1.0  # global norm
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class TrainerConfig:
    total_training_steps: int = 100  # batches trained on
    save_freq: int = 10  # training steps between checkpoints; -1 = only at the end
    test_freq: int = 10  # training steps between evaluations; -1 = never
    val_before_train: bool = True  # evaluate before the first step
    max_ckpt_to_keep: int = 2
    resume_mode: str = "auto"  # auto (go on from the last checkpoint of the workdir) | disable


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices."""

    data: int = -1  # copies of the parameters; -1 = what the other axes leave
    fsdp: int = 1  # parameters and optimizer state are divided, rows too
    tensor: int = 1  # heads, feed-forward and vocabulary are divided


@dataclass(frozen=True)
class MonitorConfig:
    console: str = "steps"  # steps (one line a step) | detailed (all that goes to train.log)
    num_samples: int = 8  # responses a step whose text is kept under samples/


@dataclass(frozen=True)
class EvaluateConfig:
    n: int = 4  # samples per problem: k of mean@k
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_prompts: int = -1  # problems evaluated, the first ones; -1 = all


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    seed: int = 0  # of every random draw: weights, prompt order, sampling
    workdir: str = "runs/dapo"  # what the run writes


def default_config() -> Any:
    """The defaults as a locked ConfigDict, for a config file's `get_config()` to change."""
    return _config_dict(Config).lock()


def _config_dict(section: type) -> config_dict.ConfigDict:
    values = config_dict.ConfigDict()
    for name, kind in typing.get_type_hints(section).items():
        default = getattr(section(), name)
        if dataclasses.is_dataclass(kind):
            values[name] = _config_dict(typing.cast(type, kind))
        elif default is None:
            values[name] = config_dict.placeholder(_optional_type(kind))
        else:
            values[name] = default
    return values


def _optional_type(kind: Any) -> type:
    assert isinstance(kind, types.UnionType), kind
    return next(option for option in kind.__args__ if option is not types.NoneType)


def freeze(values: Any) -> Config:
    """The frozen dataclasses of a ConfigDict made by `default_config()`."""
    return _freeze(Config, values)


def _freeze(section: Any, values: Any) -> Any:
    kinds = typing.get_type_hints(section)
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise ValueError(f"unknown config keys {unknown} in {section.__name__}: start from default_config()")
    fields = {
        name: _freeze(kind, values[name])
        if dataclasses.is_dataclass(kind)
        else tuple(values[name])
        if isinstance(values[name], (list, tuple))
        else values[name]
        for name, kind in kinds.items()
    }
    return section(**fields)


def gen_batch_size(config: Config) -> int:
    """Prompts per generation round."""
    return config.data.gen_batch_size or config.data.train_batch_size


CHOICES = {
    "data.task": ("files", "arithmetic"),
    "data.truncation": ("error", "left", "right", "middle"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "algorithm.adv_estimator": ("grpo", "dapo"),
    "actor.loss_agg_mode": (
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "actor.old_logprob": ("auto", "rollout", "recompute"),
    "actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "trainer.resume_mode": ("auto", "disable"),
    "monitor.console": ("steps", "detailed"),
}
POSITIVE = (
    "data.train_batch_size data.max_prompt_length data.max_response_length rollout.n rollout.max_num_seqs "
    "rollout.decode_chunk_length reward.num_workers reward.timeout_s actor.ppo_mini_batch_size "
    "actor.ppo_micro_batch_size_per_device actor.ppo_epochs actor.logprob_chunk_size actor.grad_clip "
    "trainer.total_training_steps trainer.max_ckpt_to_keep mesh.fsdp mesh.tensor evaluate.n"
).split()


def validate(config: Config) -> None:
    """Raises one ValueError with every problem of `config` that can be seen without a device or a file."""
    problems = _choice_problems(config) + _range_problems(config) + _batch_problems(config)
    if problems:
        raise ValueError("the config has problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _choice_problems(config: Config) -> list[str]:
    problems = []
    for key, choices in CHOICES.items():
        if _lookup(config, key) not in choices:
            problems.append(f"{key}={_lookup(config, key)!r} must be one of {', '.join(choices)}")
    return problems


def _range_problems(config: Config) -> list[str]:
    problems = [
        f"{key}={_lookup(config, key)} must be greater than 0" for key in POSITIVE if not _lookup(config, key) > 0
    ]
    for name in ("rollout", "evaluate"):
        section = getattr(config, name)
        if section.temperature < 0:
            problems.append(f"{name}.temperature={section.temperature} must be 0 (greedy) or more")
        if not 0 < section.top_p <= 1:
            problems.append(f"{name}.top_p={section.top_p} must be in (0, 1]; 1 switches it off")
        if section.top_k == 0 or section.top_k < -1:
            problems.append(f"{name}.top_k={section.top_k} must be positive, or -1 to switch it off")
    if config.rollout.temperature == 0:
        problems.append("rollout.temperature=0 gives equal samples, and no gradient: raise it")
    actor = config.actor
    if not 0 < actor.clip_ratio_low < 1:
        problems.append(f"actor.clip_ratio_low={actor.clip_ratio_low} must be in (0, 1)")
    if actor.clip_ratio_high <= 0:
        problems.append(f"actor.clip_ratio_high={actor.clip_ratio_high} must be greater than 0")
    if actor.clip_ratio_c <= 1:
        problems.append(f"actor.clip_ratio_c={actor.clip_ratio_c} must be greater than 1: it bounds the dual clip")
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        problems.append(
            f"reward.overlong_buffer.len={buffer.len} must be in 1..data.max_response_length={longest}"
        )
    try:
        if not isinstance(json.loads(config.data.chat_template_kwargs), dict):
            raise ValueError("not an object")
    except ValueError as error:
        problems.append(f"data.chat_template_kwargs={config.data.chat_template_kwargs!r} must be JSON: {error}")
    if not config.model.path:
        problems.append("model.path is empty: give a Hugging Face directory, a .gguf file, or 'random'")
    if config.data.task == "files" and not config.data.train_files:
        problems.append("data.train_files is empty: give parquet or JSONL files, or set data.task=arithmetic")
    return problems


def _batch_problems(config: Config) -> list[str]:
    """The divisibility rules between prompts, mini-batches and micro-batches."""
    problems = []
    data, actor, n = config.data, config.actor, config.rollout.n
    batch, mini, micro = data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_device
    if min(batch, mini, micro, n) < 1:
        return []
    if batch % mini:
        problems.append(
            f"data.train_batch_size={batch} must be a multiple of actor.ppo_mini_batch_size={mini} "
            "(both in prompts)"
        )
    if mini * n % micro:
        problems.append(
            f"actor.ppo_mini_batch_size x rollout.n = {mini} x {n} = {mini * n} responses must be a multiple of "
            f"actor.ppo_micro_batch_size_per_device={micro}"
        )
    if n > config.rollout.max_num_seqs:
        problems.append(
            f"rollout.max_num_seqs={config.rollout.max_num_seqs} must be at least rollout.n={n}: "
            "a group is decoded together"
        )
    if config.evaluate.n > config.rollout.max_num_seqs:
        problems.append(
            f"rollout.max_num_seqs={config.rollout.max_num_seqs} must be at least evaluate.n={config.evaluate.n}"
        )
    if data.gen_batch_size is not None and data.gen_batch_size < 1:
        problems.append(f"data.gen_batch_size={data.gen_batch_size} must be greater than 0, or null")
    if not config.algorithm.filter_groups.enable and gen_batch_size(config) != batch:
        problems.append(
            f"data.gen_batch_size={gen_batch_size(config)} differs from data.train_batch_size={batch}, which "
            "only makes sense with algorithm.filter_groups.enable=True"
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
    if rollout.n == 1 and config.algorithm.filter_groups.enable:
        found.append("rollout.n=1: a group of one sample is always kept, and its advantage is its reward")
    if config.evaluate.n == 1 and config.evaluate.temperature > 0:
        found.append("evaluate.n=1 with temperature > 0 is a noisy measure: raise evaluate.n")
    return found
