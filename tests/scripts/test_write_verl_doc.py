"""The tables of docs/coming_from_verl.md are what the script writes from the program's own table."""

import write_verl_doc as script

from dapo_jax.verl.options import TABLE, expanded


def test_the_page_is_up_to_date():
    page = script.PAGE.read_text()
    assert page == script.document(page), "run: python scripts/docs/write_verl_doc.py"


def test_every_option_is_on_the_page():
    page = script.PAGE.read_text()
    assert [key for entry in TABLE for key in expanded(entry.verl) if f"`{key}`" not in page] == []
