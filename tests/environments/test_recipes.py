"""The environments of the recipes and of the guide, each played once without a model."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from dapo_jax.config.files import read_config_file
from dapo_jax.environments.protocol import Environment, Episode, Reply

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
sys.path.append(str(CONFIGS))


def episode_of(recipe: str, make: type, row: dict) -> Episode:
    path = read_config_file(str(CONFIGS / f"{recipe}.py")).environment.path
    assert path == f"{CONFIGS / recipe}.py:{make.__name__}"
    return Episode(Environment(path, make, arguments={}, tool_format="json"), 0, row)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_calculator_answers_one_call_and_judges_what_follows():
    from calculator import Calculator, rows

    first = rows(2, seed=0)[0]
    assert [message["content"] for message in first["prompt"][:2]] == ["12 + 7 = ?", "calc: 12 + 7"]
    question = first["prompt"][-1]["content"].removesuffix(" = ?")
    truth = first["reward_model"]["ground_truth"]
    episode = episode_of("calculator", Calculator, {"answer": truth})
    assert episode.reset() == Reply()
    reply = episode.step(f"calc: {question} = 1")
    assert (reply.messages, reply.reward, reply.done) == (said(f"= {truth}"), 0.0, False)
    ended = episode.step(f"{truth}.")
    assert (ended.reward, ended.done, ended.numbers["called"]) == (1.0, True, 1.0)
    alone = episode_of("calculator", Calculator, {"answer": truth})
    alone.reset()
    assert alone.step("calc: it").done and alone.step(f"1 {truth}").reward == 1.0


def test_the_lake_shows_the_board_after_each_move():
    pytest.importorskip("gymnasium", reason="pip install 'dapo_jax[gymnasium]'")
    from frozen_lake import Lake, boards, reaches, shown

    board = "SFF/HFH/FFG"
    assert shown(board, 0) == "p..\nh.h\n..g"
    episode = episode_of("frozen_lake", Lake, {"board": board})
    assert episode.reset() == Reply()
    found = [episode.step(text) for text in ("u", "x", "to the r", "d", "d", "r")]
    assert [reply.messages for reply in found[:3]] == [said(text) for text in ["p..\nh.h\n..g"] * 2 + [".p.\nh.h\n..g"]]
    assert [reply.done for reply in found] == [False] * 5 + [True]
    assert (found[-1].reward, found[-1].numbers) == (1.0, {"acc": 1.0})
    late = episode_of("frozen_lake", Lake, {"board": board})
    late.reset()
    assert [late.step("u").done for _ in range(6)] == [False] * 5 + [True]
    assert json.dumps(boards(2)) == json.dumps([boards(2)[1]] * 2) and not set(boards(3)[0]) & set(boards(3)[1])
    assert reaches("SF/FG", "rd") == 0.875 and reaches("SF/HG", "d") == 0.0


def class_of_the_guide(name: str) -> type:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/environments.md").read_text(), re.M | re.S)
    names: dict = {"__name__": "guide"}
    exec(next(block for block in blocks if f"class {name}" in block), names)
    return names[name]


def play(make: type, row: dict) -> Episode:
    return Episode(Environment("guide", make, arguments={}, tool_format="json"), 0, row)


def test_the_class_of_a_user_of_trl_plays_unchanged():
    episode = play(class_of_the_guide("Thinks"), {"answer": "3"})
    assert episode.reset().messages == said("I think of a number from 1 to 20.")
    calls = [episode.step(json.dumps({"name": "guess", "arguments": {"number": number}})) for number in (2, 3, 3)]
    assert [reply.messages[0]["content"] for reply in calls] == [
        "higher",
        "found",
        "Error: ValueError: The game is over.",
    ]
    assert episode.step("It is 3.").done and episode.finish().reward == 1.0
    assert episode.environment.description.rewards
    without = type("Without", (), {"reset": lambda self: None, "reward": lambda self, count: "a tool"})
    without.reward.__annotations__ = {"count": int}
    assert not Environment("guide", without, arguments={}, tool_format="json").description.rewards


def test_the_game_of_textarena_says_only_what_is_new():
    pytest.importorskip("textarena", reason="pip install textarena")
    episode = play(class_of_the_guide("GuessTheNumber"), {})
    assert "between 1 and 20" in episode.reset().messages[0]["content"]
    for number in range(1, 21):
        if (reply := episode.step(f"[{number}]")).done:
            assert reply.reward > 0 and reply.numbers["acc"] == (reply.reward == 1)
            return
        assert reply.messages == said(f"\n[Player] [{number}]\n[GAME] The target number is higher.")
    raise AssertionError("one of 1 to 20 is right")


@pytest.mark.parametrize("recipe", ["calculator", "frozen_lake"])
def test_the_recipes_write_their_rows(recipe, tmp_path, monkeypatch, capsys):
    if recipe == "frozen_lake":
        pytest.importorskip("gymnasium", reason="pip install 'dapo_jax[gymnasium]'")
    monkeypatch.chdir(tmp_path)
    importlib.import_module(recipe).main()
    config = read_config_file(str(CONFIGS / f"{recipe}.py"))
    for file in (*config.data.train_files, *config.data.val_files):
        assert all(json.loads(line)["prompt"][-1]["role"] == "user" for line in Path(file).read_text().splitlines())
    assert capsys.readouterr().out.count("held out by chance") == 3 * (recipe == "frozen_lake")
