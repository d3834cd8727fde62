"""Functions that only this session has run in worker processes, with their limits."""

import json
import pickle
import re
import socket
import sys
import threading
import types
from pathlib import Path

import cloudpickle
import pytest
from config_problems import assert_one, config_with, problems
from small_run import rows_without_clock, small_config

from dapo_jax.command.validation import validate
from dapo_jax.config.values import with_values
from dapo_jax.errors import InputError
from dapo_jax.interface.rewards import reward_options
from dapo_jax.rewards import session
from dapo_jax.rewards.session import keep
from dapo_jax.rewards.verifiers import load_verifier
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool
from dapo_jax.training.loop import train

CELL = (Path(__file__).parent / "data" / "notebook_cell.txt").read_text()
REQUEST = ScoreRequest("any", "so 34", "34", {"n": 3})
SETTINGS = {"num_workers": 1, "timeout_s": 30.0}
SCALE, NUMBER = {"right": 2.0}, re.compile("[0-9]+")


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(session, "_KEPT", {})


@pytest.fixture(scope="module")
def notebook():
    """The namespace of a session that has run a cell."""
    cells = types.ModuleType("__main__")
    exec(compile(CELL, "<cell 1>", "exec"), vars(cells))
    return cells


def verdict(function, request=REQUEST, **settings):
    with VerifierPool(keep(function), **{**SETTINGS, **settings}) as pool:
        [found] = pool.score([request])
    return found


def test_a_lambda_a_closure_and_what_they_use_run_in_a_worker():
    scale, mine = 3.0, __import__("os").getpid()
    assert verdict(lambda text, ground_truth: float(ground_truth in text)).numbers == {"score": 1.0, "acc": 1.0}
    assert verdict(lambda text: scale * SCALE["right"] * len(NUMBER.findall(text))).numbers["score"] == 6.0
    assert verdict(lambda text: float(__import__("os").getpid() != mine)).numbers["score"] == 1.0


def test_functions_of_a_notebook_take_what_they_use_along_and_mix_with_others(notebook):
    closure, free = notebook.outer()
    own = {"closure": (closure, 2.0), "free": (free, 3.0), "method": (notebook.Judge().method, 0.0)}
    of_cell = {"four": 1.0, "one": 0.0, "two": 1.0, "uses_lambda": 0.0, "counts": 1.0, "tagged": 1.0}
    own |= {name: (getattr(notebook, name), score) for name, score in of_cell.items()}
    parts = {"correct": "math_dapo", **{name: keep(function, name) for name, (function, _) in own.items()}}
    with VerifierPool(json.dumps(parts), **SETTINGS) as pool:
        [found] = pool.score([ScoreRequest("any", "<b>34</b>", "34", {})])
    expected = {"correct": -1.0, **{name: score for name, (_, score) in own.items()}}
    assert found.error is None and found.numbers["score"] == sum(expected.values())
    assert {name: found.numbers[name] for name in expected} == expected


def test_what_another_process_cannot_have_is_refused_with_the_way_out():
    lock, rows = threading.Lock(), (row for row in "ab")
    for function in (lambda text: lock.locked(), lambda text: next(rows)):
        with pytest.raises(InputError, match="cannot be sent to a verifier process .*: make what it uses inside"):
            keep(function)


def test_what_is_absent_there_is_the_start_s_or_the_sample_s_error(notebook, tmp_path, monkeypatch):
    assert "NameError" in str(verdict(notebook.absent).error)
    module = types.ModuleType("only_here")
    exec("def score(text): return 1.0", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(InputError, match="raised ModuleNotFoundError: No module named 'only_here'"):
        verdict(module.score)


def test_only_this_session_has_it():
    message = "reward.function='python:own' is a function of the Python session"
    changes = ({"reward.function": "python:own"}, {"reward.functions": '{"a": "gsm8k", "b": "python:own"}'})
    for change in changes:
        assert_one(problems(change), message)
    with pytest.raises(InputError, match=message):
        VerifierPool("python:own", **SETTINGS)
    keep(len, "own")
    for change in changes:
        validate(config_with(change))


def test_another_function_of_the_same_name_is_told(caplog):
    first = lambda text: 1.0  # noqa: E731
    assert keep(first) == keep(first) == "python:function" and not caplog.records
    assert keep(lambda text: 2.0) == "python:function"
    assert "python:function is another function from now on" in caplog.text
    with pytest.raises(InputError, match="tools, 'function': reward has another function of this name: rename one"):
        keep(lambda number: 3.0, option="tools")


def test_nothing_is_unpickled_but_in_a_worker_what_its_pool_has_sent(tmp_path, monkeypatch):
    """No answer, file or config of a run leads to a pickle."""

    def refused(*_args, **_keywords):
        raise AssertionError("something was unpickled")

    class Harm:
        def __reduce__(self):
            return (tmp_path.joinpath("made").touch, ())

    harm = pickle.dumps(Harm())
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    monkeypatch.setattr(cloudpickle, "loads", refused)

    def answers(text):
        """Writes a pickle where its answer belongs."""
        import gc

        [connection] = [one for one in gc.get_objects() if isinstance(one, socket.socket)]
        connection.sendall(len(harm).to_bytes(8, "big") + harm)
        return 1.0

    assert verdict(lambda text: 1.0).numbers["score"] == 1.0
    assert "sent an invalid answer" in str(verdict(answers).error)
    (tmp_path / "reward_function.py").write_bytes(harm)
    (tmp_path / "function.pickle").write_bytes(harm)
    for name in (f"{tmp_path}/reward_function.py:score", f"python:{harm.hex()}", f"python:{tmp_path}/function.pickle"):
        with pytest.raises(InputError):
            VerifierPool(name, **SETTINGS)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_run_is_that_of_the_same_function_of_a_module_resumed_and_each_part_has_its_curve(tmp_path):
    (tmp_path / "own.py").write_text(
        "def brief(a, text, b, c): return {'score': -len(text), 'words': len(text.split())}"
    )

    def trained(name, function, steps=2):
        parts = {"correct": function, "brief": (f"{tmp_path}/own.py:brief", 0.01)}
        config = small_config(tmp_path / name, **{"trainer.total_training_steps": steps})
        train(with_values(config, reward_options(parts)))
        return rows_without_clock(tmp_path / name)

    own = lambda a, b, c, d: load_verifier("arithmetic")(a, b, c, d)  # noqa: E731
    trained("a", own, steps=1)
    session._KEPT.clear()  # as in another session
    start, step, _ = rows = trained("a", own)
    trained("b", "dapo_jax.rewards.numerals.arithmetic", steps=1)
    assert rows == trained("b", "dapo_jax.rewards.numerals.arithmetic")
    for name in ("correct", "brief", "brief.words"):
        assert f"eval/arithmetic/{name}/mean@4" in start and f"rollout/{name}/mean" in step
    assert step["rollout/correct/mean"] == step["rollout/acc/mean"]
    shares = step["rollout/correct/mean"] + 0.01 * step["rollout/brief/mean"]
    assert step["rollout/score/mean"] == pytest.approx(shares)
