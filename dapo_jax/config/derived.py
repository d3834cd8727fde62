"""Host: values derived from several options."""

import dataclasses
import json
from pathlib import Path

from dapo_jax.config.places import copy_of, is_address, place_of
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    DistillationConfig,
    EnvironmentConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from dapo_jax.errors import InputError


def gen_batch_size(data: DataConfig) -> int:
    """Prompts per generation round."""
    return data.gen_batch_size or data.train_batch_size


def checkpoint_dir(workdir: str, trainer: TrainerConfig) -> str:
    """Where the checkpoints of the run in `workdir` are: an absolute path, or an address."""
    given = trainer.checkpoint_dir
    return str(place_of(given) if given else place_of(workdir) / "checkpoints")


def in_folder(config: Config, folder: Path) -> Config:
    """`config` with `folder` on this machine as workdir, if that is an address. Checkpoints stay at the address."""
    if not is_address(config.workdir):
        return config
    trainer = dataclasses.replace(config.trainer, checkpoint_dir=checkpoint_dir(config.workdir, config.trainer))
    return dataclasses.replace(config, workdir=str(folder), trainer=trainer)


def judge_folder(workdir: str) -> Path:
    """Where a judge's answers are kept: in the workdir, or on this machine if that is an address."""
    return copy_of(workdir, "judges") if is_address(workdir) else Path(workdir) / "judge"


def trains_on_older_samples(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> bool:
    """Whether an older policy may have sampled some groups of a batch; the old log-probabilities are then its own."""
    return algorithm.filter_groups.leftover == "carry" or bool(trainer.rollout_ahead)


def segment_steps(data: DataConfig, rollout: RolloutConfig) -> int:
    """Training steps that the longest response takes with rollout.segment_length; 0 without."""
    length = rollout.segment_length
    return -(-data.max_response_length // length) if length else 0


def plays_episodes(environment: EnvironmentConfig) -> bool:
    """Whether responses are episodes with an environment or tools."""
    return bool(environment.path or environment.tools)


def environment_classes(path: str) -> dict[str, str]:
    """The classes of environment.path by the names that rows have in their column `environment`; {"": path} for one.

    Raises:
        InputError: the text of several is no JSON object of names and classes.
    """
    if not path.startswith("{"):
        return {"": path}
    try:
        found = json.loads(path)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and found and all(isinstance(one, str) and one for one in found.values()):
        if all(name.isidentifier() for name in found):
            return found
    raise InputError(
        f"environment.path={path[:200]} must be a class, or a JSON object of classes by names of letters, digits and "
        '_, such as {"lake": "lake.py:Lake", "desk": "desk.py:Desk"}: correct it'
    )


def uses_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a reference policy is loaded."""
    return algorithm.use_kl_in_reward or actor.use_kl_loss


def further_rewards(reward: RewardConfig, *, weighed: bool = False) -> dict[str, float]:
    """The names and weights of the rewards of a response that are added to its verifier's score.

    Args:
        weighed: the weights of the numbers as they are: those for lengths already hold theirs, and get 1.
    """
    model, buffer, length = reward.model, reward.overlong_buffer, reward.length
    found = {"reward_model": model.weight} if model.path else {}
    found |= {"overlong_reward": 1.0 if weighed else buffer.penalty_factor} if buffer.enable else {}
    of_length = 1.0 if weighed else abs(length.weight)  # its sign is in the number
    return found | ({"length_reward": of_length} if length.form != "none" else {})


def trains_on_rewards(distillation: DistillationConfig) -> bool:
    """Whether advantages follow rewards, and not a teacher alone."""
    return distillation.use_task_rewards or not distillation.path


def keeps_some(algorithm: AlgorithmConfig) -> bool:
    """Whether some samples of a group are left out of training."""
    return min(algorithm.keep_pos_ratio, algorithm.keep_neg_ratio) < 1


def candidates(distillation: DistillationConfig) -> int:
    """Tokens in each place whose probabilities a teacher's are compared with in the loss; 0 without such a loss."""
    return distillation.top_k if distillation.path and distillation.form == "top_k" else 0
