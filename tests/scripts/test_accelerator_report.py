"""The accelerator report: on a CPU with small sizes, and what it does with sections that fail or come too late."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import accelerator_benchmarks
import accelerator_findings
import accelerator_numerics
import accelerator_page
import accelerator_report
import accelerator_rollouts
import accelerator_sections
import accelerator_shares
import numpy as np
import pytest
from waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]

NAMES = [section.name for section in accelerator_report.SECTIONS]
ONE_SIZE = {name for name in NAMES if "1.5b" not in name} - {"rows_0.5b", "variants"}  # each kind of measurement once
CHECK = {"check": "sum", "found": 2, "wanted": "2", "passed": True}
FINDINGS = {"checks": [CHECK], "tables": {"Sums": [{"a": 1, "b": None}]}, "notes": [], "data": {"platform": "cpu"}}
FAILS = FINDINGS | {"checks": [CHECK | {"passed": False}]}
SKIPPED = FINDINGS | {"checks": [], "data": {"skipped": "it does not fit"}}


@pytest.fixture
def stand_ins(monkeypatch):
    """Name of a section -> its findings, unless FINDINGS, and what its process does then."""
    found, then = {}, {}

    def command(name, folder, *, small):
        findings = json.dumps(found.get(name, FINDINGS))
        return ["bash", "-c", f"echo '{findings}' >{folder / name}.json; {then.get(name, '').format(folder=folder)}"]

    monkeypatch.setattr(accelerator_report, "section_command", command)
    return found, then


def report(folder, *options):
    """Exit code, sections and page of a report, which is to leave the handlers of signals alone."""
    with mock.patch.object(signal, "signal"):
        code = accelerator_report.main(["--output", str(folder / "report"), *options])
    sections = json.loads((folder / "report/report.json").read_text())["sections"]
    return code, {one["name"]: one["status"] for one in sections}, (folder / "report/report.md").read_text()


def test_a_report_in_which_all_passes_or_does_not_fit(stand_ins, tmp_path, capsys):
    stand_ins[0]["rollout_1.5b"] = SKIPPED
    code, statuses, page = report(tmp_path)
    assert code == 0 and statuses == dict.fromkeys(NAMES, "passed") | {"rollout_1.5b": "skipped: it does not fit"}
    assert "No section failed. rollout_1.5b skipped: it does not fit. The page: " in capsys.readouterr().out
    assert "rollout_1.5b skipped: it does not fit." in page and "**Small sizes.**" in page and "| 1 | - |" in page


def test_failing_sections_are_named_and_lose_no_other(stand_ins, tmp_path, capsys):
    stand_ins[0]["attention"] = FAILS
    stand_ins[1]["tokens"] = "echo MemoryError: all of it; exit 1"
    code, statuses, page = report(tmp_path, "--sections", "attention,tokens,training")
    failed = {"attention": "failed: 1 of 1 checks", "tokens": "failed: exit code 1"}
    assert code == 1 and statuses == {"environment": "passed", **failed, "training": "passed"}
    assert "Failed: attention, tokens." in capsys.readouterr().out and "Failed: attention, tokens." in page
    assert "MemoryError: all of it" in page and "| **NO** |" in page


def test_a_section_that_hangs_has_failed_or_ends_with_the_time_and_nothing_outlives_it(stand_ins, tmp_path):
    started = tmp_path / "started"
    stand_ins[1]["tokens"] = f"sleep 600 & echo $! >{started}; while :; do sleep 0.1; done"

    def status(seconds, *, least=0.0, most=LIMIT_S, small=False):
        section = accelerator_report.Section("tokens", "Tokens", least, most)
        deadline = time.monotonic() + accelerator_report.GRACE_S + seconds
        result = accelerator_report.run_section(section, tmp_path, small=small, deadline=deadline)
        assert result["checks"] == (FINDINGS["checks"] if started.exists() else [])
        return result["status"]

    assert status(10.0, least=1000.0) == "skipped: out of time" and not started.exists()
    seconds = 0.5
    while not started.exists() or not started.read_text():  # a slow machine needs longer to start it
        seconds *= 2
        assert status(seconds) == "ended: out of time"
    file = Path(f"/proc/{started.read_text().strip()}/stat")
    wait_until(lambda: not file.exists() or file.read_text().rpartition(")")[2].split()[0] == "Z")
    assert status(LIMIT_S, most=seconds) == f"failed: no end after {seconds:.0f} s"
    with mock.patch.object(accelerator_report, "MOST_WITHOUT_S", 0.1):
        assert status(LIMIT_S, small=True) == "failed: no end after 0 s"


def test_sections_that_have_passed_in_another_report_are_taken_over(stand_ins, tmp_path):
    """With the data that later sections read; not from a report of other sizes or devices."""
    found, then = stand_ins
    found["update_0.5b"] = FINDINGS | {"data": {"update": "measured"}}
    then["tokens"] = "exit 1"
    assert report(tmp_path / "1", "--sections", "attention,tokens,update_0.5b")[0] == 1
    then |= {"tokens": "", "attention": "exit 1", "memory": f"cp {{folder}}/update_0.5b.json {tmp_path}/read"}
    given = "--sections", "attention,tokens,update_0.5b,memory", "--after"
    code, statuses, page = report(tmp_path / "2", *given, str(tmp_path / "1/report"))
    assert code == 0 and set(statuses.values()) == {"passed"} and page.count("Taken over from") == 2
    assert json.loads((tmp_path / "read").read_text())["data"] == {"update": "measured"}
    assert report(tmp_path / "3", *given, str(tmp_path / "2/report"))[0] == 0
    found["environment"] = FINDINGS | {"data": {"platform": "cpu", "devices": "others"}}
    assert report(tmp_path / "4", *given, str(tmp_path / "2/report"))[1]["attention"] == "failed: exit code 1"


@pytest.mark.parametrize(
    "options",
    ["--minute 3", "--minutes 0", "--minutes x", "--sections speed", "--after full", "--after nowhere"]
    + ["--output full", "--output file", "--output file/below"],
)
def test_wrong_options_are_one_line(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/report.json").touch()
    Path("file").touch()
    with pytest.raises(SystemExit) as end:
        accelerator_report.main(options.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("accelerator_report: ") and error.count("\n") == 1
    assert options.split()[0] in error and not Path("runs").exists()


def test_all_sections_have_a_program_and_are_in_the_help():
    assert {*NAMES, "tokens_on_cpu"} == set(accelerator_sections.SECTIONS)
    text = (ROOT / "scripts/accelerator_report.sh").read_text()
    assert all(name in text for name in NAMES[1:])


def test_findings_are_valid_json_at_any_time(tmp_path):
    findings = accelerator_findings.Findings(tmp_path / "found.json")
    findings.row("Table", value=float("nan"), other=float("inf"))
    findings.check("finite", float("nan"), "finite", False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tables"] == {"Table": [{"value": "nan", "other": "inf"}]} and not found["checks"][0]["passed"]


def test_cells():
    values = {None: "-", True: "yes", 12345.6: "12346", 0.00001: "1.0e-05", 7: "7", "a|b\nc": r"a\|b c", 0.0: "0"}
    assert {value: accelerator_page.cell(value, "a") for value in values} == values
    assert accelerator_page.cell(0.123, "share of the limit") == "12.3 %"


def test_limits_of_the_benchmarks(monkeypatch):
    """By hand, for a model whose sizes are round numbers."""
    arch = accelerator_benchmarks.architecture("qwen2.5-0.5b")
    assert accelerator_rollouts.cache_bytes(arch) == 2 * 2 * 24 * 2 * 64
    monkeypatch.setattr(accelerator_rollouts, "device_limits", lambda: SimpleNamespace(bandwidth=1e12))
    args = SimpleNamespace(batch=16, prompt_length=10)
    # Two decoding steps of three tokens: the weights twice, two prompts twice, one and two own tokens of 16 rows.
    expected = (2 * 494032768 * 2 + (2 * 10 * 2 + 16 * (1 + 2)) * 12288) / 1e12
    assert accelerator_rollouts.reading_seconds(arch, args, 3, 1) == pytest.approx(expected)


def test_the_time_of_a_device_is_divided_among_its_kernels():
    """A loop encloses a product and half of its time is its own; another queue copies meanwhile; nothing runs at 8."""
    kernel = accelerator_shares.Kernel
    queue = [kernel("while.3", 0, 4e6), kernel("gemm_fusion_dot_1 ", 1e6, 3e6), kernel("paged_attention", 4e6, 7e6)]
    copies = [kernel("MemcpyD2D", 2e6, 3e6), kernel("chosen_block", 9e6, 10e6)]
    rows = {
        row["of"]: (row["kernels"], row["ms"], row["share of the time"])
        for row in accelerator_shares.shares([queue, copies])
    }
    assert rows == {
        "attention": (1, 3.0, 0.3),
        "products": (2, 3.0, 0.3),
        "elementwise, sums, copies": (2, 3.0, 0.3),
        accelerator_shares.BETWEEN: (None, 2.0, 0.2),
    }


@pytest.mark.parametrize("limit, rollout, update", [(None, 256, 2), (72, 256, 8), (14, 256, 4), (2, 0, 0)])
def test_sizes_follow_the_memory(limit, rollout, update, monkeypatch):
    for module in (accelerator_benchmarks, accelerator_rollouts):
        monkeypatch.setattr(module, "memory_limit", lambda: limit and limit * 2**30)
    arch = accelerator_benchmarks.architecture("qwen2.5-0.5b")
    assert accelerator_rollouts.rows_that_fit(arch, 512, 512, most=256) == rollout
    chunk = accelerator_benchmarks.logits_chunk()
    assert accelerator_benchmarks.micro_batch_that_fits(arch, 2048, 1, chunk) == update


def test_k3_is_exact_for_small_differences():
    assert accelerator_numerics.k3(np.array([1e-4, -1e-4], np.float32)) == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.slow
@pytest.mark.long("one size")
@pytest.mark.parametrize(
    "names", [[name for name in NAMES if name in ONE_SIZE], NAMES], ids=["one size", "all sections"]
)
def test_the_report_on_a_cpu(names, tmp_path):
    """From a folder that is not the checkout. The time limit is for a report that hangs."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHON": sys.executable}
    environment = {**os.environ, **variables, "DAPO_JAX_CACHE": str(tmp_path / "cache")}
    command = ["bash", ROOT / "scripts/accelerator_report.sh", "--output", "report", "--minutes", "40"]
    command += ["--sections", ",".join(names)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=3000)
    page = (tmp_path / "report/report.md").read_text()
    assert done.returncode == 0, page
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["small"] and report["to_come"] == []
    assert [(section["name"], section["status"]) for section in report["sections"]] == [(n, "passed") for n in names]
    assert all(check["passed"] for section in report["sections"] for check in section["checks"])
    assert all(section["tables"] and f"\n## {section['title']}\n" in page for section in report["sections"])
    measured = {section["name"]: section["tables"] for section in report["sections"]}
    assert [row["step"] for row in measured["training"]["Steps"]] == list(range(1, 9))
    assert measured["update_0.5b"]["Update"][0]["tokens/s"] > 0
    for part in ("update", "rollout"):
        rows = measured[f"{part}_0.5b"][f"Where the time of the {part} goes, by a profile"]
        assert all(row["ms"] > 0 for row in rows if row["of"] != "attention")  # a CPU's is several products
    assert all(measured[name]["Rollout"] for name in names if name.startswith("rollout_"))
    slots = [(row["slots"], row["lengths"]) for row in measured["long_tail"]["Slots"]]
    assert slots == list(itertools.product((16, 8), ("equal", "long tail")))
    for row in measured.get("variants", {"Variants": []})["Variants"]:
        assert row["tokens/s"] > 0
    peaks = [row["measured peak"] for row in measured["memory"]["GiB of a device"]]
    assert peaks == [None] * sum(name.startswith("update") for name in names)
