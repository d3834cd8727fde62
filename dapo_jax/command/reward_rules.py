"""Host: the rules of a config about reward functions, their numbers and the judge, one line per problem."""

import json
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from urllib.parse import urlsplit

from dapo_jax.command.tasks import NO_FUNCTIONS
from dapo_jax.config.derived import environment_classes, trains_on_rewards
from dapo_jax.config.own_functions import is_own
from dapo_jax.config.sections import DistillationConfig, EnvironmentConfig, JudgeConfig, RewardConfig
from dapo_jax.data.experience import OWN_SCORES
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_prompt import read_template
from dapo_jax.rewards.response_format import compiled_pattern
from dapo_jax.rewards.session import OF_SESSION, session_problem
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.weighted import functions_of, is_weighted, parse_parts

_OURS = ("model", "messages", "stream", "n")  # fields of a request to a judge


def reward_problems(reward: RewardConfig, distillation: DistillationConfig, function: str) -> Iterator[str]:
    """What is wrong with reward.function and reward.functions, of which `function` is given."""
    if function == "none" and not reward.model.path and trains_on_rewards(distillation):
        yield (
            "reward.function=none needs a reward model or a teacher: give reward.model.path, or "
            "algorithm.distillation.path with use_task_rewards=False"
        )
    try:
        parts = () if reward.functions == NO_FUNCTIONS else parse_parts(reward.functions)
    except InputError as error:
        yield str(error)
        return
    for name in [part.function for part in parts] or [function]:
        if problem := session_problem(name):
            yield problem
    try:
        compiled_pattern(reward.format.pattern)
    except InputError as error:
        yield str(error)
    if function == "none" and reward.length.form != "none":
        yield (
            f"reward.length.form={reward.length.form} needs a verifier that says which responses are right, but "
            "reward.function=none: choose one, or set form=none"
        )
    if taken := sorted({part.name for part in parts} & {*OWN_SCORES}):
        yield f"reward.functions, {', '.join(taken)}: these numbers are computed from the score: rename the functions"


def environment_problems(environment: EnvironmentConfig, reward: RewardConfig) -> Iterator[str]:
    """What is wrong with the names in the section environment, or does not go with it."""
    try:
        classes = environment_classes(environment.path).values()
    except InputError as error:
        yield str(error)
        return
    for option, name in [*(("path", one) for one in classes), *(("tools", tool) for tool in environment.tools)]:
        if name and not (is_own(name) or name.startswith(OF_SESSION)):
            form = "FILE.py:CLASS or package.module.CLASS" if option == "path" else "FILE.py:FUNCTION"
            yield f"environment.{option}={name!r} must be {form}: correct it"
        elif problem := session_problem(name, f"environment.{option}"):
            yield problem
    if reward.model.path:
        yield (
            f"reward.model.path={reward.model.path} scores a response of one turn, which environment.path and tools "
            "have several of: leave out one of the two"
        )


def metric_problems(metric: str, numbers: Collection[str], function: str) -> Iterator[str]:
    """A filter metric that is never measured."""
    if metric in numbers or (metric == "acc" and function == "none"):  # of which filter_problems speaks
        return
    option = f"reward.function{'s' * is_weighted(function)}={function}"
    close = [name for name in numbers if metric.startswith(name)] or get_close_matches(metric, numbers)
    meant = f" (did you mean {close[0]}?)" if close else ""
    yield (
        f"algorithm.filter_groups.metric={metric} is not a number that {option} returns: "
        f"choose one of {', '.join(numbers)}{meant}, or give a function of your own that returns it"
    )


def measured_numbers(reward: RewardConfig, function: str) -> list[str] | None:
    """The numbers that a response has; None if what `function` returns is not known, as of one of your own."""
    try:
        if not VERIFIERS.keys() >= {*functions_of(function)}:
            return None
    except InputError:  # reward_problems reports it
        return None
    returned = [*VERIFIERS[function].numbers] if function in VERIFIERS else ["acc", "score"]
    returned += [part.name for part in parse_parts(function)] if is_weighted(function) else []
    measured = {
        "reward_model": bool(reward.model.path),
        "length_reward": reward.length.form != "none",
        "overlong": reward.overlong_buffer.enable and reward.overlong_buffer.log,
    }
    return [*returned, *(name for name in OWN_SCORES if measured.get(name, True))]


def judge_problems(judge: JudgeConfig) -> Iterator[str]:
    """What is wrong with reward.judge, if a reward function asks it."""
    if not judge.model:
        yield "reward.judge.model is empty: give the name that the endpoint knows"
    yield from _address_problems(judge.base_url)
    yield from _body_problems(judge.extra_body)
    if judge.max_cost and not judge.price_per_million_input_tokens + judge.price_per_million_output_tokens:
        yield (
            f"reward.judge.max_cost={judge.max_cost} needs prices: give reward.judge.price_per_million_input_tokens "
            "and price_per_million_output_tokens"
        )
    try:
        read_template(judge.template)
    except InputError as error:
        yield str(error)


def _address_problems(address: str) -> Iterator[str]:
    rule = "must be the address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1"
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        yield f"reward.judge.base_url {rule}: correct it"
        return
    if "@" in parts.netloc or parts.query or parts.fragment:  # they may hold a secret: not in the message
        yield f"reward.judge.base_url {rule}, without user, password and parameters: use reward.judge.api_key_env"
    elif not known:
        yield f"reward.judge.base_url={address!r} {rule}: correct it"


def _body_problems(text: str) -> Iterator[str]:
    rule = f'reward.judge.extra_body={text[:100]!r} must be a JSON object such as {{"top_p": 1}}'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield f"{rule} ({error}): correct it"
        return
    if not isinstance(given, dict):
        yield f"{rule}: correct it"
    elif taken := sorted({*given} & {*_OURS}):
        yield f"{rule}, without {', '.join(taken)}, which the run sets: leave it out"
