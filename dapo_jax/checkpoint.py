"""Host: saving and restoring all that a run needs to go on as if it had never stopped."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

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
    """The checkpoints of a run, written in the background, the newest `max_to_keep` kept. All processes take part.

    Args:
        directory: an absolute path or an address like gs://bucket/run; created if needed.
    """

    def __init__(self, directory: str, *, max_to_keep: int) -> None:
        self._manager = ocp.CheckpointManager(
            epath.Path(directory),
            options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=True),
            item_handlers={
                "models": ocp.PyTreeCheckpointHandler(),
                "progress": ocp.JsonCheckpointHandler(),
                "stream": ocp.StandardCheckpointHandler(),
            },
        )

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
                    models=ocp.args.PyTreeSave(_trained(models)),
                    progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
                    stream=ocp.args.StandardSave(stream),
                ),
            )

    def restore(self, step: int, shape: Models) -> tuple[Models, Progress, dict[str, Any]]:
        """The models, laid out as `shape` (jax.ShapeDtypeStruct with shardings) says, the progress and the stream.

        Raises:
            ValueError: the checkpoint holds other models than the run has.
        """
        wanted = _trained(shape)
        saved = self._saved_shapes(step)
        models = sorted({name.partition(".")[0] for name in saved})
        if models != sorted(wanted):
            raise ValueError(
                f"the checkpoint of step {step} holds {models}, the run has {sorted(wanted)}: choose another workdir, "
                "or the algorithm.adv_estimator that the checkpoint was made with"
            )
        _check_shapes(step, saved, _shapes(wanted))
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                models=_restore_as(wanted), progress=ocp.args.JsonRestore(), stream=ocp.args.StandardRestore()
            ),
        )
        return Models(**restored["models"]), Progress(**restored["progress"]), restored["stream"]

    def restore_policy(self, step: int, shape: Any) -> Any:
        """The policy's parameters alone, laid out as `shape` says.

        Raises:
            ValueError: the checkpoint holds other parameters.
        """
        wanted = {"actor": {"params": shape}}
        saved = {name: shape for name, shape in self._saved_shapes(step).items() if name.startswith("actor.params.")}
        _check_shapes(step, saved, _shapes(wanted))
        arguments = ocp.args.Composite(models=_restore_as(wanted, partial_restore=True))
        return self._manager.restore(step, args=arguments)["models"]["actor"]["params"]

    def _saved_shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shape of each array of the models, by its path."""
        leaves = jax.tree.leaves(self._manager.item_metadata(step)["models"].tree)
        return {leaf.name: tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape")}

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its path, under the names that Orbax gives."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


def _check_shapes(step: int, saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    differing = sorted(name for name in saved | wanted if saved.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise ValueError(
            f"the checkpoint of step {step} is of another model: {len(differing)} arrays differ, {name} has shape "
            f"{saved.get(name, 'none')} there and {wanted.get(name, 'none')} in this run: choose another workdir, or "
            "the model.path, model.lora and optimizer settings that the checkpoint was made with"
        )


def _restore_as(shape: Any, *, partial_restore: bool = False) -> ocp.args.PyTreeRestore:
    arguments = ocp.checkpoint_utils.construct_restore_args(shape)
    return ocp.args.PyTreeRestore(shape, restore_args=arguments, partial_restore=partial_restore)


def _trained(models: Models) -> dict[str, TrainState]:
    """The models by name, without those that the run does not have."""
    return {name: state for name, state in vars(models).items() if state is not None}
