"""Host: the environment of a run, and what it tells of itself."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from dapo_jax.command.tasks import given_function, held_out_options, parse_tasks
from dapo_jax.config.derived import plays_episodes
from dapo_jax.config.sections import Config, DataConfig, EnvironmentConfig, RewardConfig
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.environments.chat import Chat
from dapo_jax.environments.pool import EnvironmentPool
from dapo_jax.environments.tool_formats import format_of
from dapo_jax.errors import InputError
from dapo_jax.parallel.processes import gather
from dapo_jax.rewards.verdicts import Verdict
from dapo_jax.rewards.weighted import described

ENDS = ("done", "max_turns", "length", "fault")


@dataclass
class Environments:
    """The environments of a run.

    Args:
        chats: of each environment, by its name.
        seed: of the run.
        check: called while waiting for environments; may raise.
    """

    pool: EnvironmentPool
    chats: Mapping[str, Chat]
    seed: int
    data: DataConfig
    settings: EnvironmentConfig
    check: Callable[[], None] = lambda: None
    # By name, once tried; False: its `reset` has said nothing in the trial, and must not for any row.
    speaks_first: dict[str, bool] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # since `take_metrics`

    @property
    def gives_rewards(self) -> bool:
        """Whether the environments give rewards; if not, reward functions read the whole chat."""
        return all(one.rewards for one in self.pool.descriptions.values())

    @property
    def may_speak_first(self) -> bool:
        """Whether an environment may add to prompts."""
        return any(self.speaks_first.get(name, True) for name in self.chats)

    def take_metrics(self) -> dict[str, float]:
        """`environment/` metrics since the last call, of all processes."""
        found = gather(self.pool.take_counts())
        calls = {name: (max if name == "longest" else sum)(one[name] for one in found) for name in found[0]}
        counts, self.counts = self.counts, Counter()
        ended = max(sum(counts[name] for name in ENDS), 1)
        return {
            **{f"environment/{name}": calls[name] for name in ("calls", "timeouts", "retries", "faults")},
            "environment/time_s/mean": calls["seconds"] / max(calls["calls"], 1),
            "environment/time_s/max": calls["longest"],
            "environment/invalid_calls": float(counts["invalid"]),
            "environment/cut_observations": float(counts["cut"]),
            **{f"environment/ended_by_{name}": counts[name] / ended for name in ENDS},
        }

    def judged(self, own: dict[str, float], verdict: Verdict) -> Verdict:
        """The verdict on an episode that has these numbers of the environment, and this verdict on its chat."""
        if self.gives_rewards:
            return Verdict(own, verdict.pred, None)
        missing = verdict.error is not None and not verdict.numbers
        return verdict if missing else replace(verdict, numbers=verdict.numbers | own)

    def without_function(self, config: Config) -> RewardConfig:
        """The rewards of a run, without a function if the environment gives rewards.

        Raises:
            InputError: both give rewards.
        """
        reward = config.reward
        if not self.gives_rewards:
            return reward
        tasks = parse_tasks(config.evaluate.tasks, held_out_options(config.data, config.evaluate, reward))
        given = [(described(given_function(reward)), given_function(reward))]
        given += [(f"evaluate.tasks, {task.name!r}: reward_function", task.reward_function) for task in tasks]
        for option, function in given:
            if function not in ("auto", "none"):
                raise InputError(
                    f"{option} must not be given with environment.path={self.settings.path}, which gives rewards "
                    "itself: leave it out, or get_reward and reward"
                )
        return replace(reward, function="none")


@contextmanager
def open_environments(
    config: Config, tokenizer: Tokenizer, check: Callable[[], None] = lambda: None
) -> Iterator[Environments | None]:
    """The environment of a config, or its tools alone; None if it has neither. Its processes end with it.

    Args:
        check: called while waiting for environments; may raise.

    Raises:
        InputError: the environment or the chat template does not fit.
    """
    settings = config.environment
    if not plays_episodes(settings):
        yield None
        return
    tool_format = format_of(tokenizer.chat_template, settings.tool_format)
    with EnvironmentPool(settings, tool_format, env=config.reward.env) as pool:
        giving = [name for name, one in pool.descriptions.items() if one.rewards]
        if len(giving) not in (0, len(pool.descriptions)):
            raise InputError(
                f"environment.path={settings.path}: only {', '.join(giving)} give rewards: add get_reward to the others"
            )
        chats = {name: Chat(tokenizer, config.data, settings, one.tools) for name, one in pool.descriptions.items()}
        for chat in chats.values():
            chat.check()
        yield Environments(pool, chats, config.seed, config.data, settings, check)
