"""Host: how long the decoding of a training step takes at least, under three schedules; a simulation without devices.

    python scripts/benchmarks/simulate_decoding.py [--shape "7B v5p:2x2x4" ...] [--segment-length 8192]

Schedules of a step that needs 512 kept groups (--target), each kept with probability --keep-rate; shapes of one device
need one for each prompt of their rows:

    rounds      rounds of so many prompts, one after the other, a queue for each
    one queue   all rounds in one queue, left once enough groups are kept (backfill=stream)
    segments    a step goes on with the unfinished responses of earlier steps, then begins target / keep rate prompts;
                it draws at most --segment-length tokens of each response; two queues, one after the other

Responses are lognormal with a median of 3,000 tokens and sigma 1, half of the variance between prompts, at most 20,480;
a round is also shown with all of them that long. The engine's own rules decide what is decoded when. Rounds are as many
as a step needs on average. A token takes the larger of operations / peak and bytes / bandwidth: a device reads its
weights once, and the pages of its rows; the shard with most pages sets the time. Links, prefill, draws and the host are
left out. The prefill that segments repeat has columns of its own: each token once, and with the engine's padding.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("simulate_decoding")

import argparse
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decoding_roofline import SAMPLES, Machine, Simulation, known, machines, slots_for

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience
from dapo_jax.dynamic_sampling.accepted import Accepted
from dapo_jax.dynamic_sampling.accumulation import Found, Sampled
from dapo_jax.dynamic_sampling.prompt_stream import History, PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.layout import Layout
from dapo_jax.rollout.queue import needed_work
from dapo_jax.training.step import accumulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command

from dapo_jax.tools.plan import plan

LIMIT, PROMPT_LIMIT = 20480, 2048  # tokens of a response and of a prompt, at most
ROUNDS = 3  # whose time is averaged


@dataclass(frozen=True)
class Prompts:
    """Prompts by number, and what sampling them gives."""

    lengths: np.ndarray  # [Q] tokens
    responses: np.ndarray  # [Q, G] tokens
    keep: np.ndarray  # [Q] bool

    @classmethod
    def draw(cls, seed: Sequence[int], count: int, keep_rate: float) -> "Prompts":
        """Long-tailed responses; half of the variance of their logarithms lies between prompts."""
        rng = np.random.default_rng(seed)
        normal = np.sqrt(0.5) * (rng.normal(size=(count, 1)) + rng.normal(size=(count, SAMPLES)))
        responses = np.clip(3000 * np.exp(normal), 1, LIMIT).astype(int)
        lengths = np.clip(200 * np.exp(0.4 * rng.normal(size=count)), 16, PROMPT_LIMIT).astype(int)
        return cls(lengths, responses, rng.random(count) < keep_rate)


class SimulatedRollout:
    """What a step samples, in a queue of its own; `wait` knows what is kept."""

    def __init__(self, prompts: Prompts, queue: Simulation) -> None:
        self.prompts, self.queue, self.sampled = prompts, queue, Sampled()
        self.started: deque[tuple[Sequence[int], Callable[[], None]]] = deque()

    @property
    def under_way(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self.started)

    def start(self, numbers: Sequence[int]) -> None:
        """Queues the prompts with these numbers."""
        rows = np.array(numbers) % len(self.prompts.keep)
        self.started.append((numbers, self.queue.add(self.prompts.lengths[rows], self.prompts.responses[rows])))

    def wait(self) -> Round:
        """Decodes until the responses to the oldest of them have ended."""
        numbers, wait = self.started.popleft()
        wait()
        return verdicts(numbers, self.prompts.keep[np.array(numbers) % len(self.prompts.keep)])

    def close(self) -> None:
        """Nothing is held."""


def one_queue(
    machine: Machine, layout_of: Callable[[int], Layout], prompts: Prompts, given: argparse.Namespace
) -> tuple[float, float]:
    """Mean seconds of a step, and tokens drawn per trained one.

    A step begins with the prompt after the last accepted one (leftover=requeue).

    Args:
        layout_of: the slots for so many prompts.
    """
    count, seconds, drawn, trained = len(prompts.keep), 0.0, 0, 0
    limit, steps = count // given.target, given.steps
    for queue, accepted in queues(machine, layout_of, prompts, given.target, given.keep_rate, steps=steps, limit=limit):
        assert accepted.experience is not None
        seconds, drawn = seconds + queue.seconds, drawn + queue.drawn
        trained += int(prompts.responses[accepted.experience.numbers % count].sum())
    return seconds / steps, drawn / trained


def queues(
    machine: Machine,
    layout_of: Callable[[int], Layout],
    prompts: Prompts,
    target: int,
    keep_rate: float,
    *,
    steps: int,
    limit: int = 0,
) -> Iterator[tuple[Simulation, Accepted]]:
    """The queue of each step at its end, with what it has accepted: `target` groups.

    Args:
        layout_of: the slots for so many prompts.
        keep_rate: that the first step expects.
        limit: of rounds; 0 = none.
    """
    count, options = len(prompts.keep), FilterGroupsConfig(backfill="stream", max_num_gen_batches=limit)
    state, source = StreamState(0, keep_rate, History.empty(count)), PromptSource(lambda n: n % count, count)
    for step in range(1, steps + 1):
        found = Found(state, source, options, target, target, step)
        queue = Simulation(machine, layout_of(found.schedule.expected_prompts), LIMIT)
        rollout: Any = SimulatedRollout(prompts, queue)
        known_already: Any = lambda round_: round_  # noqa: E731
        accepted = accumulate(rollout, known_already, found)
        state = accepted.state
        yield queue, accepted


def verdicts(numbers: Sequence[int], keep: np.ndarray) -> Round:
    """A round; its responses hold no tokens here."""
    count = len(keep)
    groups = Experience(
        numbers=np.array(numbers),
        rows=np.array(numbers),
        prompts=[[]] * count,
        responses=np.zeros((count, SAMPLES, 0), np.int32),
        mask=np.zeros((count, SAMPLES, 0), bool),
        logprobs=np.zeros((count, SAMPLES, 0), np.float32),
        finished=np.ones((count, SAMPLES), bool),
        texts=[[""] * SAMPLES] * count,
        scores={},
        versions=np.zeros(count, np.int64),
        failed=np.zeros((count, SAMPLES), bool),
    )
    return Round(groups, keep, keep.astype(np.float32))


def segment(prompts: Prompts, age: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What a step draws of responses that began `age` steps before, if R of them are unfinished.

    Returns:
        tokens of prompts and responses so far [R], and tokens to draw [R], at most `length`.
    """
    rest = prompts.responses - age * length
    going = rest > 0
    begun = np.broadcast_to(prompts.lengths[:, None], rest.shape) + age * length
    return begun[going], np.minimum(rest[going], length)


def staleness(responses: np.ndarray, length: int) -> tuple[float, int, float]:
    """Steps from the draw of a token to the step in which all responses of its group have ended.

    Args:
        responses: [Q, G] tokens.

    Returns:
        the mean and the largest of the groups' first tokens, and the mean of all tokens.
    """
    ends = ((responses - 1) // length).max(axis=1)  # steps after the first token
    full = responses // length  # segments
    drawn = length * full * (full - 1) / 2 + full * (responses - full * length)  # sum of position // length
    tokens = (ends[:, None] * responses - drawn).sum() / responses.sum()
    return float(ends.mean()), int(ends.max()), float(tokens)


def segmented(machine: Machine, given: argparse.Namespace) -> tuple[float, float, float]:
    """Mean seconds of steps in which responses of all ages go on: decoding, their prefill, and that with padding."""
    length, count = given.segment_length, round(given.target / given.keep_rate)
    ages = -(-LIMIT // length)
    cohorts = [Prompts.draw([given.seed, 1, step], count, 1.0) for step in range(ages - 1 + given.steps)]
    seconds, needed, padded = 0.0, 0.0, 0.0
    for step in range(ages - 1, len(cohorts)):
        parts = [segment(cohorts[step - age], age, length) for age in range(ages - 1, 0, -1)]  # the oldest first
        begun, rest = (np.concatenate(values) for values in zip(*parts, strict=True))
        old = slot_queue(machine, begun, rest[:, None], prompt_limit=PROMPT_LIMIT + LIMIT, limit=length)
        new = np.minimum(cohorts[step].responses, length)
        seconds += old.seconds
        seconds += slot_queue(machine, cohorts[step].lengths, new, prompt_limit=PROMPT_LIMIT, limit=length).seconds
        needed += machine.peak_seconds(token_flops(machine.arch).of_prompts(begun))
        padded += machine.peak_seconds(old.computed["prefill"])
    return seconds / given.steps, needed / given.steps, padded / given.steps


def slot_queue(
    machine: Machine, prompts: np.ndarray, responses: np.ndarray, *, prompt_limit: int, limit: int
) -> Simulation:
    """A queue for these prompts, at its end."""
    settings, history = machine.settings(prompt_limit=prompt_limit, limit=limit), known(responses, limit)
    queue = Simulation(machine, slots_for(machine, settings, prompts, responses.shape[1], history), limit)
    queue.add(prompts, responses)()
    return queue


def in_rounds(machine: Machine, layout: Layout, prompts: Prompts, given: argparse.Namespace) -> tuple[float, float]:
    """Mean rounds of a step, and their seconds."""
    rounds = plan(given.keep_rate, target=given.target, gen_batch_size=given.target).rounds
    seconds = 0.0
    for first in range(0, ROUNDS * given.target, given.target):
        here = slice(first, first + given.target)
        queue = Simulation(machine, layout, LIMIT)
        queue.add(prompts.lengths[here], prompts.responses[here])()
        seconds += queue.seconds
    return rounds, rounds * seconds / ROUNDS


def one_round(name: str, machine: Machine, prompts: Prompts, given: argparse.Namespace) -> dict[str, Any]:
    """The row of a shape in the table of rounds."""
    row: dict[str, Any] = {"model, devices": name, "rows of a shard": given.target * SAMPLES // machine.fsdp}
    lengths, responses = prompts.lengths[: given.target], prompts.responses[: given.target]
    for case, drawn in (("long tail", responses), ("all longest", np.full_like(responses, LIMIT))):
        queue = slot_queue(machine, lengths, drawn, prompt_limit=PROMPT_LIMIT, limit=LIMIT)
        needed = needed_work(machine.arch, lengths, drawn)["decode"]
        row[f"{case}: slots"] = ", ".join(map(str, queue.layout.ladder))
        row[f"{case}: computed / needed"] = queue.computed["decode"] / needed
        row[f"{case}: s"] = queue.seconds if queue.seconds < 100 else round(queue.seconds)
    return row


def simulated(
    name: str, machine: Machine, given: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The row of a shape in each table; the last is empty without segments."""
    given = argparse.Namespace(**{**vars(given), "target": given.target or machine.target})
    count = max(4 * round(given.target / given.keep_rate), ROUNDS * given.target)
    prompts = Prompts.draw([given.seed, 0], count, given.keep_rate)
    settings, history = machine.settings(prompt_limit=PROMPT_LIMIT, limit=LIMIT), known(prompts.responses, LIMIT)

    def layout_of(num_prompts: int) -> Layout:
        return slots_for(machine, settings, prompts.lengths, SAMPLES, history, num_prompts)

    rounds, apart = in_rounds(machine, layout_of(given.target), prompts, given)
    queue, drawn = one_queue(machine, layout_of, prompts, given)
    row = {
        "model, devices": name,
        "rounds, s": round(apart),
        "one queue, s": round(queue),
        "one queue / rounds": queue / apart,
        "tokens drawn / trained: rounds": rounds,
        "one queue": drawn,
    }
    if not given.segment_length:
        return one_round(name, machine, prompts, given), row, {}
    seconds, needed, padded = segmented(machine, given)
    first, most, tokens = staleness(prompts.responses, given.segment_length)
    segments = {
        "model, devices": name,
        "segments, s": round(seconds),
        "segments / rounds": seconds / apart,
        "prefill again, s": round(needed),
        "padded, s": round(padded),
        "steps from first token to update": first,
        "most": most,
        "from any token": tokens,
    }
    return one_round(name, machine, prompts, given), row, segments


def parser_of(description: str | None, shapes: Collection[str], default: list[str]) -> argparse.ArgumentParser:
    """The options of all simulations."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=shapes, default=default)
    parser.add_argument("--target", type=int, help="kept groups per step, and prompts of a round; default: the shape's")
    parser.add_argument("--keep-rate", type=float, default=1 / 3, help="share of groups that are kept")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and of what is kept")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    shapes = machines()
    parser = parser_of(__doc__, shapes, list(shapes))
    parser.add_argument("--segment-length", type=int, default=8192, help="tokens of a response per step; 0 = leave out")
    parser.add_argument("--steps", type=int, default=3, help="that are averaged, of one queue and of segments")
    given = parser.parse_args(arguments)
    positive = given.steps > 0 and (given.target is None or given.target > 0)
    if not positive or not 0 < given.keep_rate <= 1 or not 0 <= given.segment_length < LIMIT:
        parser.error(f"--target and --steps must be positive, --keep-rate in (0, 1], --segment-length below {LIMIT}")
    tables = zip(*(simulated(name, shapes[name], given) for name in given.shape), strict=True)
    print("\n\n".join(markdown_table(rows) for rows in tables if rows[0]))


if __name__ == "__main__":
    command(main)
