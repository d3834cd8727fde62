"""Host: what relates batches, lengths, partial rollouts and sampling ahead to each other."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dapo_jax.algorithms.arguments import needs
from dapo_jax.command.option_uses import F
from dapo_jax.config.derived import segment_steps
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    FilterGroupsConfig,
    MeshConfig,
    OverlongBufferConfig,
    RolloutConfig,
)
from dapo_jax.errors import divisors, nearest
from dapo_jax.learner.trained_networks import Network


def rollout_problems(rollout: RolloutConfig) -> Iterator[str]:
    """What is decoded at once, and where a response ends."""
    if any(not string for string in rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once: leave it out"
    if 0 < rollout.max_num_seqs < rollout.n:
        yield (
            f"rollout.max_num_seqs={rollout.max_num_seqs} must be at least rollout.n={rollout.n}: a group is decoded "
            "together"
        )


def batch_problems(networks: Mapping[str, Network], data: DataConfig, rollout: RolloutConfig) -> Iterator[str]:
    """The divisibility rules of prompts, mini-batches and micro-batches."""
    batch, n = data.train_batch_size, rollout.n
    for name, network in networks.items():
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
        if mini * n % micro and not network.packs:
            yield (
                f"{name}.ppo_mini_batch_size x rollout.n = {mini} x {n} = {mini * n} responses must be a multiple "
                f"of {name}.ppo_micro_batch_size_per_device={micro}: set "
                f"{name}.ppo_micro_batch_size_per_device={nearest(divisors(mini * n), micro)}"
            )


def length_problems(
    data: DataConfig, rollout: RolloutConfig, buffer: OverlongBufferConfig, actor: ActorConfig
) -> Iterator[str]:
    prompt, longest, shortest = data.max_prompt_length, data.max_response_length, rollout.min_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        yield f"reward.overlong_buffer.len={buffer.len} must be in 1..data.max_response_length={longest}"
    if not 0 <= shortest <= longest:
        yield f"rollout.min_response_length={shortest} must be between 0 and data.max_response_length={longest}"
    budget = actor.ppo_max_token_len_per_device
    if budget is not None and min(prompt, longest) > 0 and budget < prompt + longest:
        yield (
            f"actor.ppo_max_token_len_per_device={budget} must be at least data.max_prompt_length + "
            f"max_response_length = {prompt + longest}"
        )


def segment_problems(
    rollout: RolloutConfig, groups: FilterGroupsConfig, actor: ActorConfig, data: DataConfig
) -> Iterator[str]:
    """What partial rollouts need."""
    length = rollout.segment_length
    if length <= 0:
        return
    needed = {"enable": True, "leftover": "carry", "backfill": "batch"}
    wrong = [f"{name}={getattr(groups, name)}" for name, value in needed.items() if getattr(groups, name) != value]
    wrong += ["adaptive_limit.enable=True"] * groups.adaptive_limit.enable
    if wrong:
        cure = ", ".join(f"{name}={value}" for name, value in needed.items())
        yield (
            f"rollout.segment_length={length} trains on groups that earlier steps have begun, which does not go with "
            f"{F}.{', '.join(wrong)}: set {cure} and adaptive_limit.enable=False there"
        )
    steps = segment_steps(data, rollout)
    if groups.leftover == "carry" and groups.leftover_max_staleness < steps:
        yield (
            f"{F}.leftover_max_staleness={groups.leftover_max_staleness} must be at least {steps}: "
            f"with rollout.segment_length={length} the longest response takes {steps} training steps"
        )
    if actor.old_logprob == "recompute":
        yield (
            f"rollout.segment_length={length} trains on tokens of several policies, whose log-probabilities cannot be "
            "recomputed: set actor.old_logprob=auto or rollout"
        )


def ahead_problems(algorithm: AlgorithmConfig, actor: ActorConfig, mesh: MeshConfig) -> Iterator[str]:
    """What does not go with trainer.rollout_ahead."""
    if mesh.expert > 1:
        yield (
            f"mesh.expert={mesh.expert} cannot be combined with trainer.rollout_ahead=1, whose weights go from device "
            "to device: set mesh.expert=1"
        )
    if algorithm.use_kl_in_reward:
        yield (
            "trainer.rollout_ahead=1 cannot be combined with algorithm.use_kl_in_reward=True, whose reference policy "
            "is on the training devices: use actor.use_kl_loss=True"
        )
    if algorithm.filter_groups.leftover == "carry":
        yield (
            "trainer.rollout_ahead=1 trains on batches that are one step old, and carried groups would be older: set "
            f"{F}.leftover=requeue"
        )
    if actor.old_logprob == "recompute":
        yield (
            "trainer.rollout_ahead=1 trains on samples of an older policy, whose log-probabilities cannot be "
            "recomputed: set actor.old_logprob=auto or rollout"
        )


def episode_problems(
    environment: EnvironmentConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    estimator: Callable[..., Any],
) -> Iterator[str]:
    """What episodes of several turns do not go with."""
    if 0 < environment.max_turn_length <= rollout.min_response_length:
        yield (
            f"environment.max_turn_length={environment.max_turn_length} must be more than "
            f"rollout.min_response_length={rollout.min_response_length}, before which no turn may end: raise it"
        )
    if environment.path and needs(estimator, "hint_logprobs"):
        yield (
            f"environment.path may add to each prompt, and adv_estimator={algorithm.adv_estimator} writes prompts of "
            "its own: choose another"
        )
