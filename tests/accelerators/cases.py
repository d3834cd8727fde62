"""The table of what must compile for every accelerator: a line each, by the options that change a program."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerators.programs as of
from accelerators.kernels import windows_and_caps
from accelerators.programs import Parts, Program, step

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze
from dapo_jax.models import families

H100, V5E = "h100:8", "v5e:2x4"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 128}
WINDOW = {"sliding_window": 32}  # shorter than prompt and response
GEMMA = {**WINDOW, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DELTA = {
    **{"num_hidden_layers": 5, "full_attention_interval": 2, "head_dim": 256},
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
SIZES = {  # of a family, where they are not Llama's
    "qwen3": {"head_dim": 128},
    "qwen3_moe": EXPERTS,
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "gpt_oss": {**WINDOW, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_scaling": YARN | {"truncate": False}},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 128},
    "smollm3": {"num_hidden_layers": 4},
    "olmo3": {**WINDOW, "num_hidden_layers": 4, "rope_scaling": YARN},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "num_hidden_layers": 5, "sliding_window_pattern": 2},  # a layer after the last repetition
}
FAMILIES: Mapping[str, dict[str, Any]] = {  # config.json of each
    **{
        name: {
            **LLAMA,
            "architectures": [f"{family.hf_name}ForCausalLM"],
            "sliding_window": None,
            **SIZES.get(name, {}),
        }
        for name, family in families.FAMILIES.items()
    },
    "llama3": {**LLAMA, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {**LLAMA, **WINDOW, "architectures": ["MistralForCausalLM"]},
    "qwen3_moe, dense and experts": {
        **{**LLAMA, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]},
        **{"num_hidden_layers": 4, "decoder_sparse_step": 2},
    },
}
PUBLISHED = {  # of the sizes of the accelerator report
    f"qwen2.5-{size}": {
        **LLAMA,
        **{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "tie_word_embeddings": True},
        **dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), sizes, strict=True)),
        **{"num_attention_heads": sizes[0] // sizes[3], "num_key_value_heads": 2},
    }
    for size, sizes in {"0.5b": (896, 4864, 24, 64), "1.5b": (1536, 8960, 28, 128)}.items()
}


def small() -> Any:
    """A config whose programs have every part and compile in seconds, on a mesh with every axis."""
    config = default_config()
    config.update_from_flattened_dict(
        {
            "model.path": "random",
            "model.random.hidden_size": 128,
            "model.random.intermediate_size": 256,
            "model.random.head_dim": 64,
            "data.task": "arithmetic",
            "data.train_batch_size": 16,
            "data.max_prompt_length": 16,
            "data.max_response_length": 128,
            "rollout.n": 4,
            "rollout.max_num_seqs": 64,
            "actor.ppo_mini_batch_size": 16,
            "actor.ppo_micro_batch_size_per_device": 2,
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "mesh.train_tensor": 2,
            "workdir": "unused",
        }
    )
    return config


@dataclass(frozen=True)
class Case:
    """What a user may set, and the programs that it changes.

    The short form of the tests compiles those of `both` for all its platforms, and each other case for one of them, but
    none of `combined`.
    """

    name: str
    programs: Callable[[Parts], Iterator[Program]]
    changes: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""  # of FAMILIES or PUBLISHED; empty: the random model
    platforms: tuple[str, ...] = (H100, V5E)
    devices: tuple[int, int] = (0, 8)  # those of the mesh, from and to
    both: bool = False
    combined: bool = False  # of options that other cases have one by one: for the long form alone


def config_of(case: Case, directory: Path) -> Config:
    """The small config with the changes of a case; what they switch off has its default.

    Args:
        directory: where the model's config.json is written if the case names a family.
    """
    values = small()
    if case.family:
        (directory / "config.json").write_text(json.dumps({**FAMILIES, **PUBLISHED}[case.family]))
        values.model.path = str(directory)
    values.update_from_flattened_dict(case.changes)
    return without_switched_off(freeze(small()), freeze(values), case.changes)


LOSS, ESTIMATOR, RESPONSE = "actor.policy_loss.loss_mode", "algorithm.adv_estimator", "data.max_response_length"
ATTENTION, REMAT = "model.attention", "model.remat_policy"
OPTIMIZER_NAME, MOMENTS, OFFLOAD = (f"actor.optim.{name}" for name in ("optimizer", "moments_dtype", "offload"))
DECODE = r"decode \d+ slots a shard"
UPDATE, OPTIMIZER, CRITIC = step("actor, gradients"), step("actor, optimizer"), step("values", "critic")
GAE = {ESTIMATOR: "gae"}
KL = {"actor.use_kl_loss": True}
REWARDS = {"gdpo": {"algorithm.gdpo_reward_keys": ("acc", "score"), "algorithm.gdpo_reward_weights": (1.0, 0.5)}}
TEACHER = {"algorithm.distillation.path": "random"}
XLA, FLOAT32 = {ATTENTION: "xla"}, {"model.dtype": "float32"}
BUDGET = {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_device": 512}
HALF = {"mesh.data": 1}  # of the mesh
ALONE = {"mesh.tensor": 1, "mesh.train_tensor": 1}
ALONE_ON_8 = {**ALONE, "mesh.fsdp": 4}
LORA = {"model.lora.rank": 4}
ATTENTION_LORA = {**LORA, "model.lora.target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
WINDOWED = ("gemma2", "gemma3_text", "qwen3_moe")

CASES = [
    Case("a step with the defaults", step(), both=True),
    Case("start of training", of.start_of_training, both=True),
    # models
    *(Case(f"model {name}", step("prefill", DECODE, "actor, gradients"), family=name) for name in FAMILIES),
    Case("float32", step("prefill", DECODE, "actor, gradients", "log-probabilities"), FLOAT32),
    Case("bfloat16 by name", UPDATE, {"model.dtype": "bfloat16"}),
    # sampling: temperature, greedy, top-p, top-k are values; stop strings, and moving weights ahead, are the host's
    Case("engine", of.engine, platforms=(H100, V5E, "v5p:2x2x2", "v6e:2x4", "a100:8"), both=True),
    Case("engine, heads of 128", of.engine, family="qwen3"),
    *(
        Case(f"engine, {name}", of.engine, family=name)
        for name in ("gemma2", "gemma3_text", "qwen3_moe", "mistral with a window")
    ),
    Case("engine, heads that no kernel takes", of.gathered, {**XLA, "model.random.head_dim": 96}, both=True),
    Case("engine, chunks that no kernel takes, float32", of.gathered, {**FLOAT32, "rollout.decode_chunk_length": 127}),
    Case("responses that return", of.returning, both=True),
    Case("responses that return, Gemma 3", of.returning, family="gemma3_text"),
    Case("responses that return, Qwen3.5", of.returning, family="qwen3_5_text"),
    Case("responses continued", of.continued),
    Case("responses continued, Gemma 3", of.continued, family="gemma3_text"),
    Case("experts without tensor", step("prefill", DECODE, "actor"), ALONE_ON_8, family="qwen3_moe"),
    Case("engine, float32, without tensor", of.engine, {**FLOAT32, **ALONE, "mesh.fsdp": 4}),
    Case("one long chunk", step("decode"), {"rollout.decode_chunk_length": 128}),
    Case("one sample of a prompt", step("prefill"), {"rollout.n": 1}),
    Case("sampling on half of the devices", step("decoding", "prefill", "decode"), HALF, devices=(4, 8)),
    Case("training on the other half", step("decoding", "actor, gradients"), HALF, devices=(0, 4)),
    Case("decoding without tensor", step("prefill", DECODE), {**ALONE, "mesh.fsdp": 4}),
    # meshes and layers
    Case("update over fsdp alone", UPDATE, {**ALONE, "mesh.data": 1, "mesh.fsdp": 8}),
    Case("update of copies", UPDATE, {**ALONE, "mesh.data": 8, "mesh.fsdp": 1}),
    Case("training without tensor", step(), {"mesh.train_tensor": 1}),
    Case("training with more tensor", step("decoding", "actor"), {**ALONE, "mesh.fsdp": 4, "mesh.train_tensor": 2}),
    Case(
        "tokens of a sequence divided",
        step("decoding", "actor", "log-prob"),
        {**ALONE, "mesh.data": 1, "mesh.fsdp": 8, "mesh.context": 2},
        family="qwen3",
    ),
    Case("LoRA without tensor in training", step("decoding", "actor"), {**LORA, "mesh.train_tensor": 1}),
    Case("three layers", UPDATE, {"model.random.num_layers": 3}),
    Case("logits in several chunks", UPDATE, {"actor.logprob_chunk_size": 64}),
    # losses
    Case("losses", of.losses, both=True),
    Case(
        "a loss of sequences with their mask, the entropy and a KL divergence",
        UPDATE,
        {LOSS: "gspo", "actor.off_policy_mask_threshold": 0.1, "actor.entropy_coeff": 0.01, **KL},
    ),
    *(Case(f"tokens drawn by {name}", of.drawn_tokens, {LOSS: name}) for name in SELECTIONS),
    Case("reference", step("reference"), KL),
    Case("teacher", step("teacher's scores"), TEACHER),
    Case(
        "teacher's most likely tokens",
        step("most likely tokens", "teacher's scores", "actor, gradients"),
        {**TEACHER, "algorithm.distillation.form": "top_k"},
    ),
    Case(
        "importance weights",
        UPDATE,
        {"actor.old_logprob": "recompute", "algorithm.rollout_correction.rollout_is": "token"},
    ),
    Case("functions of a batch", of.batch_functions, both=True),
    Case("rewards and filter", of.rewards_and_filter, both=True),
    # estimators
    *(Case(f"estimator {name}", of.estimator, {ESTIMATOR: name, **REWARDS.get(name, {})}) for name in ESTIMATORS),
    *(
        Case(f"estimator cpo, {name}", of.estimator, {ESTIMATOR: "cpo", "algorithm.cpo.wrap_method": name})
        for name in CPO_METHODS
    ),
    Case("critic", CRITIC, GAE),
    Case("critic with XLA's attention, in float32", CRITIC, {**GAE, **XLA, **FLOAT32}),
    Case(
        "critic with Clip-Cov and KL",
        step("actor, gradients", "critic, gradients"),
        {**GAE, **KL, LOSS: "clip_cov"},
        combined=True,
    ),
    Case(
        "critic with a token budget and bfloat16 moments",
        CRITIC,
        {**GAE, **BUDGET, "critic.optim.moments_dtype": "bfloat16", REMAT: "attention"},
        combined=True,
    ),
    # attention and what is kept for the backward pass
    *(Case(f"remat {name}, fused", UPDATE, {REMAT: name}) for name in ("attention", "dots")),
    *(Case(f"remat {name}, XLA's attention", UPDATE, {**XLA, REMAT: name}) for name in ("full", "attention", "dots")),
    Case("everything kept", UPDATE, {"model.enable_gradient_checkpointing": False}),
    Case("remat offload", UPDATE, {REMAT: "offload"}, platforms=(V5E,)),  # JAX knows no host of GPUs
    *(  # the longest responses decide which of the two is the default
        Case(
            f"{name} by name{more}",
            step("actor, gradients", "log-prob"),
            {ATTENTION: name, **changes},
            platforms=(H100,),
        )
        for name in ("cudnn", "triton")
        for more, changes in {"": {}, ", LoRA": LORA, ", remat dots": {REMAT: "dots"}}.items()
    ),
    Case("critic, cuDNN by name", CRITIC, {**GAE, ATTENTION: "cudnn"}, platforms=(H100,)),
    Case("splash in float32", UPDATE, {**FLOAT32, ATTENTION: "splash"}, platforms=(V5E,)),
    Case("windows and soft caps", windows_and_caps, platforms=(H100, V5E, "v6e:2x4", "a100:8")),
    Case("odd lengths", UPDATE, {RESPONSE: 101}),
    Case("a response in several kernel blocks", UPDATE, {RESPONSE: 700}),
    # the batch
    Case("prompts shared, Qwen3", UPDATE, XLA, family="qwen3"),
    Case("prompts not shared", UPDATE, {**XLA, "actor.share_prompts": False}),
    Case("token budget", UPDATE, BUDGET),
    Case("token budget, XLA's attention", UPDATE, {**BUDGET, **XLA}),
    # the optimizer
    Case("moments in bfloat16", OPTIMIZER, {MOMENTS: "bfloat16"}),
    Case("Muon", OPTIMIZER, {OPTIMIZER_NAME: "muon"}),
    Case(
        "Muon, Qwen3-MoE, bfloat16",
        OPTIMIZER,
        {OPTIMIZER_NAME: "muon", MOMENTS: "bfloat16"},
        family="qwen3_moe",
        combined=True,
    ),
    Case("moments offloaded", OPTIMIZER, {OFFLOAD: True}, platforms=(V5E,)),  # JAX knows no host of GPUs
    Case("offloaded in bfloat16", OPTIMIZER, {OFFLOAD: True, MOMENTS: "bfloat16"}, platforms=(V5E,)),
    # adapters, other models, the end
    Case("LoRA", step("decoding", "actor", "log-prob"), LORA, both=True),
    Case(
        "LoRA in float32 with a KL loss",
        step("decoding", "actor, gradients", "reference"),
        {**LORA, **KL, **FLOAT32},
        combined=True,
    ),
    Case("LoRA and remat attention", UPDATE, {**LORA, REMAT: "attention"}),
    Case(
        "LoRA of attention alone, Qwen2",
        step("decoding", "actor, gradients"),
        {**LORA, "model.lora.target_modules": ("q_proj", "v_proj")},
        family="qwen2",
    ),
    Case("LoRA, Gemma 3", step("decoding", "actor", "log-prob"), LORA, family="gemma3_text"),
    Case("LoRA of attention, Qwen3-MoE", step("decoding", "actor"), ATTENTION_LORA, family="qwen3_moe", combined=True),
    *(
        Case(f"critic and KL, {name}", step("critic", "reference"), {**GAE, **KL}, family=name, combined=True)
        for name in WINDOWED
    ),
    *(
        Case(f"XLA's attention, float32, {name}", UPDATE, {**XLA, **FLOAT32}, family=name, combined=True)
        for name in WINDOWED
    ),
    Case("remat attention, Gemma 2", UPDATE, {REMAT: "attention"}, family="gemma2"),
    Case("remat dots, Qwen3-MoE", UPDATE, {REMAT: "dots"}, family="qwen3_moe", combined=True),
    Case("token budget, Gemma 3", UPDATE, BUDGET, family="gemma3_text"),
    Case("start of training, Qwen3-MoE", of.start_of_training, family="qwen3_moe"),
    Case("cuDNN with windows", UPDATE, {ATTENTION: "cudnn"}, family="mistral with a window", platforms=(H100,)),
    Case("reward model", of.reward_model),
    Case("reward model in float32, Qwen2", of.reward_model, FLOAT32, family="qwen2"),
    Case("export", of.gathers),
    Case("checksums, moments in bfloat16", of.checksums, {MOMENTS: "bfloat16"}, both=True),
    Case("checksums, moments offloaded", of.checksums, {OFFLOAD: True}, platforms=(V5E,)),
]
