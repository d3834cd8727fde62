"""Host: the networks that are trained, and what passes over their batches depend on."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.sections import ActorConfig, AlgorithmConfig
from dapo_jax.data.containers import Batch
from dapo_jax.learner.actor import Actor
from dapo_jax.learner.critic import Critic
from dapo_jax.learner.decode_weights import LatestWeights
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.teacher import Teacher
from dapo_jax.learner.update import Finish, OnMicroBatch, UpdateSettings, update_critic, update_policy
from dapo_jax.models.identity import Identity
from dapo_jax.monitor.tensorboard import Histograms
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.sharding import replicated


@dataclass(frozen=True)
class Learner:
    """The networks, their compiled functions, and the options of their batches."""

    mesh: Mesh
    actor: Actor
    critic: Critic | None  # for an estimator that needs values
    reference: Any  # weights for actor.statistics, with a KL divergence; else None
    teacher: Teacher | None  # of on-policy distillation
    loaded: Mapping[str, Identity]  # of the policy and of the models that are not trained, by option
    decode_weights: LatestWeights  # of the policy's parameters, for the sampler
    estimator: Callable[..., Any]  # see `build_estimator`
    init_models: Callable[[], Models]  # the models before the first step
    algorithm: AlgorithmConfig
    options: ActorConfig
    num_groups: int  # of a batch
    rounding: float  # nats per token by which two passes over one policy may differ
    micro_batches: Mapping[str, MicroBatches]  # of the "actor" and of the "critic"
    pad_id: int
    seed: int
    stage: Stage
    pace: OnMicroBatch


def build_estimator(algorithm: AlgorithmConfig, vocab_size: int, mesh: Mesh) -> Callable[..., Any]:
    """The jitted advantage estimator: (rewards, mask, group_ids, num_groups=..., further arrays by name).

    Its results are replicated on every device.
    """
    function = named_estimator(algorithm.adv_estimator)
    options = {**vars(algorithm), **vars(algorithm.cpo), "vocab_size": vocab_size}
    static = ("num_groups",) if needs(function, "num_groups") else ()
    bound = functools.partial(function, **chosen(function, options))
    return jax.jit(bound, static_argnames=static, out_shardings=replicated(mesh))


def update(
    learner: Learner, models: Models, batch: Batch, settings: Mapping[str, UpdateSettings]
) -> tuple[Models, Finish]:
    """Begins all optimizer steps: the critic's, then the policy's (DAPO, equation 8).

    The second part of the result waits for them and returns metrics and histograms.

    Args:
        settings: of the "actor" and of the "critic", each if it is updated.
    """
    waits: list[tuple[str, Finish, dict[str, float]]] = []
    if (of_critic := settings.get("critic")) is not None:
        assert learner.critic is not None and models.critic is not None
        with learner.stage("update_critic"):
            critic, wait = update_critic(learner.critic, models.critic, batch, of_critic, learner.mesh, learner.pace)
        models = dataclasses.replace(models, critic=critic)
        waits.append(("update_critic", wait, {"critic/lr": of_critic.learning_rate}))
    if (of_actor := settings.get("actor")) is not None:
        learner.decode_weights.drop()
        with learner.stage("update_actor"):
            actor, wait = update_policy(learner.actor, models.actor, batch, of_actor, learner.mesh, learner.pace)
        models = dataclasses.replace(models, actor=actor)
        kl_coef = {"actor/kl_coef": learner.options.kl_loss_coef} if learner.options.use_kl_loss else {}
        waits.append(("update_actor", wait, {"actor/lr": of_actor.learning_rate, **kl_coef}))

    def finish() -> tuple[dict[str, float], Histograms]:
        metrics: dict[str, float] = {}
        histograms: Histograms = {}
        for name, wait, known in waits:
            with learner.stage(name):
                found, distributions = wait()
            metrics |= found | known
            histograms |= distributions
        return metrics, histograms

    return models, finish
