"""An evening's evidence: what passes, fails, is cut off or cannot run, and what a second run does again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import gpu_evidence
import pytest
from gpu_evidence import PARTS, Part

ROOT = Path(__file__).parents[2]


def stand_in(name, text, **options):
    return Part(name, f"The {name}", lambda given: [["bash", "-c", text]], **{"most": 9.0, **options})


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """A function that runs some parts: the exit code, what became of each part, and the page."""
    monkeypatch.setattr(gpu_evidence, "PROBE", "print('1 x cpu')")
    monkeypatch.chdir(tmp_path)  # and back again

    def run(*parts, options=()):
        with mock.patch.object(gpu_evidence, "PARTS", parts):
            code = gpu_evidence.main(["--output", str(tmp_path / "out"), *options])
        files = (tmp_path / "out" / f"{part.name}.json" for part in parts)
        found = {path.stem: json.loads(path.read_text())["status"] for path in files if path.exists()}
        return code, found, (tmp_path / "out" / "evidence.md").read_text()

    return run


def test_a_second_run_does_what_has_not_passed(evidence, tmp_path, capsys):
    count = f"echo ran >>{tmp_path}/count"
    parts = (
        stand_in("good", f"{count}; echo 3 tokens a second"),
        stand_in("bad", f"{count}; echo out of memory; exit 7"),
        stand_in("slow", f"{count}; echo half; sleep 600", most=0.02),
        stand_in("absent", count, needs=lambda given: "the model is not here"),
    )
    code, found, page = evidence(*parts)
    cut = "cut off after 0.0 minutes"
    assert code == 1 and found == {
        "good": "passed",
        "bad": "failed: exit code 7",
        "slow": cut,
        "absent": "not measured: the model is not here",
    }
    assert all(text in page for text in ("3 tokens a second", "out of memory", "half", "**Small sizes**", "1 x cpu"))
    assert "| The absent | not measured: the model is not here | 0.0 | " in page
    assert evidence(*parts)[:2] == (1, found) and "The good: passed before" in capsys.readouterr().out
    assert (tmp_path / "count").read_text().count("ran") == 5


def test_without_time_nothing_runs_and_the_page_is_written_from_what_is_there(evidence, tmp_path):
    parts = stand_in("first", "echo 1"), stand_in("second", "echo 2")
    code, found, _ = evidence(*parts, options=["--minutes", "0.01"])
    assert code == 0 and found == dict.fromkeys(("first", "second"), "not measured: no time was left")
    _, found, _ = evidence(*parts, options=["--parts", "second"])
    (tmp_path / "out" / "first.json").unlink()
    (tmp_path / "out" / "second").mkdir()
    (tmp_path / "out" / "second" / "report.md").write_text("# Report\n\n## Checks\n\nall\n")
    page = tmp_path / "page.md"
    evidence(*parts, options=["--page", str(page)])
    text = page.read_text()
    assert "| The first | not measured | - | - |" in text and "\n### Checks\n\nall" in text and "# Report" not in text


@pytest.mark.parametrize("options", ["--minute 3", "--minutes 0", "--parts speed", "--minutes x", "--output file/x"])
def test_wrong_options_are_one_line(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as end:
        gpu_evidence.main(options.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("gpu_evidence: ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_part_is_in_the_help_and_its_scripts_and_configs_are_there(tmp_path):
    text = (ROOT / "scripts/gpu_evidence.sh").read_text() + gpu_evidence.__doc__
    given = gpu_evidence.Given(tmp_path, 9.0, True, sys.executable)
    for part in PARTS:
        assert text.count(part.name) >= 2
        for command in part.commands(given):
            paths = [word.removeprefix("--config=") for word in command[1:] if word.endswith(".py")]
            assert all(Path(path).is_file() for path in paths), command


@pytest.mark.full
def test_the_evidence_that_a_cpu_gives(tmp_path):
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHON": sys.executable}
    command = ["bash", ROOT / "scripts/gpu_evidence.sh", "--output", "out", "--parts", "kill,long", "--minutes", "40"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, timeout=3000)
    page = (tmp_path / "out/evidence.md").read_text()
    assert done.returncode == 0 and "no difference after 1 kills" in page and "dapo_jax shared" in page, page
