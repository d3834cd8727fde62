import ast
import datetime
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from ends_within import ends_within
from waiting import LIMIT_S, wait_until

from dapo_jax.rewards import worker, worker_process
from dapo_jax.rewards.results import normalize_result
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
import hostile_verifier  # noqa: E402

sys.path.remove(str(DATA))
RIGHT = {"score": 1.0, "acc": 1.0}
WRONG = {"score": 0.0, "acc": 0.0}


def request(solution, **extra_info):
    return ScoreRequest("hostile", solution, "34", extra_info)


def hostile_pool(timeout_s):
    sys.path.insert(0, str(DATA))
    try:
        with VerifierPool("hostile_verifier.score", num_workers=2, timeout_s=timeout_s, memory_limit_mb=256) as shared:
            yield shared
    finally:
        sys.path.remove(str(DATA))


@pytest.fixture(scope="module")
def pool():
    """For verifiers that end on their own, even on a busy machine."""
    yield from hostile_pool(timeout_s=30)


@pytest.fixture(scope="module")
def hasty_pool():
    """For verifiers that never end."""
    yield from hostile_pool(timeout_s=2)


def has_ended(pid):
    """True once the process is gone, or a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def read_pid(path):
    return int(wait_until(lambda: path.exists() and path.read_text(), "the verifier"))


def test_verdicts_come_in_the_order_of_the_requests():
    requests = [ScoreRequest("arithmetic", f"it is {i}", str(i - i % 2), {}) for i in range(1000)]
    with VerifierPool("arithmetic", num_workers=2, timeout_s=30) as pool:
        verdicts = pool.score(requests)
        assert pool.score([]) == []
    assert [verdict.pred for verdict in verdicts] == [str(i) for i in range(1000)]
    assert [verdict.numbers["acc"] for verdict in verdicts] == [1.0, 0.0] * 500
    assert all(verdict.error is None for verdict in verdicts)


def assert_one_is_wrong(pool, solution, error):
    with ends_within():
        verdicts = pool.score([request(name) for name in ("right", solution, "right", "right")])
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, WRONG, RIGHT, RIGHT]
    assert error in verdicts[1].error
    assert len(verdicts[1].error) <= 1000
    assert verdicts[1].pred is None


@pytest.mark.parametrize(
    ("solution", "error"),
    [
        ("exit_hard", "worker died (exit code 3)"),
        ("kill_itself", "worker died (exit code -9)"),
        ("close_everything", "worker died"),
        ("exit_softly", "SystemExit: 4"),
        ("fail", "ValueError: bad answer xxx"),
        ("fail_without_words", "Silent"),
        ("recurse", "RecursionError"),
        ("function", "ValueError: verifier must return a finite number"),
        ("not_finite", "ValueError: verifier must return a finite number, not 'extra': nan"),
        ("no_such_function", "KeyError"),
        ("interrupt", "KeyboardInterrupt"),
        ("abort", "worker died (exit code -6)"),
        ("allocate_at_once", "MemoryError: the verifier needs more than reward.memory_limit_mb=256"),
        ("allocate_piecewise", "MemoryError: the verifier needs more than reward.memory_limit_mb=256"),
        ("allocate_in_its_frame", "MemoryError: the verifier needs more than reward.memory_limit_mb=256"),
        ("start_threads_without_end", "RuntimeError: can't start new thread"),
        ("open_files_without_end", "OSError: [Errno 24] Too many open files"),
    ],
)
def test_a_failure_is_one_wrong_sample_and_the_others_are_scored(pool, solution, error):
    assert_one_is_wrong(pool, solution, error)


@pytest.mark.short("loop_in_c")
@pytest.mark.parametrize("solution", ["sleep", "loop_in_c", "ignore_signals"])
def test_a_verifier_without_end_is_one_wrong_sample_and_the_others_are_scored(hasty_pool, solution):
    assert_one_is_wrong(hasty_pool, solution, "timeout after 2 s")


@pytest.mark.parametrize("result", list(hostile_verifier.RESULTS)[:-1])
def test_a_result_that_is_none_is_one_wrong_sample(pool, result):
    verdicts = pool.score([request("right"), request("give", result=result), request("right")])
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, WRONG, RIGHT]
    assert verdicts[1].error.startswith("ValueError: verifier must return") and len(verdicts[1].error) <= 1000


def test_a_result_with_numbers_and_names_of_any_length_is_cut(pool):
    verdict = pool.score([request("give", result="long_numbers")])[0]
    assert verdict.numbers == RIGHT | {"n" * 1000: 1.0} and verdict.error is None and len(verdict.pred) <= 1000


def assert_it_costs_one_worker(pool, how, error):
    before, replaced = set(pool._workers), pool.num_replaced
    with ends_within():
        verdicts = pool.score([request("subverted", how=how), request("right"), request("right")])
    assert [verdict.numbers for verdict in verdicts] == [WRONG, RIGHT, RIGHT]
    assert error in verdicts[0].error
    assert len(before & pool._workers) == 1 and pool.num_replaced == replaced + 1
    assert not list(Path(worker.__file__).parent.glob("*.was_run"))


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("huge", "worker died (announced 1152921504606846976 bytes"),
        ("beyond", "worker died (announced"),
        *(
            (how, "worker died (sent an invalid answer)")
            for how in (
                "pickle",
                "random",
                "empty",
                "nothing",
                "deep",
                "nan",
                "overflow",
                "digits",
                "text",
                "no_score",
                "no_text",
                "long_text",
                "many",
                "beyond_float32",
            )
        ),
    ],
)
def test_a_subverted_worker_costs_only_its_sample(pool, how, error):
    assert_it_costs_one_worker(pool, how, error)


@pytest.mark.parametrize("how", ["unfinished", "drip"])
def test_an_answer_that_does_not_end_costs_its_sample_alone(hasty_pool, how):
    assert_it_costs_one_worker(hasty_pool, how, "timeout after 2 s")


def test_a_verifier_that_forks_answers_once(pool):
    solutions = ["fork", "right", "fail"] * 20
    verdicts = pool.score([request(solution) for solution in solutions])
    assert [verdict.error is None for verdict in verdicts] == [True, True, False] * 20
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, RIGHT, WRONG] * 20


@pytest.mark.parametrize("solution", ["print_a_flood", "start_a_thread"])
def test_what_does_not_fail_is_scored(pool, solution):
    with ends_within():
        verdicts = pool.score([request(solution)] * 8)
    assert [verdict.numbers for verdict in verdicts] == [RIGHT] * 8


def test_exhausted_workers_are_replaced_and_counted(pool):
    replaced = pool.num_replaced
    verdicts = pool.score([request("allocate_piecewise"), request("right")] * 3)
    assert [verdict.numbers for verdict in verdicts] == [WRONG, RIGHT] * 3
    assert pool.num_replaced == replaced + 3
    pool.score([request("fail"), request("right")])
    assert pool.num_replaced == replaced + 3


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("solution", ["leave_a_child", "leave_a_child_and_die"])
def test_nothing_that_a_verifier_starts_outlives_its_worker(solution, daemon, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    with VerifierPool("hostile_verifier.score", num_workers=1, timeout_s=30) as pool:
        pool.score([request(solution, path=str(tmp_path / "pid"), daemon=daemon)])
    pid = read_pid(tmp_path / "pid")
    wait_until(lambda: has_ended(pid))


def test_extra_info_reaches_the_verifier_as_json(pool):
    extra_info = {
        "a": [1, -0.5, float("inf"), True, None, "é\0\ud800", 2**70],
        "b": (1, 2),
        "c": {"d": {}},
        "e": Decimal("1.10"),
        "f": b"\0\xff",
        "g": datetime.datetime(2024, 7, 26, 1, 2, 3),
        "h": datetime.date(2024, 7, 26),
        "i": datetime.timedelta(seconds=61),
        "j": np.float32(0.5),
        "k": np.arange(2),
        "l": uuid.UUID(int=1),
        5: "m",
    }
    pred = pool.score([request("echo", x=extra_info)])[0].pred
    assert ast.literal_eval(pred.replace("inf", "1e999"))["x"] == {
        "a": [1, -0.5, float("inf"), True, None, "é\0\ud800", 2**70],
        "b": [1, 2],
        "c": {"d": {}},
        "e": "1.10",
        "f": "AP8=",
        "g": "2024-07-26T01:02:03",
        "h": "2024-07-26",
        "i": "0:01:01",
        "j": 0.5,
        "k": [0, 1],
        "l": "00000000-0000-0000-0000-000000000001",
        "5": "m",
    }


@pytest.mark.parametrize("truth", ["34", None, True, [], ["a", 1], {"a": None, "b": {"c": [0.5]}}])
def test_a_ground_truth_reaches_the_function_as_the_object_that_it_is(truth, tmp_path):
    (tmp_path / "own.py").write_text("def score(a, b, truth, c): return {'score': 1.0, 'pred': repr(truth)}")
    with VerifierPool(f"{tmp_path}/own.py:score", num_workers=1, timeout_s=30) as own:
        verdict = own.score([ScoreRequest("", "", truth, {})])[0]
    assert verdict.pred == repr(truth) and verdict.error is None


def test_extra_info_without_a_form_in_json_is_a_wrong_sample(pool):
    circular = {}
    circular["x"] = circular
    verdicts = pool.score([request("right", x={1, 2}), request("right", x=circular), request("right", x={b"k": 1})])
    assert [verdict.numbers for verdict in verdicts] == [WRONG] * 3
    assert all(verdict.error.startswith("extra_info must be convertible to JSON: ") for verdict in verdicts)


def test_a_worker_survives_an_exception_but_not_a_timeout(hasty_pool):
    before = set(hasty_pool._workers)
    hasty_pool.score([request("fail"), request("recurse"), request("function")])
    assert hasty_pool._workers == before
    hasty_pool.score([request("sleep")])
    assert len(hasty_pool._workers) == len(before) and hasty_pool._workers != before


def test_the_time_limit_holds_for_each_sample_and_kills_its_children(hasty_pool, tmp_path):
    requests = [request("start_a_child", path=str(tmp_path / str(i))) for i in range(4)]
    with ends_within():
        verdicts = hasty_pool.score(requests)
    assert [verdict.error for verdict in verdicts] == ["timeout after 2 s"] * 4
    if sys.platform == "linux":
        pids = [read_pid(tmp_path / str(i)) for i in range(4)]
        wait_until(lambda: all(map(has_ended, pids)))


def test_what_a_verifier_prints_goes_to_stderr(capfd, monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    with VerifierPool("hostile_verifier.score", num_workers=1, timeout_s=30) as pool:
        verdicts = pool.score([request("close_stdout"), request("right")])
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, RIGHT]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "written by a verifier\n"


def test_results_are_normalised(pool):
    named, huge, odd = pool.score([request(name) for name in ("named_numbers", "huge_text", "odd_text")])
    assert named.numbers == {"score": 2.0, "acc": 1.0, "length": 7.0}
    assert named.pred == "12"
    assert huge.pred == "1" * 1000
    assert odd.pred == "a\0b?"


@pytest.mark.parametrize("result", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_a_bare_number_is_score_and_acc(result):
    values, pred = normalize_result(result)
    assert values == RIGHT and pred is None
    assert all(type(value) is float for value in values.values())
    assert normalize_result({"score": result})[0] == RIGHT


@pytest.mark.parametrize(
    "result",
    [None, "1", [1.0], 1j, float("inf"), {}, {"acc": 1.0}, {"score": "1"}, {"score": 1.0, "x": None}],
)
def test_other_results_are_errors(result):
    with pytest.raises(ValueError, match="verifier must return"):
        normalize_result(result)


@pytest.mark.parametrize("number", [3.5e38, -1e300, 10**40, np.float64(1e39)])
def test_a_number_that_float32_cannot_hold_is_an_error(number):
    for result in (number, {"score": number}, {"score": 1.0, "length": number}):
        with pytest.raises(ValueError, match="verifier must return a number that is finite in float32"):
            normalize_result(result)
    largest = float(np.finfo(np.float32).max)
    assert normalize_result(largest)[0] == {"score": largest, "acc": largest}


def test_a_graded_acc_is_warned_of_once(monkeypatch, caplog):
    def warned():
        return [record.getMessage() for record in caplog.records if "neither 0 nor 1" in record.getMessage()]

    monkeypatch.syspath_prepend(DATA)
    with VerifierPool("hostile_verifier.score", num_workers=1, timeout_s=30) as pool:
        pool.score([request("right"), request("fail")])
        assert not warned()
        pool.score([request("right"), request("graded"), request("graded")])
        pool.score([request("graded")])
    assert len(warned()) == 1 and "'hostile_verifier.score' returns acc=0.25" in warned()[0]


def test_hostile_solutions_reach_the_verifier():
    solutions = ["x" * 1_000_000, "\0\ud800" * 50_000, "{" * 100_000, "\\boxed{" * 10_000]
    with VerifierPool("math_dapo", num_workers=1, timeout_s=30) as pool:
        verdicts = pool.score([ScoreRequest("math", solution, "34", {}) for solution in solutions])
    assert [verdict.numbers["score"] for verdict in verdicts] == [-1.0] * 4
    assert all(verdict.error is None for verdict in verdicts)


def test_a_worker_has_no_jax(pool):
    assert pool.score([request("modules")])[0].numbers["jax"] == 0.0
    with VerifierPool("auto", num_workers=1, timeout_s=30) as auto:
        verdict = auto.score([ScoreRequest("chess", "", "", {})])[0]
    assert verdict.numbers == WRONG and "data_source='chess' has no verifier" in verdict.error


def test_failures_are_logged_and_counted(pool, caplog):
    with caplog.at_level(logging.WARNING, logger="dapo_jax.rewards.worker_pool"):
        pool.score([request("right")])
        assert not caplog.records
        pool.score([request("fail_" + "x" * 1000)] * 5)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "data_source='hostile', KeyError" in messages[0] and "'fail_xxx" in messages[0]
    assert messages[3].endswith("failed: 5 of 5 samples")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("no_such_verifier", "", "correct the name"),
        ("no_such_module.score", "", "correct the path"),
        ("hostile.score", "score = 1", "has no function 'score': correct the path"),
        ("hostile.score", "import os; os._exit(5)", r"ended its process \(exit code 5\)"),
        ("hostile.score", "raise SystemExit", "failed with SystemExit"),
        ("hostile.score", "raise KeyboardInterrupt", "raised KeyboardInterrupt: correct its module"),
        ("hostile.score", "1 / 0", "failed with ZeroDivisionError"),
        ("hostile.score", "while True: pass", "did not load within 1 s: import its module"),
        ("hostile.score", "kept = bytearray(10**9)", "MemoryError.*reward.memory_limit_mb=256"),
        ("hostile.score", "import os, sys; os.write(int(sys.argv[1]), b'x' * 100); os._exit(0)", "announced"),
    ],
)
def test_a_verifier_that_does_not_load_is_a_value_error(name, code, reason, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if code == "while True: pass":
        monkeypatch.setattr(worker_process, "_START_LIMIT_S", 1.0)
    with ends_within(), pytest.raises(ValueError, match=f"reward.function='{name}'.*{reason}"):
        VerifierPool(name, num_workers=1, timeout_s=30, memory_limit_mb=256)


def test_a_verifier_that_no_longer_loads_stops_the_run(tmp_path, monkeypatch):
    module = tmp_path / "vanishing_verifier.py"
    module.write_text("import os\ndef score(*arguments): os._exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with VerifierPool("vanishing_verifier.score", num_workers=1, timeout_s=30) as pool:
        module.write_text("raise ImportError('gone')")
        with pytest.raises(RuntimeError, match="a verifier process did not start.*gone"):
            pool.score([request("a"), request("b"), request("c")])


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "verifier_of_this_run.py").write_text("def score(*arguments): return 0.5")
    monkeypatch.chdir(tmp_path)
    with VerifierPool("verifier_of_this_run.score", num_workers=1, timeout_s=30) as pool:
        assert pool.score([request("")])[0].numbers == {"score": 0.5, "acc": 0.5}


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 0, "timeout_s": 1},
        {"num_workers": 1, "timeout_s": 0},
        {"num_workers": 1, "timeout_s": 1, "memory_limit_mb": -1},
    ],
)
def test_limits_must_be_in_range(arguments):
    with pytest.raises(ValueError, match="must be"):
        VerifierPool("arithmetic", **arguments)


def test_the_workers_outlive_the_thread_that_made_the_pool():
    pools = []
    thread = threading.Thread(target=lambda: pools.append(VerifierPool("arithmetic", num_workers=1, timeout_s=30)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with pools[0] as pool:
        worker = set(pool._workers)
        assert pool.score([ScoreRequest("arithmetic", "34", "34", {})])[0].error is None
        assert pool._workers == worker


def test_close_does_not_wait_for_a_verifier(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    pool = VerifierPool("hostile_verifier.score", num_workers=1, timeout_s=60)
    pool.score([request("right")])
    verdicts = []
    asleep = request("where", path=str(tmp_path / "pid"))
    thread = threading.Thread(target=lambda: verdicts.extend(pool.score([asleep])))
    thread.start()
    read_pid(tmp_path / "pid")
    with ends_within():
        pool.close()
        thread.join()
    assert verdicts[0].error == "worker died (exit code -9)"
    with pytest.raises(RuntimeError):
        pool.score([request("right")])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_busy_worker_ends_with_a_killed_parent(tmp_path):
    program = (
        "from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool\n"
        "pool = VerifierPool('hostile_verifier.score', num_workers=1, timeout_s=60)\n"
        f"pool.score([ScoreRequest('', 'where', '', {{'path': {str(tmp_path / 'pid')!r}}})])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(DATA), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    pid = read_pid(tmp_path / "pid")
    assert not has_ended(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: has_ended(pid))


def test_a_program_that_does_not_close_its_pool_ends():
    program = (
        "from dapo_jax.rewards.worker_pool import VerifierPool\n"
        "pool = VerifierPool('arithmetic', num_workers=2, timeout_s=60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=LIMIT_S, check=True)
