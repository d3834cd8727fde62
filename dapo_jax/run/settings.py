"""Host: from the config to the settings of the compiled functions, for a model and its devices."""

import dataclasses
import logging
from collections.abc import Mapping

from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.tasks import given_function
from dapo_jax.command.warnings import NO_POLICY_STEP
from dapo_jax.config.derived import further_rewards
from dapo_jax.config.sections import AlgorithmConfig, Config, ModelConfig, OptimConfig, RewardConfig, TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import ActorSettings
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.trained_networks import Network
from dapo_jax.models.architecture import Architecture, Choices
from dapo_jax.models.attention import BinAttention
from dapo_jax.models.flops import token_flops
from dapo_jax.monitor.kept_batches import chosen_steps
from dapo_jax.parallel.mesh import num_batch_shards, platform
from dapo_jax.rewards.weighted import parse_parts
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.run.base_models import lora_of
from dapo_jax.run.passes import passes, within_lengths

logger = logging.getLogger(__name__)


def with_total_steps(trainer: TrainerConfig, batch: int, num_prompts: int, *, done: int) -> TrainerConfig:
    """`trainer` with the number of training steps from trainer.total_epochs and total_training_steps.

    An epoch is the number of steps that train on `num_prompts` groups. So the total, on which learning rates depend,
    is known before the first step. If the filter drops prompts, the run passes over the rows more often (metric
    data/epoch).

    Args:
        batch: data.train_batch_size.
        done: training steps that a resumed run has behind it.

    Raises:
        InputError: the total is less than one step, than `done`, or than a step of trainer.profile_steps or
            trainer.keep_batches.
    """
    if trainer.total_epochs is None:
        return trainer
    steps, given = trainer.total_epochs * num_prompts // batch, trainer.total_training_steps
    name = f"trainer.total_epochs={trainer.total_epochs} ({steps} steps of {batch} of {num_prompts} prompts)"
    if 0 < given < steps:
        logger.warning(
            "trainer.total_training_steps=%d ends the run before %s: -1 leaves it to the epochs", given, name
        )
        return trainer
    if steps < 1:
        raise InputError(f"{name} is less than one step: raise it, lower data.train_batch_size, or give more prompts")
    if steps < done:
        raise InputError(f"{name} is less than the {done} steps already done: raise it, or choose another workdir")
    for option, named in ("profile_steps", trainer.profile_steps), ("keep_batches", chosen_steps(trainer.keep_batches)):
        if steps < max(named or (), default=1):
            raise InputError(f"{name} must reach trainer.{option}={getattr(trainer, option)}: raise it, or lower those")
    logger.info("%s", name)
    if trainer.critic_warmup >= steps:
        logger.warning("%s", NO_POLICY_STEP)
    return dataclasses.replace(trainer, total_training_steps=steps)


def actor_settings(config: Config, arch: Architecture, mesh: Mesh) -> ActorSettings:
    """What the policy's compiled functions depend on."""
    return ActorSettings(
        passes=passes(config, arch, mesh),
        options=config.actor,
        temperature=config.rollout.temperature,
        distillation=config.algorithm.distillation,
        lora=lora_of(config.model.lora, arch),
    )


def algorithm_settings(algorithm: AlgorithmConfig, reward: RewardConfig) -> AlgorithmConfig:
    """The options of the algorithm, with the name and the weight of each reward that an estimator of several reads."""
    if not needs(named_estimator(algorithm.adv_estimator), "reward_parts"):
        return algorithm
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights or (1.0,) * len(keys)
    if not keys:
        scale = reward.model.function_weight if reward.model.path else 1.0
        found = {part.name: scale * part.weight for part in parse_parts(given_function(reward))}
        found |= further_rewards(reward, weighed=not algorithm.norm_adv_by_std_in_grpo)
        keys, weights = tuple(found), tuple(found.values())
    return dataclasses.replace(algorithm, gdpo_reward_keys=keys, gdpo_reward_weights=weights)


def engine_settings(
    config: Config, arch: Architecture, eos_ids: tuple[int, ...], pad_id: int, mesh: Mesh
) -> EngineSettings:
    """The settings of the sampler's engine."""
    device = platform(mesh)
    on_cpu = device == "cpu"
    return EngineSettings(
        arch=within_lengths(config.algorithm, config.data, arch),
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
        least_chunk=8 if device == "tpu" else 1,  # with fewer, a TPU would copy all pages to write into one
        choices=recorded_choices(config.model, arch),
    )


def learning_rates(networks: Mapping[str, Network], trainer: TrainerConfig, step: int) -> dict[str, float]:
    """The learning rate of each network that training step `step`, counted from 1, updates."""
    rates: dict[str, float] = {}
    for name, network in networks.items():
        waited = trainer.critic_warmup if name == "actor" else 0
        if step > waited:
            total = trainer.total_training_steps - waited
            rates[name] = learning_rate(network.options.optim, step - waited, total_steps=total)
    return rates


def learning_rate_plan(optim: OptimConfig, trainer: TrainerConfig, *, done: int) -> str:
    """One line on how the policy's learning rate changes after step `done`; empty if it is constant."""
    last, waited = trainer.total_training_steps, trainer.critic_warmup
    first, warm = max(done, waited) + 1, min(waited + optim.lr_warmup_steps, last)

    def at(step: int) -> str:
        rate = learning_rate(optim, step - waited, total_steps=last - waited)
        return f"{rate:.3g} in step {step}".replace("e-0", "e-")

    falls = optim.lr_scheduler_type != "constant" and max(first, warm) < last
    if first < warm:
        then = f", then falls to {at(last)} ({optim.lr_scheduler_type})" if falls else ", then stays constant"
        return f"learning rate: rises from {at(first)} to {at(warm)} (warm-up){then if warm < last else ''}"
    return f"learning rate: falls from {at(first)} to {at(last)} ({optim.lr_scheduler_type})" if falls else ""


def warn_of_warm_up(optim: OptimConfig, trainer: TrainerConfig) -> None:
    """Warns if the run ends before the policy's warm-up does."""
    warm_up, steps = optim.lr_warmup_steps, trainer.total_training_steps
    updates = steps - trainer.critic_warmup
    if 0 < updates < warm_up:
        logger.warning(
            "actor.optim.lr_warmup_steps=%d is more than the %d steps that update the policy: the learning rate never "
            "reaches actor.optim.lr=%g: lower the warm-up, or raise trainer.total_training_steps=%d",
            warm_up,
            updates,
            optim.lr,
            steps,
        )


def all_micro_batches(
    networks: Mapping[str, Network], model: ModelConfig, attention: BinAttention, arch: Architecture, mesh: Mesh
) -> dict[str, MicroBatches]:
    """`micro_batches` of each network; tokens of the policy may go to the experts that the sampler chose."""
    found = {name: micro_batches(network, attention, arch, mesh) for name, network in networks.items()}
    return found | {"actor": dataclasses.replace(found["actor"], choices=recorded_choices(model, arch))}


def recorded_choices(model: ModelConfig, arch: Architecture) -> Choices | None:
    """How the sampler records the experts of tokens; None if training does not use them."""
    return arch.choices if model.router_replay else None


def micro_batches(network: Network, attention: BinAttention, arch: Architecture, mesh: Mesh) -> MicroBatches:
    """How the rows of a batch are divided among the forward and backward passes of a network or a teacher."""
    return MicroBatches(
        num_shards=num_batch_shards(mesh),
        max_tokens_per_device=network.max_tokens,
        rows_per_device=0 if network.packs else network.micro_batch_size,
        attention=attention,
        flops=token_flops(arch),
        walks=arch.delta is not None,
        parts=mesh.shape.get("context", 1),
    )
