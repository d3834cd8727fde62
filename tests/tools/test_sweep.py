"""The command that trains several settings with several seeds, without training but in the slow test."""

import dataclasses
import re
import signal
from types import SimpleNamespace

import pytest
from run_folder import row_of, write_run
from shapes import SMALL
from small_run import RECIPE, rows_without_clock

from dapo_jax import cli
from dapo_jax.command.command_line import read_config
from dapo_jax.errors import InputError
from dapo_jax.monitor.recipe import write_config
from dapo_jax.monitor.records import to_json_line
from dapo_jax.tools import sweep

OPTIONS = [str(RECIPE), "trainer.total_training_steps=4"]


@pytest.fixture
def trained(monkeypatch):
    """The runs that would have been trained. Each leaves its config and 4 steps, or 2 if `codes` has an exit code."""
    found = SimpleNamespace(runs=[], codes={})

    def train(options, workdir, seed):
        arm, words = workdir.parent.name, [*options, f"--config.seed={seed}", f"--config.workdir={workdir}"]
        found.runs.append(f"{arm} {seed}")
        code = found.codes.get(found.runs[-1])
        write_run(workdir, steps=3 if code is None else 2)
        last = row_of(4) | {"eval/gsm8k/acc/mean@4": seed / 10 + seed % 2 / 50 + (arm == "slow") / 2}
        with open(workdir / "metrics.jsonl", "a") as file:
            file.write(to_json_line(last) * (code is None))
        write_config(workdir, dataclasses.asdict(read_config(["train", *words])))
        return code or 0

    monkeypatch.setattr(sweep, "run_training", train)
    return found


def fails(capsys, code: int, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", *OPTIONS, *words])
    assert ended.value.code == code
    return capsys.readouterr().err


def test_each_arm_is_trained_with_each_seed_once_and_compared(trained, tmp_path, capsys):
    output = tmp_path / "out"
    words = ["--arm", "base", "--arm", "slow:actor.optim.lr=1e-3", "--output", str(output)]
    trained.codes = {"base 1": 2}
    assert f"base, seed 1 failed with exit code 2, see above and {output}/base/seed_1/" in fails(capsys, 1, *words)
    trained.codes = {"base 1": 0}  # a signal to it alone
    assert "base, seed 1 was stopped with 2 steps left: rerun the same command" in fails(capsys, 1, *words)
    trained.codes = {}
    cli.main(["sweep", *OPTIONS, *words])
    assert trained.runs == ["base 0", *["base 1"] * 3, "base 2", "slow 0", "slow 1", "slow 2"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 of 6: base, seed 0: 0.000 held out, ") and (output / "report.html").exists()
    before, cost = "0.100 ± 0.000 (0.100 to 0.100)", ["2400 ± 0", "40 ± 0"]
    assert [re.split(" {2,}", line.strip()) for line in lines[-4:]] == [
        ["arm", "seeds", "before", "after", "difference", "tokens", "seconds"],
        ["base", "3", before, "0.107 ± 0.250 (0.000 to 0.200)", "-", *cost],
        ["slow", "3", before, "0.607 ± 0.250 (0.500 to 0.700)", "+0.500 ± 0.000", *cost],
        [f"done: {output / 'report.html'}"],
    ]
    cli.main(["sweep", *OPTIONS, *words, "--seeds", "0", "3"])
    assert trained.runs[8:] == ["base 3", "slow 3"]
    longer = ["--arm", "base", "--output", str(output), "--seeds", "3", "trainer.total_training_steps=6"]
    fails(capsys, 1, *longer)  # the stand-in stops after four steps
    assert trained.runs[10:] == ["base 3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arm a --arm a:rollout.n=8", "--arm a:rollout.n=8 has the name or all options of an earlier arm"),
        ("--arm a --arm b:rollout.n=16", "--arm b:rollout.n=16 has the name or all options of an earlier arm"),
        ("--arm a --arm b:actor.optim.lr=-1", "--arm b: the config has problems:\n  - actor.optim.lr=-1.0 must be"),
        ("--arm a:seed=3", "seed differs between the runs, and --seeds sets it"),
        ("trainer.checkpoint_dir=here", "here is for one run, and a sweep has several: leave it out"),
        ("--seeds 1 1", "--seeds 1 1: give different numbers"),
        ("--output gs://bucket/out", "must be a folder on this machine"),
    ],
)
def test_wrong_input_is_refused_before_the_first_run(trained, tmp_path, capsys, words, message):
    assert message in fails(capsys, 2, "--output", str(tmp_path / "out"), *words.split())
    assert not trained.runs and not list(tmp_path.iterdir())


def test_a_value_may_hold_commas(tmp_path):
    values = ["data.system_prompt=one,seed=two", 'trainer.logger=("console","tensorboard")', "model.path=(a,b=c)"]
    arm = f"a:{','.join(values)}".replace("one,seed=two", '"one,seed=two"')
    [planned] = sweep.planned_runs([arm], [5], OPTIONS, tmp_path)
    assert planned.options[-3:] == values and planned.config.data.system_prompt == "one,seed=two"


def test_a_folder_of_other_options_is_refused(tmp_path):
    options = [*OPTIONS, "model.path=Qwen/Qwen3-0.6B", "trainer.resume_from_path=runs/other/"]
    [planned] = sweep.planned_runs(["a"], [0], options, tmp_path)
    recorded = dataclasses.asdict(planned.config) | {"workdir": "where/it/was/before"}
    recorded["model"]["path"] += f"@{'0123456789' * 4}"  # as a run records them
    recorded["trainer"]["resume_from_path"] = "runs/other/checkpoints/20"
    del recorded["trainer"]["save_minutes"]  # of an earlier version
    write_config(planned.config.workdir, recorded)
    assert sweep.planned_runs(["a"], [0], options, tmp_path) == [planned]
    with pytest.raises(InputError, match=r"a/seed_0 holds a run of other options \(rollout.n: 16 -> 8\): choose"):
        sweep.planned_runs(["a"], [0], [*options, "rollout.n=8"], tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_run_and_its_end_is_waited_for(tmp_path, monkeypatch, number):
    program, handler = tmp_path / "python", signal.getsignal(number)
    program.write_text(f"#!/bin/sh\ntrap 'echo saved; exit 0' {number}\nkill -{number} $PPID\nsleep 0.2\nsleep 0.2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sweep, "sys", SimpleNamespace(executable=str(program)))
    with open(tmp_path / "output", "w") as output, pytest.raises(KeyboardInterrupt):
        sweep.run_training([], tmp_path, 0, output=output)
    assert (tmp_path / "output").read_text() == "saved\n" and signal.getsignal(number) == handler


@pytest.mark.slow
def test_a_run_of_a_sweep_is_that_of_the_training_command(whole, tmp_path):
    options = [f"{key}={value}" for key, value in {**SMALL, "trainer.save_freq": 1}.items()]
    cli.main(["sweep", OPTIONS[0], "--seeds", "0", *options, "--output", str(tmp_path)])
    assert rows_without_clock(tmp_path / "base" / "seed_0") == whole[2]
