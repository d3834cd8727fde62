"""Host: saving and restoring all that a run needs to go on as if it had never stopped."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from dapo_jax.learner.models import Models
from dapo_jax.learner.optimizer import TrainState


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside its parameters. Random draws have addresses, so no generator is saved."""

    step: int = 0  # training steps done
    recompute_logprobs: bool = False  # whether old_logprob=auto has fallen back to recomputing
    kl_coef: float = 0.0  # of the KL divergence in the reward
    groups_kept: int = 0
    groups_dropped: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0


class Checkpoints:
    """The checkpoints of a workdir, written in the background, the newest `max_to_keep` kept."""

    def __init__(self, workdir: str | Path, *, max_to_keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=True)
        self._manager = ocp.CheckpointManager(Path(workdir).absolute() / "checkpoints", options=options)

    def latest_step(self) -> int | None:
        """The newest step that was written completely."""
        return self._manager.latest_step()

    def save(self, models: Models, progress: Progress, stream: dict[str, Any]) -> None:
        """Writes a checkpoint of progress.step; nothing if there is one.

        Args:
            stream: NumPy arrays of any shape, nested by name: what dynamic sampling knows.
        """
        if self._manager.latest_step() != progress.step:
            self._manager.save(
                progress.step,
                args=ocp.args.Composite(
                    models=ocp.args.StandardSave(_trained(models)),
                    progress=ocp.args.JsonSave({**dataclasses.asdict(progress), "models": sorted(_trained(models))}),
                    stream=ocp.args.StandardSave(stream),
                ),
            )

    def restore(self, step: int, shape: Models) -> tuple[Models, Progress, dict[str, Any]]:
        """The models, laid out as `shape` (jax.ShapeDtypeStruct with shardings) says, the progress and the stream.

        Raises:
            ValueError: the checkpoint holds other models than the run has.
        """
        progress = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
        wanted, saved = sorted(_trained(shape)), progress.pop("models")
        if saved != wanted:
            raise ValueError(
                f"the checkpoint of step {step} holds {saved}, the run has {wanted}: choose another workdir, or the "
                "algorithm.adv_estimator that the checkpoint was made with"
            )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                models=ocp.args.StandardRestore(_trained(shape)), stream=ocp.args.StandardRestore()
            ),
        )
        return Models(**restored["models"]), Progress(**progress), restored["stream"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _trained(models: Models) -> dict[str, TrainState]:
    """The models by name, without those that the run does not have."""
    return {name: state for name, state in vars(models).items() if state is not None}
