import json

import pytest
import write_results_doc
from write_results_doc import DOCS, TABLE, document, pages

REPORTS = sorted(path for path in (DOCS / "results").glob("*.json") if "table" in json.loads(path.read_text()))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_is_up_to_date(page):
    text = page.read_text()
    assert TABLE.search(text)
    assert text == document(page), "run python scripts/docs/write_results_doc.py"
    for name in TABLE.findall(text):
        if name != "summary":
            command = json.loads((DOCS / "results" / f"{name}.json").read_text())["command"]
            before = text[: text.index(f"<!-- {name} -->")]
            assert before.rstrip().endswith(f"{command}\n```"), f"{name}: the command is `{command}`"


def test_every_report_has_its_page_and_its_rows_in_the_summary():
    found = [name for page in pages()[1:] for name in TABLE.findall(page.read_text())]
    assert sorted(found) == [path.stem for path in REPORTS]
    overview = pages()[0].read_text()
    assert len(overview.splitlines()) <= 150
    for path in REPORTS:
        assert overview.count(f"| [{path.stem}](") == len(json.loads(path.read_text())["table"])


def test_a_table_comes_from_its_file(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    runs = [
        {"seed": 1, "versions": {"jax": "1.2"}, "machine": "1 x cpu"},
        {
            "seed": 0,
            "versions": {"jax": "1.2", "torch": "3"},
            "machine": "2 x gpu",
            "arm": "b",
            "exit_code": 1,
            "rows": [{"step": 7.0}],
        },
    ]
    shown = {"seeds": 1, "before": "0.100", "after": "0.500", "tokens": 12}
    report = {
        "table": [{"arm": "a", **shown, "length": 3}, {"arm": "b", **shown, "length": 4}],
        "runs": runs,
        "token_budget": 1234.0,
        "deviation_between_seeds": 0.0625,
    }
    (tmp_path / "results" / "ours.json").write_text(json.dumps(report))
    (tmp_path / "results" / "mine.md").write_text("Before\n<!-- ours -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "results.md").write_text("See [mine](results/mine.md).\n<!-- summary -->\n<!-- end -->\n")
    monkeypatch.setattr(write_results_doc, "DOCS", tmp_path)
    overview, mine = pages()
    text = document(mine)
    assert text.startswith("Before\n<!-- ours -->\n| arm | seeds |") and text.endswith("<!-- end -->\nafter\n")
    assert "| a | 1 | 0.100 | 0.500 | 12 | 3 |" in text and "old" not in text
    sources = "[numbers](ours.json), [all curves](ours.png)"
    facts = "jax 1.2, torch 3; 1 x cpu or 2 x gpu; equal tokens: after 1234"
    early = "b with seed 0 ended with an error after step 7"
    assert "equal steps" not in text
    for row in report["table"]:
        row["equal steps"] = "0.400"
    (tmp_path / "results" / "ours.json").write_text(json.dumps(report | {"step_budget": 24.0}))
    assert "2 x gpu; equal steps: after 24; equal tokens: after 1234" in document(mine)
    noise = "standard deviation of `after` between seeds 0.062"
    assert f"\n\nSeeds 0, 1; {facts}; {noise}; {early}; {sources}." in text
    assert "| [ours](results/mine.md) | a | 1 | 0.100 | 0.500 | 12 |" in document(overview)
