"""Host: the least time in which devices decode, by rooflines: the engines walk known lengths, nothing is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.parallel.devices import GIB, LIMITS, Limits
from dapo_jax.parallel.gpus import GPUS
from dapo_jax.parallel.mesh import AXES
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.known_lengths import KnownLengths
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.shapes import ROW_MULTIPLE, LengthHistory
from dapo_jax.rollout.slot_programs import layout_of_slots
from dapo_jax.rollout.slot_queue import Opened, PrefillSize, SlotLayout, SlotQueue, Turn
from dapo_jax.rollout.slot_walk import SlotWalk

DTYPE = np.dtype(np.float16)  # of keys and values; as large as bfloat16


@dataclass(frozen=True)
class Machine:
    """A model on the devices that decode it."""

    arch: Architecture
    limits: Limits  # of a device
    fsdp: int  # shards of the rows
    tensor: int  # devices of a shard
    free: float  # GiB of a device, without the weights

    def settings(self, *, prompt_limit: int, limit: int) -> EngineSettings:
        """The engines' settings for prompts and responses of at most so many tokens."""
        mesh: Any = AbstractMesh((1, self.fsdp, self.tensor), AXES)
        return EngineSettings(
            arch=self.arch,
            mesh=mesh,
            eos_ids=(),
            pad_id=0,
            max_prompt_length=prompt_limit,
            max_response_length=limit,
            max_num_seqs=0,
            memory_share=0.85,
            chunk_length=64,
            smallest_rows=ROW_MULTIPLE,
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
    """The shapes of docs/rollout.md by name."""
    shapes = Path(__file__).resolve().parents[2] / "configs" / "shapes"
    small, large = (read_architecture(shapes / f"Qwen2.5-{size}") for size in ("7B", "32B"))
    return {
        "7B v5p:2x2x4": Machine(small, LIMITS["TPU v5"], 4, 4, 86),
        "7B v5e:8x8": Machine(small, LIMITS["TPU v5 lite"], 16, 4, 11),
        "7B h100:8": Machine(small, LIMITS[GPUS["h100"].kind], 2, 4, 57),
        "32B v5p:4x4x8": Machine(large, LIMITS["TPU v5"], 16, 8, 84),
    }


def known(responses: np.ndarray, limit: int) -> LengthHistory:
    """What an engine knows that has sampled such responses before."""
    history = LengthHistory(limit)
    history.add(responses.reshape(-1))
    return history


def wave_seconds(
    machine: Machine, settings: EngineSettings, prompts: np.ndarray, responses: np.ndarray, history: LengthHistory
) -> float:
    """Of a round of the wave engine, whose shards are alike.

    Args:
        prompts: [Q] tokens.
        responses: [Q, G] tokens.
    """
    free = machine.free * GIB
    walk, seconds = walk_round(settings, DTYPE, responses, prompts, history=history, free_bytes=free), 0.0
    for shape, chunks in walk.decodes.items():
        rows, prompts_here = shape.rows / machine.fsdp, shape.prompts / machine.fsdp
        read = prompts_here * shape.width + rows * shape.window
        token = machine.token_seconds(rows, keys=rows * (shape.width + shape.window), read=read)
        seconds += chunks * settings.tokens_per_chunk * token
    return seconds


def slots_for(
    machine: Machine,
    settings: EngineSettings,
    prompts: np.ndarray,
    num_samples: int,
    history: LengthHistory,
    num_prompts: int | None = None,
) -> SlotLayout:
    """The slots of a generation with prompts like these, [Q] tokens; `num_prompts` of them, None = Q."""
    free = machine.free * GIB
    return layout_of_slots(settings, DTYPE, prompts, num_samples, history, free, num_prompts=num_prompts)


class Queue:
    """A generation of the slot engine whose lengths are known; as its devices, it adds up the least time of its chunks.

    Args:
        limit: tokens after which any response ends.
    """

    def __init__(self, machine: Machine, layout: SlotLayout, limit: int) -> None:
        self.machine, self.layout, self.limit, self.seconds = machine, layout, limit, 0.0
        self.outcome = KnownLengths(np.zeros(0, np.int64), limit)
        self.walk = SlotWalk(machine.arch, SlotQueue(layout), lookahead=1, gathers=False)

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
        first = self.walk.queue.add(prompts, np.full(count, self.limit))
        outcome.lengths = np.append(outcome.lengths, responses)
        outcome.seen = np.append(outcome.seen, np.zeros(count, np.int64))
        rows = np.arange(first, first + count)

        def wait() -> None:
            while outcome.alive(rows).any():
                self.walk.advance(self, outcome)

        return wait

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> None:
        """As `slot_walk.Devices`; the walk counts its operations."""

    def decode(self, turn: Turn) -> int:
        """As `slot_walk.Devices`: the shard with most pages sets the time."""
        length = self.layout.page_length
        pages = np.count_nonzero(turn.table.reshape(self.layout.shards, -1), axis=1).max()
        keys = float(pages + turn.slots) * length  # a tail is as long as a page
        self.seconds += length * self.machine.token_seconds(turn.slots, keys=keys, read=keys)
        return length
