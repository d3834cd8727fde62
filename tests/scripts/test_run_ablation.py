"""The comparisons, and what is made of the metrics of their runs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import ablations
import comparison_report
import finished_runs
import numpy as np
import pytest
import run_ablation

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"versions": {"python": "3", "jax": "2", "flax": "1"}, "devices": "8 x cpu", "host": "a processor"}
ARMS = [(name, arm) for name, found in ablations.COMPARISONS.items() for arm in found.arms]


def configured(name: str, arm: str):
    return read_config(["train", *run_ablation.command_options(ablations.COMPARISONS[name], arm)])


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_arm_is_a_valid_config(name, arm):
    validate(configured(name, arm))


def test_the_paper_s_table_adds_one_part_a_line():
    arms = list(ablations.PARTS)
    found = [configured("dapo", arm) for arm in arms]
    parts = [
        (
            config.algorithm.overlong_filtering,
            config.actor.clip_ratio_high == 0.28,
            config.reward.overlong_buffer.enable,
            config.actor.loss_agg_mode == "token-mean",
            config.algorithm.filter_groups.enable,
        )
        for config in found
    ]
    assert parts == [tuple(place < number for place in range(5)) for number in range(6)]
    recipe = read_config(["train", f"--config={ROOT / 'configs/sums.py'}"])
    assert found[-1] == recipe, "the last line is the recipe itself"


def test_equal_configs_share_their_runs(tmp_path):
    def folder(name: str, arm: str, *options: str) -> Path:
        chosen = run_ablation.command_options(ablations.COMPARISONS[name], arm, options)
        return run_ablation.folder_of(tmp_path, chosen)

    whole = folder("dapo", "+ dynamic sampling")
    assert whole == folder("leftover", "batch, requeue") == folder("dtype", "float32")
    assert folder("punishment", "overlong filtering") == folder("dapo", "+ clip-higher")
    assert folder("punishment", "both") == folder("dapo", "+ soft overlong punishment")
    assert len({folder("dapo", arm) for arm in ablations.PARTS}) == 6
    assert whole != folder("dapo", "+ dynamic sampling", "--config.rollout.top_p=0.9")
    assert whole == folder("dapo", "+ dynamic sampling", "--config.seed=3", "--config.workdir=elsewhere")
    model = read_config(["train", f"--config={ROOT / 'configs/sums.py'}"]).model.path
    assert whole == folder("dapo", "+ dynamic sampling", f"--config.model.path=elsewhere/{Path(model).name}")
    assert whole != folder("dapo", "+ dynamic sampling", "--config.model.path=another.gguf")


def write_run(folder: Path, seed: int, accuracies: list[float], tokens: list[int]) -> None:
    workdir = folder / f"seed{seed}"
    workdir.mkdir(parents=True)
    rows = [{"step": 0, "eval/sums/acc/mean@2": 0.25}]
    for step, (accuracy, num_tokens) in enumerate(zip(accuracies, tokens, strict=True), start=1):
        rows.append(
            {
                "step": step,
                "eval/sums/acc/mean@2": accuracy,
                "eval/sums/response_length/mean": 10.0 * step,
                "eval/sums/response_length/clip_ratio": 0.25,
                "dynamic_sampling/generated_tokens": num_tokens,
                "timing_s/step": 2.0,
                "actor/entropy": 1.0 / step,
                "response_length/mean": 10.0,
                "perf/throughput": 1.0,
                "response_length/clip_ratio": 0.5,
                "dynamic_sampling/uniform_share": None,
                "rollout/acc/mean": 0.5,
            }
        )
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "environment.json").write_text(json.dumps(ENVIRONMENT))
    finished_runs.mark_finished(workdir)


@pytest.fixture
def arms(tmp_path):
    comparison = ablations.COMPARISONS["dapo"]
    found = {
        arm: run_ablation.folder_of(tmp_path, run_ablation.command_options(comparison, arm)) for arm in comparison.arms
    }
    write_run(found["naive GRPO"], 0, [0.5, 0.75], [100, 100])
    write_run(found["naive GRPO"], 10, [0.5, 0.25], [100, 100])
    write_run(found["+ dynamic sampling"], 0, [0.5, 1.0], [100, 300])
    (found["naive GRPO"] / "seed3").mkdir()  # still running
    return found


def test_the_table_reads_the_curves(arms):
    runs = finished_runs.finished_runs(arms, range(11))
    assert [(run.arm, run.seed) for run in runs] == [
        ("naive GRPO", 0),
        ("naive GRPO", 10),
        ("+ dynamic sampling", 0),
    ]
    assert "perf/throughput" not in runs[0].rows[1] and "dynamic_sampling/uniform_share" not in runs[0].rows[1]
    assert (runs[0].versions, runs[0].machine) == ({"python": "3", "jax": "2"}, "8 x cpu on a processor")
    assert [run.seed for run in finished_runs.finished_runs(arms, [10, 3])] == [10]
    naive, full = comparison_report.table(runs)
    assert (naive["seeds"], naive["before"], naive["after"]) == (
        2,
        "0.250 (0.250 to 0.250)",
        "0.500 (0.250 to 0.750)",
    )
    assert full["after"] == "1.000"
    # the thriftiest run took 200 tokens; there this one is a third of the way from 0.5 at 100 to 1.0 at 400
    assert full["equal tokens"] == "0.667"
    assert (full["tokens"], full["seconds"], full["entropy"], full["uniform"]) == ("400", "4", "0.500", "-")
    assert (full["length"], full["cut off"]) == ("20.0", "0.250")
    assert comparison_report.token_budget(runs) == 200 and comparison_report.step_budget(runs) == 2
    assert "equal steps" not in naive
    assert comparison_report.deviation_between_seeds(runs) == pytest.approx(2**0.5 / 4)  # .75 and .25
    assert comparison_report.deviation_between_seeds(runs[1:]) is None


def test_arms_of_unequal_length_are_compared_after_equal_steps(tmp_path):
    write_run(tmp_path / "short", 0, [0.5, 0.75], [100, 100])
    write_run(tmp_path / "long", 0, [0.25, 0.5, 1.0], [50, 50, 50])
    runs = [run for arm in ("short", "long") for run in finished_runs.runs_of_folder(arm, tmp_path / arm)]
    short, long = comparison_report.table(runs)
    assert (short["after"], short["equal steps"]) == ("0.750", "0.750")
    assert (long["after"], long["equal steps"], long["equal tokens"]) == ("1.000", "0.500", "1.000")


def test_five_seeds_are_compared_in_pairs(tmp_path):
    """The seeds differ by far more than the arms; the pairs do not."""
    for seed, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5]):
        write_run(tmp_path / "first", seed, [0.0, value], [100, 100])
        write_run(tmp_path / "other", seed, [0.0, value + 0.25], [100, 100])
    write_run(tmp_path / "other", 5, [0.0, 1.0], [100, 100])
    runs = [run for arm in ("first", "other") for run in finished_runs.runs_of_folder(arm, tmp_path / arm)]
    [line] = comparison_report.differences(runs)
    assert (line["arm"], line["after"], line["trained length"]) == ("other", "+0.250 ± 0.000", "+0.0 ± 0.0")
    assert line["clipped"] == "-", "was not measured"
    assert comparison_report.differences([run for run in runs if run.seed != 3]) == []
    assert comparison_report.table(runs)[0]["length"] == "20.0 ± 0.0"


def test_five_seeds_have_an_interval():
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    # 2.776, Student's quantile of four degrees of freedom, times 0.1581 / 5^(1/2)
    assert comparison_report.spread(values) == "0.300 ± 0.196 (0.100 to 0.500)"
    assert comparison_report.spread(values[:4]) == "0.250 (0.100 to 0.400)"
    means = np.random.default_rng(0).normal(size=(4000, 5))
    inside = [abs(np.mean(row)) <= comparison_report.half_interval(row) for row in means]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.012)


def run_of(arm: str, seed: int, machine: str, rows: list[dict[str, float]]):
    return finished_runs.Run(arm, "config", seed, machine, {}, rows)


def test_seconds_of_different_machines_are_not_compared():
    rows = [
        {"step": 0, "eval/sums/acc/mean@2": 0.0},
        {"step": 1, "eval/sums/acc/mean@2": 0.5, "dynamic_sampling/generated_tokens": 10, "timing_s/step": 2.0},
    ]
    slow = [rows[0], {**rows[1], "timing_s/step": 7.0}]
    mixed = [run_of("a", 0, "old", slow), run_of("b", 0, "new", rows)]
    assert comparison_report.timed(mixed) == []
    assert [line["seconds"] for line in comparison_report.table(mixed)] == ["-", "-"]
    both = [*mixed, run_of("a", 1, "new", rows)]
    assert comparison_report.timed(both) == both[1:]
    assert [line["seconds"] for line in comparison_report.table(both)] == ["2", "2"]


def test_seeds_are_averaged_step_by_step():
    rows = [{"step": step, "timing_s/step": 2.0, "rollout/acc/mean": 0.1 * step} for step in range(1, 5)]
    gap = [{**row, "rollout/acc/mean": 0.5} if row["step"] != 2 else {"step": 2, "timing_s/step": 4.0} for row in rows]
    places, values = comparison_report.mean_curve([rows, gap], "rollout/acc/mean", "steps")
    assert places.tolist() == [1, 3, 4]
    assert values.tolist() == [pytest.approx([0.1, 0.3, 0.4]), [0.5, 0.5, 0.5]]
    assert comparison_report.mean_curve([rows, gap], "rollout/acc/mean", "seconds")[0].tolist() == [2, 7, 9]
    assert comparison_report.mean_curve([rows], "no/such/metric", "steps")[1].size == 0


def test_a_report_keeps_the_alarms_that_are_on_and_says_which_code_ran(tmp_path):
    write_run(tmp_path, 0, [0.5], [100])
    metrics = tmp_path / "seed0" / "metrics.jsonl"
    first, last = map(json.loads, metrics.read_text().splitlines())
    last |= {"alarm/truncation": 1.0, "alarm/kl_jump": 0.0}
    metrics.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    [run] = finished_runs.runs_of_folder("arm", tmp_path)
    assert [name for name in run.rows[1] if name.startswith("alarm/")] == ["alarm/truncation"]
    assert run.exit_code == 0
    assert run.commit == "" or re.fullmatch(r"[\w.-]{7,}\+?", run.commit)


@pytest.fixture
def trained(monkeypatch):
    """Commands that would have trained; each leaves the metrics of a run."""
    commands = []

    class Done:
        returncode = 0

    def run(command, **_):
        commands.append(command)
        [workdir] = [part.partition("=")[2] for part in command if part.startswith("--config.workdir=")]
        (Path(workdir) / "environment.json").write_text(json.dumps(ENVIRONMENT))
        (Path(workdir) / "metrics.jsonl").write_text(
            '{"step": 0, "eval/sums/acc/mean@2": 0.5}\n{"step": 1, "eval/sums/acc/mean@2": 0.5, '
            '"dynamic_sampling/generated_tokens": 200, "actor/entropy": 0.5}\n'
        )
        return Done

    monkeypatch.setattr(run_ablation, "subprocess", SimpleNamespace(run=run))  # matplotlib runs commands too
    return commands


def test_finished_runs_are_reported_and_not_run_again(arms, tmp_path, trained, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "results"
    run_ablation.main(["dapo", "--seeds", "0", f"--runs={tmp_path}", f"--output={output}"])
    assert len(trained) == 4 and all("--config.seed=0" in command for command in trained)
    for name in ("dapo.png", "dapo_accuracy.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    report = json.loads((output / "dapo.json").read_text())
    assert len(report["runs"]) == 6 and len(report["table"]) == 6
    assert report["arms"]["+ dynamic sampling"]["algorithm.filter_groups.enable"] == "True"
    assert report["command"] == "python scripts/comparisons/run_ablation.py dapo --seeds 0 --output docs/results"
    assert "+ clip-higher" in capsys.readouterr().out


def test_runs_that_a_report_has_are_not_run_again(arms, tmp_path, trained):
    pytest.importorskip("matplotlib")
    output, elsewhere = tmp_path / "results", f"--runs={tmp_path / 'elsewhere'}"
    run_ablation.main(["dapo", "--seeds", "0", f"--runs={tmp_path}", f"--output={output}"])
    before = json.loads((output / "dapo.json").read_text())
    trained.clear()
    run_ablation.main(["dapo", "--seeds", "0", "1", elsewhere, f"--output={output}"])
    assert len(trained) == 6 and all("--config.seed=1" in command for command in trained)
    after = json.loads((output / "dapo.json").read_text())
    assert [run for run in after["runs"] if run["seed"] != 1] == before["runs"]
    trained.clear()
    run_ablation.main(["leftover", "--seeds", "0", elsewhere, f"--output={output}"])
    assert len(trained) == 3, "the first arm is the whole of DAPO"
    [first, *_] = json.loads((output / "leftover.json").read_text())["runs"]
    [same] = [run for run in before["runs"] if run["arm"] == "+ dynamic sampling"]
    assert first == {**same, "arm": "batch, requeue"}


@pytest.mark.parametrize("options", [["--seeds", "1"], ["--seeds", "0", "--config.rollout.top_p=0.9"]])
def test_no_run_of_a_report_is_lost(options, arms, tmp_path, trained):
    pytest.importorskip("matplotlib")
    where = [f"--runs={tmp_path}", f"--output={tmp_path / 'results'}"]
    run_ablation.main(["leftover", "--seeds", "0", *where])
    trained.clear()
    with pytest.raises(SystemExit, match="leftover.json has runs that would be lost: .* with seed 0"):
        run_ablation.main(["leftover", *options, *where])
    assert not trained


def test_a_run_that_fails_ends_the_script(tmp_path, monkeypatch):
    class Failed:
        returncode = 1

    monkeypatch.setattr(run_ablation, "subprocess", SimpleNamespace(run=lambda *_, **__: Failed))
    with pytest.raises(SystemExit, match="exit code 1"):
        run_ablation.main(["dapo", "--seeds", "0", f"--runs={tmp_path}"])
    assert list(tmp_path.glob("*/seed0/output.txt")) and not list(tmp_path.glob("*/*/finished"))


@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_cannot_go_on_may_count_as_far_as_it_came(arms, tmp_path, trained, monkeypatch, code):
    pytest.importorskip("matplotlib")
    done = run_ablation.subprocess.run

    def run(command, **options):
        result = done(command, **options)
        result.returncode = code
        return result

    monkeypatch.setattr(run_ablation, "subprocess", SimpleNamespace(run=run))
    output = tmp_path / "results"
    call = ["filter_metric", "--seeds", "0", "--accept-failures", f"--runs={tmp_path}", f"--output={output}"]
    if code != 1:  # the input was wrong, so there is no run
        with pytest.raises(SystemExit, match="exit code 2"):
            run_ablation.main(call)
        return
    run_ablation.main(call)
    report = json.loads((output / "filter_metric.json").read_text())
    assert [(run["seed"], run["exit_code"], len(run["rows"])) for run in report["runs"]] == [(0, 1, 2)] * 3
    assert report["command"].endswith("--seeds 0 --output docs/results --accept-failures")
    assert len(trained) == 3
    run_ablation.main(call)
    assert len(trained) == 3, "nor is it run again"
