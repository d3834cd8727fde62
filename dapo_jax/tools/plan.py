"""Host: the expected cost of dynamic sampling, given how often the policy is right.

    dapo-jax plan --accuracy 0.1 --n 16 --train-batch-size 512 --gen-batch-size 1536
    dapo-jax plan --beta 0.5 2 --n 16 ...
    dapo-jax plan --accuracies accuracies.txt --n 16 ...

A prompt that is answered right with probability p has a mixed group of n samples, and is kept, with probability
1 - p^n - (1 - p)^n; a single sample is always kept (keep_singletons). The mean over the prompts is the keep rate k. The
number of kept groups in N rounds of G prompts is Binomial(N G, k), so a step needs more than N rounds with probability
P(Binomial(N G, k) < B).
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import bdtr

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import InputError, say

ALMOST_SURELY = 0.999
MAX_ROUNDS = 1000


@dataclass(frozen=True)
class Plan:
    """What a training step takes, on average."""

    keep_rate: float
    rounds: float  # of gen_batch_size prompts
    limit: int | None  # rounds that are enough in 999 of 1000 steps; None = more than MAX_ROUNDS
    generated_per_trained: float  # groups sampled per group trained on, in whole rounds whose surplus is thrown away
    lowest_per_trained: float  # the same if no kept group is lost: 1 / keep rate


def keep_probability(accuracies: np.ndarray, n: int) -> np.ndarray:
    """Probability that a group of n samples is kept, for prompts of these success probabilities."""
    return 1 - accuracies**n - (1 - accuracies) ** n if n > 1 else np.ones_like(accuracies)


def plan(keep_rate: float, *, target: int, gen_batch_size: int) -> Plan:
    """The cost of steps of `target` kept groups."""
    short = [1.0]  # probability that N rounds are too few
    while short[-1] > 1e-12 and len(short) <= MAX_ROUNDS:
        prompts = len(short) * gen_batch_size
        short.append(float(bdtr(min(target - 1, prompts), prompts, keep_rate)))  # at most target - 1 are kept
    limit = next((rounds for rounds, probability in enumerate(short) if probability <= 1 - ALMOST_SURELY), None)
    rounds = math.fsum(short)
    return Plan(
        keep_rate=keep_rate,
        rounds=rounds if limit is not None else math.inf,
        limit=limit,
        generated_per_trained=rounds * gen_batch_size / target if limit is not None else math.inf,
        lowest_per_trained=1 / keep_rate if keep_rate else math.inf,
    )


def read_accuracies(arguments: argparse.Namespace) -> np.ndarray:
    """Success probabilities of prompts, equally weighted."""
    if arguments.accuracies is not None:
        words = Path(arguments.accuracies).read_text(encoding="utf-8").split()
        try:
            return np.array([float(word) for word in words])
        except ValueError as error:
            raise InputError(f"--accuracies={arguments.accuracies} must hold only numbers: {error}") from error
    if arguments.beta is not None:
        return np.random.default_rng(0).beta(*arguments.beta, size=200_000)
    return np.array([arguments.accuracy])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax plan", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--accuracy", type=float, help="one success probability for all prompts")
    source.add_argument("--beta", type=float, nargs=2, metavar=("A", "B"), help="success probabilities Beta(A, B)")
    source.add_argument("--accuracies", help="file with a measured success probability of each prompt")
    parser.add_argument("--n", type=int, default=16, help="samples per prompt")
    parser.add_argument("--train-batch-size", type=int, default=512)
    parser.add_argument("--gen-batch-size", type=int, help="default: the train batch size")
    parser.add_argument("--tokens", type=float, default=1000.0, help="mean tokens of a response")
    given = parser.parse_args(arguments)
    with refusals(["plan"]):
        accuracies, size = read_accuracies(given), given.gen_batch_size or given.train_batch_size
        if not accuracies.size or not ((accuracies >= 0) & (accuracies <= 1)).all():
            raise InputError("success probabilities must be one or more numbers in [0, 1]: correct them")
        if min(given.n, given.train_batch_size, size) < 1:
            raise InputError("--n and both batch sizes must be at least 1: correct them")
        say(described(accuracies, given.n, given.train_batch_size, size, given.tokens))


def described(accuracies: np.ndarray, n: int, target: int, size: int, tokens: float) -> str:
    """The plan in lines.

    Args:
        target, size: the train and the generation batch size, in prompts.
        tokens: mean tokens of a response.
    """
    keep_rate = float(np.mean(keep_probability(accuracies, n)))
    found = plan(keep_rate, target=target, gen_batch_size=size)
    limit = found.limit if found.limit is not None else f"more than {MAX_ROUNDS}: change the data"
    return "\n".join(
        [
            f"keep rate                      {found.keep_rate:.4f}",
            f"rounds per step                {found.rounds:.2f}",
            f"generated tokens per step      {found.rounds * size * n * tokens:.3g}",
            f"generated per trained          {found.generated_per_trained:.2f}, whole rounds",
            f"                               {found.lowest_per_trained:.2f}, if no kept group is lost (carry)",
            f"max_num_gen_batches            {limit}, enough in {ALMOST_SURELY:.1%} of the steps",
        ]
    )
