"""Host: one environment process: `python -m dapo_jax.environments.worker FD MEMORY_LIMIT_MB SPECIFICATION`.

It holds many episodes. A request names an episode by its number and holds all turns of the policy so far, so that a
process without the episode plays it again. Python's and NumPy's global random states belong to each episode.
"""

import dataclasses
import json
import random
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.config.own_functions import load_named
from dapo_jax.environments.protocol import Environment, Episode, Fault, Reply
from dapo_jax.rewards.messages import receive, short
from dapo_jax.rewards.session import of_session, received
from dapo_jax.rewards.worker import connected, error_text, is_exhaustion

PATH, TOOLS = "environment.path", "environment.tools"
WHAT = "the environment", "environment"


class Held:
    """An episode under way, with its random states."""

    def __init__(self, environment: Environment, seed: int, row: Mapping[str, Any]) -> None:
        self.episode, self.played = Episode(environment, seed, row), 0
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        self._save()

    def play(self, actions: list[str], finish: bool) -> Reply:
        """The next reply: of the start, of one of the actions, or of the end."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        number, self.played = self.played, self.played + 1
        try:
            if number == 0:
                return self.episode.reset()
            return self.episode.finish() if finish and number > len(actions) else self.episode.step(actions[number - 1])
        finally:
            self._save()

    def _save(self) -> None:
        self._python, numpy = random.getstate(), sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()


class Server:
    """Answers requests about the episodes of environments, which have names."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self.environments = environments
        self.held: dict[int, Held] = {}

    def answer(self, message: bytes) -> dict[str, Any]:
        """What the pool is sent: the descriptions, the newest replies of an episode, or an error."""
        request = json.loads(message)
        for number in request["ended"]:
            self.held.pop(number, None)
        if request["episode"] is None:
            return {name: dataclasses.asdict(one.description) for name, one in self.environments.items()}
        number, actions, finish = request["episode"], request["actions"], request["finish"]
        wanted = 1 + len(actions) + finish
        held = self.held.pop(number, None)
        if held is None or held.played != wanted - 1:
            held = Held(self.environments[request["name"]], request["seed"], request["row"])
        try:
            replies = [held.play(actions, finish) for _ in range(wanted - held.played)]
        except BaseException as error:  # including SystemExit: the next episode may be fine
            text = short(str(error)) if isinstance(error, Fault) else error_text(error, *WHAT)
            return {"error": text, "exhausted": is_exhaustion(error)}
        self.held[number] = held
        return {"replies": [dataclasses.asdict(reply) for reply in replies]}


def main() -> None:
    descriptor, memory_limit_mb, text = sys.argv[1:]
    connection, reply = connected(int(descriptor), int(memory_limit_mb))
    try:
        environments, error = loaded(json.loads(text), connection)
        reply(json.dumps(error).encode())
        server = Server(environments) if error is None else None
        while server is not None:
            reply(json.dumps(server.answer(receive(connection))).encode())
    except (EOFError, ConnectionError):
        return


def names_in(specification: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a specification loads: the option and the name of each."""
    classes = filter(None, specification["classes"].values())
    return [*((PATH, path) for path in classes), *((TOOLS, tool) for tool in specification["tools"])]


def loaded(specification: Mapping[str, Any], connection: socket.socket) -> tuple[dict[str, Environment], str | None]:
    """The environments by name, or why there are none. Classes of a session arrive over the connection first."""
    sent: dict[str, Any] = {}
    pickles = [(one, [receive(connection) for _ in of_session(one)]) for _, one in names_in(specification)]

    def found(option: str, name: str) -> Callable[..., Any]:
        kind = "class" if option == PATH else "function"
        return sent[name] if name in sent else load_named(option, name, kind)

    try:
        for name, parts_of in pickles:
            sent |= received(name, parts_of)
        tools, environments = [found(TOOLS, name) for name in specification["tools"]], {}
        for name, path in specification["classes"].items():
            given = f"{PATH}={path!r}" if path else f"{TOOLS}={tuple(specification['tools'])}"
            options = {"arguments": specification["arguments"][name], "tool_format": specification["tool_format"]}
            environments[name] = Environment(given, found(PATH, path) if path else None, tools, **options)
        return environments, None
    except ValueError as error:
        return {}, str(error)
    except BaseException as error:
        return {}, f"the environment must load, but raised {error_text(error, *WHAT)}: correct its module"


if __name__ == "__main__":
    main()
