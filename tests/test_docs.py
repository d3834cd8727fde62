"""What the pages say exists: options, files, headings. Their commands are in test_doc_commands.py."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze
from dapo_jax.monitor.console import Console
from dapo_jax.monitor.records import flatten

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = flatten(dataclasses.asdict(Config()))
SECTIONS = {key.partition(".")[0] for key in OPTIONS}
WRITTEN_BY_HAND = ("getting_started", "troubleshooting", "faq", "coming_from_verl")


@pytest.mark.parametrize("name", WRITTEN_BY_HAND)
def test_options_and_scripts_that_a_page_names_exist(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    if name == "coming_from_verl":
        for verl, *ours in cells:
            text = text.replace(verl, "")
            keys = re.findall(r"`([^`]+)`", ours[0])
            assert (bool(keys) or len(ours) == 1 or ours[0] == "-") and all(key in OPTIONS for key in keys), ours[0]
    for code in re.findall(r"`([^`\n]+)`", text):
        key = code.partition("=")[0].removeprefix("--config.").removesuffix(".*")
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in SECTIONS:
            assert key in OPTIONS or any(option.startswith(f"{key}.") for option in OPTIONS), code
        if code.startswith(("configs/", "scripts/")):
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", prose):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], anchor


def test_the_table_of_extras_has_those_of_the_package():
    [section] = re.findall(r"^## Installing\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    named = [
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    ]
    package = re.findall(r'^ {8}"([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.M)
    assert sorted(named) == sorted(package) and "quickstart" in named


def test_the_readme_begins_with_how_to_get_it_and_where_it_has_run():
    headings = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), re.M)
    assert headings[:3] == ["Two commands", "Where it has run", "Installing"]
    assert "git clone" in (ROOT / "README.md").read_text().partition("## Where it has run")[0]


def test_the_line_of_the_guide_is_one_of_the_console(capsys):
    """Its labels and its shape; the numbers are those of a run."""
    [line] = re.findall(r"^    (step +\d+/40 .*)$", (ROOT / "docs/getting_started.md").read_text(), re.M)
    Console(40, initial_step=0, enabled=True, constant=["clip"]).step_line(4, {})
    shown = capsys.readouterr().out.rstrip("\n")
    assert len(line) == len(shown) and re.findall("[a-z/]{2,}", line) == re.findall("[a-z/]{2,}", shown)


def test_python_of_the_guide_is_a_config(tmp_path):
    [code] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/getting_started.md").read_text(), re.M | re.S)
    file = tmp_path / "mine.py"
    file.write_text(code)
    config = read_config(["train", "--config", str(file)])
    validate(config)
    assert config.workdir == "runs/mine"


def test_a_yaml_of_a_fork_is_the_config_below_it(tmp_path):
    page = (ROOT / "docs/coming_from_verl.md").read_text().partition("## EasyR1 and its forks")[2]
    [theirs] = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    ours, resolved = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    file = tmp_path / "fork.py"
    file.write_text(ours)
    for key, value in flatten(yaml.safe_load(theirs)).items():
        assert f"config.{key.removeprefix('worker.')} = {value!r}".replace("'", '"') in ours, key
    config = read_config(["train", "--config", str(file)])
    validate(config)
    plain = default_config()
    exec(resolved, {"config": plain})
    plain.model.path, plain.data.train_files, plain.rollout.n = config.model.path, config.data.train_files, 16
    assert config == freeze(plain)
