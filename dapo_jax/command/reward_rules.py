"""Host: the rules of a config about reward functions and the numbers that they return, one line per problem."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from difflib import get_close_matches

from dapo_jax.config.sections import Config
from dapo_jax.data.experience import OWN_SCORES
from dapo_jax.errors import InputError
from dapo_jax.problems import NO_FUNCTIONS, given_function
from dapo_jax.rewards.response_format import compiled_pattern
from dapo_jax.rewards.verifiers import OF_SESSION, VERIFIERS, session_problem
from dapo_jax.rewards.weighted import functions_of, is_weighted, parse_parts


def reward_problems(config: Config, own: Collection[str]) -> Iterator[str]:
    """What is wrong with reward.function and reward.functions.

    Args:
        own: names of functions that this Python session has.
    """
    given = config.reward.functions
    try:
        parts = () if given == NO_FUNCTIONS else parse_parts(given)
    except InputError as error:
        yield str(error)
        return
    for function in [part.function for part in parts] or [config.reward.function]:
        if function.startswith(OF_SESSION) and function.removeprefix(OF_SESSION) not in own:
            yield session_problem(function)
    try:
        compiled_pattern(config.reward.format.pattern)
    except InputError as error:
        yield str(error)
    if given_function(config) == "none" and config.reward.length.form != "none":
        yield (
            f"reward.length.form={config.reward.length.form} needs a verifier that says which responses are right, but "
            "reward.function=none: choose one, or set form=none"
        )
    if taken := sorted({part.name for part in parts} & {*OWN_SCORES}):
        yield f"reward.functions, {', '.join(taken)}: these numbers are computed from the score: rename the functions"


def metric_problems(config: Config) -> Iterator[str]:
    """A filter metric that is never measured. Which numbers a function of your own returns is not known here."""
    groups, known = config.algorithm.filter_groups, measured_numbers(config)
    if not groups.enable or known is None:
        return
    if groups.metric in known or (groups.metric == "acc" and given_function(config) == "none"):  # _algorithm_problems
        return
    function = given_function(config)
    option = f"reward.function{'s' * is_weighted(function)}={function}"
    close = [name for name in known if groups.metric.startswith(name)] or get_close_matches(groups.metric, known)
    meant = f" (did you mean {close[0]}?)" if close else ""
    yield (
        f"algorithm.filter_groups.metric={groups.metric} is not a number that {option} returns: "
        f"choose one of {', '.join(known)}{meant}, or give a function of your own that returns it"
    )


def measured_numbers(config: Config) -> list[str] | None:
    """The numbers that a response has; None if what its reward function returns is not known."""
    reward, returned = config.reward, _returned_numbers(config)
    if returned is None:
        return None
    measured = {
        "reward_model": bool(reward.model.path),
        "length_reward": reward.length.form != "none",
        "overlong": reward.overlong_buffer.enable and reward.overlong_buffer.log,
    }
    return [*returned, *(name for name in OWN_SCORES if measured.get(name, True))]


def _returned_numbers(config: Config) -> list[str] | None:
    """The numbers that reward.function or reward.functions returns, without OWN_SCORES; None if that is not known."""
    with suppress(InputError):  # reward_problems reports it
        function = given_function(config)
        if not VERIFIERS.keys() >= {*functions_of(function)}:
            return None
        if not is_weighted(function):
            return [*VERIFIERS[function].numbers]
        return ["acc", "score", *(part.name for part in parse_parts(function))]
    return None
