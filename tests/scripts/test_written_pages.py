"""Pages of the documentation, or their tables, are what scripts/docs/ writes from the code and from reports."""

import json

import pytest
import write_configuration_doc
import write_preflight_doc
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


def test_every_option_of_verl_is_on_its_page():
    page = write_verl_doc.PAGE.read_text()
    assert [key for entry in VERL_OPTIONS for key in expanded(entry.verl) if f"`{key}`" not in page] == []


def test_every_report_of_the_preflight_has_a_recipe():
    made = {name.removeprefix("preflight_") for name in REPORTS if name.startswith("preflight_")}
    assert made <= set(write_preflight_doc.RECIPES)


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
