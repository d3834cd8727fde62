"""Host: the compiled functions of an engine: lowered from shapes alone, and compiled once, in the background."""

import functools
import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dapo_jax.models.paged_attention import AttendPages
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.sharding import batch_sharding, replicated
from dapo_jax.rollout.decoding import HEADS, ROWS, FirstDraws, Held, Plan, decode, prefill
from dapo_jax.rollout.layout import EngineSettings, Layout, PrefillSize, Shape, cache_dtype
from dapo_jax.rollout.pages import empty_pages
from dapo_jax.rollout.queue import Seen
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.stretches import empty_stretches

logger = logging.getLogger(__name__)

ANY_SAMPLING = Sampling.create(1.0, 1.0, -1)  # its values are traced: any other lowers to the same program


@dataclass(frozen=True)
class Calls:
    """What a queue with such a layout calls. Lower under `jax.set_mesh`.

    Args:
        params: shapes and shardings of the decoding weights.
        attend: attention to pages; None = stretches.
        returns: rows may return with tokens that are given.
    """

    settings: EngineSettings
    params: Params
    layout: Layout
    attend: AttendPages | None
    returns: bool = False

    def empty(self, shape: Shape | None = None) -> functools.partial:
        """Makes slots, pages and places for prompts, in which there is nothing; in `shape`, None = the first one."""
        settings, layout = self.settings, self.layout
        shape = shape or layout.first_shape
        sizes = {
            "arch": settings.arch,
            "slots": shape.slots * layout.shards,
            "dtype": np.dtype(cache_dtype(self.params)),
        }
        if layout.stretches:
            prompts = {"width": layout.page_length, "prompts": layout.pages * layout.shards}
            return functools.partial(empty_stretches, **sizes, **prompts, stretch=shape.stretch)
        pages = {"pages": layout.pages * layout.shards, "window_pages": layout.window_pages * layout.shards}
        return functools.partial(empty_pages, **sizes, **pages, page_length=layout.page_length, attend=self.attend)

    def held(self, shape: Shape | None = None) -> Held:
        """Shapes and shardings of what `empty` makes."""
        make = self.empty(shape)

        def laid_out(x: Any) -> Any:
            sharding = NamedSharding(self.settings.mesh, HEADS if len(x.shape) > 1 else ROWS)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        with jax.set_mesh(self.settings.mesh):
            return jax.tree.map(laid_out, jax.eval_shape(make))

    def lower_empty(self) -> jax.stages.Lowered:
        """Of `empty`."""
        make = self.empty()
        return make.func.lower(**make.keywords)

    def lower_prefill(self, size: PrefillSize) -> jax.stages.Lowered:
        """Of a call of prefill."""
        layout, prompts = self.layout, size.at_once * self.layout.shards
        pages = size.width // layout.page_length
        places, first = self._rows(prompts, pages), None
        if layout.stretches:
            row = self._rows(prompts * layout.num_samples)
            places, first = self._rows(prompts), FirstDraws(row, row, row)
        else:
            places = places, self._rows(prompts, min(layout.reach, pages)) if layout.reach else None
        tokens, mask = self._rows(prompts, size.width), self._rows(prompts, size.width, dtype=jnp.bool_)
        return prefill.lower(
            self.params,
            self.held(),
            tokens,
            mask,
            places,
            first,
            ANY_SAMPLING,
            np.int32(0),
            np.int32(0),
            arch=self.settings.arch,
            eos_ids=self.settings.eos_ids,
            choices=self.settings.choices,
        )

    def lower_decode(self, shape: Shape) -> jax.stages.Lowered:
        """Of a chunk."""
        settings, layout, used = self.settings, self.layout, shape.slots * self.layout.shards
        row, table = self._rows(used), self._rows(used, layout.row_pages)
        windows = Seen(self._rows(used, layout.reach), row, row) if layout.reach else None
        given = self._rows(used, layout.chunk) if self.returns else None
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(settings.mesh))
        return decode.lower(
            self.params,
            self.held(shape if layout.stretches else None),
            Plan(row, row, row, row, row, row, row, table, row, windows, given),
            ANY_SAMPLING,
            number,
            number,
            arch=settings.arch,
            num_tokens=layout.chunk,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
            choices=settings.choices,
        )

    def _rows(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(self.settings.mesh))


class Programs:
    """Programs compiled once, by key."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._thread: ThreadPoolExecutor | None = None  # one, since XLA compiles on several threads
        self._found: dict[Hashable, Future[Any]] = {}

    def prepare(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Starts to compile what `lower` returns, unless this key is known."""
        if key not in self._found:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
            self._found[key] = self._thread.submit(self._compile, key, lower)

    def get(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """The compiled program. Compiles it now if that has not begun, or has failed."""
        found = self._found.get(key)
        if found is None or found.cancel() or found.exception() is not None:
            compiled = self._compile(key, lower)
            self._found[key] = found = Future()
            found.set_result(compiled)
        return found.result()

    def close(self) -> None:
        """Drops what is still waiting to be compiled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        start = time.perf_counter()
        try:
            with jax.set_mesh(self._mesh):
                compiled = lower().compile()
        except Exception:
            logger.warning("cannot compile %s", key, exc_info=True)
            raise
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        return compiled
