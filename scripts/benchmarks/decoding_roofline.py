"""Host: the least time in which devices decode, by rooflines: the engine walks known lengths, nothing is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from dapo_jax.models import paged_attention_gpu
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.parallel.devices import GIB, LIMITS, Limits
from dapo_jax.parallel.gpus import GPUS
from dapo_jax.preflight.rollout import KnownLengths
from dapo_jax.rollout.counting import Counting, Turn
from dapo_jax.rollout.layout import EngineSettings, Layout
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.rows import ALIVE
from dapo_jax.rollout.sizes import choose_layout

SAMPLES = 16  # of a prompt
DTYPE = np.dtype(np.float16)  # of keys and values; as large as bfloat16


@dataclass(frozen=True)
class Machine:
    """A model on the devices that decode it."""

    arch: Architecture
    limits: Limits  # of a device
    fsdp: int  # shards of the rows
    tensor: int  # devices of a shard
    free: float  # GiB of a device, without the weights
    target: int = 512  # kept groups of a step, and prompts of a round

    def settings(self, *, prompt_limit: int, limit: int) -> EngineSettings:
        """The engine's settings for prompts and responses of at most so many tokens."""
        mesh: Any = AbstractMesh((1, self.fsdp, self.tensor), ("data", "fsdp", "tensor"))
        return EngineSettings(
            arch=self.arch,
            mesh=mesh,
            eos_ids=(),
            pad_id=0,
            max_prompt_length=prompt_limit,
            max_response_length=limit,
            max_num_seqs=0,
            memory_share=0.85,
            chunk_length=0,
            lookahead=1,
            seed=0,
        )

    def token_seconds(self, rows: float, *, keys: float, read: float) -> float:
        """The least time in which a shard decodes one token of each of its rows.

        Args:
            keys: that all rows together attend to.
            read: keys that are read, with their values; fewer than `keys` where rows share them.
        """
        arch, flops = self.arch, token_flops(self.arch)
        weights = flops.layers + flops.head  # bytes: 2 of each weight, which a token multiplies once
        key = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * DTYPE.itemsize
        operations = rows * (flops.layers + flops.head) + keys * flops.pair
        assert self.limits.flops is not None and self.limits.bandwidth is not None
        return max(operations / self.limits.flops, (weights + read * key) / self.limits.bandwidth) / self.tensor

    def peak_seconds(self, operations: float) -> float:
        """The time of operations that all devices share, at their peak."""
        assert self.limits.flops is not None
        return operations / (self.limits.flops * self.fsdp * self.tensor)


def machines() -> dict[str, Machine]:
    """The shapes of docs/inside.md by name."""
    shapes = Path(__file__).resolve().parents[2] / "configs" / "shapes"
    sizes = ("0.5B", "1.5B", "7B", "32B")
    half, more, small, large = (read_architecture(shapes / f"Qwen2.5-{size}") for size in sizes)
    return {
        "7B v5p:2x2x4": Machine(small, LIMITS["TPU v5"], 4, 4, 86),
        "7B v5e:8x8": Machine(small, LIMITS["TPU v5 lite"], 16, 4, 11),
        "7B h100:8": Machine(small, LIMITS[GPUS["h100"].kind], 2, 4, 57),
        "32B v5p:4x4x8": Machine(large, LIMITS["TPU v5"], 16, 8, 84),
        **{
            f"{name} h100:1, {rows} rows": Machine(arch, LIMITS[GPUS["h100"].kind], 1, 1, free, rows // SAMPLES)
            for name, arch, free in (("0.5B", half, 60), ("1.5B", more, 50))
            for rows in (256, 512)
        },
    }


def known(responses: np.ndarray, limit: int) -> LengthHistory:
    """What an engine knows that has sampled such responses before."""
    history = LengthHistory(limit)
    history.add(responses.reshape(-1))
    return history


def slots_for(
    machine: Machine,
    settings: EngineSettings,
    prompts: np.ndarray,
    num_samples: int,
    history: LengthHistory,
    num_prompts: int | None = None,
) -> Layout:
    """The slots of a queue with prompts like these, [Q] tokens; `num_prompts` of them, None = Q."""
    attend, free = paged_attention_gpu.attend, machine.free * GIB  # any kernel
    return choose_layout(settings, attend, DTYPE, prompts, num_samples, history, free, num_prompts=num_prompts)


class Simulation(Counting):
    """A queue whose lengths are known; as its devices, it adds up the least time of its chunks."""

    def __init__(self, machine: Machine, layout: Layout, limit: int) -> None:
        super().__init__(machine.arch, layout)
        self.machine, self.limit, self.seconds = machine, limit, 0.0
        self.outcome, self.queue = KnownLengths(np.zeros(0, np.int64)), Queue(layout, lookahead=1)

    @property
    def drawn(self) -> int:
        """Tokens so far."""
        return int(np.minimum(self.outcome.seen, self.outcome.lengths).sum())

    def add(self, prompts: np.ndarray, responses: np.ndarray) -> Callable[[], None]:
        """Queues prompts; the returned function decodes until their responses have ended.

        Args:
            prompts: [Q] tokens.
            responses: [Q, G] tokens.
        """
        outcome, count = self.outcome, responses.size
        first = self.queue.add(prompts, np.full(count, self.limit))
        outcome.lengths = np.append(outcome.lengths, responses)
        outcome.seen = np.append(outcome.seen, np.zeros(count, np.int64))
        rows = np.arange(first, first + count)

        def wait() -> None:
            while (outcome.states(rows) == ALIVE).any():
                self.queue.step(self, outcome)

        return wait

    def decode(self, turn: Turn) -> int:
        """As `Counting`: the shard with most pages sets the time."""
        length = self.layout.page_length
        pages = np.count_nonzero(turn.table.reshape(self.layout.shards, -1), axis=1).max()
        keys = float(pages + turn.shape.slots) * length  # a tail is as long as a page
        self.seconds += length * self.machine.token_seconds(turn.shape.slots, keys=keys, read=keys)
        return super().decode(turn)
