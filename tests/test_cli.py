"""The command dapo-jax, and the recipes that it names."""

import importlib
import runpy
import sys

import pytest

from dapo_jax import __version__, cli
from dapo_jax.command.command_line import read_config
from dapo_jax.config.files import FOLDER, LAUNCHERS, read_config_file, recipes
from dapo_jax.config.values import freeze
from dapo_jax.tools.configs import launchers


def test_help_and_version(capsys, monkeypatch):
    cli.main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in cli.COMMANDS)
    cli.main(["--version"])
    assert capsys.readouterr().out == f"dapo_jax {__version__}\n"
    monkeypatch.setattr(sys, "argv", ["cli.py", "--version"])
    runpy.run_path(cli.__file__, run_name="__main__")  # python -m dapo_jax.cli did nothing
    assert capsys.readouterr().out == f"dapo_jax {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys, monkeypatch):
    assert callable(importlib.import_module(cli.COMMANDS[name][0]).main)
    try:
        cli.main([name, "--help"])
    except SystemExit as end:
        assert not end.code
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_an_unknown_command_names_the_closest(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["trian"])
    assert end.value.code == 2 and "did you mean train?" in capsys.readouterr().err


def test_packages_that_do_not_fit_are_named_if_a_command_does_not_import(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "train", ("dapo_jax.no_such_module", ""))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])
    found = ["jax 0.7.2 needs jaxlib<=0.7.2: pip install it"]
    monkeypatch.setattr("dapo_jax.parallel.conflicts.conflicts_here", lambda environment: found)
    with pytest.raises(SystemExit) as end:
        cli.main(["train"])
    error, conflict = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "no_such_module" in error
    assert conflict == "dapo-jax: jax 0.7.2 needs jaxlib<=0.7.2: pip install it"


def test_recipes_are_named_without_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = recipes()
    assert {"tiny", "quickstart", "dapo_qwen2.5_7b"} <= set(found)
    for name, line in found.items():
        assert line.endswith(".")
        assert freeze(read_config_file(name)) == freeze(read_config_file(f"{FOLDER / name}.py"))
    assert read_config(["train", "--config", "tiny"]) == freeze(read_config_file("tiny"))
    assert read_config(["train", "tiny", "--config.seed=3"]).seed == 3
    with pytest.raises(ValueError, match="did you mean quickstart?"):
        read_config(["train", "--config", "quikstart"])


def test_recipes_are_listed_and_printed(capsys):
    cli.main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    places = [line for line in lines if not line.startswith(" ")]
    assert places[:3] == ["anything:", "two CPU cores:", "one GPU of 24 GB:"] and lines[1].startswith("  tiny ")
    assert places[-2:] == ["128 devices of 95 GB on several hosts:", "launchers:"]
    assert sorted(line.split()[0] for line in lines if line not in places) == sorted([*recipes(), *launchers()])
    assert all(f"  {line}" in "\n".join(lines) for line in recipes().values())
    for name, folder in (("tiny", FOLDER / "tiny.py"), ("slurm_gpu.sbatch", LAUNCHERS / "slurm_gpu.sbatch")):
        cli.main(["configs", name])
        assert capsys.readouterr().out == folder.read_text()
