"""Host: every option of a run with its type, bounds, default, unit and meaning.

A config file returns a locked ConfigDict from `default_config()`; `freeze` turns it into the dataclasses below.
command/validation.py checks the rules that relate several options. READS says with which settings the options of a
section are read, if not always (command/option_uses.py): in capitals a condition with a name, else an option with a
value, or one that is on; "takes" means that the chosen function has the option, or what follows, as a parameter.
Names are verl's where verl has the option. The defaults are DAPO's (arXiv:2503.14476, section 4.1).
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from dapo_jax.config.bounds import (
    AboveOne,
    Axis,
    Betas,
    EvenPositive,
    ExitCode,
    Frequency,
    LowerClip,
    NotNegative,
    Positive,
    PositiveOrNull,
    PositiveShare,
    PositiveTemperature,
    ProcessId,
    Share,
    Steps,
    Temperature,
    TopK,
    TopP,
    ZeroIsNone,
    ZeroOrOne,
    above_zero_or_off,
    at_most,
    zero_or_more,
)

Task = Literal["files", "arithmetic", "reasoning_gym"]
Truncation = Literal["error", "left", "right", "middle"]
Dtype = Literal["auto", "float32", "bfloat16"]
Attention = Literal["xla", "fused", "cudnn", "triton", "splash"]
OnLimit = Literal["error", "partial", "fallback_unfiltered"]
OnExhausted = Literal["next_epoch", "partial", "error"]
OnEmpty = Literal["error", "skip_step", "train_unfiltered"]
Leftover = Literal["requeue", "carry", "discard"]
Backfill = Literal["batch", "stream"]
LengthForm = Literal["none", "group", "cosine"]
ControllerType = Literal["fixed", "adaptive"]
Schedule = Literal["constant", "cosine"]
MomentsDtype = Literal["float32", "bfloat16"]
Optimizer = Literal["adamw", "muon"]
OldLogprob = Literal["auto", "rollout", "recompute"]
BestMode = Literal["max", "min"]
DistillationForm = Literal["sampled", "top_k"]
Deterministic = Literal["auto", "on", "off"]
ResumeMode = Literal["auto", "disable"]
ObservationTruncation = Literal["left", "right", "middle"]
EpisodeReward = Literal["last", "sum"]
ToolFormat = Literal["auto", "hermes", "llama3", "json"]


@dataclass(frozen=True)
class ArithmeticConfig:
    """Generated problems "a operator b", read when data.task is "arithmetic"."""

    operators: str = "+"  # any of + - * and >, the larger of the two
    low: int = 0  # smallest operand
    high: int = 50  # largest operand
    num_train: NotNegative[int] = 0  # problems to train on; 0 = all that are not held out
    num_heldout: NotNegative[int] = 64  # problems to evaluate on, never trained on
    template: str = "{a} {operator} {b} ="  # text of the user's message; a single operator may be left out


@dataclass(frozen=True)
class ReasoningGymConfig:
    """Problems that the library reasoning-gym generates, read when data.task is "reasoning_gym"."""

    datasets: tuple[str, ...] = ("leg_counting",)  # names of its data sets; each gives the same number of problems
    num_train: Positive[int] = 1000  # problems of each data set to train on
    num_heldout: NotNegative[int] = 64  # problems of each data set to evaluate on, never trained on
    template: str = (  # text of the user's message
        "{question}\nWrite the final answer between <answer> and </answer>."
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Draws prompts by how often their groups were mixed (docs/dynamic_sampling.md#difficulty-pools)."""

    enable: bool = False  # with or without the group filter
    floor: PositiveShare = 0.1  # smallest probability of being sampled
    decay: Share = 0.5  # weight of the past in a row's mixed rate, per group; the rate of a new row is 1
    READS = {"enable": "floor decay"}


@dataclass(frozen=True)
class DataConfig:
    task: Task = "files"  # files | arithmetic | reasoning_gym (pip install 'dapo_jax[reasoning-gym]')
    train_files: tuple[str, ...] = ()  # Parquet, JSONL or CSV: paths, gs://, hf://OWNER/NAME/CONFIG/SPLIT
    val_files: tuple[str, ...] = ()  # the same, to evaluate on
    mixture: tuple[float, ...] = ()  # weight of each of train_files among sampled prompts; empty = every row as often
    prompt_key: str = "prompt"  # column with chat messages or text
    prompt_template: str = ""  # text of the user's message, with columns in braces: {question}; empty = prompt_key
    answer_key: str = "reward_model.ground_truth"  # column with the expected answer, dotted; empty = there is none
    train_batch_size: Positive[int] = 512  # prompts per training step, after the group filter
    gen_batch_size: PositiveOrNull[int] = None  # prompts per generation round; null = train_batch_size
    max_prompt_length: Positive[int] = 1024  # tokens
    max_response_length: Positive[int] = 1024  # tokens, end-of-sequence token included
    truncation: Truncation = "error"  # over-long prompts: error | left | right | middle (which part is cut)
    filter_overlong_prompts: bool = False  # drop over-long prompts instead
    shuffle: bool = True  # a new order of the rows in every epoch
    system_prompt: str | None = None  # for prompts that have none; null = the chat template decides
    chat_template_kwargs: str = "{}"  # more variables for the chat template: dict or JSON object
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    # Aliases (aliases.py); null = not given.
    rollout_batch_size: int | None = None  # EasyR1's name for train_batch_size
    mini_rollout_batch_size: int | None = None  # EasyR1's name for gen_batch_size
    READS = {
        "task=files": "train_files val_files mixture",
        "FILES": "prompt_key prompt_template answer_key",
        "task=arithmetic": "arithmetic",
        "task=reasoning_gym": "reasoning_gym",
        "filter_overlong_prompts=False": "truncation",
        "ROUNDS": "gen_batch_size",
        "ALIAS": "rollout_batch_size mini_rollout_batch_size",
    }


@dataclass(frozen=True)
class RandomModelConfig:
    """Sizes of a freshly initialised model over a character tokenizer, read when model.path is "random"."""

    hidden_size: Positive[int] = 48  # width of the residual stream
    intermediate_size: Positive[int] = 96  # width of the feed-forward layers
    num_layers: Positive[int] = 2  # transformer blocks
    num_heads: Positive[int] = 4  # query heads
    num_kv_heads: Positive[int] = 2  # key and value heads; divides num_heads
    head_dim: EvenPositive = 16  # width of one head
    initializer_range: NotNegative[float] = 0.02  # standard deviation of the weights


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the policy (arXiv:2106.09685). Only they are trained and saved."""

    rank: Annotated[int, zero_or_more("off")] = 0  # 0 = train all weights
    alpha: Positive[float] = 16.0  # the adapters' output is scaled by alpha / rank; fixed for a run
    target_modules: tuple[str, ...] = (  # by Hugging Face's names; all-linear = those that the model has
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    READS = {"rank": "alpha target_modules"}


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # Hugging Face directory, OWNER/NAME of the hub, a workdir, or "random"
    dtype: Dtype = "auto"  # of matrix products: float32 | bfloat16 | auto (bfloat16 where it is fast)
    enable_gradient_checkpointing: bool = True  # recompute parts of a layer in the backward pass: less memory
    attention: Attention = "fused"  # training: xla | cudnn, triton (NVIDIA) | splash (TPU) | fused (the best that runs)
    router_replay: bool = True  # mixtures of experts: training uses the experts that the sampler chose
    remat_policy: str = "auto"  # kept for the backward pass: full (nothing) | attention | dots | offload | auto
    lora: LoraConfig = field(default_factory=LoraConfig)
    random: RandomModelConfig = field(default_factory=RandomModelConfig)
    READS = {"enable_gradient_checkpointing": "remat_policy", "path=random": "random"}


@dataclass(frozen=True)
class RolloutConfig:
    n: Positive[int] = 16  # samples per prompt
    temperature: PositiveTemperature = 1.0  # above 0
    top_p: TopP = 1.0  # 1 = off
    top_k: TopK = -1  # -1 = off
    min_response_length: int = 0  # no end-of-sequence token is drawn before so many tokens; not in evaluation
    stop: tuple[str, ...] = ()  # a response ends after the first of these strings, which it keeps
    max_num_seqs: NotNegative[int] = 0  # slots: responses decoded at once, at least one a device; 0 = as many as fit
    kv_memory_share: Annotated[Positive[float], at_most(1)] = 0.85  # of the free memory, for keys and values
    decode_chunk_length: NotNegative[int] = 0  # tokens between two looks at what has ended; 0 = the engine chooses
    segment_length: NotNegative[int] = 0  # partial rollouts: tokens that a response advances per training step; 0 = off
    engine: str | None = None  # of earlier versions, without effect: there is one engine; null = not given
    READS = {"ALIAS": "engine"}


@dataclass(frozen=True)
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO, equation 13)."""

    enable: bool = False  # DAPO's recipes: True
    len: int = 256  # tokens before max_response_length over which the penalty grows
    penalty_factor: NotNegative[float] = 1.0  # penalty of a response of max_response_length tokens
    log: bool = True  # if enabled: log the share of penalised responses, rollout/overlong/mean (verl: False)
    READS = {"enable": "len penalty_factor log"}


@dataclass(frozen=True)
class LengthRewardConfig:
    """A reward for short right responses, added to the score (docs/rewards.md). `acc` stays as it is."""

    form: LengthForm = "none"  # none | group (Kimi k1.5, arXiv:2501.12599) | cosine (arXiv:2502.03373)
    weight: float = 1.0  # of the length reward in seq_reward
    right_short: float = 1.0  # cosine: of a right response without a token
    right_long: float = 0.5  # and of one that is nearly max_response_length tokens long
    wrong_short: float = -1.0  # the same of a wrong response
    wrong_long: float = -0.5  # and of one that is nearly max_response_length tokens long
    at_limit: float = -1.0  # cosine: of a response of max_response_length tokens, right or wrong
    READS = {
        "form other than none": "weight",
        "form=cosine": "right_short right_long wrong_short wrong_long at_limit",
    }


@dataclass(frozen=True)
class FormatConfig:
    """The verifier `format`."""

    pattern: str = ""  # a regular expression that the whole response must match; empty = <think> and <answer>


@dataclass(frozen=True)
class JudgeConfig:
    """The verifier `judge`: a language model behind an OpenAI-compatible endpoint (docs/rewards.md)."""

    base_url: str = ""  # of the endpoint, such as http://localhost:8000/v1
    model: str = ""  # its name there
    api_key_env: str = ""  # environment variable that holds the key; empty = no key
    template: str = ""  # the prompt, a text or the path of a file; empty = DEFAULT_TEMPLATE of rewards/judge_prompt.py
    extra_body: str = "{}"  # further fields of a request, a JSON object; null leaves a field out
    max_score: Positive[float] = 10.0  # that the judge may give; score is its share of that
    threshold: PositiveShare = 0.5  # acc is 1 from this score, 0 to 1
    max_tokens: Positive[int] = 512  # of the judge's answer, its thoughts included
    timeout_s: Positive[float] = 60.0  # seconds for one request
    retries: NotNegative[int] = 5  # after time-outs, lost connections and statuses 408, 429, 500 and above
    backoff_s: Positive[float] = 1.0  # seconds before the first retry; each further wait is twice as long
    patience_s: NotNegative[float] = 600.0  # seconds without any answer after which the run ends, its state saved
    max_concurrency: Annotated[Positive[int], at_most(1024)] = 32  # requests at a time, of each training process
    max_requests: ZeroIsNone = 0  # of the work directory, retries included: then the run ends; 0 = none
    max_cost: NotNegative[float] = 0.0  # of the work directory, in the currency of the prices; 0 = none
    price_per_million_input_tokens: NotNegative[float] = 0.0  # for costs
    price_per_million_output_tokens: NotNegative[float] = 0.0  # the same of output tokens


@dataclass(frozen=True)
class RewardModelConfig:
    """A transformer with a scalar head that scores the chat of prompt and response, with or without a verifier."""

    path: str = ""  # Hugging Face sequence-classification directory, or OWNER/NAME of the hub; empty = none
    weight: float = 1.0  # score = function_weight * verifier's score + weight * reward model's score
    function_weight: float = 1.0  # of the verifier's score, see weight
    micro_batch_size_per_device: Positive[int] = 8  # chats per forward pass on one device
    max_length: Positive[int] = 4096  # tokens of prompt and response; a longer chat is cut at its beginning
    READS = {"path": "weight function_weight micro_batch_size_per_device max_length", "VERIFIED": "function_weight"}


@dataclass(frozen=True)
class RewardConfig:
    function: str = "auto"  # auto (by data_source), a verifier, your function (MODULE.NAME or FILE.py:NAME), or none
    functions: str = "{}"  # several instead, with weights: {"NAME": {"function": ..., "weight": ...}} (docs/rewards.md)
    num_workers: Annotated[Positive[int], at_most(1024)] = 2  # verifier processes
    timeout_s: Positive[float] = 10.0  # seconds that one sample's verification may take
    memory_limit_mb: ZeroIsNone = 4096  # MiB that a verifier process may write to (Linux); 0 = none
    keep_special_tokens: bool = False  # in the text that verifiers see, end tokens excepted (<think> may be one)
    error_score: float | None = None  # at most, if a response makes it fail; null = verifier's lowest, 0 for your own
    env: tuple[str, ...] = ()  # secret environment variables that verifier processes get (docs/rewards.md)
    max_error_share: PositiveShare = 1.0  # the run ends if more of a step's verifications fail; 1 = if all do
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    length: LengthRewardConfig = field(default_factory=LengthRewardConfig)
    format: FormatConfig = field(default_factory=FormatConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    READS = {
        "functions={}": "function",
        "VERIFIED": "error_score max_error_share env",
        "FORMAT": "format",
        "JUDGE": "judge",
    }


@dataclass(frozen=True)
class EnvironmentConfig:
    """What answers the policy's turns in episodes of several (docs/environments.md)."""

    path: str = ""  # a class, FILE.py:CLASS or MODULE.CLASS, or {"NAME": CLASS, ...}; "" = a response is one turn
    tools: tuple[str, ...] = ()  # functions without state that the policy may call, each FILE.py:FUNCTION
    arguments: str = "{}"  # of the class's constructor, by NAME if there are several: dict or JSON object
    max_turns: Positive[int] = 8  # of the policy, after which an episode ends
    max_turn_length: NotNegative[int] = 0  # tokens of a turn, at which the episode ends as cut off; 0 = what is left
    max_observation_length: Positive[int] = 512  # tokens of a message of the environment; longer ones are cut
    observation_truncation: ObservationTruncation = "right"  # left | right | middle (which part is cut)
    reward: EpisodeReward = "last"  # of the steps of an episode: last | sum
    tool_format: ToolFormat = "auto"  # how calls are written: auto (by the chat template) | hermes | llama3 | json
    turn_template: str = ""  # text after a turn, with {observation}; "" = by the chat template, or {observation} alone
    num_workers: Annotated[Positive[int], at_most(1024)] = 2  # environment processes
    timeout_s: Positive[float] = 10.0  # seconds that a call may take
    memory_limit_mb: ZeroIsNone = 4096  # MiB that an environment process may write to (Linux); 0 = none
    READS = {
        "path": "arguments reward",
        "ENVIRONMENT": "max_turns max_turn_length max_observation_length observation_truncation tool_format "
        "turn_template num_workers timeout_s memory_limit_mb",
    }


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    """verl's names for reward.function="PATH:NAME" (aliases.py); null = not given."""

    path: str | None = None  # Python file with the function
    name: str | None = None  # the function; null = compute_score
    READS = {"ALIAS": "path name"}


@dataclass(frozen=True)
class AdaptiveLimitConfig:
    """A limit on rounds, from the share of groups that a step has kept (dynamic_sampling/schedule.py)."""

    enable: bool = False  # compute the limit in each step, at most max_num_gen_batches
    slack: NotNegative[float] = 2.0  # rounds more than expected
    min_rounds: Positive[int] = 2  # rounds before the limit is computed; later rounds can lower it
    READS = {"enable": "slack min_rounds"}


@dataclass(frozen=True)
class StreamConfig:
    """How many prompts backfill=stream samples at a time, and the running keep rate, which rounds use too."""

    slack: Positive[float] = 1.0  # stream: kept groups to aim at per missing group; below 1: fewer prompts wait
    keep_rate_prior: Share = 0.5  # assumed share of kept groups before any is known; bounds adaptive_limit too
    keep_rate_ema: Share = 0.9  # weight of the past in the running keep rate, per training step


@dataclass(frozen=True)
class SkipUniformConfig:
    """Skips prompts whose past groups were all uniform (after GRESO, arXiv:2506.02177)."""

    enable: bool = False  # skipped prompts are counted
    floor: PositiveShare = 0.2  # smallest probability of being sampled
    decay: PositiveShare = 0.5  # the probability is decay^(uniform groups in a row), but at least floor
    READS = {"enable": "floor decay"}


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, section 3.2); docs/dynamic_sampling.md explains the policies."""

    enable: bool = True  # verl: False; DAPO needs it
    metric: str = "acc"  # acc | score | seq_reward | seq_final_reward | token_level_rewards | what the reward returns
    rule: str = "std"  # std: spread above std_threshold | mean_range: filter_low < mean < filter_high | mixed
    std_threshold: NotNegative[float] = 0.0  # 0: the values differ, compared exactly
    filter_low: float = 0.01  # rule mean_range: means must be above this
    filter_high: float = 0.99  # and below this
    keep_singletons: bool = True  # keep groups of one sample
    max_num_gen_batches: int = 10  # at most so many generation rounds per training step; <= 0 = no limit
    adaptive_limit: AdaptiveLimitConfig = field(default_factory=AdaptiveLimitConfig)
    on_limit: OnLimit = "error"  # too few groups at the limit: error | partial (train on them) | fallback_unfiltered
    on_exhausted: OnExhausted = "next_epoch"  # the epoch ends within a step: next_epoch | partial | error
    on_empty: OnEmpty = "error"  # a partial step without a group: error | skip_step | train_unfiltered
    leftover: Leftover = "requeue"  # surplus groups: requeue (sample again) | carry (use later) | discard (verl)
    leftover_max_staleness: Positive[int] = 1  # carry: training steps after which a group is dropped
    backfill: Backfill = "batch"  # batch (rounds of gen_batch_size) | stream (a queue as the keep rate predicts)
    stream: StreamConfig = field(default_factory=StreamConfig)
    skip_uniform: SkipUniformConfig = field(default_factory=SkipUniformConfig)
    READS = {
        "enable": "metric rule std_threshold filter_low filter_high keep_singletons adaptive_limit leftover "
        "leftover_max_staleness backfill stream skip_uniform",
        "rule=std": "std_threshold",
        "rule=mean_range": "filter_low filter_high",
        "rollout.n=1": "keep_singletons",
        "rollout.segment_length=0": "on_limit on_exhausted on_empty",
        "LIMITED": "on_limit",
        "PARTIAL": "on_empty",
        "leftover=carry": "leftover_max_staleness",
        "backfill=stream": "stream.slack",
    }


@dataclass(frozen=True)
class KLControllerConfig:
    """Coefficient of the KL divergence in the reward."""

    type: ControllerType = "fixed"  # fixed | adaptive (arXiv:1909.08593, once per training step)
    kl_coef: NotNegative[float] = 0.001  # the coefficient, or the one to start from
    horizon: Positive[float] = 10000.0  # sequences; adaptive only
    target_kl: Positive[float] = 0.1  # nats per token; adaptive only
    READS = {"type=adaptive": "horizon target_kl"}


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """For a sampler whose log-probabilities differ from the training pass (algorithms/rollout_correction.py)."""

    rollout_is: str = "none"  # importance weights: none | token | sequence (verl: null is none)
    rollout_is_threshold: str = "2.0"  # "high": truncate there; "low_high": 0 outside
    rollout_is_batch_normalize: bool = False  # divide the weights by their mean
    rollout_rs: tuple[str, ...] = ()  # rejection criteria, all of which must hold, such as token_k1, seq_mean_k3
    rollout_rs_threshold: tuple[str, ...] = ()  # one per criterion: "high" or "low_high"
    READS = {"rollout_is=token or sequence": "rollout_is_threshold", "NORMALIZED": "rollout_is_batch_normalize"}


@dataclass(frozen=True)
class CPOConfig:
    """What adv_estimator=cpo adds to GRPO's advantages (algorithms/advantages.py)."""

    wrap_method: str = "mi"  # mi | mi_clamp_unify_difficulty | negonly_mi3 | seq_kl | negonly_seq_kl
    cpo_lambda: Positive[float] = 5.0  # the probability ratio is clamped to 1 / cpo_lambda .. cpo_lambda
    pos_alpha: float = 0.05  # weight in groups that are all right, for mi_clamp_unify_difficulty
    neg_alpha: float = 0.1  # in groups that are all wrong; for negonly_mi3 in all groups but those that are all right
    mi_alpha: float = 0.1  # in mixed groups; for mi in all groups
    kl_alpha: float = 0.1  # for seq_kl and negonly_seq_kl
    READS = {
        "wrap_method=mi_clamp_unify_difficulty or negonly_mi3": "cpo_lambda neg_alpha",
        "wrap_method=mi_clamp_unify_difficulty": "pos_alpha",
        "wrap_method=mi or mi_clamp_unify_difficulty": "mi_alpha",
        "wrap_method=seq_kl or negonly_seq_kl": "kl_alpha",
    }


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation: a frozen teacher judges each token that the policy samples (docs/algorithms.md)."""

    path: str = ""  # the teacher, as model.path; its tokens must be the policy's; "" = none
    weight: Positive[float] = 1.0  # of the divergence from the teacher
    use_task_rewards: bool = True  # False: train on the teacher alone, not on the reward
    form: DistillationForm = "sampled"  # sampled: part of the advantage of each token | top_k: a loss of its own
    top_k: Positive[int] = 32  # top_k: the policy's most likely tokens in each place, which are compared one by one
    temperature: PositiveOrNull[float] = None  # of the teacher's probabilities; null = rollout.temperature
    READS = {"path": "weight use_task_rewards form temperature", "form=top_k": "top_k"}


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # of ESTIMATORS in algorithms/advantages.py (verl: gae), or FILE.py:function
    norm_adv_by_std_in_grpo: bool = True  # False: Dr. GRPO (arXiv:2503.20783)
    gdpo_reward_keys: tuple[str, ...] = ()  # gdpo: rewards to normalise, by name; () = all that the config asks for
    gdpo_reward_weights: tuple[float, ...] = ()  # gdpo: their weights; () = 1 each, or those of the config
    gamma: Share = 1.0  # discount per token, of gae and reinforce_plus_plus
    lam: Share = 1.0  # lambda of gae
    keep_pos_ratio: Share = 1.0  # train on this share of a group's good samples, the best; grpo only
    keep_neg_ratio: Share = 1.0  # and on this share of its bad samples, the worst
    compute_new_adv: bool = False  # normalise the advantages again, over the kept samples
    top_entropy_quantile: PositiveShare = 1.0  # policy gradient only at this share of the tokens, of highest entropy
    overlong_filtering: bool = False  # leave responses that were cut off out of the loss (DAPO, section 3.4)
    use_kl_in_reward: bool = False  # subtract the KL to the reference; rounding, 1e-5 nats a token, is no difference
    kl_penalty: str = "kl"  # its estimator: a name of PENALTIES in dapo_jax/algorithms/kl.py
    kl_ctrl: KLControllerConfig = field(default_factory=KLControllerConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    cpo: CPOConfig = field(default_factory=CPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    # Aliases (aliases.py); null = not given.
    use_dynamic_sample: bool | None = None  # filter_groups as in EasyR1's "dynamic sampling" forks
    dynamic_sample_max_gen_batches: int | None = None  # filter_groups.max_num_gen_batches; 3 unless given
    online_filtering: bool | None = None  # filter_groups as in EasyR1
    filter_key: str | None = None  # filter_groups.metric; "overall" is score
    filter_low: float | None = None  # filter_groups.filter_low
    filter_high: float | None = None  # filter_groups.filter_high
    READS = {
        "adv_estimator takes": "norm_adv_by_std_in_grpo gamma lam",
        "adv_estimator takes reward_parts": "gdpo_reward_keys gdpo_reward_weights",
        "adv_estimator=grpo or dapo": "keep_pos_ratio keep_neg_ratio",
        "KEPT": "compute_new_adv",
        "use_kl_in_reward": "kl_penalty kl_ctrl",
        "adv_estimator takes wrap_method": "cpo",
        "ALIAS": "use_dynamic_sample dynamic_sample_max_gen_batches online_filtering filter_key filter_low filter_high",
    }


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (arXiv:1711.05101) or Muon (arXiv:2502.16982)."""

    optimizer: Optimizer = "adamw"  # adamw | muon: for the matrices of layers, with updates as large as AdamW's
    lr: NotNegative[float] = 1e-6  # learning rate after the warm-up
    lr_warmup_steps: NotNegative[int] = 20  # training steps; the first has lr / lr_warmup_steps (verl: 0)
    lr_scheduler_type: Schedule = "constant"  # after the warm-up: constant | cosine, down to lr * min_lr_ratio
    min_lr_ratio: Share = 0.0  # cosine: last learning rate, as a multiple of lr; 0: it reaches 0 one step later
    weight_decay: NotNegative[float] = 0.1  # verl's framework: 0.01; its DAPO scripts: 0.1
    betas: Betas = (0.9, 0.999)  # decay of Adam's two running moments, per update
    eps: Positive[float] = 1e-8  # added to the root of the second moment
    moments_dtype: MomentsDtype = "float32"  # of the moments: float32 | bfloat16 (half the memory, random rounding)
    offload: bool = False  # keep the moments in host memory between updates (GPUs and TPUs)
    READS = {"lr_scheduler_type=cosine": "min_lr_ratio"}


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy loss, and the options that only some losses have (algorithms/policy_loss.py)."""

    loss_mode: str = "vanilla"  # a name of LOSSES, or your own FILE.py:function
    clip_cov_ratio: Positive[float] = 0.0002  # clip_cov: share of a mini-batch's tokens whose gradient is detached
    clip_cov_lb: float = 1.0  # clip_cov: smallest covariance that may be drawn
    clip_cov_ub: float = 5.0  # clip_cov: largest covariance that may be drawn
    kl_cov_ratio: Positive[float] = 0.0002  # kl_cov: share of a mini-batch's tokens that are penalised
    ppo_kl_coef: float = 0.1  # kl_cov: the penalty's coefficient
    tau_pos: Positive[float] = 1.0  # sapo: temperature of the gate for positive advantages
    tau_neg: Positive[float] = 1.05  # sapo: and for the others
    dro_beta: Positive[float] = 0.1  # dro: coefficient of the quadratic pull to the old policy (verl: null, an error)
    READS = {
        "loss_mode takes": "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef tau_pos tau_neg dro_beta",
    }


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: Positive[int] = 32  # prompts per optimizer step
    ppo_micro_batch_size_per_device: Positive[int] = 8  # responses of full length per pass on one device
    use_dynamic_bsz: bool = True  # pack responses into passes, the critic's too; False: one padded row for each
    ppo_max_token_len_per_device: PositiveOrNull[int] = None  # tokens of a packed pass; null = as many as those have
    share_prompts: bool = True  # compute a prompt once for the responses packed with it; not with cuDNN's attention
    ppo_epochs: Positive[int] = 1  # passes over a training batch
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio_low: LowerClip = 0.2  # the ratio is clipped below 1 - clip_ratio_low; dppo: bound of the divergence
    clip_ratio_high: Positive[float] = 0.28  # clip-higher (DAPO, section 3.1); verl's framework: 0.2
    clip_ratio_c: AboveOne = 10.0  # dual clip: bound of a token's |loss|, as a multiple of |advantage|
    off_policy_mask_threshold: PositiveOrNull[float] = None  # drops sequences of A < 0 that drifted (nats per token)
    loss_agg_mode: str = "token-mean"  # a name of MODES in dapo_jax/algorithms/aggregation.py
    loss_scale_factor: PositiveOrNull[float] = None  # of seq-mean-token-sum-norm; null = max_response_length
    count_empty_sequences: bool = False  # True: sequence means divide by the configured size, as in verl
    entropy_coeff: NotNegative[float] = 0.0  # coefficient of the mean token entropy, subtracted from the loss
    use_kl_loss: bool = False  # add the KL divergence to the reference policy to the loss
    kl_loss_coef: float = 0.001  # its coefficient
    kl_loss_type: str = "low_var_kl"  # a name of PENALTIES in dapo_jax/algorithms/kl.py
    old_logprob: OldLogprob = "auto"  # rollout | recompute | auto (rollout, until the two differ: docs/inside.md)
    logprob_chunk_size: Positive[int] = 4096  # tokens per device whose logits are in memory at a time
    grad_clip: Positive[float] = 1.0  # global norm
    optim: OptimConfig = field(default_factory=OptimConfig)
    READS = {
        "ppo_max_token_len_per_device=None": "ppo_micro_batch_size_per_device",
        "use_dynamic_bsz": "ppo_max_token_len_per_device",
        "policy_loss.loss_mode takes": "clip_ratio_low clip_ratio_high clip_ratio_c",
        "SCALED": "loss_scale_factor",
        "SEQUENCES": "count_empty_sequences",
        "use_kl_loss": "kl_loss_coef kl_loss_type",
    }


@dataclass(frozen=True)
class ReferenceConfig:
    """The policy that KL divergences refer to; loaded only if one of them is on."""

    path: str | None = None  # as model.path, of the same architecture; null = model.path
    READS = {"REFERENCE": "path"}


@dataclass(frozen=True)
class CriticModelConfig:
    path: str = ""  # Hugging Face directory of the policy's architecture; empty = the policy's weights


@dataclass(frozen=True)
class CriticConfig:
    """A value function: a transformer like the policy's with a scalar head, trained if adv_estimator needs one (gae).

    actor.loss_scale_factor and actor.count_empty_sequences apply to its loss too.
    """

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: PositiveOrNull[int] = None  # prompts per optimizer step; null = the actor's
    ppo_micro_batch_size_per_device: PositiveOrNull[int] = None  # responses per pass on one device; null = the actor's
    ppo_epochs: Positive[int] = 1  # passes over a training batch
    cliprange_value: Positive[float] = 0.5  # how far a value may move from the old one before its loss is clipped
    loss_agg_mode: str = "token-mean"  # a name of MODES in dapo_jax/algorithms/aggregation.py
    grad_clip: Positive[float] = 1.0  # global norm
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-5, lr_warmup_steps=0, weight_decay=0.01)  # verl's
    )
    READS = {"actor.ppo_max_token_len_per_device=None": "ppo_micro_batch_size_per_device"}


@dataclass(frozen=True)
class TrainerConfig:
    total_training_steps: Steps = 100  # batches trained on; -1 = as many as total_epochs says
    total_epochs: PositiveOrNull[int] = None  # at most epochs x prompts // train_batch_size steps; null = no limit
    critic_warmup: NotNegative[int] = 0  # first steps, which update only the critic; the policy's schedule follows
    save_freq: Frequency = 10  # training steps between checkpoints; -1 = only at the end
    save_minutes: NotNegative[float] = 0.0  # also save once the newest checkpoint is so many minutes old; 0 = off
    test_freq: Frequency = 10  # training steps between evaluations; -1 = only at the end
    val_before_train: bool = True  # evaluate before the first step
    max_ckpt_to_keep: Positive[int] = 2  # newest checkpoints to keep
    keep_best_ckpt: ZeroIsNone = 1  # and checkpoints with the best best_metric; 0 = none
    best_metric: str = ""  # name of a metric; empty = the mean of eval/*/acc/mean@k over the data sources
    best_metric_mode: BestMode = "max"  # max | min
    rollout_ahead: ZeroOrOne = 0  # 1 = sample a batch with a policy one step older while other devices train
    rollout_devices: NotNegative[int] = 0  # with rollout_ahead: devices that sample, over all processes; 0 = half
    logger: tuple[str, ...] = ("console", "tensorboard")  # also wandb, FILE.py:Class; metrics.jsonl always
    project_name: str = "dapo_jax"  # of the run in Weights & Biases (pip install 'dapo_jax[wandb]') or your own tracker
    experiment_name: str = ""  # the run's name there; empty = the last part of workdir, in a sweep with its arm
    checkpoint_dir: str = ""  # path or gs:// address that all processes can reach; empty = workdir/checkpoints
    checkpoint_timeout_s: Positive[int] = 3600  # seconds to write a checkpoint before the run fails (Orbax: 1200)
    coordinator: str = ""  # host:port of process 0; empty = JAX finds it (TPU pods, Slurm, Open MPI), or one process
    num_processes: NotNegative[int] = 0  # 0 = JAX finds it; 1 = this process alone
    process_id: ProcessId = -1  # of this process, from 0; -1 = JAX finds it
    heartbeat_timeout_s: Positive[int] = 30  # seconds without a heartbeat after which a process counts as dead
    gpu_memory_fraction: PositiveShare = 0.9  # of each GPU's memory, reserved at the start; JAX's default is 0.75
    compiler_options: str = "{}"  # XLA options for training passes, on top of docs/inside.md's: dict or JSON object
    compilation_cache_dir: str = "~/.cache/dapo_jax/compiled"  # compiled programs kept between runs; empty = none
    deterministic: Deterministic = "auto"  # on GPUs, same bits after a restart: auto | on (from workdir/compiled) | off
    resume_mode: ResumeMode = "auto"  # auto (resume from the workdir's newest checkpoint) | disable
    resume_from_path: str = ""  # start from another run's state: WORKDIR, or WORKDIR/checkpoints/STEP
    stop_patience_s: NotNegative[float] = 15.0  # seconds that a running update may take to finish after a signal
    stopped_exit_code: ExitCode = 0  # exit code after SIGTERM or SIGINT; 1 if the scheduler takes 0 for done
    max_nonfinite_steps: Positive[int] = 3  # a run ends after so many steps in a row with a non-finite loss or gradient
    keep_batches: str = ""  # batches to keep in workdir/batches: steps such as 37,40, or alarm; empty = none
    profile_steps: tuple[int, ...] = ()  # training steps that JAX's profiler traces into workdir/profile
    max_try_make_batch: int | None = None  # EasyR1's name for filter_groups.max_num_gen_batches; null = not given
    READS = {
        "algorithm.adv_estimator takes values": "critic_warmup",
        "MEASURED": "test_freq",
        "BEST": "keep_best_ckpt best_metric_mode",
        "rollout_ahead=1": "rollout_devices",
        "rollout_ahead=0": "stop_patience_s",
        "TRACKED": "project_name experiment_name",
        "ALIAS": "max_try_make_batch",
    }


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. Their product is the number of devices."""

    data: Axis = -1  # copies of the parameters; -1 = what the other axes leave
    fsdp: Positive[int] = 1  # shards of parameters and optimizer state, and of rows
    expert: Positive[int] = 1  # shards of experts, and of rows and other parameters as fsdp; devices exchange tokens
    tensor: Positive[int] = 1  # shards of heads, feed-forward, experts and vocabulary
    context: Positive[int] = 1  # in training, devices that share the tokens of a sequence; fsdp takes the rest
    train_tensor: NotNegative[int] = 0  # tensor in training, where fsdp takes the rest; 0 = the least that fits


@dataclass(frozen=True)
class AlarmConfig:
    """When a step looks suspicious: a warning and a metric alarm/*. An alarm never stops a run."""

    entropy_collapse: Share = 0.1  # alarm if entropy is below this multiple of the first step's
    entropy_explosion: AboveOne = 3.0  # if entropy is above this multiple of the first step's
    kl_jump: AboveOne = 10.0  # if a KL divergence is above this multiple of its running mean
    mismatch_growth: AboveOne = 10.0  # if sampler and training pass differ (k3) by more than this multiple of its mean
    truncation: Share = 0.5  # if more than this share of trained responses ends at max_response_length
    reward_errors: Share = 0.1  # if the verification of more than this share of samples fails
    score_by_length: Share = 0.8  # if |correlation| of score and length among equally right answers is above this
    slow_process: AboveOne = 3.0  # if a process takes this multiple of the median one's seconds for its own work
    heldout_drop: Share = 0.5  # if held-out accuracy is below this multiple of the best so far


@dataclass(frozen=True)
class MonitorConfig:
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    console: str = "steps"  # steps (a line each) | detailed (with train.log) | quiet (final table) | json
    filter_log: bool = False  # also print train.log's lines of dynamic sampling, which scripts parse, to stderr
    num_samples: NotNegative[int] = 8  # responses to keep as text: trained ones per step, held-out ones per evaluation
    watchdog_minutes: NotNegative[float] = 30.0  # a step of 10 medians and this long logs its stacks; 0 = off
    watchdog_ends: bool = False  # such a step also ends its process, with exit code 1
    detailed_stats: bool = False  # evaluations also log /mean, /max, /min and /std over problems of each metric
    READS = {
        "algorithm.filter_groups.enable": "filter_log",
        "watchdog_minutes": "watchdog_ends",
        "CONSOLE": "console",
        "MEASURED": "alarms.heldout_drop detailed_stats",
    }


@dataclass(frozen=True)
class EvaluateConfig:
    n: Positive[int] = 4  # samples per problem: k of mean@k
    temperature: Temperature = 1.0  # 0 = greedy
    top_p: TopP = 1.0  # 1 = off
    top_k: TopK = -1  # -1 = off
    max_prompts: Annotated[int, above_zero_or_off("all problems")] = -1  # evaluate the first of them; -1 = all
    batch_size: Annotated[int, zero_or_more("all problems at a time")] = 0  # problems sampled at a time; 0 = all
    tasks: str = "{}"  # more task sets: dict or JSON object, name -> options (docs/evaluation.md)
    bootstrap: bool = False  # best@k, worst@k and maj@k by draws with replacement, as verl, not in closed form
    READS = {"MEASURED": "n temperature top_p top_k max_prompts batch_size bootstrap", "SAMPLED": "top_p top_k"}


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    seed: NotNegative[int] = 0  # of all random draws: weights, prompt order, sampling
    workdir: str = "runs/dapo"  # directory or gs:// address that the run writes to
    READS = {"algorithm.adv_estimator takes values": "critic"}
