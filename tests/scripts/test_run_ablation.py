"""The comparisons, and what is made of the metrics of their runs."""

import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import ablations
import comparison_report
import finished_runs
import pytest
import run_ablation

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.values import DEFAULTS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"versions": {"python": "3", "jax": "2", "flax": "1"}, "devices": "8 x cpu", "host": "a processor"}
ARMS = [(name, arm) for name, found in ablations.COMPARISONS.items() for arm in found.arms]


@functools.cache
def configured(name: str, arm: str):
    return read_config(["train", *run_ablation.command_options(ablations.COMPARISONS[name], arm)])


@pytest.mark.short("dapo-")
@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_arm_is_a_valid_config(name, arm):
    validate(configured(name, arm))


def test_every_option_of_an_arm_exists():
    for name, arm in ARMS:
        comparison = ablations.COMPARISONS[name]
        assert comparison.shared.keys() | comparison.arms[arm].keys() <= DEFAULTS.keys(), (name, arm)


def test_the_paper_s_table_adds_one_part_a_line():
    found = [configured("dapo", arm) for arm in ablations.PARTS]
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


@functools.cache
def folder_of(name: str, arm: str, *options: str) -> str:
    chosen = run_ablation.command_options(ablations.COMPARISONS[name], arm, options)
    return run_ablation.folder_of(Path(), chosen).name


def test_equal_configs_share_their_runs():
    whole = folder_of("dapo", "+ dynamic sampling")
    assert whole == folder_of("leftover", "batch, requeue") == folder_of("dtype", "float32")
    assert folder_of("punishment", "overlong filtering") == folder_of("dapo", "+ clip-higher")
    assert folder_of("punishment", "both") == folder_of("dapo", "+ soft overlong punishment")
    assert len({folder_of("dapo", arm) for arm in ablations.PARTS}) == 6
    changed = functools.partial(folder_of, "dapo", "+ dynamic sampling")
    model = Path(configured("dapo", "+ dynamic sampling").model.path).name
    same = ["--config.seed=3", "--config.workdir=elsewhere", f"--config.model.path=elsewhere/{model}"]
    assert whole == changed(*same)
    elsewhere = "--config.environment.path=elsewhere/calculator.py:Calculator"
    assert folder_of("calculator", "with the calculator") == folder_of("calculator", "with the calculator", elsewhere)
    assert whole not in (changed("--config.rollout.top_p=0.9"), changed("--config.model.path=another"))


def rows_of(accuracies: list[float], tokens: list[int]) -> list[dict]:
    """metrics.jsonl of a run with these held-out accuracies and sampled tokens after each step."""
    return [{"step": 0, "eval/sums/acc/mean@2": 0.25}] + [
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
            "alarm/truncation": 1.0,
            "alarm/kl_jump": 0.0,
        }
        for step, (accuracy, num_tokens) in enumerate(zip(accuracies, tokens, strict=True), start=1)
    ]


def write_run(workdir: Path, rows: list[dict]) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "environment.json").write_text(json.dumps(ENVIRONMENT))


def run_of(arm: str, seed: int, rows: list[dict], machine: str = "a machine"):
    kept = [{name: value for name, value in row.items() if finished_runs.is_kept(name, value)} for row in rows]
    return finished_runs.Run(arm, "config", seed, machine, {}, kept, finished_runs.means_of(rows))


@pytest.fixture
def arms(tmp_path):
    """The folders of the arms of the comparison "dapo", three with finished runs."""
    found = {arm: tmp_path / folder_of("dapo", arm) for arm in ablations.PARTS}
    for arm, seed, accuracies, tokens in [
        ("naive GRPO", 0, [0.5, 0.75], [100, 100]),
        ("naive GRPO", 10, [0.5, 0.25], [100, 100]),
        ("+ dynamic sampling", 0, [0.5, 1.0], [100, 300]),
    ]:
        write_run(found[arm] / f"seed{seed}", rows_of(accuracies, tokens))
        finished_runs.mark_finished(found[arm] / f"seed{seed}")
    (found["naive GRPO"] / "seed3").mkdir()  # still running
    return found


def test_the_table_reads_the_curves(arms):
    runs = finished_runs.finished_runs(arms, range(11))
    assert [(run.arm, run.seed) for run in runs] == [("naive GRPO", 0), ("naive GRPO", 10), ("+ dynamic sampling", 0)]
    dropped = {"perf/throughput", "dynamic_sampling/uniform_share", "alarm/truncation", "alarm/kl_jump"}
    assert runs[0].rows[1].keys() == rows_of([0.5], [100])[1].keys() - dropped
    assert (runs[0].versions, runs[0].machine) == ({"python": "3", "jax": "2"}, "8 x cpu on a processor")
    assert runs[0].exit_code == 0 and re.fullmatch(r"|[\w.-]{7,}\+?", runs[0].commit)
    assert [run.seed for run in finished_runs.finished_runs(arms, [10, 3])] == [10]


@pytest.mark.parametrize("name", ["filter_sums", "leftover", "distillation"])
def test_a_report_follows_from_its_runs(name):
    """In pairs and of unequal steps, on two machines, of too few seeds for pairs; older tables have fewer columns."""
    path = ROOT / f"docs/results/{name}.json"
    report, runs = json.loads(path.read_text()), [*finished_runs.reported_runs([path]).values()]
    columns = [finished_runs.as_columns(run.rows) for run in runs]
    assert json.loads(json.dumps(columns)) == [run["rows"] for run in report["runs"]]
    table = [
        {column: line[column] for column in kept}
        for line, kept in zip(comparison_report.table(runs), report["table"], strict=True)
    ]
    found = {"table": table, "differences": comparison_report.differences(runs)}
    found |= {"step_budget": comparison_report.step_budget(runs), "token_budget": comparison_report.token_budget(runs)}
    found |= {"deviation_between_seeds": comparison_report.deviation_between_seeds(runs)}
    assert {entry: value for entry, value in found.items() if entry in report} == {
        entry: report[entry] for entry in found if entry in report
    }


def test_of_some_metrics_only_the_mean_over_the_steps_is_kept():
    clipped, *_ = finished_runs.MEANS
    assert finished_runs.means_of([{"step": 0}, {clipped: 0.25}, {clipped: None}, {clipped: 0.5}]) == {clipped: 0.375}


def test_seeds_are_averaged_step_by_step():
    rows = [{"step": step, "timing_s/step": 2.0, "rollout/acc/mean": 0.1 * step} for step in range(1, 5)]
    gap = [{**row, "rollout/acc/mean": 0.5} if row["step"] != 2 else {"step": 2, "timing_s/step": 4.0} for row in rows]
    places, values = comparison_report.mean_curve([rows, gap], "rollout/acc/mean", "steps")
    assert places.tolist() == [1, 3, 4]
    assert values.tolist() == [pytest.approx([0.1, 0.3, 0.4]), [0.5, 0.5, 0.5]]
    assert comparison_report.mean_curve([rows, gap], "rollout/acc/mean", "seconds")[0].tolist() == [2, 7, 9]
    assert comparison_report.mean_curve([rows], "no/such/metric", "steps")[1].size == 0


@pytest.fixture
def trained(monkeypatch):
    """Seeds of runs that would have been trained: each leaves metrics and ends with `trained.code`; no pictures."""
    trained = SimpleNamespace(seeds=[], code=0)

    def run(options, workdir, seed, **_):
        trained.seeds.append(seed)
        write_run(workdir, rows_of([0.5], [200]))
        return trained.code

    monkeypatch.setattr(run_ablation, "run_training", run)
    monkeypatch.setattr(run_ablation, "empty_figure", lambda: None)
    monkeypatch.setattr(comparison_report, "draw", lambda *_: None)
    return trained


def test_finished_runs_are_reported_and_neither_run_again_nor_lost(arms, tmp_path, trained, capsys):
    output = tmp_path / "results"

    def make(name, *options, runs="elsewhere"):
        """The report, and how many runs were trained for it."""
        trained.seeds.clear()
        run_ablation.main([name, "--seeds", *options, f"--runs={tmp_path / runs}", f"--output={output}"])
        return json.loads((output / f"{name}.json").read_text()), list(trained.seeds)

    report, trained_seeds = make("dapo", "0", runs="")
    assert trained_seeds == [0] * 4
    assert len(report["runs"]) == 6 and len(report["table"]) == 6
    assert report["arms"]["+ dynamic sampling"]["algorithm.filter_groups.enable"] == "True"
    assert report["command"] == "python scripts/comparisons/run_ablation.py dapo --seeds 0 --output docs/results"
    assert "+ clip-higher" in capsys.readouterr().out

    more, trained_seeds = make("dapo", "0", "1")
    assert trained_seeds == [1] * 6
    assert [run for run in more["runs"] if run["seed"] != 1] == report["runs"], "a report keeps runs too"

    other, trained_seeds = make("leftover", "0")
    assert len(trained_seeds) == 3, "the first arm is the whole of DAPO"
    [same] = [run for run in report["runs"] if run["arm"] == "+ dynamic sampling"]
    assert other["runs"][0] == {**same, "arm": "batch, requeue"}

    for options in (["1"], ["0", "--config.rollout.top_p=0.9"]):
        with pytest.raises(SystemExit, match="leftover.json has runs that would be lost: .* with seed 0"):
            make("leftover", *options)
        assert not trained.seeds


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(comparison_report, "PANELS", comparison_report.PANELS[1:4])
    monkeypatch.setattr(comparison_report, "ACCURACY_PANELS", 1)
    runs = [run_of(arm, 0, rows_of([0.5, 1.0], [100, 100])) for arm in "ab"]
    comparison_report.report("dapo", runs, tmp_path, {})
    for name in ("dapo.png", "dapo_accuracy.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_ends_the_script_or_counts_as_far_as_it_came(tmp_path, trained):
    call = ["filter_metric", "--seeds", "0", f"--runs={tmp_path}", f"--output={tmp_path / 'results'}"]
    for code, options in ((1, []), (2, ["--accept-failures"])):  # 2: the input was wrong, so there is no run
        trained.code = code
        with pytest.raises(SystemExit, match=f"exit code {code}"):
            run_ablation.main(call + options)
        [output] = tmp_path.glob("*/seed0/output.txt")
        assert not list(tmp_path.glob("*/*/finished"))
        shutil.rmtree(output.parent)
    trained.seeds.clear()
    trained.code = 1
    for _ in range(2):
        run_ablation.main([*call, "--accept-failures"])
        assert len(trained.seeds) == 3, "nor is it run again"
    report = json.loads((tmp_path / "results/filter_metric.json").read_text())
    assert [(run["seed"], run["exit_code"], len(run["rows"]["step"])) for run in report["runs"]] == [(0, 1, 2)] * 3
    assert report["command"].endswith("--seeds 0 --output docs/results --accept-failures")
