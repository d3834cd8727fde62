"""Host: the functions that an engine compiles, and how they are lowered from shapes alone."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dapo_jax.models import paged_attention_gpu
from dapo_jax.models.paged_attention import AttendPages
from dapo_jax.models.state_kernels import state_kernel
from dapo_jax.models.transformer import Params
from dapo_jax.models.vocabulary_blocks_gpu import INNER, block_sums
from dapo_jax.parallel.sharding import batch_sharding, on_mesh, replicated
from dapo_jax.rollout.counting import RowStates, Seen
from dapo_jax.rollout.decoding import HEADS, ROWS, FirstDraws, Held, Plan, Reading, decode, prefill, read
from dapo_jax.rollout.layout import EngineSettings, Layout, PrefillSize, ReadSize, Shape, cache_dtype
from dapo_jax.rollout.pages import empty_pages
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.stretches import empty_stretches

ANY_SAMPLING = Sampling.create(1.0, 1.0, -1)  # its values are traced: any other lowers to the same program


@dataclass(frozen=True)
class Calls:
    """What a queue with such a layout calls. Lower under `jax.set_mesh`.

    Args:
        params: shapes and shardings of the decoding weights.
        attend: attention to pages; None = stretches.
        limits: some token may not be drawn somewhere, see `Sampling.limits`.
    """

    settings: EngineSettings
    params: Params
    layout: Layout
    attend: AttendPages | None
    limits: bool = True

    def empty(self, shape: Shape | None = None) -> functools.partial:
        """Makes slots, pages and places for prompts, in which there is nothing; in `shape`, None = the first one."""
        layout, shape = self.layout, shape or self.layout.first_shape
        sizes: dict[str, Any] = {"arch": self.settings.arch, "slots": shape.slots * layout.shards}
        sizes["dtype"] = np.dtype(cache_dtype(self.params))
        if layout.stretches:
            prompts = {"width": layout.page_length, "prompts": layout.pages * layout.shards}
            return functools.partial(empty_stretches, **sizes, **prompts, stretch=shape.stretch)
        numbers = {"pages": layout.pages, "window_pages": layout.window_pages}
        numbers["states"] = layout.states + layout.row_states
        sizes |= {name: number * layout.shards for name, number in numbers.items()}
        sizes |= {"page_length": layout.page_length, "chunk": layout.chunk, "attend": self.attend}
        delta = self.settings.arch.delta
        return functools.partial(empty_pages, **sizes, update=state_kernel(self.settings.mesh, delta))

    @property
    def prefill(self) -> functools.partial:
        """`decoding.prefill`."""
        settings = self.settings
        return functools.partial(prefill, arch=settings.arch, eos_ids=settings.eos_ids, choices=settings.choices)

    @property
    def decode(self) -> functools.partial:
        """`decoding.decode`."""
        arch = self.settings.arch
        is_plain = self.attend is paged_attention_gpu.attend and not self.limits and arch.hidden_size % INNER == 0
        sizes = {"num_tokens": self.layout.chunk, "pad_id": self.settings.pad_id, "limits": self.limits}
        sizes |= {"block_sums": block_sums if is_plain else None, "ends_early": self.layout.ends_early}
        return functools.partial(decode, **sizes, **self.prefill.keywords)

    @property
    def read(self) -> functools.partial:
        """`decoding.read`."""
        return functools.partial(read, arch=self.settings.arch, choices=self.settings.choices)

    def held(self, shape: Shape | None = None) -> Held:
        """Shapes and shardings of what `empty` makes."""
        mesh, make = self.settings.mesh, self.empty(shape)
        with jax.set_mesh(mesh):
            made = jax.eval_shape(make)
            heads, rows = on_mesh((HEADS, ROWS))
        return jax.tree.map(lambda x: shaped(x, NamedSharding(mesh, heads if x.ndim > 1 else rows)), made)

    def lower_empty(self) -> jax.stages.Lowered:
        """Of `empty`."""
        return _lower(self.empty())

    def lower_prefill(self, size: PrefillSize) -> jax.stages.Lowered:
        """Of a call of prefill."""
        layout, prompts = self.layout, size.at_once * self.layout.shards
        pages = size.width // layout.page_length
        places, first = self._rows(prompts, pages), None
        if layout.stretches:
            row = self._rows(prompts * layout.num_samples)
            places, first = self._rows(prompts), FirstDraws(row, row, row)
        else:
            windows = self._rows(prompts, min(layout.reach, pages)) if layout.reach else None
            places = places, windows, self._rows(prompts) if layout.states else None
        tokens, mask = self._rows(prompts, size.width), self._rows(prompts, size.width, dtype=jnp.bool_)
        given = self.params, self.held(), tokens, mask, places, first, ANY_SAMPLING
        return _lower(self.prefill, *given, np.int32(0), np.int32(0))

    def lower_decode(self, shape: Shape) -> jax.stages.Lowered:
        """Of a chunk."""
        layout, used = self.layout, shape.slots * self.layout.shards
        row, table = self._rows(used), self._rows(used, layout.row_pages)
        destinations = self._rows(used, 2) if layout.go_on_anywhere else row
        windows = Seen(self._rows(used, layout.reach), row, destinations) if layout.reach else None
        given = (self._rows(used, layout.chunk), row) if layout.returns else (None, None)
        runs = row if layout.together else None
        states = RowStates(row, row) if layout.states else None
        plan = Plan(row, row, row, row, row, row, row, table, destinations, states, windows, runs, *given)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.settings.mesh))
        held = self.held(shape if layout.stretches else None)
        return _lower(self.decode, self.params, held, plan, ANY_SAMPLING, number, number)

    def lower_read(self, size: ReadSize) -> jax.stages.Lowered:
        """Of a call that reads tokens of an environment."""
        layout, rows = self.layout, size.rows * self.layout.shards
        row, tokens, table = self._rows(rows), self._rows(rows, size.tokens), self._rows(rows, layout.row_pages)
        follows = self._rows(rows, dtype=jnp.bool_)
        pages, states = self._rows(rows, 2), RowStates(row, row) if layout.states else None
        windows = Seen(self._rows(rows, layout.reach), row, pages) if layout.reach else None
        reading = Reading(tokens, row, row, follows, table, pages, states, windows)
        return _lower(self.read, self.params, self.held(), reading)

    def _rows(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(self.settings.mesh))


def shaped(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with this sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _lower(call: functools.partial, *given: Any) -> jax.stages.Lowered:
    """A call of a jitted function, lowered."""
    return call.func.lower(*given, **call.keywords)
