"""Host: what an episode is given, what it has earned, and the trial of an environment before a run."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dapo_jax.data.rows import PromptRow
from dapo_jax.environments.pool import EnvironmentPool, Play
from dapo_jax.environments.protocol import Description, Fault, Reply
from dapo_jax.errors import InputError

SALT = 0x656E76  # keeps the seeds of environments apart from other draws
TRUTHS = ("ground_truth", "answer", "solution")  # columns that users of TRL name so, unless they exist
COLUMN = "environment"  # of a row: which of several
TRIAL = "A first try."


def seed_of(seed: int, number: int, *, held_out: bool = False) -> int:
    """The seed of all episodes of a prompt number: a group begins in one state. Held-out problems have their own."""
    return int(np.random.SeedSequence([seed, SALT, number, *([1] * held_out)]).generate_state(1)[0])


def columns_of(row: PromptRow) -> dict[str, Any]:
    """What `reset` gets of a row, by name."""
    return dict.fromkeys(TRUTHS, row.ground_truth) | {"data_source": row.data_source} | row.columns


def name_of(row: PromptRow, names: Collection[str]) -> str:
    """The name of a row's environment; "" if there is one alone. InputError if it has none of the names."""
    if "" in names:
        return ""
    if (found := row.columns.get(COLUMN)) in names:
        return str(found)
    raise InputError(
        f"{row.origin} must name one of {', '.join(names)} of environment.path in its column {COLUMN}, not {found!r}: "
        "correct the row, or add the environment"
    )


def told(rows: Iterable[PromptRow], descriptions: Mapping[str, Description]) -> list[PromptRow]:
    """The rows as played, with the name of their environment, if it has one, as that of their metrics, and its tools.

    Tools are variables of the chat template; prompts of plain text have none.
    """
    found = []
    for row in rows:
        name = name_of(row, descriptions)
        tools = {} if isinstance(row.prompt, str) else {"tools": descriptions[name].tools}
        kwargs = {**tools, **row.template_kwargs} if descriptions[name].tools else row.template_kwargs
        found.append(replace(row, task=name, template_kwargs=kwargs, played=True))
    return found


@dataclass
class Earned:
    """What an episode was given so far.

    Args:
        sums: environment.reward=sum, else the last step's counts.
    """

    sums: bool
    reward: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)  # of the last info that has each
    turns: int = 0
    calls: int = 0
    invalid: int = 0
    ended: bool = False  # by the environment, or `get_reward` has spoken; False: by a limit

    def take(self, reply: Reply) -> None:
        """The reply to a turn, or to the end: what `get_reward` says is the reward of the whole episode."""
        self.turns += not reply.ends
        self.calls += reply.calls
        self.invalid += reply.invalid
        self.numbers |= reply.numbers
        self.ended = reply.done or reply.ends
        if reply.reward is not None:
            self.reward = self.reward + reply.reward if self.sums and not reply.ends else reply.reward

    @property
    def verdict(self) -> dict[str, float]:
        """Named numbers as a verifier returns them.

        Unless the environment says it, acc is the reward, or 0 if a limit ended the episode: the environment might
        have said it at the end, and what was earned on the way is no answer.
        """
        acc = self.reward if self.ended else 0.0
        return {"score": self.reward, "acc": acc} | self.numbers | {"num_turns": float(self.turns)}


def try_on(pool: EnvironmentPool, row: PromptRow, seed: int) -> list[Reply]:
    """Plays the start and one turn of the row's environment, twice with one seed: what was said.

    Raises:
        InputError: it fails, or is not the same both times.
    """
    name, plays = name_of(row, pool.descriptions), list[Play]()
    description = pool.descriptions[name]
    try:
        for _ in range(2):
            play, first = pool.begin(seed, columns_of(row), name)
            plays.append(play)
            first.result()
            pool.step(play, TRIAL).result()
            if description.tools and description.rewards:
                pool.finish(play).result()
    except Fault as fault:
        raise InputError(
            f"the environment failed on a trial episode for {row.origin} with {fault}: correct it (dapo-jax env check "
            "plays one)"
        ) from fault
    finally:
        for play in plays:
            pool.end(play)
    if plays[0].replies != plays[1].replies:
        raise InputError(
            f"the environment says something else in a second episode for {row.origin} with the same seed: let it draw "
            "from the seed alone, as the episodes of a group must begin alike"
        )
    return plays[0].replies
