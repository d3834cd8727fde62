"""Host: how long a training step takes if sampling runs ahead on devices of its own; a simulation without devices.

    python scripts/benchmarks/simulate_ahead.py [--shape "7B h100:8" ...] [--keep-rate 0.33]

The shape's devices sample and as many train; with trainer.rollout_ahead=0 all of them do one after the other. Sampling
is one queue (backfill=stream), whose least time is that of simulate_decoding.py. Training takes three forward passes at
--training-share of the peak; a second row per shape shows the largest gain: training that takes as long as sampling.
Lengths are lognormal with a median of 3,000 tokens and sigma 1, at most 20,480, or all equal to their mean.

    0         sampling, then training, on twice the devices
    1         a batch is sampled while the one before is trained on: the longer of the two
    2, 4      so many batches are sampled together, in one queue, while so many are trained on
    2, 4 one by one   each batch by the policy of 2 or 4 steps before its own, none awaited but by that rule
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("simulate_ahead")

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decoding_roofline import Machine, known, machines, slots_for
from simulate_decoding import LIMIT, PROMPT_LIMIT, Prompts, parser_of, queues

from dapo_jax.training.metrics import forward_flops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command

PASSES = 3  # forward passes that an update takes
AHEAD = 1, 2, 4


def sampling_seconds(machine: Machine, prompts: Prompts, given: argparse.Namespace, together: int) -> np.ndarray:
    """Seconds of each queue that finds the groups of so many batches, of --batches batches."""
    settings, history = machine.settings(prompt_limit=PROMPT_LIMIT, limit=LIMIT), known(prompts.responses, LIMIT)
    layout_of = functools.partial(slots_for, machine, settings, prompts.lengths, prompts.responses.shape[1], history)
    target, steps = given.target * together, given.batches // together
    found = queues(machine, layout_of, prompts, target, given.keep_rate, steps=steps)
    return np.array([queue.seconds for queue, _ in found])


def one_by_one(sampling: np.ndarray, training: float, ahead: int) -> float:
    """Seconds of a step if a batch begins once the one before is sampled and the policy `ahead` + 1 steps before is
    there, and its step once it is sampled and the step before has ended; the first `ahead` steps are left out."""
    sampled, trained = [0.0], [0.0]
    for step, seconds in enumerate(np.tile(sampling, 8), 1):
        sampled.append(max(sampled[-1], trained[max(step - 1 - ahead, 0)]) + seconds)
        trained.append(max(sampled[-1], trained[-1]) + training)
    return (trained[-1] - trained[ahead]) / (len(trained) - 1 - ahead)


def simulated(name: str, machine: Machine, lengths: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Two rows of the table: training at its own speed, and as long as sampling."""
    given = argparse.Namespace(**{**vars(given), "target": given.target or machine.target})
    count = round(1.5 * given.batches * given.target / given.keep_rate)
    prompts = Prompts.draw([given.seed, 0], count, given.keep_rate)
    if lengths == "equal":
        prompts = dataclasses.replace(prompts, responses=np.full_like(prompts.responses, prompts.responses.mean()))
    sampling = {together: sampling_seconds(machine, prompts, given, together) for together in AHEAD}
    both = dataclasses.replace(machine, fsdp=2 * machine.fsdp)
    alone = sampling_seconds(both, prompts, given, 1).mean()
    rows = (prompts.lengths[:, None] + prompts.responses)[prompts.keep].ravel()
    flops = PASSES * forward_flops(machine.arch, rows) / prompts.keep.sum() * given.target
    own = machine.peak_seconds(flops) / given.training_share
    found = []
    for case, training in (("", own), (", balanced", float(sampling[1].mean()))):
        steps = {0: alone + training / 2}
        steps |= {ahead: np.maximum(sampling[ahead], ahead * training).mean() / ahead for ahead in AHEAD}
        found.append(
            {
                "devices, lengths": f"2 x {name.split()[1]}, {lengths}{case}",
                "sampling, s": round(sampling[1].mean()),
                "training, s": round(training),
                **{str(ahead): round(seconds) for ahead, seconds in steps.items()},
                **{f"{ahead} one by one": round(one_by_one(sampling[1], training, ahead)) for ahead in AHEAD[1:]},
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    shapes = machines()
    parser = parser_of(__doc__, shapes, ["7B h100:8", "7B v5p:2x2x4"])
    parser.add_argument("--training-share", type=float, default=0.4, help="of the peak that training reaches")
    parser.add_argument("--batches", type=int, default=8, help="that are sampled, a multiple of 4")
    given = parser.parse_args(arguments)
    if given.batches < 4 or given.batches % 4 or not 0 < given.keep_rate <= 1 or not 0 < given.training_share <= 1:
        parser.error("--batches must be a multiple of 4, --keep-rate and --training-share in (0, 1]")
    cases = [(name, lengths) for name in given.shape for lengths in ("equal", "long-tailed")]
    rows = [row for name, lengths in cases for row in simulated(name, shapes[name], lengths, given)]
    print(markdown_table(rows))


if __name__ == "__main__":
    command(main)
