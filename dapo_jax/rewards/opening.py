"""Host: starts what verifies the responses of a run: worker processes, a thread of this process, a judge."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import jax

from dapo_jax.config.sections import RewardConfig
from dapo_jax.rewards.in_process import InProcessVerifiers
from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.judged import JudgedVerifiers
from dapo_jax.rewards.verdicts import Verifiers
from dapo_jax.rewards.verifiers import is_of_session
from dapo_jax.rewards.weighted import has_judge, without_judge
from dapo_jax.rewards.worker_pool import VerifierPool


@contextmanager
def open_verifiers(
    functions: Iterable[str], reward: RewardConfig, own: Mapping[str, Callable[..., Any]], folder: Path
) -> Iterator[tuple[dict[str, Verifiers], Judge | None]]:
    """What verifies by each reward function, and the judge that they share, if one of them asks it.

    Args:
        own: reward functions of this Python session, by the NAME of python:NAME.
        folder: of the judge's answers.

    Raises:
        InputError: a verifier cannot work.
    """
    names = list(dict.fromkeys(functions))
    with ExitStack() as stack:
        judge = None
        if any(has_judge(name) for name in names):
            process, count = jax.process_index(), jax.process_count()
            judge = stack.enter_context(closing(Judge(reward.judge, folder, process=process, num_processes=count)))
        yield {name: stack.enter_context(_verifiers(name, reward, own, judge)) for name in names}, judge


def _verifiers(
    name: str, reward: RewardConfig, own: Mapping[str, Callable[..., Any]], judge: Judge | None
) -> Verifiers:
    """Worker processes for a reward function, or a thread for one that only this session has, and the judge."""
    if judge is not None and has_judge(name):
        others = without_judge(name)
        rest = _verifiers(others, reward, own, None) if others else None
        return JudgedVerifiers(name, judge, rest, error_score=reward.error_score)
    if is_of_session(name):
        return InProcessVerifiers(name, own, error_score=reward.error_score, pattern=reward.format.pattern)
    return VerifierPool(
        name,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_limit_mb=reward.memory_limit_mb,
        error_score=reward.error_score,
        pattern=reward.format.pattern,
        env=reward.env,
        hidden_env=(reward.judge.api_key_env,),
    )
