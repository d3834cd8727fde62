"""Host: the rules of a config about the judge that scores responses, one line per problem."""

import json
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from dapo_jax.command.option_uses import verifiers_of
from dapo_jax.config.sections import Config
from dapo_jax.errors import InputError
from dapo_jax.rewards.judge_prompt import read_template
from dapo_jax.rewards.weighted import JUDGE

_OURS = ("model", "messages", "stream", "n")  # fields of a request


def judge_problems(config: Config) -> Iterator[str]:
    """What is wrong with reward.judge, if a reward function asks it."""
    asked = False
    with suppress(InputError):  # reward_problems reports it
        asked = JUDGE in verifiers_of(config)
    if not asked:
        return
    judge = config.reward.judge
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
