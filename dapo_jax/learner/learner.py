"""Host: the networks of a run, what their batches depend on, and the update on one."""

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
from dapo_jax.learner.trainable import WithFrozen
from dapo_jax.learner.trained_networks import Network
from dapo_jax.learner.update import Finish, OnMicroBatch, Update, update_critic, update_policy, with_loss_weights
from dapo_jax.models.identity import Identity
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.monitor.tensorboard import Histograms
from dapo_jax.parallel.sharding import replicated


@dataclass(frozen=True)
class Teacher:
    """A frozen language model that scores the policy's tokens. Its architecture may be another."""

    statistics: WithFrozen  # (params, micro-batch) -> TokenStatistics, replicated
    params: Any  # in the dtype of matrix products
    vocab_size: int  # its embeddings; the policy may have more
    micro_batches: MicroBatches
    identity: Identity


@dataclass(frozen=True)
class Networks:
    """The compiled functions of all networks, with the weights that are not trained."""

    actor: Actor
    critic: Critic | None  # for an estimator that needs values
    reference: Any  # weights for actor.statistics, with a KL divergence; else None
    teacher: Teacher | None  # of on-policy distillation
    loaded: Mapping[str, Identity]  # of the policy and of the models that are not trained, by option
    decode_weights: LatestWeights  # of the policy's parameters, for the sampler
    init_models: Callable[[], Models]  # the models before the first step


@dataclass(frozen=True)
class Batching:
    """What a batch depends on besides the networks."""

    mesh: Mesh  # that trains
    algorithm: AlgorithmConfig
    estimator: Callable[..., Any]  # see `build_estimator`
    trained: Mapping[str, Network]
    micro_batches: Mapping[str, MicroBatches]  # of each network that is trained
    num_groups: int  # of a batch
    rounding: float  # nats per token by which two passes over one policy may differ
    pad_id: int
    seed: int

    @property
    def actor(self) -> ActorConfig:
        """The policy's section."""
        options = self.trained["actor"].options
        assert isinstance(options, ActorConfig)
        return options


@dataclass(frozen=True)
class Learner:
    """Makes batches, and updates the networks on them."""

    networks: Networks
    batching: Batching
    monitor: Monitor
    pace: OnMicroBatch  # is called after each micro-batch; may raise

    @property
    def mesh(self) -> Mesh:
        """The one that trains."""
        return self.batching.mesh

    def estimating(self, estimator: Callable[..., Any]) -> "Learner":
        """The same with another advantage estimator."""
        return dataclasses.replace(self, batching=dataclasses.replace(self.batching, estimator=estimator))


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
    learner: Learner, models: Models, batch: Batch, learning_rates: Mapping[str, float]
) -> tuple[Models, Finish]:
    """Begins all optimizer steps: the critic's, then the policy's (DAPO, equation 8).

    The second part of the result waits for them and returns metrics and histograms.

    Args:
        learning_rates: of the "actor" and of the "critic", each if it is updated.
    """
    networks, batching, stage = learner.networks, learner.batching, learner.monitor.stage
    waits: list[tuple[str, Finish, dict[str, float]]] = []

    def given(name: str, rate: float) -> tuple[Batch, Update]:
        network = batching.trained[name]
        return with_loss_weights(batch, network, learner.mesh), Update(network, batching.micro_batches[name], rate)

    of_network = {name: given(name, rate) for name, rate in learning_rates.items()}  # before any step begins
    if "critic" in learning_rates:
        assert networks.critic is not None and models.critic is not None
        with stage("update_critic"):
            critic, wait = update_critic(
                networks.critic, models.critic, *of_network["critic"], learner.mesh, learner.pace
            )
        models = dataclasses.replace(models, critic=critic)
        waits.append(("update_critic", wait, {"critic/lr": learning_rates["critic"]}))
    if "actor" in learning_rates:
        networks.decode_weights.drop()
        with stage("update_actor"):
            actor, wait = update_policy(networks.actor, models.actor, *of_network["actor"], learner.mesh, learner.pace)
        models = dataclasses.replace(models, actor=actor)
        options = batching.actor
        kl_coef = {"actor/kl_coef": options.kl_loss_coef} if options.use_kl_loss else {}
        waits.append(("update_actor", wait, {"actor/lr": learning_rates["actor"], **kl_coef}))

    def finish() -> tuple[dict[str, float], Histograms]:
        metrics: dict[str, float] = {}
        histograms: Histograms = {}
        for name, wait, known in waits:
            with stage(name):
                found, distributions = wait()
            metrics |= found | known
            histograms |= distributions
        return metrics, histograms

    return models, finish
