"""Device: what a policy and a value function share: passes, sharded parameters, gradients, optimizer steps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.config.sections import ActorConfig, CriticConfig
from dapo_jax.data.containers import MicroBatch
from dapo_jax.learner.optimizer import TrainState, apply_gradients, for_moments, init_state
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import BinAttention
from dapo_jax.models.weights import Weight, unflatten, weight_shardings
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, replicated

HOST = "pinned_host"  # JAX's name of host memory
Metrics = dict[str, Any]  # Mean or Max, see containers.py, or what else can be merged
# (params, what is not trained, micro-batch) -> its share of the loss, metrics
Loss = Callable[[Any, Any, MicroBatch], tuple[jax.Array, Metrics]]


@dataclass(frozen=True)
class Passes:
    """What passes over the layers of a model depend on, on one kind of devices."""

    arch: Architecture
    dtype: Any  # of the operands of matrix products
    remat: str  # a name of models/remat.py's POLICIES
    attention: BinAttention
    compiler_options: Mapping[str, Any] = field(default_factory=dict)  # XLA's


@dataclass(frozen=True, eq=False)
class WithFrozen:
    """A jitted function of (params, what is not trained, ...) that knows the second."""

    function: Any
    frozen: Any

    def __call__(self, params: Any, *rest: Any) -> Any:
        return self.function(params, self.frozen, *rest)

    def lower(self, params: Any, *rest: Any) -> jax.stages.Lowered:
        """The lowered function; arguments may be shapes with shardings."""
        return self.function.lower(params, self.frozen, *rest)


@dataclass(frozen=True)
class Operands:
    """The parameters as `Trainable.accumulate` takes them: matrices of layers in the dtype of products."""

    cast: Any  # jitted: the leaves of params["layers"] that are cast -> the same, cast
    names: tuple[str, ...]  # of these leaves

    def __call__(self, params: Any) -> Any:
        return self._with(params, self.cast(self._leaves(params)))

    def lower(self, params: Any) -> jax.stages.Lowered:
        return self.cast.lower(self._leaves(params))

    def shapes(self, params: Any) -> Any:
        return self._with(params, self.lower(params).out_info)

    def _leaves(self, params: Any) -> dict[str, Any]:
        return {name: params["layers"][name] for name in self.names}

    def _with(self, params: Any, leaves: dict[str, Any]) -> Any:
        return {**params, "layers": {**params["layers"], **leaves}}


@dataclass(frozen=True)
class Trainable:
    """The compiled functions that train a model on a mesh."""

    shardings: Any  # of the parameters
    init_random: Callable[[int], TrainState]  # seed -> state
    init_from: Callable[[Any], TrainState]  # params (donated) -> state
    zero_gradients: Any  # jitted: params -> float32 gradients [data, ...], for each copy of the params
    operands: Operands  # params -> what `accumulate` takes, for all micro-batches of an optimizer step
    accumulate: WithFrozen  # (operands, gradients (donated), batch) -> gradients, metrics
    apply: Any  # jitted: (state (donated), gradients, rate) -> state, norm of the gradients
    state_shape: Any  # TrainState of jax.ShapeDtypeStruct with shardings, for restoring


def build_trainable(
    loss_fn: Loss,
    table: Sequence[Weight],
    init: Callable[[int], Any],
    options: ActorConfig | CriticConfig,
    mesh: Mesh,
    *,
    compiler_options: Mapping[str, Any],
    dtype: Any,
    frozen: Any = None,
) -> Trainable:
    """Compiles (on first use) the training functions of a model whose parameters are sharded over `mesh`.

    Args:
        table: the weights that are trained.
        init: seed -> fresh params.
        options: the optimizer's among them.
        compiler_options: XLA's, of `accumulate`.
        dtype: to which the layers' matrices are cast once an optimizer step; the loss is differentiated by these.
        frozen: arrays that the loss reads besides the params, or their shapes for lowering alone.
    """
    optim = options.optim
    shardings, whole = weight_shardings(table, mesh, TRAIN_RULES), replicated(mesh)
    abstract_params = unflatten((weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32)) for weight in table)
    abstract_state = jax.eval_shape(lambda params: init_state(params, optim, table), abstract_params)
    state_shardings, moment_shardings = _state_shardings(abstract_state, shardings, mesh, offload=optim.offload)
    gradient_shardings = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("data", *x.spec)), shardings)
    copies = mesh.shape["data"]

    def apply(state, gradients, rate):
        if optim.offload:
            state = dataclasses.replace(state, moments=jax.device_put(state.moments, moment_shardings))
        return apply_gradients(state, jax.tree.map(lambda x: jnp.sum(x, axis=0), gradients), rate, options, table)

    return Trainable(
        shardings=shardings,
        init_random=jax.jit(lambda seed: init_state(init(seed), optim, table), out_shardings=state_shardings),
        init_from=jax.jit(
            lambda params: init_state(params, optim, table), out_shardings=state_shardings, donate_argnums=0
        ),
        zero_gradients=jax.jit(
            lambda params: jax.tree.map(lambda x: jnp.zeros((copies, *x.shape), x.dtype), params),
            out_shardings=gradient_shardings,
        ),
        operands=_operands(table, shardings, dtype),
        accumulate=WithFrozen(
            jax.jit(
                _accumulation(loss_fn, mesh),
                in_shardings=(shardings, None, gradient_shardings, batch_sharding(mesh)),
                out_shardings=(gradient_shardings, whole),
                donate_argnums=2,
                compiler_options=dict(compiler_options),
            ),
            frozen,
        ),
        apply=jax.jit(
            apply,
            in_shardings=(state_shardings, gradient_shardings, whole),
            out_shardings=(state_shardings, whole),
            donate_argnums=0,
        ),
        state_shape=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_state,
            state_shardings,
        ),
    )


def _operands(table: Sequence[Weight], shardings: Any, dtype: Any) -> Operands:
    """Leaves that have the dtype are not among those that are cast: a jitted function would copy them."""
    narrow = jnp.dtype(dtype) != jnp.float32
    names = tuple(weight.path[1] for weight in table if narrow and weight.stacked and weight.is_matrix)

    def cast(leaves: dict[str, Any]) -> dict[str, Any]:
        return {name: leaf.astype(dtype) for name, leaf in leaves.items()}

    return Operands(jax.jit(cast, out_shardings={name: shardings["layers"][name] for name in names}), names)


def _state_shardings(
    abstract_state: TrainState, shardings: Any, mesh: Mesh, *, offload: bool
) -> tuple[TrainState, Any]:
    """Where the state lies between updates, and where its moments lie during one."""
    whole = replicated(mesh)
    moments = for_moments(abstract_state.moments, shardings, whole)
    kept = jax.tree.map(lambda x: x.with_memory_kind(HOST) if offload and x is not whole else x, moments)
    return TrainState(params=shardings, moments=kept, updates=whole, skipped=whole), moments


def _accumulation(loss_fn: Loss, mesh: Mesh) -> Callable[..., tuple[Any, Metrics]]:
    """(params, what is not trained, gradients, micro-batch) -> gradients with the micro-batch's added, metrics.

    Each copy of the parameters along "data" adds up the gradients of its own rows. They are summed over the copies
    once, before the optimizer step.
    """

    def accumulate(params, frozen, gradients, batch):
        (loss, metrics), new = jax.value_and_grad(loss_fn, has_aux=True)(params, frozen, batch)
        leaves, tree = jax.tree.flatten(jax.tree.map(jnp.add, gradients, new))
        smallest = min(range(len(leaves)), key=lambda place: leaves[place].size)
        leaves[smallest] += jnp.where(jnp.isfinite(loss), 0.0, jnp.nan)  # so that the update is skipped
        return jax.tree.unflatten(tree, leaves), {name: part.across("data") for name, part in metrics.items()}

    return jax.shard_map(
        accumulate,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
        out_specs=(PartitionSpec("data"), PartitionSpec()),
        axis_names={"data"},
        check_vma=False,
    )
