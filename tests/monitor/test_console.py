"""Host: console lines are aligned and complete, with a bar only on a terminal."""

import json
import math
import time

import pytest
from terminal import look_at_a_terminal

from dapo_jax.monitor import console as console_module
from dapo_jax.monitor.console import WIDTH, Console
from dapo_jax.monitor.statistics import time_metrics

METRICS = {
    "rollout/acc/mean": 0.4123,
    "train/num_kept_prompts": 157.0,
    "dynamic_sampling/num_evaluated_prompts": 384.0,
    "train/num_gen_batches": 3.0,
    "response_length/mean": 812.44,
    "actor/entropy": 0.512,
    "actor/pg_loss": -0.01234,
    "actor/grad_norm": 0.1321,
    "actor/lr": 1e-6,
    "actor/pg_clipfrac": 0.00123,
    "timing_s/step": 34.06,
    "perf/throughput": 811.7,
}


def make_console(total_steps=300, *, constant=(), turns=False, **options):
    constant = constant if turns else [*constant, "turns"]
    return Console(total_steps, **{"initial_step": 0, "enabled": True, "constant": constant, **options})


def test_episodes_have_their_turns_in_the_line(capsys):
    make_console(turns=True).step_line(12, METRICS | {"rollout/num_turns/mean": 2.375})
    assert "  len 812.4  turns 2.38  entropy 0.512  " in capsys.readouterr().out


def test_line_shows_the_numbers_of_the_step_and_of_every_task_set(capsys):
    name = "eval/gsm8k/acc/mean@4"
    others = {"eval/math/train/acc/mean@8": 0.5, name + "/std": 0.1, "eval/gsm8k/acc/best@4": 0.9}
    make_console().step_line(12, METRICS | {name: 0.5125} | others)
    assert capsys.readouterr().out == (
        "step  12/300  acc 0.412  kept   157 of 384  len 812.4  entropy 0.512  grad 0.132  clip 0.001   34.1s  "
        "  812 tok/s\n"
        "step  12/300  eval gsm8k mean@4 0.512  eval math/train mean@8 0.500\n"
    )


def test_columns_are_aligned_whatever_is_absent(capsys):
    console = make_console(constant=["clip"])
    console.step_line(0, {"eval/gsm8k/acc/mean@4": 0.1})
    console.step_line(1, METRICS)
    console.step_line(299, {"rollout/acc/mean": 0.5})
    console.step_line(300, METRICS | {"actor/grad_norm": float("nan"), "rollout/acc/mean": -0.5})
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "step   0/300  eval gsm8k mean@4 0.100"
    assert "kept       - of -  " in lines[1]
    assert "grad   nan" in lines[2]
    for label in ("acc", "kept", "len", "entropy", "grad"):
        assert len({line.index(f"  {label} ") for line in lines}) == 1, label


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, " 0.040s "), (4e-7, " 4e-7s ")])
def test_a_small_value_has_more_decimals(capsys, seconds, shown):
    make_console(2).step_line(1, METRICS | {"timing_s/step": seconds})
    assert shown in capsys.readouterr().out


EXTREMES = (0.0, -0.0, 1e-9, -1e-9, 0.99995, -0.99995, 99.995, 99999.5, -123456.7, 1e12, -1e300, math.nan, -math.inf)


@pytest.mark.parametrize("constant", [(), ("clip",), ("kept",), ("clip", "kept")])
@pytest.mark.parametrize("total_steps", [1, 300, 9999, 10**6, 10**9])
def test_no_line_is_longer_than_a_terminal_is_wide(capsys, total_steps, constant):
    console = make_console(total_steps, constant=constant)
    tasks = {f"eval/{'a long name ' * 12}{number}/acc/mean@4": -1e9 for number in range(3)}
    for extreme in EXTREMES:
        console.step_line(total_steps, dict.fromkeys(METRICS, extreme) | tasks)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH == 120
    trained = [line for line in lines if " eval " not in line]
    assert len(trained) == len(EXTREMES) and len(set(map(len, trained))) == 1  # aligned
    if total_steps < 10**4:
        for word in ("acc", "kept", "len", "entropy", "grad", "clip", "tok/s"):
            assert all((f" {word}" in line) == (word not in constant) for line in trained), word


def test_the_final_table_is_aligned_and_formats_counts_measures_and_parts(capsys):
    console = make_console()
    console.final_table([])
    parts = {"gen": 3.4, "adv": 0.1}
    console.final_table(
        [("steps", "300"), ("tokens", 1234567), ("accuracy", 0.25), ("best", None), ("s", parts)], report="a b"
    )
    assert capsys.readouterr().out.splitlines() == [
        "steps     300",
        "tokens    1,234,567",
        "accuracy  0.250",
        "best      -",
        "s         sampling 3",
        "done: dapo-jax report 'a b'",
    ]


def show_a_step(console, metrics=METRICS):
    console.stage("gen")
    console.step_line(1, metrics)
    console.close()
    console.close()


def test_without_a_terminal_a_stage_that_lasts_has_a_line_and_later_another(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "LONG_S", 0.05)
    console = make_console()
    console.stage("load")
    console.step_line(0, {})
    for name in ("gen", "reward", "gen"):  # stages of sampling are one
        console.stage(name)
    console.detail("round 2, 3 of 16 groups kept")
    console.compiling("compiling, 8 programs so far")
    found, end = "", time.monotonic() + 20
    while found.count("sampling") < 2 and time.monotonic() < end:
        time.sleep(0.01)
        found += capsys.readouterr().out
    line = "sampling: round 2, 3 of 16 groups kept, compiling, 8 programs so far ({:.0f} s)\n"
    assert found.replace("loading the model (0 s)\n", "") == line.format(0.05) + line.format(0.15)
    console.close()
    time.sleep(0.3)
    assert capsys.readouterr().out == ""


def test_on_a_terminal_the_bar_shows_stage_and_steps_done(monkeypatch):
    terminal, console = look_at_a_terminal(monkeypatch), make_console(10, initial_step=4)
    console.note("")
    console.compiling("compiling")
    assert terminal.getvalue() == ""  # what is refused before its first stage leaves no bar
    console.compiling("")
    console.stage("gen")
    assert "4/10" in terminal.getvalue()
    console.detail("round 2, 3 of 16 groups kept")
    console.compiling("compiling, 8 programs so far")
    assert "sampling; round 2, 3 of 16 groups kept; compiling, 8 programs so far" in terminal.getvalue()
    console.compiling("")
    console.stage("reward")
    assert "verifying; round 2, 3 of 16 groups kept]" in terminal.getvalue()
    console.step_line(7, METRICS)
    console.stage("gen")
    assert "sampling" in terminal.getvalue().rpartition("7/10")[2]
    assert "kept" not in terminal.getvalue().rpartition("7/10")[2]
    console.close()
    assert "7/10" in terminal.getvalue().splitlines()[-1]


def test_the_stage_has_the_speed_of_the_step_before(monkeypatch):
    terminal, console = look_at_a_terminal(monkeypatch), make_console(10)
    tokens = {"dynamic_sampling/generated_tokens": 4000, "perf/total_num_tokens": 900}
    row = tokens | {"timing_s/gen": 2.0, "timing_s/update_actor": 0.5, "timing_s/reward": 1.25}
    console.step_line(1, row | time_metrics(row))
    speeds = {"gen": "sampling 2,000", "update_actor": "updating the policy 1,800", "reward": "verifying 1.2 s"}
    for name, speed in speeds.items():
        console.stage(name)
        assert speed in terminal.getvalue().splitlines()[-1].rpartition("\r")[2]
    console.close()


@pytest.mark.parametrize(("options", "shown"), [({"enabled": False}, ""), ({"mode": "quiet"}, "steps  1\n")])
def test_a_disabled_console_is_silent_and_quiet_is_the_final_table_alone(monkeypatch, capsys, options, shown):
    terminal, console = look_at_a_terminal(monkeypatch), make_console(**options)
    show_a_step(console)
    console.final_table([("steps", 1)], report="runs/tiny")
    assert terminal.getvalue() == "" and capsys.readouterr().out == shown


def test_json_is_an_object_a_step_and_the_summary(monkeypatch, capsys):
    terminal, console = look_at_a_terminal(monkeypatch), make_console(mode="json")
    show_a_step(console, METRICS | {"actor/pg_loss": float("nan")})
    table = {"tokens generated": 1234567, "best": None, "seconds per stage": {"gen": 3.5}}
    console.final_table(list(table.items()))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"step": 1} | METRICS | {"actor/pg_loss": None}, {"summary": table}]
    assert terminal.getvalue() == ""
