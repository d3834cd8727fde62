"""Observations as tokens: the chat template's own text between two turns, which no policy token depends on."""

import json
import random
import string
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from environments.played import Desk
from small_run import small_config, sums
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dapo_jax.config.sections import DataConfig, EnvironmentConfig
from dapo_jax.data.chat_template import Conversation, render
from dapo_jax.data.containers import Rollout
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import character_tokenizer, piece_tokenizer
from dapo_jax.environments.chat import Chat
from dapo_jax.environments.episodes import told
from dapo_jax.environments.protocol import Description, Reply
from dapo_jax.environments.tool_formats import EXAMPLES, calls_in, misfit, schema
from dapo_jax.errors import InputError
from dapo_jax.rewards.verification import Verification
from dapo_jax.run.episodes import open_environments
from dapo_jax.run.parts import read_episodes
from dapo_jax.run.turns import Episodes
from dapo_jax.tools import env_check

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
FILE = Path(__file__).with_name("played.py")
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"properties": {}}}}
USER = {"role": "user", "content": "Play."}
TURN = {"role": "assistant", "content": "left"}


def said(text, role="user"):
    return [{"role": role, "name": "f", "content": text}]


def tokenizer_of(template):
    text = template if "{%" in template else (TEMPLATES / f"{template}.jinja").read_text()
    pattern = r"<\|im_start\|>|<\|im_end\|>|<eos>|[\s\S]"
    found = piece_tokenizer(["<|im_start|>", "<|im_end|>", *string.printable], pattern, text)
    return type(found)(**{**vars(found), "eos_ids": (*found.eos_ids, found.encode("<|im_end|>")[0])})


def chat_of(template, tools=(), **settings):
    return Chat(tokenizer_of(template), DataConfig(), EnvironmentConfig(**settings), tools)


@pytest.mark.parametrize(("template", "tools"), [("chatml", ()), ("qwen3", (TOOL,)), (env_check.CHATML, ())])
def test_the_tokens_of_a_whole_chat_are_those_of_its_template(template, tools):
    chat = chat_of(template, tools)
    chat.check()
    role, tokenizer = "tool" if tools else "user", chat.tokenizer
    row = told([PromptRow((USER,), "s", "t", {})], {"": Description(tools)})[0]
    between = chat.continuation(said("go on", role), ended=True)
    end = tokenizer.encode("<|im_end|>" if template != env_check.CHATML else "<eos>")
    found = [*chat.prompt(row), *tokenizer.encode("left"), *end, *between, *tokenizer.encode("left")]
    messages = [USER, TURN, *said("go on", role)]
    given = {"tools": list(tools)} if tools else {}
    text = render(tokenizer.chat_template or "", [Conversation(messages, tokenizer.special_tokens, given)])[0]
    assert found == tokenizer.encode(text + "left")
    assert chat.continuation(said("go on", role), ended=False) == [*end, *between], "an end that was not drawn"


def test_a_template_that_changes_earlier_turns_is_refused_and_the_option_is_the_cure():
    with pytest.raises(InputError, match=r"must write earlier turns of the assistant as they were(?s:.*)turn_template"):
        chat_of("qwen3").check()  # thoughts before the last message of a user are left out
    template = "<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
    stated = chat_of("qwen3", turn_template=template)
    stated.check()
    expected = stated.tokenizer.encode(template.replace("{observation}", "go"))
    assert stated.continuation(said("go"), ended=True) == expected[1:]
    with pytest.raises(InputError, match=r"environment.turn_template='Go on' must have \{observation\} once"):
        chat_of("chatml", turn_template="Go on").check()


def test_a_model_without_a_template_gets_the_observation_as_it_is():
    base = character_tokenizer()
    base = type(base)(**{**vars(base), "chat_template": None})
    chat = Chat(base, DataConfig(), EnvironmentConfig())
    chat.check()
    assert chat.continuation(said("ok\n"), ended=True) == base.encode("ok\n")
    assert chat.prompt(chat.opened(PromptRow("1 + 1", "s", "2", {}), said(" ="))[0]) == base.encode("1 + 1 =")


@pytest.mark.parametrize(("side", "kept"), [("left", "cd"), ("right", "ab"), ("middle", "ad")])
def test_a_long_observation_is_cut_on_the_stated_side_and_counted(side, kept):
    chat = chat_of("chatml", max_observation_length=2, observation_truncation=side)
    assert chat.cut([*said("abcd"), *said("xy")]) == ([*said(kept), *said("xy")], 1)


def test_a_lone_surrogate_of_an_observation_is_a_question_mark():
    """A model can write one in a call, whose name the observation repeats: the run ended, and so did each rerun."""
    chat = chat_of("chatml", max_observation_length=9)
    assert chat.continuation(said("no \ud83d"), ended=True) == chat.continuation(said("no ?"), ended=True)
    assert chat.cut(said("no \ud83d"))[1] == 0


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def bytes_tokenizer():
    """A token for each byte, and <eos>."""
    base, backend = character_tokenizer(), tokenizers.Tokenizer(models.BPE({one: n for n, one in enumerate(BYTES)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return replace(base, backend=backend, eos_ids=(len(BYTES),))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_cut_keeps_special_tokens_and_leaves_no_part_of_a_character(side):
    """A cut observation lost <eos> and its like, which an uncut one has, and could begin or end with \ufffd."""
    text = "äöü<eos>äöüä<eos>数学"
    for limit in range(1, 20):
        settings = EnvironmentConfig(max_observation_length=limit, observation_truncation=side)
        [message], longer = Chat(bytes_tokenizer(), DataConfig(), settings).cut(said(text))
        assert longer == 1 and {*message["content"]} <= {*text} and ("<eos>" in message["content"] or limit < 14)


@pytest.mark.parametrize("text", ["\n{observation}\n", "{observation}"])
def test_no_space_that_an_encoding_begins_with_stands_between_two_turns(text):
    """Tokenizers like Llama 2's begin each text with a space, and so did all that an environment said."""
    vocab = {one: n for n, one in enumerate(["<unk>", "<0x0A>", "<eos>", "▁", "g", "o", "▁g", "▁go", "go"])}
    merges = [("▁", "g"), ("▁g", "o"), ("g", "o")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    base = replace(character_tokenizer(), backend=backend, eos_ids=(2,), chat_template=None)
    chat = Chat(base, DataConfig(), EnvironmentConfig(turn_template=text))
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for normalizer, pre_tokenizer in ((prepend, None), (None, pre_tokenizers.Metaspace(split=False))):
        backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
        assert base.encode("go") == [vocab["▁go"]]
        line = [vocab["<0x0A>"]] * text.count("\n")
        assert chat.continuation(said("go"), ended=True) == [*line[:1], vocab["go"], *line[1:]]


QUIET = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ '-' if quiet }}{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '-' if quiet }}{{ 'hm' if brief }}{% endif %}"
)


def test_a_rows_arguments_of_the_template_hold_in_every_turn(tmp_path):
    """They held in the first, and those of the run in the others; what is said first was cut without being counted."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "hint": "x"}) + "\n" for row in sums(1, 2)))
    options = {"environment.path": f"{FILE}:Guess", "data.task": "files", "data.train_files": f"{tmp_path}/rows.jsonl"}
    options |= {"environment.max_observation_length": 5, "environment.num_workers": 1, "data.max_prompt_length": 99}
    config, tokenizer = small_config(tmp_path, **options), tokenizer_of(QUIET)
    with open_environments(config, tokenizer) as environments:
        assert environments is not None
        _, problems = read_episodes(config, tokenizer, environments)
        rows = [replace(problems.train_set.rows[0], template_kwargs={"quiet": True}), problems.train_set.rows[1]]
        tokens = [environments.chats[""].prompt(row) for row in rows]
        verification = Verification(None, tokenizer, rows, 3, check=lambda: None)
        episodes = Episodes(environments, [0, 1], rows, tokens, verification, held_out=False)
        quiet, plain = [tokenizer.decode(episodes._tokens(row, Reply(said("go")), [0])[0]) for row in (0, 3)]
        assert quiet == plain.replace("user\n", "user\n-").replace("assistant\n", "assistant\n-") != plain
        assert environments.counts["cut"] == 6 and tokenizer.decode(episodes.prompts[1]).count("guess") == 1
        episodes.cancel()
        begun = Rollout(np.zeros((2, 1), int), np.zeros((2, 1), bool), np.zeros((2, 1)), np.zeros(2, bool))
        once = Verification(None, tokenizer, rows, 1, check=lambda: None)
        Episodes(environments, [0, 1], rows, episodes.prompts, once, held_out=False, begun=begun).cancel()
        assert environments.counts["cut"] == 6, "cut in an earlier step, and counted there"
    given = json.dumps({"brief": True})
    rows = [{**row, "hint": "x", "chat_template_kwargs": given} for row in sums(1, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        open_environments(config, tokenizer) as environments,
        pytest.raises(InputError, match="with brief of a row must"),
    ):
        read_episodes(config, tokenizer, environments)


def test_a_template_that_teaches_another_form_of_calls_is_refused_with_tools_alone():
    """Qwen3.5's was taken for hermes, whose JSON its model does not write: each call was wrong."""
    template = env_check.CHATML + "{# <tool_call>\n<function=name> #}"
    with pytest.raises(
        InputError, match="environment.tool_format=auto: .* not read here: choose hermes, llama3, json,"
    ):
        chat_of(template, (TOOL,)).check()
    chat_of(template).check()
    chat_of(template, (TOOL,), tool_format="hermes").check()


def test_what_the_environment_reads_of_a_turn_has_no_end_but_other_special_tokens():
    chat = chat_of("chatml")
    turn = chat.tokenizer.encode("<|im_start|>up<|im_end|>")
    assert chat.text_of(turn) == "<|im_start|>up" and chat.text_of(turn[-1:]) == ""


def listing(found: typing.List) -> str:  # noqa: UP006
    """What is found."""
    return str(found)


@pytest.mark.parametrize("tool_format", EXAMPLES)
def test_the_check_command_calls_tools_as_the_format_reads_them(tool_format):
    """It wrote <tool_call> for models whose template teaches another form, and no tool was called."""
    tool = schema("it", Desk.calculator, 1)
    assert schema("it", listing)["function"]["parameters"]["properties"]["found"] == {"type": "array", "items": {}}
    [call] = calls_in(env_check._call(random.Random(0), [tool], tool_format), tool_format)
    assert call.name == "calculator" and not call.problem and not misfit(tool, call.arguments)


def test_the_check_command_prints_who_wrote_each_token(capsys):
    env_check.main([f"{FILE}:Guess", "--row", '{"hint": "odd"}', "--turns", "3", "--seed", "3"])
    lines = capsys.readouterr().out.splitlines()
    begins = [line.partition(",")[0] for line in lines if line and line[0] != " "]
    assert begins == ["prompt", *["policy", "environment"] * 2, "policy", "ended done: score 0"]
    assert sum("tokens to train on:" in line for line in lines) == 3
    assert any(line.startswith("  reward 0; acc 0, noise") for line in lines)
    assert "'g' 'u' 'e' 's' 's' ' ' '1' '.' '.' '9'" in " ".join(line.strip() for line in lines)
    env_check.main([f"{FILE}:Desk", "--row", '{"answer": "3*4"}', "--turns", "2"])
    printed = capsys.readouterr().out
    assert "1 calls" in printed and "ended done: score 0, acc 0, num_turns 2" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to check"),
        ([f"{FILE}:NoReset"], "it has no reset: add it"),
        ([f"{FILE}:Guess", "--row", "[1]"], "--row=[1] must be a JSON object"),
    ],
)
def test_the_check_command_refuses_with_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        env_check.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
