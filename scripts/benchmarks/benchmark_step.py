"""Host: how fast a whole training step is, compared with TRL's GRPOTrainer (torch) and Tunix's GRPO learner.

    python scripts/benchmarks/benchmark_step.py --repeats 3 --output step.json
    python scripts/benchmarks/benchmark_step.py --peers trl=TORCH_ENV/bin/python tunix=TUNIX_ENV/bin/python

A step samples responses, scores them and updates the policy once. Model, lengths, options and contenders are those of
benchmark_update.py. Responses end where the benchmark says: dapo_jax limits each one, and in TRL a logits processor
makes the end-of-sequence token certain there and impossible before. Tunix's sampler has no lengths per row, so Tunix
takes part only in equal lengths. Measured are:

    dapo_jax NAME  sample_batch (with the verifier processes and the group filter) and train_on of training/step.py,
                   metrics, advance; without logging and saving
    trl, tunix     from the start of a step of their trainer to the start of the next

Peers have no group filter, and use their default sampler: TRL transformers' generate, Tunix its own. The columns are
those of benchmark_update.py. The limit adds those of the two parts: sampling at the speed of its matrix products or of
the memory, whichever is slower, and the update.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("benchmark_step")

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmark_rollout
import benchmark_update
from benchmark_update import Ours, run_benchmark
from peer_trainers import TRL, Tunix
from workload import make_lengths, num_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import command


class OursStep(Ours):
    """dapo_jax."""

    def __init__(self, args: argparse.Namespace, dtype: str, options: dict[str, Any]) -> None:
        super().__init__(args, dtype, options)
        engine: Any = self.run.sampler.engine
        engine.submit = functools.partial(engine.submit, limits=make_lengths(args))

    def __call__(self, case: str) -> tuple[int, float]:
        from dapo_jax.run.progress import advance
        from dapo_jax.training.step import sample_batch, train_on

        start, step = time.perf_counter(), self.progress.step + 1
        weights = self.run.learner.networks.decode_weights(self.models.actor.params)
        batch, self.stream = sample_batch(self.run, weights, self.stream, self.progress, step)
        self.models, finish = train_on(self.run, self.models, batch.experience, self.progress, step)
        self.progress, _ = advance(self.run.config, self.progress, batch, batch.metrics | finish()[0])
        self.jax.block_until_ready(self.models)
        seconds = time.perf_counter() - start
        assert batch.experience is not None
        assert batch.experience.num_tokens == make_lengths(self.args).sum()
        return num_tokens(self.args), seconds

    def limit(self, case: str) -> dict[str, float | None]:
        """Tokens per second of matrix products and memory traffic alone."""
        weights = self.run.learner.networks.decode_weights(self.models.actor.params)
        sampling = benchmark_rollout.least_seconds(
            weights, self.run.arch, self.run.learner.mesh, make_lengths(self.args), self.args.prompt_length
        )
        update = benchmark_update.least_seconds(self.run, weights, self.args)
        return {"limit": num_tokens(self.args) / (sampling + update)}


class TRLStep(TRL):
    """TRL's GRPOTrainer."""

    whole_step = True


class TunixStep(Tunix):
    """Google Tunix' GRPO learner."""

    whole_step = True

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        lengths = make_lengths(args)
        if lengths.min() < lengths.max():
            raise NotImplementedError("Tunix's sampler has no lengths per row")
        super().__init__(args, dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__file__, __doc__, {"dapo_jax": OursStep, "trl": TRLStep, "tunix": TunixStep}, arguments)


if __name__ == "__main__":
    command(main)
