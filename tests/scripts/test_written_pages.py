"""Pages of the documentation, or their tables, are what scripts/docs/ writes from the code and from reports."""

import json

import pytest
import write_configuration_doc
import write_preflight_doc
import write_results_doc
import write_verl_doc
from write_results_doc import DOCS, TABLE, document, pages

from dapo_jax.verl.options import TABLE as VERL_OPTIONS
from dapo_jax.verl.options import expanded

WRITTEN = {
    write_configuration_doc.PAGE: write_configuration_doc.document,
    write_preflight_doc.PAGE: write_preflight_doc.page,
    write_preflight_doc.RESULTS: write_preflight_doc.results,
    write_verl_doc.PAGE: lambda: write_verl_doc.document(write_verl_doc.PAGE.read_text()),
    **{page: lambda page=page: document(page) for page in pages()},
}
REPORTS = {path.stem: json.loads(path.read_text()) for path in (DOCS / "results").glob("*.json")}
TABLES = sorted(name for name, report in REPORTS.items() if "table" in report)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_a_page_is_up_to_date(page):
    assert page.read_text() == WRITTEN[page](), "run the scripts in scripts/docs/"


def test_every_option_has_a_row_of_type_bound_default_and_meaning():
    text = write_configuration_doc.document()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split("`")[1] for row in rows}) > 150
    assert not [row for row in rows if row.endswith("|  |")]
    assert "| `data.gen_batch_size` | `int \\| None`, greater than 0, or null | `null` | prompts per generation" in text
    assert "| `critic.optim.lr` | `float`, 0 or more | `1e-05` | learning rate after the warm-up |" in text
    assert '| `model.path` | `str` | `""` | Hugging Face directory, OWNER/NAME of the hub, a' in text


def test_every_option_of_verl_is_on_its_page():
    page = write_verl_doc.PAGE.read_text()
    assert [key for entry in VERL_OPTIONS for key in expanded(entry.verl) if f"`{key}`" not in page] == []


def test_every_report_of_the_preflight_has_a_recipe():
    made = {name.removeprefix("preflight_") for name in REPORTS if name.startswith("preflight_")}
    assert made <= set(write_preflight_doc.RECIPES)


def test_expected_times_have_their_own_table(monkeypatch):
    report = next(iter(write_preflight_doc.reports().values()))
    expected = {
        "lengths": "lognormal:median=3000,sigma=1,clip=8192,within=0.5,prompt_median=200,prompt_sigma=0.5",
        "response_tokens": {"mean": 3456.7},
        "efficiency": {"update": 0.9, "decode": 0.5, "prefill": 0.25},
        "step_seconds": 123.4,
    }
    monkeypatch.setattr(write_preflight_doc, "reports", lambda: {"7b_v5p": {**report, "expected": expected}})
    row = f"| 7b_v5p | median=3000, sigma=1 | 3457 | 123 | {round(report['step_seconds'])} | 0.90 | 0.50 | 0.25 |"
    assert row in write_preflight_doc.page()


def test_every_report_has_its_page_with_its_command():
    assert len((DOCS / "results.md").read_text().splitlines()) <= 150
    texts = [page.read_text() for page in pages()]
    assert sorted(name for text in texts for name in TABLE.findall(text)) == TABLES
    for name in TABLES:
        [text] = [text for text in texts if f"<!-- {name} -->" in text]
        command = REPORTS[name]["command"]
        assert text.partition(f"<!-- {name} -->")[0].rstrip().endswith(f"{command}\n```"), f"{name}: `{command}`"


def test_reports_hold_what_tables_and_pictures_need():
    assert sum(path.stat().st_size for path in (DOCS / "results").glob("*.json")) <= 1_000_000
    for name, report in REPORTS.items():
        if name.startswith("preflight_"):
            assert write_preflight_doc.kept({**report, "programs": []}) == report


def test_a_table_comes_from_its_file(tmp_path, monkeypatch):
    first = {"seed": 1, "versions": {"jax": "1.2"}, "machine": "1 x cpu"}
    failed = {"seed": 0, "versions": {"jax": "1.2", "torch": "3"}, "machine": "2 x gpu", "arm": "b"}
    failed |= {"exit_code": 1, "rows": {"step": [7]}}
    shown = {"seeds": 1, "before": "0.100", "after": "0.500", "tokens": 12}
    table = [{"arm": "a", **shown, "length": 3}, {"arm": "b", **shown, "length": 4}]
    report = {"table": table, "runs": [first, failed], "token_budget": 1234.0, "deviation_between_seeds": 0.0625}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ours.json").write_text(json.dumps(report))
    (tmp_path / "results" / "mine.md").write_text("Before\n<!-- ours -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "results" / "plain.md").write_text("No table.\n")
    (tmp_path / "results.md").write_text("See [plain](results/plain.md) and [mine](results/mine.md).\n")
    monkeypatch.setattr(write_results_doc, "DOCS", tmp_path)
    [mine] = pages()
    text = document(mine)
    assert text.startswith("Before\n<!-- ours -->\n| arm | seeds |") and text.endswith("<!-- end -->\nafter\n")
    assert "| a | 1 | 0.100 | 0.500 | 12 | 3 |" in text and "old" not in text and "equal steps" not in text
    assert (
        "\n\nSeeds 0, 1; jax 1.2, torch 3; 1 x cpu or 2 x gpu; equal tokens: after 1234; standard deviation of `after` "
        "between seeds 0.062; b with seed 0 ended with an error after step 7; [numbers](ours.json), [all curves]"
        "(ours.png)."
    ) in text
    for row in table:
        row["equal steps"] = "0.400"
    (tmp_path / "results" / "ours.json").write_text(json.dumps(report | {"step_budget": 24.0}))
    assert "2 x gpu; equal steps: after 24; equal tokens: after 1234" in document(mine)
