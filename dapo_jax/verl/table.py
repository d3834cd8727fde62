"""Host: the table from verl's options to ours, which options.py looks up.

An entry names verl's options and ours. `{a,b}` means either, in the same order on both sides, and `*` any part of a
key. Options that neither verl 0.7 nor 0.9 has come from its DAPO recipe and, in EASYR1, from EasyR1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dapo_jax.verl.values import (
    Values,
    advantage_estimator,
    at_most_off,
    both_clip_ratios,
    bypass,
    chat_template,
    correction,
    critic_warm_up,
    distillation_form,
    filter_metric,
    fsdp_size,
    greedy,
    lora_modules,
    lower_clip,
    only_positive,
    overlong_switch,
    policy_loss,
    resume_mode,
    reward_manager,
    reward_model_path,
    reward_model_switch,
    reward_name,
    router_replay,
    sampled,
    set_by_hand,
    teacher,
    teacher_weight,
    thresholds,
    token_budget,
    tool_format,
    trackers,
    unless_by_sequence,
    unless_greedy,
    warm_up_share,
    with_correction,
)

Convert = Callable[[Any, Values], dict[str, Any]]
OPTIMIZERS = "actor.optim.optimizer is adamw or muon"


@dataclass(frozen=True)
class Entry:
    """Options of verl with their equivalent here."""

    verl: str  # their keys, see above
    ours: str = ""  # our keys, as many as verl's or fewer; empty = no equivalent
    note: str = ""  # what differs, or why there is no equivalent
    convert: Convert | None = None  # from a value and all given options to our values; None = unchanged
    same: tuple[Any, ...] = ()  # without equivalent: values that ask for what happens anyway; "${KEY}" is that of KEY
    by_hand: bool = False  # verl's value says nothing about the value to use here
    lost: bool = False  # there is no equivalent, and a run without it differs


def _same(key: str, note: str = "", convert: Convert | None = None) -> Entry:
    return Entry(key, key, note, convert)


def _actor(key: str, note: str = "", convert: Convert | None = None) -> Entry:
    return Entry(f"{ACTOR}.{key}", f"actor.{key}", note, convert)


def _by_hand(verl: str, ours: str, note: str) -> Entry:
    return Entry(verl, ours, note, set_by_hand, by_hand=True)


def _missing(verl: str, note: str, *same: Any) -> Entry:
    return Entry(verl, note=note, same=same, lost=True)


ARR, ACTOR, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BOTH, MODELS = f"{{{ACTOR},critic}}", f"{{{ARR},critic}}.model"
CORRECTION = "algorithm.rollout_correction"
MEGATRON = f"{BOTH}.megatron.override_transformer_config"
OPTIMIZER = "lr,weight_decay,betas,min_lr_ratio,lr_scheduler_type"
TEACHER, DISTILLED = "algorithm.distillation", "distillation.distillation_loss"
BUFFERS = "{reward_model.overlong_buffer,reward_model.reward_kwargs.overlong_buffer_cfg,"
BUFFERS += "reward.reward_kwargs.overlong_buffer_cfg}"
NO_ENGINE = "the sampler is compiled with the trainer: no server to choose or set up"
NO_TORCH = "XLA compiles and partitions the programs"
TEXT_ONLY = "models read text only"
DENSE = "models are not quantized"
DROPOUT = "models have no dropout"
FLOAT32 = "parameters are float32; actor.optim.moments_dtype=bfloat16 halves the optimizer's memory"
LONGEST = "data.max_response_length is the limit"
REPLAY = "R3 is the default; the critic and the reference choose for themselves"
SINGLE_TURN = "turns and tools are Python classes and functions: environment.path, environment.tools"
ADAPTERS = "adapters start at zero and have only a rank, an alpha and target modules"
MANAGER = "reward.function is the function itself"
SANDBOX = "{sandbox_fusion,reward.sandbox_fusion,reward_model.sandbox_fusion}"
PACKED = "micro-batches are packed by length"
KEPT = "monitor.num_samples responses per step and per evaluation are kept"

HERE = (
    _same("data.{train_files,val_files}", "parquet, JSONL or CSV, the same columns"),
    _same("data.{prompt_key,train_batch_size,truncation}"),
    _same("data.gen_batch_size", "null: the training batch size"),
    _same("data.{max_prompt_length,max_response_length}", "in tokens"),
    _same("data.{filter_overlong_prompts,shuffle}"),
    Entry("data.seed", "seed", "for every random draw"),
    Entry(
        "data.val_batch_size",
        "evaluate.batch_size",
        "0: all problems of a task set",
        only_positive("evaluate.batch_size"),
    ),
    Entry("data.val_max_samples", "evaluate.max_prompts", "only the first ones", only_positive("evaluate.max_prompts")),
    Entry("data.apply_chat_template_kwargs", "data.chat_template_kwargs", "a JSON object", chat_template),
    Entry("data.apply_chat_template_kwargs.*", "data.chat_template_kwargs", "a JSON object", chat_template),
    Entry(f"{ARR}.model.path", "model.path", "a directory or a name on the hub"),
    Entry(f"{ARR}.model.{{lora_rank,lora.rank}}", "model.lora.rank"),
    Entry(f"{ARR}.model.{{lora_alpha,lora.alpha}}", "model.lora.alpha"),
    Entry(f"{ACTOR}.router_replay.mode", "model.router_replay", "R3 or disabled; R2 differs", router_replay),
    Entry(
        f"{ARR}.model.{{target_modules,lora.target_modules}}",
        "model.lora.target_modules",
        "all-linear is the default; Megatron's names become Hugging Face's",
        lora_modules,
    ),
    Entry(
        f"{ARR}.model.enable_gradient_checkpointing",
        "model.enable_gradient_checkpointing",
        "model.remat_policy sets what is recomputed",
    ),
    Entry(f"{ROLLOUT}.{{n,temperature,top_p}}", "rollout.{n,temperature,top_p}"),
    Entry(
        f"{ROLLOUT}.do_sample",
        "rollout.temperature",
        "which is above 0; only verl's HF sampler reads do_sample",
        sampled,
    ),
    Entry(
        f"{ROLLOUT}.top_k",
        "rollout.top_k",
        "-1 is off, and so is 0, as in verl's HF sampler",
        only_positive("rollout.top_k"),
    ),
    Entry(f"{ROLLOUT}.val_kwargs.{{n,top_p}}", "evaluate.{n,top_p}", "4 samples unless set"),
    Entry(f"{ROLLOUT}.val_kwargs.temperature", "evaluate.temperature", "1 unless set", unless_greedy),
    Entry(f"{ROLLOUT}.val_kwargs.do_sample", "evaluate.temperature", "0 is greedy", greedy),
    Entry(f"{ROLLOUT}.val_kwargs.top_k", "evaluate.top_k", "-1 is off", only_positive("evaluate.top_k")),
    _by_hand(
        f"{ROLLOUT}.gpu_memory_utilization",
        "rollout.kv_memory_share",
        "the share of free memory for the KV cache alone: verl's number means something else",
    ),
    _by_hand(
        f"{ROLLOUT}.max_num_seqs",
        "rollout.max_num_seqs",
        "over all devices, in verl per engine; 0 = as many as fit in memory",
    ),
    Entry(f"{ROLLOUT}.tensor_model_parallel_size", "mesh.tensor", "of sampling; mesh.train_tensor is that of training"),
    _actor("ppo_mini_batch_size", "prompts over all devices, as in verl"),
    Entry(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size_per_device", "responses"),
    _by_hand(
        f"{ACTOR}.ppo_micro_batch_size",
        "actor.ppo_micro_batch_size_per_device",
        "responses per device, in verl over all devices",
    ),
    _actor("use_dynamic_bsz", "on unless set"),
    Entry(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "actor.ppo_max_token_len_per_device",
        "at least the longest prompt and response",
        token_budget,
    ),
    Entry(f"{ACTOR}.use_prefix_grouper", "actor.share_prompts", "on unless set"),
    _actor("{ppo_epochs,grad_clip,entropy_coeff,loss_scale_factor}"),
    Entry(f"{ACTOR}.optim.clip_grad", "actor.grad_clip"),
    Entry(
        f"{ACTOR}.clip_ratio",
        "actor.clip_ratio_low actor.clip_ratio_high",
        "set both; verl reads it only if clip_ratio_low and clip_ratio_high are null (default 0.2)",
        both_clip_ratios,
    ),
    _actor("clip_ratio_low", "0.2 here; more than 1 is 1, which never clips either", lower_clip),
    _actor("clip_ratio_high", "0.28 here"),
    _actor("clip_ratio_c", "10, as in the DAPO scripts; verl's default is 3"),
    Entry(f"{ACTOR}.{{tau_pos,tau_neg}}", "actor.policy_loss.{tau_pos,tau_neg}"),
    Entry(
        f"{ACTOR}.policy_loss.{{tau_pos,tau_neg}}",
        "actor.policy_loss.{tau_pos,tau_neg}",
        "meant; verl itself reads only tau_pos and tau_neg of the actor (1 and 1.05 unless set)",
        by_hand=True,
    ),
    _actor(
        "policy_loss.loss_mode",
        "verl always aggregates gspo, sapo and geo_mean by seq-mean-token-mean: set actor.loss_agg_mode too",
        policy_loss,
    ),
    _actor("policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef,dro_beta}"),
    _actor("loss_agg_mode", "exact over the mini-batch, for any micro-batch size", unless_by_sequence),
    _actor("{use_kl_loss,kl_loss_coef,kl_loss_type}"),
    _actor(f"optim.{{{OPTIMIZER}}}"),
    Entry(f"{BOTH}.optim.override_optimizer_config.{{eps,weight_decay}}", "{actor,critic}.optim.{eps,weight_decay}"),
    Entry(f"{ACTOR}.optim.{{warmup_style,lr_decay_style}}", "actor.optim.lr_scheduler_type"),
    _actor("optim.lr_warmup_steps", "20 unless set", only_positive("actor.optim.lr_warmup_steps")),
    Entry(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        "actor.optim.lr_warmup_steps",
        "a number of training steps: ratio x trainer.total_training_steps, unless lr_warmup_steps is positive (in "
        "verl 0.7 with FSDP also if it is 0)",
        warm_up_share("actor"),
    ),
    Entry(f"{ACTOR}.{{fsdp_config,megatron,veomni}}.optimizer_offload", "actor.optim.offload"),
    Entry(
        f"{ACTOR}.fsdp_config.fsdp_size",
        "mesh.fsdp",
        "mesh.train_tensor divides the weights too; -1 in verl = all devices",
        fsdp_size,
    ),
    Entry(f"{ARR}.ref.{{model.path,model}}", "reference.path", "loaded only if a KL divergence needs it"),
    _same("critic.model.path", "must have the policy's architecture; empty = the policy's weights"),
    _same("critic.ppo_mini_batch_size"),
    _same("critic.{ppo_epochs,loss_agg_mode}", "verl's default is the actor's"),
    Entry("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_device", "responses"),
    _same("critic.{cliprange_value,grad_clip}"),
    Entry("critic.optim.clip_grad", "critic.grad_clip"),
    _same(f"critic.optim.{{{OPTIMIZER}}}"),
    Entry("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    _same("critic.optim.lr_warmup_steps", "", only_positive("critic.optim.lr_warmup_steps")),
    Entry(
        "critic.optim.lr_warmup_steps_ratio",
        "critic.optim.lr_warmup_steps",
        "a number of training steps",
        warm_up_share("critic"),
    ),
    Entry("critic.{fsdp,model.fsdp_config,megatron,veomni}.optimizer_offload", "critic.optim.offload"),
    _same("algorithm.adv_estimator", "grpo unless set", advantage_estimator),
    _same("algorithm.{gamma,lam,norm_adv_by_std_in_grpo,use_kl_in_reward,kl_penalty}"),
    _same("algorithm.kl_ctrl.{type,kl_coef,horizon,target_kl}"),
    _same("algorithm.filter_groups.enable", "on unless set"),
    _same("algorithm.filter_groups.metric", "acc unless set", filter_metric),
    _same("algorithm.filter_groups.max_num_gen_batches", "10 unless set; 0 = no limit"),
    _same(
        f"{CORRECTION}.rollout_is",
        "with actor.old_logprob=recompute; null = none",
        with_correction(f"{CORRECTION}.rollout_is"),
    ),
    *(
        _same(f"{CORRECTION}.{name}", "read with rollout_is", correction(f"{CORRECTION}.{name}"))
        for name in ("rollout_is_threshold", "rollout_is_batch_normalize")
    ),
    _same(
        f"{CORRECTION}.rollout_rs",
        "a tuple; with actor.old_logprob=recompute",
        with_correction(f"{CORRECTION}.rollout_rs"),
    ),
    _same(f"{CORRECTION}.rollout_rs_threshold", "a tuple, one per criterion", thresholds),
    Entry(f"{CORRECTION}.bypass_mode", "actor.old_logprob", "rollout is bypass, recompute is not", bypass),
    Entry(
        "{custom_reward_function,reward.custom_reward_function}.path",
        "custom_reward_function.path",
        "works unchanged; short for reward.function=PATH:NAME",
    ),
    Entry(
        "{custom_reward_function,reward.custom_reward_function}.name",
        "custom_reward_function.name",
        "compute_score unless set",
        reward_name,
    ),
    Entry(
        "{reward_model.reward_manager,reward_manager.name,reward.reward_manager.name}",
        "reward.function",
        "auto chooses the verifier by data_source; reward.overlong_buffer is the penalty of the dapo manager",
        reward_manager,
    ),
    Entry(f"{BUFFERS}.enable", "reward.overlong_buffer.enable", "", overlong_switch),
    Entry(f"{BUFFERS}.len", "reward.overlong_buffer.len"),
    Entry(f"{BUFFERS}.penalty_factor", "reward.overlong_buffer.penalty_factor"),
    Entry(f"{BUFFERS}.log", "reward.overlong_buffer.log", "on unless set; rollout/overlong_reward is always logged"),
    Entry("{reward_model,reward}.num_workers", "reward.num_workers", "processes that run the verifier"),
    Entry(
        "{reward_model.enable,reward.reward_model.enable}",
        "reward.model.path",
        "on if it has a path; with reward.function=none it is the only reward",
        reward_model_switch,
    ),
    Entry(
        "{reward_model.model.path,reward.reward_model.model_path}",
        "reward.model.path",
        "with a reward function too, the scores are added; verl takes one of them",
        reward_model_path,
    ),
    Entry("reward_model.max_length", "reward.model.max_length"),
    Entry("reward_model.micro_batch_size_per_gpu", "reward.model.micro_batch_size_per_device"),
    _same(
        "trainer.{total_epochs,total_training_steps}",
        "the smaller number of steps wins; total_training_steps=-1 leaves it to the epochs",
    ),
    *(
        _same(f"trainer.{name}", "-1 = only at the end", at_most_off(f"trainer.{name}"))
        for name in ("save_freq", "test_freq")
    ),
    _same("trainer.val_before_train"),
    _same("trainer.critic_warmup", "steps without the policy; verl's N has N - 1 of them", critic_warm_up),
    Entry(
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_ckpt_to_keep",
        "trainer.keep_best_ckpt keeps the best ones in addition",
    ),
    Entry("trainer.default_local_dir", "workdir", "logs and checkpoints"),
    _same("trainer.resume_mode", "for resume_path, set only trainer.resume_from_path", resume_mode),
    _by_hand("trainer.resume_from_path", "trainer.resume_from_path", "a run of this trainer"),
    _same("trainer.logger", "console, tensorboard, wandb; metrics.jsonl is always written", trackers),
    _same("trainer.{project_name,experiment_name}", "for wandb"),
    Entry("{trainer.profile_steps,global_profiler.steps}", "trainer.profile_steps"),
    Entry("distillation.teacher_models.*.model_path", f"{TEACHER}.path", "one teacher", teacher),
    Entry(f"{DISTILLED}.loss_mode", f"{TEACHER}.form", "k1 is sampled; others differ", distillation_form),
    Entry(f"{DISTILLED}.{{use_task_rewards,topk}}", f"{TEACHER}.{{use_task_rewards,top_k}}"),
    Entry(f"{DISTILLED}.distillation_loss_coef", f"{TEACHER}.weight", "verl: if use_task_rewards", teacher_weight),
    Entry(
        f"{ROLLOUT}.multi_turn.max_assistant_turns",
        "environment.max_turns",
        "read with environment.path or environment.tools",
        only_positive("environment.max_turns"),
        by_hand=True,
    ),
    Entry(
        f"{ROLLOUT}.multi_turn.format",
        "environment.tool_format",
        "auto, by the chat template, unless set to hermes, llama3 or json",
        tool_format,
        by_hand=True,
    ),
    _by_hand(
        f"{ROLLOUT}.multi_turn.max_tool_response_length",
        "environment.max_observation_length",
        "in tokens, in verl in characters",
    ),
    _by_hand(
        f"{ROLLOUT}.multi_turn.tool_response_truncate_side",
        "environment.observation_truncation",
        "the side that is cut, in verl the one that stays",
    ),
)

NOT_NEEDED = (
    Entry(f"{ROLLOUT}.{{name,mode,load_format,enforce_eager,free_cache_engine,layered_summon}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{cudagraph_capture_sizes,max_num_batched_tokens,max_model_len}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{enable_chunked_prefill,enable_prefix_caching,scheduling_policy}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{disable_log_stats,skip_tokenizer_init,multi_stage_wake_up,logprobs_mode}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{engine_kwargs,checkpoint_engine,prometheus,disaggregation}}.*", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{data_parallel_size,expert_parallel_size,pipeline_model_parallel_size}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{n_gpus_per_node,nnodes,update_weights_bucket_megabytes,moe_*,trace.*}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.{{skip_dump_dir,skip.*,over_sample_rate}}", note=NO_ENGINE),
    Entry(f"{ROLLOUT}.calculate_log_probs", note="always on: every step compares the two log-probabilities"),
    Entry(f"{ROLLOUT}.{{seed,full_determinism}}", note="seed: every draw has its own key and is reproducible"),
    Entry(f"{ROLLOUT}.agent.num_workers", note=NO_ENGINE),
    Entry(f"{ARR}.{{rollout,ref}}.log_prob_*", note="passes without a gradient use the actor's micro-batches"),
    Entry(
        f"{{{ACTOR},{ARR}.ref,critic}}.{{ulysses_sequence_parallel_size,fsdp_config.ulysses_sequence_parallel_size}}",
        note="mesh.context, if one sequence does not fit: mesh.fsdp stores weights, and fused attention no scores",
    ),
    Entry(
        f"{{{ACTOR}.fsdp_config,{ARR}.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config}}.*",
        note="mesh.fsdp divides parameters and optimizer state; actor.optim.offload keeps the moments on the host",
    ),
    Entry(f"{{{ACTOR}.megatron,{ARR}.ref.megatron,critic.megatron,reward_model.megatron}}.*", note="mesh.tensor"),
    Entry(f"{{{ACTOR},{ARR}.ref,critic}}.veomni.*", note="mesh.fsdp"),
    Entry(f"{{{ACTOR},{ARR}.ref,critic,reward_model}}.strategy", note=NO_TORCH),
    Entry(f"{{{ACTOR},{ARR}.ref}}.{{use_torch_compile,entropy_*,pad_to_length}}", note=NO_TORCH),
    Entry(f"{ACTOR}.{{use_fused_kernels,data_loader_seed}}", note=NO_TORCH),
    Entry(f"{ACTOR}.calculate_entropy", note="always on"),
    Entry(f"{{{ACTOR}.use_remove_padding,{ARR}.model.use_remove_padding}}", note=PACKED),
    Entry(f"{{{ACTOR},{ARR}.ref,critic}}.rollout_n", note="rollout.n"),
    Entry(f"{BOTH}.optim.{{total_training_steps,zero_indexed_step}}", note="the trainer's own"),
    Entry(f"{BOTH}.optim.optimizer_impl", note="optax"),
    Entry(f"{ACTOR}.calculate_sum_pi_squared", note="computed if adv_estimator=optimal_token_baseline"),
    Entry(f"{BOTH}.checkpoint.*", note="a checkpoint holds everything that a run needs to resume"),
    Entry(f"{{{ARR}.{{actor,ref,rollout}},critic,reward_model}}.profiler.*", note="trainer.profile_steps"),
    Entry("global_profiler.*", note="trainer.profile_steps"),
    Entry(f"{ARR}.model.{{trust_remote_code,use_shm}}", note="read from model.path"),
    Entry(f"{ARR}.model.{{use_liger,use_fused_kernels,fused_kernel_options.*,tiled_mlp.*}}", note=NO_TORCH),
    Entry(f"{ARR}.model.enable_activation_offload", note="model.remat_policy=offload"),
    Entry(f"{MODELS}.override_config.max_position_embeddings", note="positions beyond it are computed anyway"),
    Entry(f"{ARR}.{{hybrid_engine,nccl_timeout}}", note=NO_TORCH),
    Entry("critic.{enable,use_dynamic_bsz,ppo_max_token_len_per_gpu,forward_*}", note="as for the actor"),
    Entry("critic.{data_loader_seed,ppo_micro_batch_size}", note="as for the actor"),
    Entry("critic.model.*", note="as for the policy's model"),
    Entry(
        "data.{return_*,use_shm,trust_remote_code,dataloader_num_workers,filter_overlong_prompts_workers}",
        note="rows are read once",
    ),
    Entry("data.validation_shuffle", note="every problem is evaluated, in file order"),
    Entry("algorithm.filter_groups.max_inflight_gen_batches", note="rollout.max_num_seqs"),
    Entry("reward_model.{launch_reward_fn_async,use_reward_loop}", note="verifiers run while the batch is sampled"),
    Entry("{reward_model,reward.reward_model}.{enable_resource_pool,n_gpus_per_node,nnodes}", note="one mesh for all"),
    Entry("reward_model.model.{use_*,fsdp_config.*,trust_remote_code}", note=NO_TORCH),
    Entry(
        "reward_model.{use_dynamic_bsz,forward_max_token_len_per_gpu,micro_batch_size}",
        note="reward.model.micro_batch_size_per_device",
    ),
    Entry("reward_model.ulysses_sequence_parallel_size", note="sequences stay whole"),
    Entry("{reward_model,reward.reward_model}.rollout.*", note=NO_ENGINE),
    Entry("trainer.{n_gpus_per_node,nnodes}", note="mesh.data=-1 takes every device that JAX finds"),
    Entry("trainer.balance_batch", note=PACKED),
    Entry("trainer.log_val_generations", note=KEPT),
    Entry("trainer.{rollout_data_dir,validation_data_dir}", note=KEPT),
    Entry(
        "trainer.{default_hdfs_dir,del_local_ckpt_after_load,max_critic_ckpt_to_keep}", note="trainer.checkpoint_dir"
    ),
    Entry(
        "trainer.{device,use_legacy_worker_impl,ray_wait_register_center_timeout,use_v1}",
        note="one trainer, on JAX's devices",
    ),
    Entry("trainer.esi_redundant_time", note="SIGTERM saves a checkpoint to resume from"),
    Entry("trainer.v1.*", note="the asynchronous trainer: see trainer.rollout_ahead, algorithm.filter_groups.leftover"),
    Entry("{transfer_queue,ray_kwargs,skip,hydra}.*", note="no Ray and no hydra"),
    Entry("model_engine", note="one trainer, on JAX's devices"),
    Entry(
        f"{BOTH}.optim.override_optimizer_config.{{*offload*,overlap_*,use_precision_aware_optimizer}}",
        note="actor.optim.offload, actor.optim.moments_dtype",
    ),
    Entry("*_target_", note="hydra's class name"),
    Entry("distillation.enabled", note="algorithm.distillation.path names the teacher"),
    Entry("distillation.{n_gpus_per_node,nnodes,teacher_key}", note="one teacher, on the training mesh"),
    Entry("distillation.teacher_models.*", note="one teacher, on the training mesh"),
)

NOT_HERE = (  # an option that changes a run, followed by options that are read only with it
    _missing(f"{BOTH}.shuffle", "mini-batches follow the order of the batch"),
    _missing("critic.loss_scale_factor", "it is the actor's", f"${{{ACTOR}.loss_scale_factor}}"),
    _missing(f"{MEGATRON}.{{moe_aux_loss_coeff,moe_z_loss_coeff}}", "the router has no loss of its own"),
    _missing(f"{MEGATRON}.{{attention_dropout,hidden_dropout}}", DROPOUT),
    _missing(f"{MODELS}.override_config.{{attention_dropout,embd_pdrop,resid_pdrop}}", DROPOUT),
    _missing(f"{{{ACTOR}.fsdp_config,critic.{{fsdp,model.fsdp_config}}}}.model_dtype", FLOAT32, "fp32", "float32"),
    _missing(f"{{{ACTOR}.{{fsdp_config,megatron}},{ROLLOUT}}}.dtype", "set model.dtype", "bfloat16", "bf16", "auto"),
    _missing(f"{ACTOR}.policy_loss.*", "for a policy loss that does not exist here"),
    _missing(f"{{{ARR}.ref,critic}}.router_replay.mode", REPLAY, "disabled"),
    _missing(f"{{{ACTOR},{ACTOR}.fsdp_config,{ARR}.ref.fsdp_config,critic.fsdp}}.qat.enable", DENSE),
    _missing(f"{ROLLOUT}.{{quantization,qat.enable}}", DENSE),
    Entry(f"{{{ACTOR},{ARR}.ref,critic}}.router_replay.*", note=REPLAY),
    Entry(f"{{{ACTOR},{ARR}.ref,critic}}.qat.*", note=DENSE),
    Entry(f"{ROLLOUT}.enable_rollout_routing_replay", note=REPLAY),
    Entry(f"{ROLLOUT}.{{quantization_config_file,qat*}}", note=DENSE),
    _missing(f"{ROLLOUT}.prompt_length", "data.max_prompt_length is the limit", "${data.max_prompt_length}"),
    _missing(f"{ROLLOUT}.response_length", LONGEST, "${data.max_response_length}"),
    _missing(f"{ROLLOUT}.skip_rollout skip.*.enable", "every step samples its own responses"),
    _missing(f"{ROLLOUT}.limit_images", TEXT_ONLY),
    _missing(f"{ROLLOUT}.ignore_eos", "a response ends with its end-of-sequence token"),
    _missing(f"{ROLLOUT}.multi_turn.enable", SINGLE_TURN),
    Entry(f"{ROLLOUT}.multi_turn.*", note=SINGLE_TURN),
    _missing(f"{ROLLOUT}.agent.*", SINGLE_TURN, "single_turn_agent"),
    _missing(f"{ARR}.model.mtp.{{enable,enable_train}}", "one token is predicted at a time"),
    Entry(f"{{{ARR}.model.mtp.*,{ROLLOUT}.mtp}}", note="one token is predicted at a time"),
    _missing(f"{ARR}.model.{{external_lib,custom_chat_template}}", "change the files of model.path"),
    _missing(f"{ARR}.model.{{hf_config_path,tokenizer_path}}", "read from model.path", f"${{{ARR}.model.path}}"),
    _missing(f"{ARR}.model.{{exclude_modules,lora_adapter_path,lora.{{dropout,adapter_path}}}}", ADAPTERS),
    _missing(f"{ARR}.model.lora.{{exclude_modules,type,lora_B_init_method}}", ADAPTERS, "lora", "zero"),
    Entry(f"{ARR}.model.lora.*", note=ADAPTERS),
    _missing("critic.model.{lora_rank,lora.rank,lora_adapter_path,lora.adapter_path}", "the critic has no adapters"),
    _missing(f"{MODELS}.override_config", "change config.json of model.path"),
    _missing(f"{MODELS}.override_config.*", "change config.json of model.path"),
    _missing(f"{BOTH}.optim.{{optimizer,override_optimizer_config}}", OPTIMIZERS, "AdamW"),
    _missing(f"{BOTH}.optim.override_optimizer_config.*", OPTIMIZERS),
    _missing(f"{BOTH}.optim.num_cycles", "lr_scheduler_type=cosine has half a cycle", 0.5),
    _missing(f"{ACTOR}.freeze_vision_tower", TEXT_ONLY),
    _missing("data.{image_key,video_key,audio_key}", TEXT_ONLY, "images", "videos", "audios"),
    Entry("data.{image_patch_size,mm_processor_kwargs}", note=TEXT_ONLY),
    _missing("data.train_max_samples", "shorten the file to the rows to train on", -1),
    _missing("data.tokenizer", "the tokenizer comes from model.path"),
    _missing("data.reward_fn_key", "the column is data_source", "data_source"),
    _missing("data.{custom_cls,datagen,sampler,continuous_token}.*", "write the rows to a file: docs/data.md", "auto"),
    _missing("data.{tool_config_path,function_tool_path}", SINGLE_TURN),
    _missing("algorithm.use_pf_ppo", "algorithm.keep_pos_ratio and keep_neg_ratio select samples"),
    Entry("algorithm.pf_ppo.*", note="for use_pf_ppo"),
    _missing(f"{CORRECTION}.{{loss_type,use_policy_gradient}}", "actor.policy_loss.loss_mode is the loss", "ppo_clip"),
    _missing(f"{CORRECTION}.rollout_rs_threshold_lower", "write the threshold as low_high, such as 0.5_2.0"),
    _missing(f"{CORRECTION}.rollout_token_veto_threshold", "a criterion of rollout_rs, such as token_k1, drops tokens"),
    _missing(
        "{custom_reward_function,reward.custom_reward_function}.reward_kwargs.*",
        "pass them in a function of your own that calls this one",
    ),
    _missing("{reward,reward_model}.reward_kwargs.max_resp_len", LONGEST, "${data.max_response_length}"),
    _missing("{reward,reward_model}.reward_kwargs.*", "set them in a reward function of your own"),
    _missing(f"{SANDBOX}.url", "call the sandbox in a reward function of your own"),
    Entry(f"{SANDBOX}.*", note="for the sandbox"),
    _missing("reward_model.model.{input_tokenizer,external_lib,override_config}", "it has its own tokenizer"),
    _missing("reward_model.{reward_loop_source,reward_loop_module_path,reward_loop_class_name}", MANAGER, "register"),
    _missing("{reward_manager,reward.reward_manager}.{source,module.path}", MANAGER, "register"),
    Entry("{reward_manager,reward.reward_manager}.module.*", note=MANAGER),
    _missing(f"{DISTILLED}.loss_max_clamp", "the divergence from the teacher is not clamped"),
    _missing(f"{DISTILLED}.clip_ratio_low", "actor.clip_ratio_low holds", f"${{{ACTOR}.clip_ratio_low}}"),
    _missing(f"{DISTILLED}.clip_ratio_high", "actor.clip_ratio_high holds", f"${{{ACTOR}.clip_ratio_high}}"),
    Entry(f"{DISTILLED}.{{clip_ratio,policy_loss_mode}}", note="vanilla, with a low and a high ratio, as in verl"),
    Entry(f"{DISTILLED}.use_policy_gradient", note="algorithm.distillation.form decides"),
    Entry(f"{DISTILLED}.log_prob_min_clamp", note="only a loss_mode of top k reads it in verl"),
    _missing("trainer.val_only", "use python -m dapo_jax.evaluate"),
    _missing("async_training.*", "trainer.rollout_ahead=1 samples while training"),
    _missing(
        "rollout.{nnodes,n_gpus_per_node,total_rollout_steps}", "trainer.rollout_devices sample while the others train"
    ),
    _missing("trainer.v1.trainer_mode", "trainer.rollout_ahead=1 samples while training", "sync"),
)


EASYR1 = (
    Entry("data.{rollout_batch_size,mini_rollout_batch_size}", "data.{train_batch_size,gen_batch_size}", "prompts"),
    Entry("worker.actor.global_batch_size", "actor.ppo_mini_batch_size", "prompts"),
    Entry("worker.actor.micro_batch_size_per_device_for_update", "actor.ppo_micro_batch_size_per_device", "responses"),
    Entry(
        "worker.actor.micro_batch_size_per_device_for_experience",
        note="passes without a gradient use the actor's micro-batches",
    ),
    Entry("worker.actor.{max_grad_norm,dynamic_batching}", "actor.{grad_clip,use_dynamic_bsz}"),
    Entry("worker.actor.model.model_path", "model.path", "a directory or a name on the hub"),
    Entry("worker.actor.model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"),
    Entry("worker.actor.model.lora.{rank,alpha}", "model.lora.{rank,alpha}"),
    _by_hand("worker.actor.optim.lr_warmup_ratio", "actor.optim.lr_warmup_steps", "a number of training steps"),
    Entry("worker.actor.offload.offload_optimizer", "actor.optim.offload"),
    Entry("worker.rollout.val_override_config.{n,temperature,top_p}", "evaluate.{n,temperature,top_p}"),
    Entry("worker.rollout.tensor_parallel_size", "mesh.tensor"),
    _by_hand("worker.rollout.gpu_memory_utilization", "rollout.kv_memory_share", "the share of free memory"),
    Entry("worker.reward.reward_function", "reward.function", "with another signature: see docs/rewards.md"),
    Entry("worker.{actor.fsdp,actor.offload,ref.fsdp,ref.offload}.*", note="mesh.fsdp divides parameters"),
    _by_hand("algorithm.disable_kl", "actor.use_kl_loss", "off unless set"),
    Entry("algorithm.use_kl_loss", "actor.use_kl_loss"),
    _by_hand("algorithm.kl_coef", "actor.kl_loss_coef", "with use_kl_in_reward: algorithm.kl_ctrl.kl_coef"),
    Entry("trainer.{max_steps,val_freq,save_limit}", "trainer.{total_training_steps,test_freq,max_ckpt_to_keep}"),
    Entry("trainer.save_checkpoint_path", "workdir", "logs and checkpoints"),
    Entry("trainer.load_checkpoint_path", "trainer.resume_from_path", "a run of this trainer", set_by_hand),
    Entry(
        "worker.actor.model.lora.target_modules", "model.lora.target_modules", "all-linear is the default", lora_modules
    ),
    Entry("worker.actor.model.{trust_remote_code,lora.exclude_modules}", note="leave it out"),
    Entry("worker.actor.{padding_free,ulysses_size}", note=PACKED),
    Entry("worker.rollout.disable_tqdm", note="monitor.console"),
    Entry("trainer.{find_last_checkpoint,save_model_only}", note="a run resumes from its newest checkpoint"),
    Entry("trainer.val_generations_to_log", note=KEPT),
    _missing(
        "worker.actor.optim.strategy",
        f"{OPTIMIZERS}; actor.optim.moments_dtype=bfloat16 halves its memory",
    ),
    _missing("worker.actor.model.freeze_vision_tower", TEXT_ONLY),
    _missing("data.{image_dir,video_fps,min_pixels,max_pixels}", TEXT_ONLY),
    Entry(
        "data.answer_key",
        "data.answer_key",
        "the same, but replace prompt_key by prompt_template={COLUMN}: only that goes through the chat template",
        by_hand=True,
    ),
    _missing("data.format_prompt", "write its text as data.prompt_template, which takes columns in braces"),
    _missing("data.override_chat_template", "change the chat template in model.path"),
)
