"""Host: the rollout engine that decodes in waves whose rows become fewer and whose cache grows.

All rows of a wave have sampled equally many tokens. Between two chunks the host looks for responses that have ended:
they are handed on, and the survivors move to a smaller batch once they fit (shapes.rungs); a full cache is widened
(shapes.windows). None of this changes a token: every draw has an address (sampling.py).
"""

import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.data.containers import Prompts, Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.memory import free_bytes
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import batch_sharding, put
from dapo_jax.rollout.decoding import Chunk, Wave, keep_rows, resize_cache, start_wave
from dapo_jax.rollout.engine import OnFinished, StopRule
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.sampling import Sampling, row_keys
from dapo_jax.rollout.shapes import LengthHistory, expected_path, prompt_width, rungs, wave_size, window_of
from dapo_jax.rollout.wave_programs import WaveSettings, cache_dtype, lower_chunk, rows_at_once

LENGTHS = "lengths "  # precedes the number of a purpose in a checkpoint


class WaveEngine:
    """A `RolloutEngine`.

    Args:
        check: called before each chunk; may raise to end the sampling.
    """

    def __init__(self, settings: WaveSettings, check: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self.check = check
        self.programs = Programs(settings.mesh)
        self._histories: dict[int, LengthHistory] = {}  # by purpose: evaluation may end sooner than training
        self._free_bytes: float | None = None  # on each device, before the first wave
        self._param_shapes: Params | None = None

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        limits: np.ndarray | None = None,
        stop: StopRule | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """As `RolloutEngine.generate`, whose parameters say what to sample and how; `limits` is for measurements.

        Args:
            limits: [Q * num_samples], most tokens of each response; None = max_response_length for all.
        """
        longest, num_rows = self.settings.max_response_length, len(prompts) * num_samples
        responses = Responses(
            np.full(num_rows, longest) if limits is None else np.minimum(limits, longest),
            max_length=longest,
            eos_ids=self.settings.eos_ids,
            pad_id=self.settings.pad_id,
            stop=stop,
            on_finished=on_finished,
        )
        history, shards = self.history(purpose), num_batch_shards(self.settings.mesh)
        max_rows = self._rows_at_once(params, num_samples, history)
        size = wave_size(len(prompts), num_samples, max_rows=max_rows, shards=shards)
        call = _Call(params, sampling, purpose, num_samples, size, responses, history)
        for first in range(0, len(prompts), size):
            self.check()
            wave = _Decoding(self, call, prompts[first : first + size], first * num_samples)
            wave.run(numbers[first : first + size])
            history.add(responses.lengths(wave.first_row, wave.end_row))
        return responses.rollout()

    def history(self, purpose: int) -> LengthHistory:
        """How long the responses of a purpose have been."""
        return self._histories.setdefault(purpose, LengthHistory(self.settings.max_response_length))

    def _rows_at_once(self, params: Params, num_samples: int, history: LengthHistory) -> int:
        if self._free_bytes is None and not self.settings.max_num_seqs:
            self._free_bytes = free_bytes(self.settings.mesh)
        return rows_at_once(self.settings, cache_dtype(params), history, num_samples, self._free_bytes or 0.0)

    def state(self) -> dict[str, np.ndarray]:
        """What the size of the next wave depends on."""
        return {
            **{f"{LENGTHS}{purpose}": history.to_array() for purpose, history in self._histories.items()},
            "free_bytes": np.array(-1.0 if self._free_bytes is None else self._free_bytes),
            "devices": np.array(_checksum(self.settings.mesh)),
        }

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`; the free memory of other devices is ignored."""
        for name, array in arrays.items():
            if name.startswith(LENGTHS):
                self.history(int(name.removeprefix(LENGTHS))).restore(np.asarray(array))
        free = float(arrays["free_bytes"])
        same = int(arrays.get("devices", -1)) == _checksum(self.settings.mesh)
        self._free_bytes = free if same and free >= 0 else None

    def param_shapes(self, params: Params) -> Params:
        """Shapes and shardings of the decoding weights, which are the same in every call."""
        shapes = self._param_shapes
        if shapes is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            self._param_shapes = shapes
        return shapes

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()


def _checksum(mesh: Mesh) -> int:
    """Equal for equally many devices of one kind, divided alike; the same on every process."""
    return zlib.crc32(f"{mesh.devices.flat[0].device_kind} {dict(mesh.shape)}".encode())


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the waves of one call of `generate` share."""

    params: Params
    sampling: Sampling
    purpose: int
    num_samples: int
    size: int  # prompts of a wave
    responses: Responses
    history: LengthHistory


class _Decoding:
    """One wave. Prompts missing to its size are filled with copies of the last that start finished."""

    def __init__(self, engine: WaveEngine, call: _Call, prompts: Sequence[Sequence[int]], first_row: int) -> None:
        settings = engine.settings
        self.engine, self.settings, self.call, self.prompts = engine, settings, call, prompts
        self.responses = call.responses
        self.first_row, self.end_row = first_row, first_row + len(prompts) * call.num_samples
        self.shards = num_batch_shards(settings.mesh)
        self.ladder = settings.ladder
        self.width = prompt_width(max(map(len, prompts)), settings.max_prompt_length)
        self.rows = np.arange(first_row, first_row + call.size * call.num_samples)  # response of each row of the wave
        self.rows[self.rows >= self.end_row] = -1
        self.samples_per_prompt = call.num_samples  # rows that share a prompt's part of the cache
        self.window = self.ladder[0]
        self.sampled = 0  # tokens of each row that are sampled or being sampled

    def run(self, numbers: Sequence[int]) -> None:
        """Decodes until all rows have ended."""
        pending: deque[tuple[Chunk, np.ndarray, int]] = deque()
        self._prepare()
        wave, chunk = self._start(numbers)
        pending.append((chunk, self.rows, 0))
        self.sampled = 1
        while True:
            longest = self.responses.longest(self.rows)
            while len(pending) > self.settings.lookahead or (pending and self.sampled >= longest):
                self.responses.add(*pending.popleft())
            alive = self.responses.alive(self.rows)
            if self.sampled >= longest or not alive.any():
                break
            self.engine.check()
            wave = self._resize(wave, alive)
            wave, chunk = self._decode(wave)
            pending.append((chunk, self.rows, self.sampled))
            self.sampled += self.settings.tokens_per_chunk
            self._prepare_next()

    def _start(self, numbers: Sequence[int]) -> tuple[Wave, Chunk]:
        settings, call = self.settings, self.call
        missing = call.size - len(self.prompts)
        tokens, mask = pad_prompts([*self.prompts, *[self.prompts[-1]] * missing], self.width, settings.pad_id)
        addresses = np.array([*numbers, *[-1] * missing], np.int32)
        batch = put(Prompts(tokens, mask, addresses), batch_sharding(settings.mesh))
        keys = row_keys(settings.seed, call.purpose, batch.numbers, call.num_samples)
        return start_wave(
            call.params,
            batch,
            keys,
            call.sampling,
            arch=settings.arch,
            window=self.window,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
        )

    def _resize(self, wave: Wave, alive: np.ndarray) -> Wave:
        """The wave with room for the next chunk, and with fewer rows if the survivors fit a smaller batch."""
        window = window_of(self.ladder, self._tokens_after_next())
        here = alive.reshape(self.shards, -1)
        per_device = min(rung for rung in self._rungs(here.shape[1]) if rung >= here.sum(axis=1).max())
        if window == self.window and per_device == here.shape[1]:
            return wave
        chosen = None
        same = self.samples_per_prompt
        if per_device < here.shape[1]:
            # A device with fewer survivors repeats its first row; the tokens of the copies belong to no response.
            local = np.zeros((self.shards, per_device), np.int32)
            rows = np.full((self.shards, per_device), -1)
            for shard, (own, of_shard) in enumerate(zip(self.rows.reshape(here.shape), here, strict=True)):
                kept = np.flatnonzero(of_shard)
                local[shard, : len(kept)], rows[shard, : len(kept)] = kept, own[kept]
            chosen = put(local.reshape(-1), batch_sharding(self.settings.mesh))
            self.rows, self.samples_per_prompt = rows.reshape(-1), 1
        self.window = window
        caches = wave.caches
        rest = keep_rows(dataclasses.replace(wave, caches=[]), chosen, num_samples=same) if chosen is not None else wave
        for layer, cache in enumerate(caches):  # only one layer at a time is in memory twice
            caches[layer] = resize_cache(cache, chosen, num_samples=same, window=window)
        return dataclasses.replace(rest, caches=caches)

    def _rungs(self, rows: int) -> list[int]:
        return rungs(rows, self.settings.smallest_rows)

    def _decode(self, wave: Wave) -> tuple[Wave, Chunk]:
        program = self.engine.programs.get(*self._lowering(len(self.rows), self._prompts(), self.window))
        return program(self.call.params, wave, self.call.sampling)

    def _prompts(self) -> int:
        """Prompts whose keys and values the wave caches."""
        return len(self.rows) // self.samples_per_prompt

    def _tokens_after_next(self) -> int:
        """Tokens of a row in the cache when the next chunk is done."""
        return self.sampled - 1 + self.settings.tokens_per_chunk

    def _prepare(self) -> None:
        """Starts to compile the shapes that the wave is expected to go through."""
        rows, history = self.call.size * self.call.num_samples, self.call.history
        path = [(rows // self.shards, self.window)]
        if history.known:
            path = expected_path(
                self._rungs(rows // self.shards),
                self.settings.tokens_per_chunk,
                self.ladder,
                history.alive,
                lookahead=self.settings.lookahead,
            )
        for per_device, window in path:
            whole = per_device * self.shards == rows
            prompts = self.call.size if whole else per_device * self.shards
            self.engine.programs.prepare(*self._lowering(per_device * self.shards, prompts, window))

    def _prepare_next(self) -> None:
        """Starts to compile for the chunk after the one just dispatched if that needs a wider window."""
        needed = self._tokens_after_next()
        if self.window < needed <= self.ladder[-1]:
            window = window_of(self.ladder, needed)
            self.engine.programs.prepare(*self._lowering(len(self.rows), self._prompts(), window))

    def _lowering(self, rows: int, prompts: int, window: int) -> tuple[Any, Callable[[], jax.stages.Lowered]]:
        settings, sampling = self.settings, self.call.sampling
        params = self.engine.param_shapes(self.call.params)

        def lower() -> jax.stages.Lowered:
            return lower_chunk(settings, params, sampling, rows=rows, prompts=prompts, width=self.width, window=window)

        return (rows, prompts, self.width, window), lower
