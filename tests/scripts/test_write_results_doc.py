import json

import write_results_doc


def test_the_page_is_up_to_date():
    page = write_results_doc.PAGE.read_text()
    assert write_results_doc.TABLE.search(page)
    assert page == write_results_doc.document(), "run python scripts/docs/write_results_doc.py"
    for name in write_results_doc.TABLE.findall(page):
        command = json.loads((write_results_doc.DOCS / "results" / f"{name}.json").read_text())["command"]
        before = page[: page.index(f"<!-- {name} -->")]
        assert before.rstrip().endswith(f"{command}\n```"), f"{name}: the command is `{command}`"


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
    report = {
        "table": [{"arm": "a", "after": "0.500"}, {"arm": "b", "after": "0.250"}],
        "runs": runs,
        "token_budget": 1234.0,
        "deviation_between_seeds": 0.0625,
    }
    (tmp_path / "results" / "ours.json").write_text(json.dumps(report))
    (tmp_path / "results.md").write_text("Before\n<!-- ours -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(write_results_doc, "DOCS", tmp_path)
    monkeypatch.setattr(write_results_doc, "PAGE", tmp_path / "results.md")
    text = write_results_doc.document()
    assert text.startswith("Before\n<!-- ours -->\n| arm | after |") and text.endswith("<!-- end -->\nafter\n")
    assert "| a | 0.500 |" in text and "old" not in text
    sources = "[numbers](results/ours.json), [all curves](results/ours.png)"
    facts = "jax 1.2, torch 3; 1 x cpu or 2 x gpu; equal tokens: after 1234"
    early = "b with seed 0 ended with an error after step 7"
    noise = "standard deviation of `after` between seeds 0.062"
    assert f"\n\nSeeds 0, 1; {facts}; {noise}; {early}; {sources}." in text
