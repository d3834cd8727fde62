"""Small models with prompts and engines: whatever the schedule, it has to draw the responses of `reference`."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from jax.sharding import Mesh
from small_policy import engine_settings

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.transformer import Params, forward, logits, positions_of
from dapo_jax.models.vocabulary_blocks import BLOCK
from dapo_jax.models.weights import init_params
from dapo_jax.parallel.compilation import Programs
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout import devices as devices_module
from dapo_jax.rollout import engine as engine_module
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN, Sampling, row_keys, sample

FREE, GREEDY = Sampling.create(1.0, 1.0, -1), Sampling.create(0.0, 1.0, -1)
PAD, SAMPLES = 0, 4
TRITON = functools.partial(paged_attention_gpu.attend, interpret=True)
MOSAIC = functools.partial(paged_attention_tpu.attend, interpret=True)
# Of an engine's settings, those that its programs do not depend on.
SCHEDULE = {"max_num_seqs": 0, "memory_share": 1.0, "lookahead": 0, "seed": 0}


class SharedPrograms(Programs):
    """Programs that all engines with the same settings compile once; says which of them an engine uses."""

    def __init__(self, mesh: Mesh, found: dict) -> None:
        super().__init__(mesh)
        self._found = found
        self.called: list[Any] = []
        self.prepared: list[Any] = []

    def prepare(self, key: Hashable, lower: Any) -> None:
        self.prepared.append(key)
        super().prepare(key, lower)

    def get(self, key: Hashable, lower: Any) -> Any:
        self.called.append(key)
        return super().get(key, lower)


@functools.cache
def _found(kind: Any, settings: EngineSettings) -> dict:
    return {}


def shared(engine: Any) -> Any:
    """The engine, with the programs of all engines like it."""
    settings = dataclasses.replace(engine.settings, **SCHEDULE)
    engine.programs = SharedPrograms(settings.mesh, _found(engine.attend, settings))
    return engine


def called(engine: Engine) -> list[Any]:
    """Keys of the programs that an engine of `shared` has decoded with."""
    assert isinstance(engine.programs, SharedPrograms)
    return engine.programs.called


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """SAMPLES responses to each of some prompts."""

    arch: Architecture
    params: Params  # on the host, one entry for each layer
    prompts: Sequence[Sequence[int]]
    eos_ids: tuple[int, ...]
    length: int  # most tokens of a response
    width: int  # of the longest prompt, at most
    numbers: Sequence[int]
    tolerance: float = 1e-5  # between a log-probability of an engine and that of `forward`

    @property
    def prompt_lengths(self) -> np.ndarray:
        return np.array([len(prompt) for prompt in self.prompts])

    def settings(self, mesh: Mesh | None = None, **changes: Any) -> EngineSettings:
        own = {"arch": self.arch, "eos_ids": self.eos_ids, "pad_id": PAD, "max_prompt_length": self.width}
        own |= {"max_response_length": self.length, "chunk_length": 8}
        return engine_settings(mesh or shapes.one_device_mesh(), **{**own, **changes})

    def engine(self, kind: str, mesh: Mesh | None = None, **changes: Any) -> Engine:
        """16 slots for all rows, with "pages" or "stretches", of which each width is a program: so chunks are long.

        With "triton" and "mosaic" kernels of GPUs and TPUs attend to pages, in Pallas' interpreter.
        """
        attend = {"pages": attend_gathered, "stretches": None, "triton": TRITON, "mosaic": MOSAIC}[kind]
        chunk = self.length // 2 if attend is None else 8
        return shared(Engine(self.settings(mesh, **{"max_num_seqs": 16, "chunk_length": chunk, **changes}), attend))

    def on(self, mesh: Mesh) -> Params:
        return jax.device_put(self.params, replicated(mesh))

    def sample(self, engine: Engine, *, sampling: Sampling = FREE, **options: Any) -> Rollout:
        mesh, fields = engine.settings.mesh, {"num_samples": SAMPLES, "purpose": TRAIN, "stop": None}
        fields |= {name: options.pop(name) for name in fields if name in options}
        own = {"prompts": self.prompts, "numbers": self.numbers, **options}
        with jax.set_mesh(mesh):
            try:
                return engine.generate(request=Request(self.on(mesh), sampling=sampling, **fields), **own)
            finally:
                engine.close()

    @functools.cached_property
    def reference(self) -> Rollout:
        """All rows have a slot from the start, on one device."""
        found = self.sample(self.engine("pages", max_num_seqs=1000))
        self.assert_drawn(found, FREE)
        return found

    def assert_tokens_drawn(self, rollout: Rollout, sampling: Sampling, *, purpose: int = TRAIN) -> None:
        """Each token of the policy is what one pass of `forward` draws after those before it, in the first prompts."""
        count = len(rollout.mask) // SAMPLES
        prompts, prompt_mask = pad_prompts(self.prompts[:count], self.width, PAD)
        tokens = np.concatenate([prompts.repeat(SAMPLES, 0), rollout.responses], axis=1)
        mask = np.concatenate([prompt_mask.repeat(SAMPLES, 0), rollout.mask], axis=1)
        keys = row_keys(0, purpose, np.array(self.numbers[:count]), SAMPLES)
        expected, logprobs = _redrawn(self.params, tokens, mask, keys, sampling, self.arch, self.width, self.eos_ids)
        own = rollout.mask if rollout.by_policy is None else rollout.by_policy
        np.testing.assert_array_equal(rollout.responses[own], np.asarray(expected)[own])
        np.testing.assert_allclose(rollout.logprobs[own], np.asarray(logprobs)[own], atol=self.tolerance)

    def assert_drawn(self, rollout: Rollout, sampling: Sampling) -> None:
        """As `assert_tokens_drawn`, and responses end where they may."""
        self.assert_tokens_drawn(rollout, sampling)
        lengths, ends = rollout.mask.sum(axis=1), np.isin(rollout.responses, self.eos_ids) & rollout.mask
        np.testing.assert_array_equal(rollout.mask, np.arange(self.length) < lengths[:, None])
        np.testing.assert_array_equal(
            ends, rollout.finished[:, None] & (np.arange(self.length) == lengths[:, None] - 1)
        )
        assert (lengths[~rollout.finished] == self.length).all()


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _redrawn(params, tokens, mask, keys, sampling, arch, width, eos_ids):
    """The token and its log-probability that each position of the responses draws, [B, R] each."""
    scores = logits(params, forward(params, tokens, positions_of(mask), mask, arch), arch)[:, width - 1 : -1]
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, -arch.vocab_size % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(*scores.shape[:2], -1, BLOCK).swapaxes(0, 1)
    positions = jnp.arange(len(blocks))
    found = jax.lax.map(lambda place: sample(place[0], keys, place[1], sampling, eos_ids), (blocks, positions))
    return jax.tree.map(jnp.transpose, found)


def assert_same(found: Rollout, expected: Rollout, rows: Any = slice(None), *, tolerance: float = 1e-5) -> None:
    """`found` has `rows` of the expected responses."""
    for name in ("mask", "responses", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name)[rows], name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs[rows], atol=tolerance)


def queues_of(
    monkeypatch: pytest.MonkeyPatch, pages: int | None = None, window_pages: int | None = None
) -> list[Queue]:
    """The queues that engines make from now on, with so many pages a shard; None = as many as they take."""
    queues: list[Queue] = []

    def made(layout, **options):
        queues.append(Queue(layout, **options))
        return queues[-1]

    def layout_of(*args, **sizes):
        layout = choose_layout(*args, **sizes)
        sizes = {"pages": pages or layout.pages, "window_pages": window_pages or layout.window_pages}
        return dataclasses.replace(layout, **sizes)

    choose_layout = engine_module.choose_layout
    monkeypatch.setattr(engine_module, "choose_layout", layout_of)
    monkeypatch.setattr(devices_module, "Queue", made)
    return queues


def assert_all_pages_are_free(queue: Queue) -> None:
    for shard in queue.shards:
        assert sorted(shard.free) == list(range(1, queue.layout.pages)) and not shard.prompts and not shard.left
        assert not shard.parked and not shard.returning
        assert sorted(shard.free_windows) == list(range(1, queue.layout.window_pages))
        states, both = queue.layout.states, queue.layout.states + queue.layout.row_states
        assert [sorted(free) for free in (shard.free_states, shard.free_row_states)] == [
            list(range(2, states)),
            list(range(states, both)),
        ]


@functools.cache
def dense(num_layers: int = 1) -> Rollouts:
    """A dense model."""
    arch = dataclasses.replace(shapes.ARCH, num_layers=num_layers)
    params = jax.device_get(unstack_layers(jax.jit(lambda: init_params(arch, 0))(), arch))
    prompts = [[5 + i % 50] * (1 + i * 5 % 23) for i in range(16)]
    return Rollouts(arch, params, prompts, eos_ids=(2, 3), length=70, width=24, numbers=range(16))
