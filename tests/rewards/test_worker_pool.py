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

from dapo_jax.errors import printable
from dapo_jax.rewards import worker, worker_pool, worker_supervisor
from dapo_jax.rewards.messages import MalformedAnswer, decode_answer, normalize_result
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
import hostile_verifier  # noqa: E402

sys.path.remove(str(DATA))
RIGHT = {"score": 1.0, "acc": 1.0}
WRONG = {"score": 0.0, "acc": 0.0}


def request(solution, **extra_info):
    return ScoreRequest("hostile", solution, "34", extra_info)


def hostile_pool(timeout_s=30, num_workers=1):
    return VerifierPool("hostile_verifier.score", num_workers=num_workers, timeout_s=timeout_s, memory_limit_mb=256)


@pytest.fixture(scope="module", autouse=True)
def _path():
    (DATA / "forged.was_run").unlink(missing_ok=True)
    sys.path.insert(0, str(DATA))
    yield
    sys.path.remove(str(DATA))


@pytest.fixture(scope="module")
def pool():
    """For verifiers that end on their own, even on a busy machine."""
    with hostile_pool(num_workers=2) as shared:
        yield shared


@pytest.fixture(scope="module")
def hasty_pool():
    """For verifiers that never end."""
    with hostile_pool(timeout_s=2, num_workers=2) as shared:
        yield shared


def has_ended(pid):
    """True once the process is gone, or a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def read_pid(path):
    return int(wait_until(lambda: path.exists() and path.read_text(), "the verifier"))


def test_verdicts_come_in_the_order_of_the_requests(pool):
    requests = [request("echo", i=i) if i % 2 else request("fail") for i in range(500)]
    verdicts = pool.score(requests)
    assert [verdict.pred for verdict in verdicts] == [repr({"i": i}) if i % 2 else None for i in range(500)]
    assert [verdict.numbers["acc"] for verdict in verdicts] == [0.0, 1.0] * 250
    assert pool.score([]) == []


def assert_wrong(pool, failing, error, *, num_replaced=0):
    """A failing request is one wrong sample, and the others are scored."""
    before, _ = set(pool._workers), pool.take_replaced()
    with ends_within():
        verdicts = pool.score([request("right"), failing, request("right"), request("right")])
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, WRONG, RIGHT, RIGHT]
    assert error in verdicts[1].error and len(verdicts[1].error) <= 1000 and verdicts[1].pred is None
    assert len(before - pool._workers) == pool.take_replaced() == num_replaced
    assert len(pool._workers) == len(before) and not (DATA / "forged.was_run").exists()


OUT_OF_MEMORY = "MemoryError: the verifier needs more than reward.memory_limit_mb=256"


@pytest.mark.parametrize(
    ("solution", "error"),
    [
        ("exit_softly", "SystemExit: 4"),
        ("fail", "ValueError: bad answer xxx"),
        ("fail_without_words", "Silent"),
        ("recurse", "RecursionError"),
        ("function", "ValueError: verifier must return a finite number"),
        ("not_finite", "ValueError: verifier must return a finite number, not 'extra': nan"),
        ("no_such_function", "KeyError"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_one_wrong_sample_and_costs_no_worker(pool, solution, error):
    assert_wrong(pool, request(solution), error)


@pytest.mark.short("exit_hard", "piecewise", "huge", "pickle")
@pytest.mark.parametrize(
    ("solution", "error"),
    [
        ("exit_hard", "worker died (exit code 3)"),
        ("kill_itself", "worker died (exit code -9)"),
        ("abort", "worker died (exit code -6)"),
        ("close_everything", "worker died"),
        ("allocate_at_once", OUT_OF_MEMORY),
        ("allocate_piecewise", OUT_OF_MEMORY),
        ("allocate_in_its_frame", OUT_OF_MEMORY),
        ("start_threads_without_end", "RuntimeError: can't start new thread"),
        ("open_files_without_end", "OSError: [Errno 24] Too many open files"),
        ("huge", "worker died (announced 1152921504606846976 bytes"),
        ("beyond", "worker died (announced"),
        ("pickle", "worker died (sent an invalid answer)"),
    ],
)
def test_a_worker_that_dies_is_exhausted_or_subverted_is_replaced_and_counted(pool, solution, error):
    assert_wrong(pool, request(solution), error, num_replaced=1)


@pytest.mark.short("loop_in_c", "sleep", "drip")
@pytest.mark.parametrize("solution", ["sleep", "loop_in_c", "ignore_signals", "unfinished", "drip"])
def test_a_verifier_or_an_answer_without_end_is_one_wrong_sample(hasty_pool, solution):
    assert_wrong(hasty_pool, request(solution), "timeout after 2 s", num_replaced=1)


@pytest.mark.parametrize("how", hostile_verifier.FORGED)
def test_a_forged_message_is_no_answer(how):
    with pytest.raises(MalformedAnswer):
        decode_answer(hostile_verifier.FORGED[how])
    assert not (DATA / "forged.was_run").exists()


def test_a_verifier_that_forks_answers_once(pool):
    verdicts = pool.score([request(solution) for solution in ["fork", "right", "fail"] * 20])
    assert [verdict.error is None for verdict in verdicts] == [True, True, False] * 20
    assert [verdict.numbers for verdict in verdicts] == [RIGHT, RIGHT, WRONG] * 20


def test_what_does_not_fail_is_scored(pool):
    with ends_within():
        verdicts = pool.score([request("print_a_flood"), request("start_a_thread")] * 8)
    assert [verdict.numbers for verdict in verdicts] == [RIGHT] * 16


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.short("leave_a_child-True", "and_die-True")
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("solution", ["leave_a_child", "leave_a_child_and_die"])
def test_nothing_that_a_verifier_starts_outlives_its_worker(solution, daemon, tmp_path):
    with hostile_pool() as pool:
        pool.score([request(solution, path=str(tmp_path / "pid"), daemon=daemon)])
    pid = read_pid(tmp_path / "pid")
    wait_until(lambda: has_ended(pid))


def test_the_time_limit_holds_for_each_sample_and_kills_its_children(hasty_pool, tmp_path):
    requests = [request("start_a_child", path=str(tmp_path / str(i))) for i in range(3)]
    with ends_within():
        verdicts = hasty_pool.score(requests)
    assert [verdict.error for verdict in verdicts] == ["timeout after 2 s"] * 3
    if sys.platform == "linux":
        pids = [read_pid(tmp_path / str(i)) for i in range(3)]
        wait_until(lambda: all(map(has_ended, pids)))


def test_extra_info_reaches_the_verifier_as_json(pool):
    given_and_found = {
        "a": ([1, -0.5, float("inf"), True, None, "é\0\ud800", 2**70],) * 2,
        "b": ((1, 2), [1, 2]),
        "c": ({"d": {}}, {"d": {}}),
        "e": (Decimal("1.10"), "1.10"),
        "f": (b"\0\xff", "AP8="),
        "g": (datetime.datetime(2024, 7, 26, 1, 2, 3), "2024-07-26T01:02:03"),
        "h": (datetime.date(2024, 7, 26), "2024-07-26"),
        "i": (datetime.timedelta(seconds=61), "0:01:01"),
        "j": (np.float32(0.5), 0.5),
        "k": (np.arange(2), [0, 1]),
        "l": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        5: ("m", "m"),
    }
    extra_info = {name: given for name, (given, _) in given_and_found.items()}
    pred = pool.score([request("echo", x=extra_info)])[0].pred
    expected = {str(name): found for name, (_, found) in given_and_found.items()}
    assert ast.literal_eval(pred.replace("inf", "1e999"))["x"] == expected


def test_a_ground_truth_reaches_the_function_as_the_object_that_it_is(pool):
    truths = ["34", None, True, [], ["a", 1], {"a": None, "b": {"c": [0.5]}}]
    verdicts = pool.score([ScoreRequest("", "truth", truth, {}) for truth in truths])
    assert [(verdict.pred, verdict.error) for verdict in verdicts] == [(repr(truth), None) for truth in truths]


def test_what_is_not_the_responses_fault_is_no_verdict():
    """None says so; a worker that had died before it was asked has not read the response."""
    with hostile_pool() as pool:
        [worker] = pool._workers
        assert pool.score([request("right")])[0].numbers == RIGHT
        worker.kill()
        worker._process.wait()
        verdicts = pool.score([request("right"), request("absent"), request("right")])
    assert [verdict.numbers for verdict in verdicts] == [{}, {}, RIGHT] and pool.take_replaced() == 1
    assert verdicts[0].error == "the worker had died (exit code -9)"
    assert verdicts[1].error == "the function returned None: no verdict"


def test_a_worker_that_cannot_be_replaced_keeps_nobody_waiting(monkeypatch):
    with hostile_pool() as pool, ends_within():
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no process"):
            patch.setattr(pool, "_start_worker", lambda: (_ for _ in ()).throw(OSError("no process")))
            pool.score([request("exit_hard")])
        assert pool.score([request("right"), request("right")])[1].numbers == RIGHT


def test_extra_info_without_a_form_in_json_is_no_verdict(pool):
    circular = {}
    circular["x"] = circular
    verdicts = pool.score([request("right", x={1, 2}), request("right", x=circular), request("right", x={b"k": 1})])
    assert [verdict.numbers for verdict in verdicts] == [{}] * 3
    assert all(verdict.error.startswith("extra_info must be convertible to JSON: ") for verdict in verdicts)


def test_what_a_verifier_prints_goes_to_stderr_and_a_graded_acc_is_warned_of_once(capfd, caplog):
    def warned():
        return [record.getMessage() for record in caplog.records if "neither 0 nor 1" in record.getMessage()]

    with hostile_pool() as pool:
        verdicts = pool.score([request("close_stdout"), request("right"), request("fail")])
        assert [verdict.numbers for verdict in verdicts] == [RIGHT, RIGHT, WRONG] and not warned()
        pool.score([request("right"), request("graded"), request("graded")])
        pool.score([request("graded")])
    assert len(warned()) == 1 and "'hostile_verifier.score' returns acc=0.25" in warned()[0]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "written by a verifier\n"


def test_floods_end_and_escape_sequences_reach_no_terminal(capfd, caplog):
    with hostile_pool() as pool:
        verdicts = pool.score([request("print_escapes"), *[request("print_a_flood")] * 3])
    assert [verdict.error is None for verdict in verdicts] == [False, True, True, True]
    printed = capfd.readouterr().err
    assert printed.startswith("\\x1b[31mred\n") and printed.endswith("over 1 MiB: the rest is dropped\n")
    assert len(printed) < worker_supervisor.MAX_PRINTED + 200
    assert printable("a\tb\n\x1b\x9b\u202e\ud800\r") == "a\tb\n\\x1b\\x9b\\u202e\\ud800\\r"


def test_a_worker_gets_no_secret_that_is_not_named_and_limits(monkeypatch):
    secret = ["HF_TOKEN", "WANDB_API_KEY", "MY_JUDGE", "PROXY", "NEEDED_KEY"]
    for name in secret:
        monkeypatch.setenv(name, "http://user:word@host" if name == "PROXY" else "x")
    monkeypatch.setenv("HARMLESS", "http://host")
    limits = ["RLIMIT_FSIZE", "RLIMIT_NPROC"]
    options = {"num_workers": 1, "timeout_s": 30, "hidden_env": ("MY_JUDGE",)}
    with VerifierPool("hostile_verifier.score", env=("NEEDED_KEY",), **options) as pool:
        seen, found = pool.score([request("environment", names=[*secret, "HARMLESS"]), request("limits", names=limits)])
    assert {*seen.pred.split()} == {"NEEDED_KEY", "HARMLESS"}
    assert found.numbers["RLIMIT_FSIZE"] == worker.MAX_FILE and found.numbers["RLIMIT_NPROC"] >= worker.MORE_TASKS
    with pytest.raises(ValueError, match="reward.env=.'ABSENT',. must be variables that are set: export ABSENT"):
        VerifierPool("hostile_verifier.score", env=("ABSENT",), **options)


def test_results_are_normalised_and_cut(pool):
    names = ("named_numbers", "huge_text", "odd_text", "long_numbers", "modules")
    named, huge, odd, long, modules = pool.score([request(name) for name in names])
    assert named.numbers == {"score": 2.0, "acc": 1.0, "length": 7.0}
    assert (named.pred, huge.pred, odd.pred) == ("12", "1" * 1000, "a\0b?")
    assert long.numbers == RIGHT | {"n" * 1000: 1.0} and long.error is None and len(long.pred) <= 1000
    assert modules.numbers["jax"] == 0.0  # a worker does not load it


@pytest.mark.parametrize("result", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_a_bare_number_is_score_and_acc(result):
    values, pred = normalize_result(result)
    assert values == RIGHT and pred is None
    assert all(type(value) is float for value in values.values())
    assert normalize_result({"score": result})[0] == RIGHT


def test_any_other_result_is_an_error():
    others = ["1.0", {}, {"reward": 1.0}, {"acc": 1.0}, {"score": "1"}, {"score": 1.0, "x": None}, [1.0], 1 + 1j]
    others += [float("nan"), float("inf"), {"score": float("inf")}, {"score": 10**400}, 10**10000]
    others += [{"score": 1.0, "more": {"score": 1.0}}, {"score": 1.0, **{str(i): 1.0 for i in range(101)}}]
    for result in others:
        with pytest.raises(ValueError, match="verifier must return"):
            normalize_result(result)
    for number in (3.5e38, -1e300, 10**40, np.float64(1e39)):
        for result in (number, {"score": number}, {"score": 1.0, "length": number}):
            with pytest.raises(ValueError, match="verifier must return a number that is finite in float32"):
                normalize_result(result)
    largest = float(np.finfo(np.float32).max)
    assert normalize_result(largest)[0] == {"score": largest, "acc": largest}


def test_failures_are_logged_and_counted(pool, caplog):
    with caplog.at_level(logging.WARNING, logger="dapo_jax.rewards.worker_pool"):
        pool.score([request("right")])
        assert not caplog.records
        pool.score([request("fail_" + "x" * 1000)] * 5)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "data_source='hostile', KeyError" in messages[0] and "'fail_xxx" in messages[0]
    assert messages[3].endswith("failed: 5 of 5 samples")


@pytest.mark.short("exit code 5", "KeyboardInterrupt", "did not load")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(5)", r"ended its process \(exit code 5\)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt: correct its module"),
        ("1 / 0", "failed with ZeroDivisionError"),
        ("import time\nwhile True: time.sleep(1)", "did not load within 1 s: import its module"),
        ("kept = bytearray(10**9)", "MemoryError.*reward.memory_limit_mb=256"),
        ("import os, sys; os.write(int(sys.argv[1]), b'x' * 100); os._exit(0)", "announced"),
    ],
)
def test_a_verifier_that_does_not_load_is_a_value_error(code, reason, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if "while" in code:
        monkeypatch.setattr(worker_pool, "_START_LIMIT_S", 1.0)
    with ends_within(), pytest.raises(ValueError, match=f"reward.function='hostile.score'.*{reason}"):
        VerifierPool("hostile.score", num_workers=1, timeout_s=30, memory_limit_mb=256)


def test_a_verifier_that_no_longer_loads_stops_the_run(tmp_path, monkeypatch):
    """Its module is one of the current directory, where a worker finds modules too."""
    module = tmp_path / "vanishing_verifier.py"
    module.write_text("import os\ndef score(a, solution, b, c): return 0.5 if solution else os._exit(1)")
    monkeypatch.chdir(tmp_path)
    with VerifierPool("vanishing_verifier.score", num_workers=1, timeout_s=30) as pool:
        assert pool.score([request("right")])[0].numbers == {"score": 0.5, "acc": 0.5}
        module.write_text("raise ImportError('gone')")
        with pytest.raises(RuntimeError, match="a verifier process did not start.*gone"):
            pool.score([request(""), request(""), request("")])


def test_the_workers_outlive_the_thread_that_made_the_pool_and_closing_waits_for_none(tmp_path):
    pools, verdicts = [], []
    maker = threading.Thread(target=lambda: pools.append(hostile_pool(timeout_s=60)))
    maker.start()
    maker.join()
    time.sleep(0.1)
    [pool] = pools
    worker = set(pool._workers)
    assert pool.score([request("right")])[0].error is None and pool._workers == worker
    asleep = request("where", path=str(tmp_path / "pid"))
    waiting = threading.Thread(target=lambda: verdicts.extend(pool.score([asleep])))
    waiting.start()
    read_pid(tmp_path / "pid")
    with ends_within():
        pool.close()
        waiting.join()
    assert verdicts[0].error == "worker died (exit code -9)"
    with pytest.raises(RuntimeError):
        pool.score([request("right")])


def program(*lines):
    """Starts a Python with a pool of the hostile verifier."""
    text = "from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool\n"
    text += "pool = VerifierPool('hostile_verifier.score', num_workers=1, timeout_s=60)\n" + "\n".join(lines)
    return subprocess.Popen([sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_busy_worker_ends_with_a_killed_parent(tmp_path):
    parent = program(f"pool.score([ScoreRequest('', 'where', '', {{'path': {str(tmp_path / 'pid')!r}}})])")
    pid = read_pid(tmp_path / "pid")
    assert not has_ended(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: has_ended(pid))


@pytest.mark.slow
def test_a_program_that_does_not_close_its_pool_ends():
    assert program().wait(timeout=LIMIT_S) == 0
