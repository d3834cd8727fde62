"""Host: what each policy of dynamic sampling generates and how long it takes, on one task and one fixed policy.

    python scripts/benchmarks/benchmark_dynamic_sampling.py --config configs/quickstart.py --steps 8 --output FILE.json

Each line is the same number of training steps of data.train_batch_size groups under another policy. The model is not
trained in between, so all lines have the same keep rate. The lines take turns, step by step, so a slow spell of the
machine affects all of them. All shapes are compiled beforehand. Columns:

    gen               data.gen_batch_size in rounds of train_batch_size, or the slack of a stream
    rounds            rounds of prompts that were judged, per step
    keep rate         share of kept groups among those that were evaluated
    groups, tokens    generated per trained group and token
    x minimum         generated groups times the keep rate, per trained group: 1 = every kept group was trained on
    s/step            seconds of sampling and verifying per step, without the update, which is the same for all lines
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("benchmark_dynamic_sampling")

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.config.sections import Config
from dapo_jax.dynamic_sampling.accepted import Accepted
from dapo_jax.dynamic_sampling.prompt_stream import StreamState
from dapo_jax.learner.optimizer import Models
from dapo_jax.run.parts import Run, open_run
from dapo_jax.training.state import first_state
from dapo_jax.training.step import sample_groups

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table


@dataclass
class Line:
    """One policy and its cost so far."""

    name: str
    gen: float
    run: Run
    stream: StreamState
    seconds: float = 0.0
    steps: list[Accepted] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The measured columns."""
        rounds = [round_ for step in self.steps for round_ in step.rounds]
        trained = [step.experience for step in self.steps if step.experience is not None]
        evaluated = sum(len(round_.keep) for round_ in rounds)
        kept = sum(int(round_.keep.sum()) for round_ in rounds)
        groups = evaluated / sum(len(experience) for experience in trained)
        tokens = sum(r.outcomes.lengths.sum() for r in rounds) / sum(experience.num_tokens for experience in trained)
        return {
            "policy": self.name,
            "gen": self.gen,
            "rounds": sum(step.num_rounds for step in self.steps) / len(self.steps),
            "keep rate": kept / evaluated,
            "groups": groups,
            "tokens": tokens,
            "x minimum": groups * kept / evaluated,
            "s/step": self.seconds / len(self.steps),
        }


def with_policy(config: Config, *, gen_batch_size: int, **filter_groups: Any) -> Config:
    """`config` under another policy of dynamic sampling."""
    groups = dataclasses.replace(config.algorithm.filter_groups, **filter_groups)
    return dataclasses.replace(
        config,
        algorithm=dataclasses.replace(config.algorithm, filter_groups=groups),
        data=dataclasses.replace(config.data, gen_batch_size=gen_batch_size),
    )


def policies(config: Config) -> Iterator[tuple[str, float, Config]]:
    """Name, size and config of each line."""
    groups, batch = config.algorithm.filter_groups, config.data.train_batch_size
    for leftover in ("discard", "requeue", "carry"):
        for rounds in (1, 2, 3):
            yield (
                f"batch, {leftover}",
                rounds,
                with_policy(config, gen_batch_size=rounds * batch, backfill="batch", leftover=leftover),
            )
    for slack in (0.75, 1.0, 1.25):
        stream = dataclasses.replace(groups.stream, slack=slack)
        yield (
            "stream, requeue",
            slack,
            with_policy(config, gen_batch_size=batch, backfill="stream", leftover="requeue", stream=stream),
        )


def measure(config: Config, steps: int) -> list[dict[str, Any]]:
    """The rows of the table."""
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        models, stream = state.models, state.stream
        lines = [Line(name, gen, dataclasses.replace(run, config=c), stream) for name, gen, c in policies(config)]
        compile_shapes(run, models, [line.run.config for line in lines])
        for step in range(1, steps + 1):
            for line in lines:
                start = time.perf_counter()
                weights = line.run.learner.networks.decode_weights(models.actor.params)
                accepted = sample_groups(line.run, weights, line.stream, step=step, version=step - 1, kl_coef=0.0)
                line.seconds += time.perf_counter() - start
                line.stream = accepted.state
                line.steps.append(accepted)
            run.monitor.console.close()
            print(f"step {step} of {steps} done", flush=True)
        return [line.row() for line in lines]


def compile_shapes(run: Run, models: Models, configs: Sequence[Config]) -> None:
    """Samples one step of each policy."""
    for config in configs:
        weights, stream = run.learner.networks.decode_weights(models.actor.params), first_state(run).stream
        sample_groups(dataclasses.replace(run, config=config), weights, stream, step=1, version=0, kl_coef=0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each policy")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    given, rest = parser.parse_known_args(arguments)
    config = read_config(["benchmark", *rest])
    rows = measure(config, given.steps)
    print(markdown_table(rows))
    if given.output:
        about = {"jax": jax.__version__, "devices": [str(device) for device in jax.devices()], "steps": given.steps}
        given.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with refusals(sys.argv):
        main()
