"""Host: values derived from several options."""

import dataclasses
from pathlib import Path

from dapo_jax.config.sections import AlgorithmConfig, Config
from dapo_jax.places import copy_of, is_address, place_of


def gen_batch_size(config: Config) -> int:
    """Prompts per generation round."""
    return config.data.gen_batch_size or config.data.train_batch_size


def checkpoint_dir(config: Config) -> str:
    """Where the checkpoints of a run are: an absolute path, or an address."""
    given = config.trainer.checkpoint_dir
    return str(place_of(given) if given else place_of(config.workdir) / "checkpoints")


def in_folder(config: Config, folder: Path) -> Config:
    """`config` with `folder` on this machine as workdir, if that is an address. Checkpoints stay at the address."""
    if not is_address(config.workdir):
        return config
    trainer = dataclasses.replace(config.trainer, checkpoint_dir=checkpoint_dir(config))
    return dataclasses.replace(config, workdir=str(folder), trainer=trainer)


def judge_folder(config: Config) -> Path:
    """Where a judge's answers are kept: in the workdir, or on this machine if that is an address."""
    workdir = config.workdir
    return copy_of(workdir, "judges") if is_address(workdir) else Path(workdir) / "judge"


def mini_batch_size(config: Config, name: str) -> int:
    """Prompts per optimizer step of the "actor" or the "critic"."""
    return getattr(config, name).ppo_mini_batch_size or config.actor.ppo_mini_batch_size


def micro_batch_size(config: Config, name: str) -> int:
    """Responses per forward and backward pass of the "actor" or the "critic" on one device."""
    return getattr(config, name).ppo_micro_batch_size_per_device or config.actor.ppo_micro_batch_size_per_device


def token_budget(config: Config, name: str) -> int:
    """Tokens of a packed pass of the "actor" or the "critic" on one device."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return config.actor.ppo_max_token_len_per_device or micro_batch_size(config, name) * longest


def trains_on_older_samples(config: Config) -> bool:
    """Whether an older policy may have sampled some groups of a batch; the old log-probabilities are then its own."""
    return config.algorithm.filter_groups.leftover == "carry" or bool(config.trainer.rollout_ahead)


def segment_steps(config: Config) -> int:
    """Training steps that the longest response takes, with rollout.segment_length above 0."""
    return -(-config.data.max_response_length // config.rollout.segment_length)


def uses_reference(config: Config) -> bool:
    """Whether a reference policy is loaded."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def further_rewards(config: Config) -> dict[str, float]:
    """The names and weights of the rewards of a response that are added to its verifier's score."""
    model, buffer, length = config.reward.model, config.reward.overlong_buffer, config.reward.length
    found = {"reward_model": model.weight} if model.path else {}
    found |= {"overlong_reward": buffer.penalty_factor} if buffer.enable else {}
    return found | ({"length_reward": abs(length.weight)} if length.form != "none" else {})  # its sign is in the number


def trains_on_rewards(config: Config) -> bool:
    """Whether advantages follow rewards, and not a teacher alone."""
    distillation = config.algorithm.distillation
    return distillation.use_task_rewards or not distillation.path


def keeps_some(algorithm: AlgorithmConfig) -> bool:
    """Whether some samples of a group are left out of training."""
    return min(algorithm.keep_pos_ratio, algorithm.keep_neg_ratio) < 1
