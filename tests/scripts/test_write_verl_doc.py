"""The tables of docs/coming_from_verl.md are what the script writes from the program's own table."""

import importlib.util
from pathlib import Path

from dapo_jax.from_verl.options import TABLE, expanded

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("write_verl_doc", ROOT / "scripts/write_verl_doc.py")
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_the_page_is_up_to_date():
    page = script.PAGE.read_text()
    assert page == script.document(page), "run: python scripts/write_verl_doc.py"


def test_every_option_is_on_the_page():
    page = script.PAGE.read_text()
    assert [key for entry in TABLE for key in expanded(entry.verl) if f"`{key}`" not in page] == []
