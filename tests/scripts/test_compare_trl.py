"""The comparison with TRL, whose trainer is not installed here: its settings, and what is made of its records."""

import json
from pathlib import Path
from types import SimpleNamespace

import compare_trl
import comparison_report
import pytest
import run_ablation
import trl_task
from scripts.test_run_ablation import ENVIRONMENT, rows_of, write_run

from dapo_jax.command.command_line import read_config
from dapo_jax.tools.data import main

ROOT = Path(__file__).parents[2]


def test_trl_is_told_our_settings():
    config = read_config(["train", f"--config={ROOT / 'configs/sums.py'}"])
    settings = compare_trl.settings_of(config, seed=7)
    assert settings["updates_per_step"] * settings["rows_per_update"] == 6 * 8
    assert (settings["rows_per_update"], settings["samples"], settings["max_tokens"]) == (16, 8, 32)
    assert (settings["clip_low"], settings["clip_high"], settings["mask_truncated"]) == (0.2, 0.28, True)
    assert settings["overlong_buffer"] == 8 and settings["seed"] == 7
    rates = settings["learning_rates"]
    assert len(rates) == 16 and rates[:2] == [6e-6, 1.2e-5] and rates[-1] == pytest.approx(1.2e-6)
    assert trl_task.length_of([5, 2, 2], eos=2, most=3) == 2 and trl_task.length_of([5, 6, 7], eos=2, most=3) == 3


def test_problems_are_asked_as_here(tmp_path):
    main(["sums", f"--output={tmp_path}", "--problems", "4", "2"])
    rows = trl_task.rows_of([str(tmp_path / "sums" / "heldout.parquet")])
    assert len(rows) == 2 and [turn["role"] for turn in rows[0]["prompt"]] == ["system", "user", "assistant", "user"]
    assert rows[0]["prompt"][0]["content"] == ""
    assert trl_task.is_right("8 + 5 = 13, 13 + 6 = 19", "19") == 1 and trl_task.is_right("19 - 1 = 18", "19") == 0
    assert [len(batch) for batch in trl_task.batches(rows * 3, 4)] == [4, 2]


def test_both_sides_are_run_and_reported(tmp_path, monkeypatch, capsys):
    programs, pictures = [], []

    def run(command, **_):
        programs.append(command[0])
        workdir = Path(command[-1])
        settings = json.loads((workdir / "settings.json").read_text())
        assert settings["seed"] == 3 and settings["steps"] == 2
        write_run(workdir, rows_of([0.5], [200]))
        (workdir / "environment.json").write_text(json.dumps(ENVIRONMENT | {"versions": {"trl": "1.0"}}))
        return SimpleNamespace(returncode=0)

    def train(options, workdir, seed, **_):
        programs.append("ours")
        write_run(workdir, rows_of([0.5], [200]))

    monkeypatch.setattr(run_ablation, "run_training", train)
    monkeypatch.setattr(compare_trl, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(compare_trl, "empty_figure", lambda: None)
    monkeypatch.setattr(comparison_report, "draw", lambda name, runs, panels, path: pictures.append(path.name))
    where = ["--trl=torch/bin/python", f"--runs={tmp_path}", f"--output={tmp_path / 'results'}"]
    compare_trl.main([*where, "--seeds", "3", "--config.trainer.total_training_steps=2"])
    assert [program == "torch/bin/python" for program in programs] == [False, False, True]
    report = json.loads((tmp_path / "results/compare_trl.json").read_text())
    ours = {"python": "3", "jax": "2"}
    assert [run["versions"] for run in report["runs"]] == [ours, ours, {"trl": "1.0"}]
    assert {run["machine"] for run in report["runs"]} == {"8 x cpu on a processor"}
    assert [line["arm"] for line in report["table"]] == ["dapo_jax", "dapo_jax, no filter", "TRL"]
    assert pictures[0] == "compare_trl.png" and "| TRL | 1 | 0.250" in capsys.readouterr().out
