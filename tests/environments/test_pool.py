"""Environments in their processes: forms, tool calls, random states, limits and failures."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_jax.config.sections import DataConfig, EnvironmentConfig
from dapo_jax.data.rows import PromptRow
from dapo_jax.environments import episodes
from dapo_jax.environments import pool as pool_module
from dapo_jax.environments.episodes import Earned, columns_of, seed_of, told, try_on
from dapo_jax.environments.pool import EnvironmentPool
from dapo_jax.environments.protocol import Description, Fault, Reply
from dapo_jax.environments.tool_formats import Call, calls_in, format_of
from dapo_jax.errors import InputError
from dapo_jax.rewards.session import keep
from dapo_jax.rewards.verdicts import Verdict
from dapo_jax.run.episodes import Environments

FILE = Path(__file__).with_name("played.py")
ROW = PromptRow(({"role": "user", "content": "Play."},), "games", "3*4", {"hint": "odd"})


def pool_of(name="", *, tool_format="hermes", **changes):
    settings = {"path": f"{FILE}:{name}" if name else "", "num_workers": 1, "timeout_s": 5.0, **changes}
    return EnvironmentPool(EnvironmentConfig(**settings), tool_format)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(pool, texts, *, seed=4, row=ROW):
    play, first = pool.begin(seed, columns_of(row))
    first.result()
    return [play.replies[0], *(pool.step(play, text).result() for text in texts)]


@pytest.fixture(scope="module")
def guess():
    with pool_of("Guess", arguments='{"most": 7}', num_workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def desk():
    with pool_of("Desk", tools=(f"{FILE}:twice",)) as pool:
        yield pool


def test_the_text_form_answers_with_observation_reward_and_numbers(guess):
    first, wrong, right = played(guess, ["2", "it is 5"])
    assert first == Reply([{"role": "user", "content": "guess 1..7: odd"}])
    assert wrong.messages[0]["content"].startswith("not 2, ") and not wrong.done and wrong.reward == 0
    assert right.done and right.reward == 0.5 and right.numbers["acc"] == 1 and "word" not in right.numbers
    assert guess.descriptions[""].tools == [] and guess.descriptions[""].rewards


def test_random_states_belong_to_the_episode_and_interleaving_changes_nothing(guess):
    alone = played(guess, ["1", "2"])
    plays = [guess.begin(seed, columns_of(ROW))[0] for seed in (4, 4, 5, 4)]
    for text in ("1", "2"):
        for answer in [guess.step(play, text) for play in plays]:
            answer.result()
    assert plays[0].replies == plays[1].replies == plays[3].replies == alone != plays[2].replies
    assert try_on(guess, ROW, 4)[0] == alone[0]


def test_a_group_has_one_seed_and_other_groups_others():
    others = {seed_of(1, 5), seed_of(1, 6), seed_of(2, 5), seed_of(1, 5, held_out=True)}
    assert seed_of(1, 5) == seed_of(1, 5) and len(others) == 4


def test_tools_are_called_in_order_and_the_models_mistakes_are_text(desk):
    calls = call("calculator", expression="3*4") + "then" + call("unit", kind="s") + call("twice", number=4)
    first, several, end = played(desk, [calls, "it is 12"])
    assert first.messages == [] and several.calls == 3 and several.invalid == 0 and not several.done
    assert [(one["role"], one["content"]) for one in several.messages] == [
        ("tool", "12"),
        ("tool", '{"unit": "s"}'),
        ("tool", "8"),
    ]
    assert end.done and end.messages == [] and end.reward is None
    wrong = {
        call("divide"): "there is no tool divide, only twice, calculator, unit",
        call("calculator"): "calculator needs the argument expression",
        call("calculator", expression=3): 'the argument expression of calculator must be {"type": "string"}',
        call("calculator", expression="3*4", base=2): "calculator has no argument base, only expression, digits",
        call("unit", kind="kg"): 'the argument kind of unit must be {"enum": ["m", "s"]}',
        call("twice", number=True): 'the argument number of twice must be {"type": "integer"}',
        call("calculator", expression="3*4", digits="1"): '"anyOf": [{"type": "integer"}, {"type": "null"}]',
        call("calculator", expression="three"): "ValueError: not enough values to unpack",
        "<tool_call>{broken": "a call must be a JSON object",
        '<tool_call>{"name": "twice", "arguments": {"number": 1e999}}': "a call must be a JSON object",
        '<tool_call>{"name": "twice", "arguments": {"number": NaN}}': "a call must be a JSON object",
        call("twice", number=0): "ZeroDivisionError: integer division",
        '<tool_call>{"name": "unit", "arguments": [1]}': "the arguments of unit must be a JSON object",
    }
    found = played(desk, list(wrong))[1:]
    for reply, text in zip(found, wrong.values(), strict=True):
        assert (
            reply.invalid == reply.calls == 1 and not reply.done and reply.messages[0]["content"].startswith("Error: ")
        )
        assert text in reply.messages[0]["content"]


def test_schemas_say_types_defaults_and_what_the_docstring_says(desk):
    found = {one["function"]["name"]: one["function"] for one in desk.descriptions[""].tools}
    calculator = found["calculator"]
    assert calculator["description"] == "Evaluates a product." and calculator["parameters"]["required"] == [
        "expression"
    ]
    assert calculator["parameters"]["properties"]["expression"] == {
        "type": "string",
        "description": 'for example "3*4".',
    }
    assert found["twice"]["parameters"]["properties"] == {"number": {"type": "integer"}} and len(found) == 3


def test_the_reward_of_the_tool_form_is_asked_at_the_end(desk):
    play, first = desk.begin(0, columns_of(ROW))
    first.result()
    desk.step(play, call("calculator", expression="3*4")).result()
    assert desk.descriptions[""].rewards and desk.finish(play).result() == Reply(reward=1.0, ends=True)
    with pool_of(tools=(f"{FILE}:twice",)) as pool:
        assert not pool.descriptions[""].rewards
        assert played(pool, [call("twice", number=1), "2"])[1].messages[0]["content"] == "2"


@pytest.mark.parametrize(
    ("text", "tool_format", "names"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', "llama3", ["a"]),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "llama3", ["a", "b"]),
        ('{"name": "a", "parameters": {"q": "x;y"}}; {"name": "b", "parameters": {}};', "llama3", ["a", "b"]),
        ('so\n```json\n{"name": "a", "arguments": {}}\n```\n', "json", ["a"]),
        ('{"name": "a", "arguments": "{}"}', "json", ["a"]),
        ("no call", "json", []),
        ("no call", "llama3", []),
        ("no call", "hermes", []),
        ('<tool_call>{"name": "a"}', "hermes", ["a"]),
    ],
)
def test_calls_are_read_in_each_format(text, tool_format, names):
    found = calls_in(text, tool_format)
    assert [one.name for one in found] == names and not any(one.problem for one in found)
    assert all(isinstance(one, Call) for one in found)


def test_a_call_of_several_that_cannot_be_read_is_no_call_and_the_others_are():
    found = calls_in('{"name": "a"} and; {"name": "b"}; {; no', "llama3")
    assert [one.name for one in found] == ["", "b", "", ""] == [one.name * (not one.problem) for one in found]


def test_the_chat_template_says_which_format_it_teaches():
    found = [format_of(text) for text in ("... <tool_call> ...", "<|python_tag|>", "plain", None)]
    assert found == ["hermes", "llama3", "json", "json"]
    others = (
        "<tool_call>\n<function=f>",
        "<tool_call>f\n<arg_key>",
        "[TOOL_CALLS] [",
        "<|channel|>",
        "<function_calls>",
    )
    assert not any(map(format_of, others)) and {format_of(text, "json") for text in others} == {"json"}


def test_a_process_that_fails_once_is_replaced_and_its_episodes_are_played_again(tmp_path):
    texts = ["1", "2"]
    with pool_of("Broken", timeout_s=2.0) as pool:
        expected = played(pool, texts)
    for way in ("raise", "die"):
        with pool_of("Broken", arguments=json.dumps({"marker": str(tmp_path / way)}), timeout_s=20.0) as pool:
            other, first = pool.begin(4, columns_of(ROW))
            assert [first.result(), pool.step(other, "1").result()] == expected[:2]
            (tmp_path / way).unlink()
            failing = played(pool, [way])
            assert failing[1].messages[0]["content"].startswith(f"not {way}")
            assert pool.step(other, "2").result() == expected[2], "though its process has died meanwhile"
            counts = pool.take_counts()
            assert counts["retries"] == 1 and counts["faults"] == 0 and pool.take_counts()["calls"] == 0


@pytest.mark.parametrize(
    ("way", "message", "changes"),
    [
        ("raise", "RuntimeError: out of order", {}),
        ("die", r"died \(exit code 3\)", {}),
        ("sleep", "has not answered within environment.timeout_s=0.5", {"timeout_s": 0.5}),
        (
            "eat",
            "MemoryError: the environment needs more than environment.memory_limit_mb=256",
            {"memory_limit_mb": 256},
        ),
        ("say nothing", "step must return its observation as text or as a list of messages", {}),
        ("no number", "the reward of step must be a finite number, not nan", {}),
    ],
)
def test_an_environment_that_fails_twice_is_a_fault(way, message, changes):
    with pool_of("Broken", **{"timeout_s": 20.0, **changes}) as pool:
        with pytest.raises(Fault, match=message):
            played(pool, [way])
        assert pool.take_counts()["faults"] == 1
        assert len(played(pool, ["1"])) == 2, "the pool goes on"


def test_a_process_that_cannot_be_started_is_a_fault(monkeypatch):
    def fails(*arguments):
        raise BlockingIOError("no more processes")

    with pool_of("Broken", timeout_s=20.0) as pool:
        monkeypatch.setattr(pool_module, "Worker", fails)
        with pytest.raises(Fault, match=r"no process of .* could be started \(no more processes\)"):
            played(pool, ["die"])


def test_an_environment_that_the_seed_does_not_fix_or_that_fails_is_refused(monkeypatch):
    with pool_of("Fickle") as pool, pytest.raises(InputError, match="in a second episode for a generated row with"):
        try_on(pool, ROW, 1)
    monkeypatch.setattr(episodes, "TRIAL", "raise")
    failed = "failed on a trial episode for a generated row with RuntimeError: out of order"
    with pool_of("Broken") as pool, pytest.raises(InputError, match=failed):
        try_on(pool, ROW, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "it has no reset: add it"),
        ("NoTools", "it has no step or a tool: add it"),
        ("Arity", "change its parameters"),
        ("Untyped", "the parameter word of lookup must have a type"),
        ("Odd", "has the type <class 'complex'>, which must be str, int"),
        ("twice", "must be a class with reset"),
        ("Absent", "has no class 'Absent'"),
    ],
)
def test_what_has_none_of_the_forms_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        pool_of(name)


def test_arguments_must_fit_the_constructor():
    for arguments, message in (
        ('{"least": 1}', "unexpected keyword argument 'least'"),
        ("[1]", "must be a JSON object of the constructor's arguments"),
    ):
        with pytest.raises(InputError, match=message):
            pool_of("Guess", arguments=arguments)
    for arguments in ('{"most": 7}', '{"b": {}}', "[1]"):
        with pytest.raises(InputError, match="must be a JSON object of such objects by the names a, c"):
            pool_of(path=json.dumps({"a": f"{FILE}:Guess", "c": f"{FILE}:Guess"}), arguments=arguments)


def test_a_class_of_a_session_reaches_the_processes():
    class Echo:
        def reset(self):
            return None

        def step(self, text):
            return text, 0.0, False

    with pool_of(path=keep(Echo, "Echo")) as pool:
        assert played(pool, ["hello"])[1].messages == [{"role": "user", "content": "hello"}]
    with pytest.raises(InputError, match="environment.path='python:Other' is a function of the Python session"):
        pool_of(path="python:Other")


def test_an_episode_earns_its_last_reward_or_their_sum():
    replies = [Reply(reward=0.5), Reply(reward=-1.0, numbers={"acc": 0.0, "steps": 2.0})]
    for sums, score in ((False, -1.0), (True, -0.5)):
        earned = Earned(sums)
        for reply in replies:
            earned.take(reply)
        assert earned.verdict == {"score": score, "acc": 0.0, "steps": 2.0, "num_turns": 2.0}
    assert Earned(False).verdict == {"score": 0.0, "acc": 0.0, "num_turns": 0.0}


def test_what_a_limit_cuts_off_counts_as_no_answer_unless_the_environment_says_so():
    """A class that says acc only when it is done had the sum of its rewards as the accuracy of an unsolved episode."""
    on_the_way, end = [Reply(reward=0.3)] * 5, Reply(reward=0.3, done=True)
    solved = Reply(reward=0.3, done=True, numbers={"acc": 1.0})
    said, whole = Reply(numbers={"acc": 0.5}), Reply(reward=0.9, ends=True)
    for last, acc in ((None, 0.0), (end, 1.8), (solved, 1.0), (said, 0.5), (whole, 0.9)):
        earned = Earned(True)
        for reply in filter(None, [*on_the_way, last]):
            earned.take(reply)
        assert earned.verdict["acc"] == pytest.approx(acc) and earned.verdict["score"] >= 0.9


@pytest.mark.parametrize("name", ["score", "num_turns", "observation_tokens", "a/b", "seq_reward"])
def test_numbers_with_a_name_of_the_run_are_refused(name):
    """They replaced the reward that a run trains on, or were replaced, without a word; a/b ended the first step."""

    class Says:
        def reset(self):
            return None

        def step(self, text):
            return "", 0.0, True, {name: 1.0}

    with pool_of(path=keep(Says, "Says")) as pool:
        with pytest.raises(Fault, match=f"the info of step must not have {name}, .*rename it"):
            played(pool, ["1"])
        with pytest.raises(InputError, match=name):
            try_on(pool, ROW, 1)


def test_a_reward_function_does_not_replace_what_is_counted_of_an_episode():
    pool = SimpleNamespace(descriptions={"": Description(rewards=False)})
    environments = Environments(pool, {}, 0, DataConfig(), EnvironmentConfig())  # pyright: ignore[reportArgumentType]
    found = environments.judged({"num_turns": 2.0}, Verdict({"score": 1.0, "num_turns": 9.0}, None, None))
    assert found.numbers == {"score": 1.0, "num_turns": 2.0}


def test_a_column_called_seed_does_not_replace_that_of_the_episode(guess):
    """Rows of reasoning_gym have one, the same in all rows: every episode had one seed."""
    row = replace(ROW, extra_info={**ROW.extra_info, "seed": 0})
    assert row.columns["seed"] == 0 and played(guess, ["1", "2", "5"], row=row) == played(guess, ["1", "2", "5"])


def test_rows_that_differ_only_in_what_reset_is_given_are_different_problems():
    rows = [PromptRow(ROW.prompt, "games", None, {"size": size}) for size in (2, 3, 2)]
    assert len({row.identity for row in rows}) == 1, "nothing reads the column"
    first, *others = told(rows, {"": Description()})
    assert [row.identity == first.identity for row in others] == [False, True]
