"""docs/configuration.md is what the script writes from the code, and says something of every option."""

import write_configuration_doc as script


def test_the_page_is_up_to_date():
    assert script.PAGE.read_text() == script.document(), "run: python scripts/docs/write_configuration_doc.py"


def test_every_option_has_a_row_with_a_meaning():
    rows = [line for line in script.document().splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split("`")[1] for row in rows}) > 150
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_row_is_type_bound_default_and_meaning():
    page = script.document()
    assert "| `data.gen_batch_size` | `int \\| None`, greater than 0, or null | `null` | prompts per generation" in page
    assert "| `critic.optim.lr` | `float`, 0 or more | `1e-05` | learning rate after the warm-up |" in page
    assert '| `model.path` | `str` | `""` | Hugging Face directory, OWNER/NAME of the hub, .gguf file, a' in page
