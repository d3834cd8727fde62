"""Device: the models that a run trains."""

from flax import struct

from dapo_jax.learner.optimizer import TrainState


@struct.dataclass
class Models:
    """The state of each trained model; a checkpoint holds all of it."""

    actor: TrainState
    critic: TrainState | None = None
