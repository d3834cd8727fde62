"""What the pages say exists: options, files, headings. Their commands are in test_doc_commands.py."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, flatten, freeze
from dapo_jax.monitor.console import Console
from dapo_jax.training import step

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS = flatten(dataclasses.asdict(Config()))
SECTIONS = {key.partition(".")[0] for key in OPTIONS}
# Files of the reader, of another program, or made by a run.
OF_OTHERS = {"FILE.py", "mine.py", "my/rewards.py", "countdown.py", "test_countdown.py", "run.sh", "run_dapo.sh"}
OF_OTHERS |= {"run.py", "recipe/dapo/dapo_ray_trainer.py", "train.sbatch", "guess.py", "desk.py"}
WRITTEN_BY_HAND = ("getting_started", "troubleshooting", "coming_from_verl")


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
        is_option = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and not key.endswith(".json")  # a file has that
        if is_option and key.partition(".")[0] in SECTIONS:
            assert key in OPTIONS or any(option.startswith(f"{key}.") for option in OPTIONS), code
        if code.startswith(("configs/", "scripts/")):
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files_and_headings(page):
    text = page.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", prose):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], anchor
    codes = "\n".join(re.findall(r"`([^`\n]+)`", prose))
    paths = re.findall(r"(?<![\w./-])[\w./-]+\.(?:py|sh|sbatch|yaml)\b", codes)
    paths += re.findall(r"^(?:dapo_jax|docs|configs|scripts|tests)/[\w./-]*$", codes, re.M)
    for tree in re.findall(r"^```text\n(dapo_jax/.*?)^```$", text, re.M | re.S):
        paths += [line.split()[0] for line in tree.splitlines()]
    for path in {*paths} - OF_OTHERS:
        places = [ROOT / path, ROOT / "dapo_jax" / path, *ROOT.glob(f"*/*/{path}"), *ROOT.glob(f"*/{path}")]
        assert any(place.exists() for place in places), path


def test_the_readme_begins_with_a_loop_where_it_has_run_how_to_try_it_and_one_step():
    text = (ROOT / "README.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[:4] == ["Where it has run", "Try it", "One step", "Installing"]
    assert "```python\nimport dapo_jax as dx\n" in text.partition("## Where it has run")[0]
    assert "git clone" in text.partition("## One step")[0] and len(text.splitlines()) <= 150
    rows = re.findall(r"^\| (`.*?) \| ", text.partition("## Installing")[2].partition("\n## ")[0], re.M)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    package = re.findall(r'^ {8}"([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.M)
    assert sorted(named) == sorted(package) and "plots" in named, "the table has all extras of the package"


def test_the_step_of_the_readme_names_functions_of_the_step():
    [text] = re.findall(r"^```text\n(sample_batch.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    names = [line.split()[0] for line in text.splitlines()]
    assert {"sample_batch", "sample_groups", "train_step", "train_on", "update"} <= set(names)
    code = Path(step.__file__).read_text()
    for name in names:
        assert hasattr(step, name) or re.search(rf"\b{re.escape(name)}\(", code), name


def test_the_functions_that_a_page_names_exist():
    found = [name for page in PAGES for name in re.findall(r"`([\w/]+\.py): (\w+)`", page.read_text())]
    assert len(found) > 10
    for file, name in found:
        assert re.search(rf"^def {name}\(", (ROOT / "dapo_jax" / file).read_text(), re.M), (file, name)


def test_the_tests_that_the_laws_name_exist():
    laws = (ROOT / "docs" / "inside.md").read_text().split("## Tests")[1]
    named = set(re.findall(r"`((?:\w+/)?test_\w+)`", laws))
    assert len(named) > 9
    for name in named:
        assert (ROOT / "tests" / f"{name}.py").exists(), name


def test_the_line_of_the_guide_is_one_of_the_console(capsys):
    """Its labels and its shape; the numbers are those of a run."""
    [line] = re.findall(r"^    (step +\d+/100 .*)$", (ROOT / "docs/getting_started.md").read_text(), re.M)
    Console(100, initial_step=0, enabled=True, constant=["clip", "turns"]).step_line(50, {})
    shown = capsys.readouterr().out.rstrip("\n")
    assert len(line) == len(shown) and re.findall("[a-z/]{2,}", line) == re.findall("[a-z/]{2,}", shown)


def config_of(code, folder):
    """A valid config, from the text of its file."""
    file = folder / "mine.py"
    file.write_text(code)
    config = read_config(["train", "--config", str(file)])
    validate(config)
    return config


def test_python_of_the_guide_is_a_config(tmp_path):
    [code] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/getting_started.md").read_text(), re.M | re.S)
    assert config_of(code, tmp_path).workdir == "runs/mine"


def test_a_yaml_of_a_fork_is_the_config_below_it(tmp_path):
    page = (ROOT / "docs/coming_from_verl.md").read_text().partition("## EasyR1 and its forks")[2]
    [theirs] = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    ours, resolved = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    for key, value in flatten(yaml.safe_load(theirs)).items():
        assert f"config.{key.removeprefix('worker.')} = {value!r}".replace("'", '"') in ours, key
    config = config_of(ours, tmp_path)
    plain = default_config()
    exec(resolved, {"config": plain})
    plain.model.path, plain.data.train_files, plain.rollout.n = config.model.path, config.data.train_files, 16
    assert config == freeze(plain)
