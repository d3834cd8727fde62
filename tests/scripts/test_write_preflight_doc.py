import pytest
import write_preflight_doc as script


@pytest.mark.parametrize(("path", "document"), [(script.PAGE, script.page), (script.RESULTS, script.results)])
def test_a_page_is_up_to_date(path, document):
    assert path.read_text() == document(), "run: python scripts/docs/write_preflight_doc.py"


def test_every_report_has_a_recipe():
    made = {path.stem.removeprefix("preflight_") for path in (script.DOCS / "results").glob("preflight_*.json")}
    assert made <= set(script.RECIPES)


def test_expected_times_have_their_own_table(monkeypatch):
    report = next(iter(script.reports().values()))
    expected = {
        "lengths": "lognormal:median=3000,sigma=1,clip=8192,within=0.5,prompt_median=200,prompt_sigma=0.5",
        "response_tokens": {"mean": 3456.7},
        "efficiency": {"update": 0.9, "decode": 0.5, "prefill": 0.25},
        "step_seconds": 123.4,
    }
    monkeypatch.setattr(script, "reports", lambda: {"7b_v5p": {**report, "expected": expected}})
    longest = round(report["step_seconds"])
    assert f"| 7b_v5p | median=3000, sigma=1 | 3457 | 123 | {longest} | 0.90 | 0.50 | 0.25 |" in script.page()
