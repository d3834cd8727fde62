"""Host: plays one episode of an environment with random text, and prints what the model would see, token by token.

    dapo-jax env check lake.py:Lake
    dapo-jax env check desk.py:Desk --model Qwen/Qwen2.5-0.5B-Instruct --row '{"answer": "12"}'
    dapo-jax env check --tools desk.py:calculator --turns 2

Each group of tokens says who wrote it: the prompt, the policy (what a run trains on) or the environment (what it does
not). Nothing is trained, and no device is used. Without --model, a token is a character of a chat in ChatML.
"""

import json
import random
import string
from collections.abc import Sequence
from typing import Any

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.config.sections import DataConfig, EnvironmentConfig
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer, load_tokenizer, piece_tokenizer
from dapo_jax.environments.chat import Chat
from dapo_jax.environments.episodes import Earned, columns_of, told, try_on
from dapo_jax.environments.pool import EnvironmentPool
from dapo_jax.environments.protocol import Fault, Reply
from dapo_jax.environments.tool_formats import EXAMPLES, FORMATS, format_of
from dapo_jax.errors import InputError, say
from dapo_jax.hub.repositories import model_at

WIDTH = 100  # columns
WORDS = ("yes", "no", "up", "right", "left", "7", "12", "[3]", "guess", "the answer is 4")
CHATML = (
    "{% if tools %}<|im_start|>system\nCall tools by <tool_call>:\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{{ eos_token }}\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax env check", __doc__)
    parser.add_argument("path", nargs="?", default="", help="a class, FILE.py:CLASS or package.module.CLASS")
    parser.add_argument("--tools", nargs="+", default=(), help="functions, each FILE.py:FUNCTION")
    parser.add_argument("--arguments", default="{}", help="JSON object: of the class's constructor")
    parser.add_argument("--model", default="", help="whose tokenizer and chat template: a directory or a hub name")
    parser.add_argument("--prompt", default="Play.", help="text of the first user message")
    parser.add_argument("--row", default="{}", help="JSON object: further columns of the row, for reset")
    parser.add_argument("--seed", type=int, default=0, help="of the episode and of the random text")
    parser.add_argument("--turns", type=int, default=4, help="of the policy, at most")
    parser.add_argument("--tool-format", default="auto", choices=("auto", *FORMATS), help="environment.tool_format")
    parser.add_argument("--turn-template", default="", help="environment.turn_template")
    given = parser.parse_args(arguments)
    settings = EnvironmentConfig(
        path=given.path,
        tools=tuple(given.tools),
        arguments=given.arguments,
        max_turns=given.turns,
        turn_template=given.turn_template,
        tool_format=given.tool_format,
        num_workers=1,
    )
    with refusals(["env check", *(arguments or ())]):
        if not (settings.path or settings.tools):
            raise InputError("there is nothing to check: give FILE.py:CLASS, or --tools FILE.py:FUNCTION")
        for line in played(settings, given.model, row_of(given.prompt, given.row), given.seed):
            say(line)


def row_of(prompt: str, columns: str) -> PromptRow:
    """A row with one user message."""
    try:
        found = json.loads(columns)
    except ValueError as error:
        raise InputError(f"--row={columns} must be a JSON object ({error}): correct it") from error
    if not isinstance(found, dict):
        raise InputError(f"--row={columns} must be a JSON object of columns: correct it")
    truth = next((found[name] for name in ("ground_truth", "answer", "solution") if name in found), "")
    return PromptRow(({"role": "user", "content": prompt},), "env check", truth, found, "the row of --row")


def characters() -> Tokenizer:
    """A token for each printable character, and those of ChatML."""
    return piece_tokenizer(["<|im_start|>", *string.printable], r"<\|im_start\|>|<eos>|[\s\S]", CHATML)


def played(settings: EnvironmentConfig, model: str, row: PromptRow, seed: int) -> list[str]:
    """What is printed of an episode.

    Raises:
        InputError: the environment or the chat template does not fit.
    """
    tokenizer = load_tokenizer(model_at(model, weights=False)) if model else characters()
    random_text, lines, earned = random.Random(seed), list[str](), Earned(settings.reward == "sum")
    tool_format = format_of(tokenizer.chat_template, settings.tool_format)
    with EnvironmentPool(settings, tool_format) as pool:
        description = pool.descriptions[""]
        tools = description.tools
        chat = Chat(tokenizer, DataConfig(), settings, tools)
        chat.check()
        try_on(pool, row, seed)
        (row,) = told([row], pool.descriptions)
        try:
            play, first = pool.begin(seed, columns_of(row))
            lines += shown("prompt", chat.prompt(chat.opened(row, first.result().messages)[0]), tokenizer)
            for turn in range(settings.max_turns):
                calls = bool(tools) and turn < settings.max_turns - 1
                text = _call(random_text, tools, tool_format) if calls else _words(random_text)
                lines += shown("policy", [*tokenizer.encode(text), tokenizer.eos_ids[0]], tokenizer)
                reply = pool.step(play, text).result()
                earned.take(reply)
                if reply.done:
                    break
                said, _ = chat.cut(reply.messages)
                lines += [*shown("environment", chat.continuation(said, ended=True), tokenizer), _numbers(reply)]
            if tools and description.rewards:
                earned.take(pool.finish(play).result())
        except Fault as fault:
            raise InputError(f"the environment failed: {fault}: correct it") from fault
        how = "done" if reply.done else "after environment.max_turns"
        rewards = ", ".join(f"{name} {value:g}" for name, value in earned.verdict.items())
        return [*lines, f"ended {how}: {rewards}" if description.rewards else f"ended {how}: no reward of its own"]


def shown(writer: str, tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Lines of tokens as Python writes their texts, after who wrote them."""
    lines = [f"{writer}, {len(tokens)} tokens{' to train on' if writer == 'policy' else ''}:"]
    line = " "
    for token in tokens:
        text = repr(tokenizer.decode([token], skip_special_tokens=False))
        if len(line) + len(text) > WIDTH:
            lines.append(line)
            line = " "
        line += f" {text}"
    return [*lines, line]


def _numbers(reply: Reply) -> str:
    numbers = ", ".join(f"{name} {value:g}" for name, value in reply.numbers.items())
    calls = f"{reply.calls} calls, {reply.invalid} of them wrong" if reply.calls else ""
    reward = "" if reply.reward is None else f"reward {reply.reward:g}"
    return "  " + "; ".join(filter(None, [reward, numbers, calls]))


def _words(random_text: random.Random) -> str:
    return " ".join(random_text.choices(WORDS, k=random_text.randint(1, 3)))


def _call(random_text: random.Random, tools: Sequence[dict[str, Any]], tool_format: str) -> str:
    """A call of one of the tools, with random arguments of the right types."""
    function = random_text.choice(tools)["function"]
    properties = function["parameters"]["properties"]
    arguments = {name: _value(random_text, rule) for name, rule in properties.items()}
    return EXAMPLES[tool_format].format(json.dumps({"name": function["name"], "arguments": arguments}))


def _value(random_text: random.Random, rule: dict[str, Any]) -> Any:
    if "enum" in rule or "anyOf" in rule:
        return random_text.choice(rule["enum"]) if "enum" in rule else _value(random_text, rule["anyOf"][0])
    number = random_text.randint(1, 9)
    values = {"integer": number, "number": number / 2, "boolean": number > 4, "object": {}, "array": [], "null": None}
    return values.get(rule.get("type", ""), _words(random_text))
