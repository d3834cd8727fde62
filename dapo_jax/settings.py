"""Host: from the config to the settings of the compiled functions, for a model and its devices."""

import dataclasses
import json
import logging
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.base_models import lora_of
from dapo_jax.command.warnings import NO_POLICY_STEP
from dapo_jax.config.derived import further_rewards, micro_batch_size, mini_batch_size, token_budget
from dapo_jax.config.sections import ActorConfig, AlgorithmConfig, Config, CriticConfig, ModelConfig, TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import ActorSettings
from dapo_jax.learner.choices import trained
from dapo_jax.learner.critic import CriticSettings, critic_architecture
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.optimizer import OptimizerSettings, learning_rate
from dapo_jax.learner.update import UpdateSettings
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import BinAttention
from dapo_jax.models.flops import token_flops
from dapo_jax.models.fused_attention import bin_attention, kernels, unfit
from dapo_jax.parallel.compilation import OVERLAP
from dapo_jax.parallel.devices import multiplies_bfloat16
from dapo_jax.parallel.mesh import num_batch_shards, platform
from dapo_jax.problems import given_function
from dapo_jax.rewards.weighted import parse_parts
from dapo_jax.rollout.layout import EngineSettings

logger = logging.getLogger(__name__)


def with_total_steps(config: Config, num_prompts: int, *, done: int) -> Config:
    """`config` with the number of training steps from trainer.total_epochs and total_training_steps.

    An epoch is the number of steps that train on `num_prompts` groups. So the total, on which learning rates depend,
    is known before the first step. If the filter drops prompts, the run passes over the rows more often (metric
    data/epoch).

    Args:
        done: training steps that a resumed run has behind it.

    Raises:
        InputError: the total is less than one step, than `done`, or than a step of trainer.profile_steps.
    """
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_epochs is None:
        return config
    steps, given = trainer.total_epochs * num_prompts // batch, trainer.total_training_steps
    name = f"trainer.total_epochs={trainer.total_epochs} ({steps} steps of {batch} of {num_prompts} prompts)"
    if 0 < given < steps:
        logger.warning(
            "trainer.total_training_steps=%d ends the run before %s: -1 leaves it to the epochs", given, name
        )
        return config
    if steps < 1:
        raise InputError(f"{name} is less than one step: raise it, lower data.train_batch_size, or give more prompts")
    if steps < done:
        raise InputError(f"{name} is less than the {done} steps already done: raise it, or choose another workdir")
    if steps < max(trainer.profile_steps, default=1):
        raise InputError(f"{name} must reach trainer.profile_steps={trainer.profile_steps}: raise it, or lower those")
    logger.info("%s", name)
    if trainer.critic_warmup >= steps:
        logger.warning("%s", NO_POLICY_STEP)
    return dataclasses.replace(config, trainer=dataclasses.replace(trainer, total_training_steps=steps))


def actor_settings(config: Config, arch: Architecture, mesh: Mesh) -> ActorSettings:
    """The settings of the policy's compiled functions."""
    actor, distillation = config.actor, config.algorithm.distillation
    return ActorSettings(
        arch=within_lengths(config, arch),
        dtype=compute_dtype(config.model, mesh),
        temperature=config.rollout.temperature,
        remat=remat_policy(config.model),
        attention=training_attention(config, arch, mesh),
        chunk_size=actor.logprob_chunk_size,
        loss_mode=actor.policy_loss.loss_mode,
        loss_options=loss_options(actor),
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        optimizer=optimizer_settings(actor),
        off_policy_mask_threshold=actor.off_policy_mask_threshold,
        candidates=distillation.top_k if distillation.path and distillation.form == "top_k" else 0,
        distillation_weight=distillation.weight,
        lora=lora_of(config, arch),
        compiler_options=compiler_options(config.trainer, mesh),
    )


def algorithm_settings(config: Config) -> AlgorithmConfig:
    """The options of the algorithm, with the name and the weight of each reward that an estimator of several reads."""
    algorithm = config.algorithm
    if not needs(named_estimator(algorithm.adv_estimator), "reward_parts"):
        return algorithm
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights or (1.0,) * len(keys)
    if not keys:
        scale = config.reward.model.function_weight if config.reward.model.path else 1.0
        found = {part.name: scale * part.weight for part in parse_parts(given_function(config))}
        found |= further_rewards(config)
        keys, weights = tuple(found), tuple(found.values())
    return dataclasses.replace(algorithm, gdpo_reward_keys=keys, gdpo_reward_weights=weights)


def loss_options(actor: ActorConfig) -> dict[str, float]:
    """The options of the policy losses, by name."""
    clip = {name: getattr(actor, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    return clip | {name: value for name, value in vars(actor.policy_loss).items() if name != "loss_mode"}


def critic_settings(config: Config, arch: Architecture, mesh: Mesh) -> CriticSettings:
    """The settings of the critic's compiled functions."""
    return CriticSettings(
        arch=critic_architecture(within_lengths(config, arch)),
        dtype=compute_dtype(config.model, mesh),
        remat=remat_policy(config.model),
        attention=training_attention(config, arch, mesh),
        cliprange_value=config.critic.cliprange_value,
        optimizer=optimizer_settings(config.critic),
        compiler_options=compiler_options(config.trainer, mesh),
    )


def optimizer_settings(section: ActorConfig | CriticConfig) -> OptimizerSettings:
    """The optimizer's settings, apart from the learning rate."""
    optim = section.optim
    return OptimizerSettings(
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        grad_clip=section.grad_clip,
        moments_dtype=jnp.dtype(optim.moments_dtype),
        offload=optim.offload,
        muon=optim.optimizer == "muon",
    )


def engine_settings(
    config: Config, arch: Architecture, eos_ids: tuple[int, ...], pad_id: int, mesh: Mesh
) -> EngineSettings:
    """The settings of the sampler's engine."""
    on_cpu = platform(mesh) == "cpu"
    return EngineSettings(
        arch=within_lengths(config, arch),
        mesh=mesh,
        eos_ids=eos_ids,
        pad_id=pad_id,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        max_num_seqs=config.rollout.max_num_seqs,
        memory_share=config.rollout.kv_memory_share,
        chunk_length=config.rollout.decode_chunk_length,
        lookahead=0 if on_cpu else 1,  # a CPU would decode and look ahead with the same cores
        seed=config.seed,
        least_page=1 if on_cpu else 16,  # which kernels of accelerators need
        choices=arch.choices if config.model.router_replay else None,
    )


def learning_rate_of(config: Config, name: str, step: int) -> float:
    """The learning rate of the "actor" or the "critic" in training step `step`, counted from 1."""
    optim = getattr(config, name).optim
    waited = config.trainer.critic_warmup if name == "actor" else 0
    return learning_rate(
        step - waited,
        lr=optim.lr,
        warmup_steps=optim.lr_warmup_steps,
        scheduler=optim.lr_scheduler_type,
        total_steps=config.trainer.total_training_steps - waited,
        min_ratio=optim.min_lr_ratio,
    )


def learning_rate_plan(config: Config, *, done: int) -> str:
    """One line on how the policy's learning rate changes after step `done`; empty if it is constant."""
    optim, last, waited = config.actor.optim, config.trainer.total_training_steps, config.trainer.critic_warmup
    first, warm = max(done, waited) + 1, min(waited + optim.lr_warmup_steps, last)

    def at(step: int) -> str:
        return f"{learning_rate_of(config, 'actor', step):.3g} in step {step}".replace("e-0", "e-")

    falls = optim.lr_scheduler_type != "constant" and max(first, warm) < last
    if first < warm:
        then = f", then falls to {at(last)} ({optim.lr_scheduler_type})" if falls else ", then stays constant"
        return f"learning rate: rises from {at(first)} to {at(warm)} (warm-up){then if warm < last else ''}"
    return f"learning rate: falls from {at(first)} to {at(last)} ({optim.lr_scheduler_type})" if falls else ""


def warn_of_warm_up(config: Config) -> None:
    """Warns if the run ends before its warm-up does."""
    warm_up, steps = config.actor.optim.lr_warmup_steps, config.trainer.total_training_steps
    updates = steps - config.trainer.critic_warmup
    if 0 < updates < warm_up:
        logger.warning(
            "actor.optim.lr_warmup_steps=%d is more than the %d steps that update the policy: the learning rate never "
            "reaches actor.optim.lr=%g: lower the warm-up, or raise trainer.total_training_steps=%d",
            warm_up,
            updates,
            config.actor.optim.lr,
            steps,
        )


def update_settings(config: Config, arch: Architecture, mesh: Mesh, name: str, step: int) -> UpdateSettings:
    """How training step `step` updates the "actor" or the "critic" on its batch."""
    section: ActorConfig | CriticConfig = getattr(config, name)
    return UpdateSettings(
        learning_rate=learning_rate_of(config, name, step),
        mini_batch_rows=mini_batch_size(config, name) * config.rollout.n,
        micro_batches=micro_batches(config, arch, mesh, name),
        epochs=section.ppo_epochs,
        loss_agg_mode=section.loss_agg_mode,
        loss_scale_factor=config.actor.loss_scale_factor or float(config.data.max_response_length),
        count_empty_sequences=config.actor.count_empty_sequences,
    )


def updates_of_step(config: Config, arch: Architecture, mesh: Mesh, step: int) -> dict[str, UpdateSettings]:
    """`update_settings` of each network that training step `step` updates."""
    networks = [name for name in trained(config) if name != "actor" or step > config.trainer.critic_warmup]
    return {name: update_settings(config, arch, mesh, name, step) for name in networks}


def micro_batches(config: Config, arch: Architecture, mesh: Mesh, name: str = "actor") -> MicroBatches:
    """How the rows of the actor or the critic are divided among forward and backward passes."""
    return MicroBatches(
        num_shards=num_batch_shards(mesh),
        max_tokens_per_device=token_budget(config, name),
        rows_per_device=0 if config.actor.use_dynamic_bsz else micro_batch_size(config, name),
        attention=training_attention(config, arch, mesh),
        choices=arch.choices if config.model.router_replay and name == "actor" else None,
        flops=token_flops(arch),
    )


def compiler_options(trainer: TrainerConfig, mesh: Mesh) -> dict[str, Any]:
    """XLA's options for passes over the layers: the platform's, overridden by trainer.compiler_options."""
    return {**OVERLAP.get(platform(mesh), {}), **json.loads(trainer.compiler_options)}


def compute_dtype(model: ModelConfig, mesh: Mesh) -> jnp.dtype:
    """The dtype of matrix products; model.dtype=auto chooses a fast one for the devices."""
    if model.dtype != "auto":
        return jnp.dtype(model.dtype)
    return jnp.dtype(jnp.bfloat16 if multiplies_bfloat16(mesh.devices.flat[0]) else jnp.float32)


def training_attention(config: Config, arch: Architecture, mesh: Mesh) -> BinAttention:
    """The implementation of attention in training.

    Raises:
        InputError: see `chosen_attention`.
    """
    name, _ = chosen_attention(config, arch, mesh)
    windows = within_lengths(config, arch).window is not None
    return bin_attention(name, mesh.devices.flat[0], share_prompts=config.actor.share_prompts, windows=windows)


def within_lengths(config: Config, arch: Architecture) -> Architecture:
    """`arch` without windows that no sequence of the run leaves. Hinted prompts may have any length."""
    if needs(named_estimator(config.algorithm.adv_estimator), "hint_logprobs"):
        return arch
    return arch.within(config.data.max_prompt_length + config.data.max_response_length)


def chosen_attention(config: Config, arch: Architecture, mesh: Mesh) -> tuple[str, str]:
    """The implementation of attention in training, and why it is xla if model.attention=fused.

    Raises:
        InputError: the kernel that model.attention names cannot run on these devices.
    """
    asked, device, dtype = config.model.attention, mesh.devices.flat[0], compute_dtype(config.model, mesh)
    if asked == "xla":
        return asked, ""
    names = kernels(device, config.data.max_response_length) if asked == "fused" else (asked,)
    problems = {name: unfit(name, device, dtype, arch.head_dim, arch.attention_cap) for name in names}
    if fit := [name for name, problem in problems.items() if not problem]:
        return fit[0], ""
    problem = next(iter(problems.values()), "")
    if asked != "fused":
        raise InputError(f"model.attention={asked} {problem}: choose fused or xla, or other devices")
    return "xla", problem


def remat_policy(model: ModelConfig) -> str:
    """What each layer saves for the backward pass: a name in models/remat.py's POLICIES."""
    return model.remat_policy if model.enable_gradient_checkpointing else "none"
