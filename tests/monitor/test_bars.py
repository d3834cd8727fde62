"""Host: bars are for terminals and notebooks: they count, leave nothing behind, and are hidden where nobody looks."""

import functools
import io
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from small_run import small_config
from terminal import look_at_a_terminal

from dapo_jax.config.sections import MonitorConfig, TrainerConfig
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.export.export import export
from dapo_jax.monitor import bars
from dapo_jax.monitor.bars import bar, shows_progress, surroundings
from dapo_jax.monitor.console import Console
from dapo_jax.parallel.compilation import compilation_shown
from dapo_jax.training.loop import train


def look_at_a_notebook(monkeypatch, *, widgets=False):
    """A notebook whose shell inherits from Jupyter's, as Colab's does; returns what its cell shows."""
    shell, cell = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})(), io.StringIO()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(bars, "find_spec", lambda name: name == "ipywidgets" and widgets)
    monkeypatch.setattr(sys, "stdout", cell)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return cell


def test_a_bar_counts_and_is_gone_at_its_end(monkeypatch):
    terminal = look_at_a_terminal(monkeypatch)
    with bar("loading the model", total=4000, unit="B", shown=True) as loaded:
        loaded.update(1000)
        loaded.refresh()
        assert "loading the model:  25%" in terminal.getvalue() and "1.00k/4.00k" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[0].endswith(" ") and "\n" not in terminal.getvalue()


def test_there_is_no_bar_where_nobody_looks(monkeypatch):
    for shown, stderr in ((False, look_at_a_terminal(monkeypatch)), (True, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", stderr)
        with bar("loading", total=2, unit="B", shown=shown) as loaded:
            loaded.update(1)
        assert stderr.getvalue() == ""


def test_who_looks(monkeypatch):
    look_at_a_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))  # only imported
    assert surroundings() == "terminal"
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert surroundings() == "log"


def test_the_bars_of_a_notebook_share_the_line_after_those_of_the_steps(monkeypatch):
    cell = look_at_a_notebook(monkeypatch)
    assert surroundings() == "notebook"
    console = Console(3, initial_step=0, enabled=True)
    console.stage("testing")
    with bar("evaluating", total=2, unit="response", shown=True) as ended:
        ended.update(1)
        ended.refresh()
    console.step_line(1, {})
    console.close()
    text = cell.getvalue()
    assert "train 0/3" in text and "evaluating:  50%" in text and "\x1b" not in text and sys.stderr.getvalue() == ""
    before, line = text.partition("step 1/3")[::2]
    assert "\n" not in before and before.endswith("\r") and "train 1/3" in line
    with bar("evaluating", total=2, unit="response", shown=False):
        assert cell.getvalue() == text


def test_a_notebook_with_widgets_has_them(monkeypatch):
    cell, shown = look_at_a_notebook(monkeypatch, widgets=True), []
    widgets = types.SimpleNamespace(tqdm=lambda **options: shown.append((options["desc"], options["total"])))
    monkeypatch.setitem(sys.modules, "tqdm.notebook", widgets)
    bar("evaluating", total=2, unit="response", shown=True)
    assert shown == [("evaluating", 2)] and cell.getvalue() == ""


@pytest.mark.parametrize(("console", "shown"), [("steps", True), ("detailed", True), ("quiet", False), ("json", False)])
def test_the_console_says_whether_there_are_bars(console, shown):
    assert shows_progress(TrainerConfig(), MonitorConfig(console=console)) is shown
    assert not shows_progress(TrainerConfig(logger=("wandb",)), MonitorConfig(console=console))


def test_programs_are_counted_while_they_are_compiled():
    shown = []
    with compilation_shown(shown.append):
        for size in (3, 5):
            jax.jit(lambda x: jnp.cos(x) @ x).lower(jnp.ones((size, size), jnp.int8)).compile()
    assert "" in shown and shown[-1] == ""
    numbers = [int(text.split()[1]) for text in shown if text]
    assert len(numbers) >= 2 and numbers == sorted(set(numbers))
    count = len(shown)
    jax.jit(lambda x: jnp.tan(x))(jnp.ones(7))
    assert len(shown) == count


@pytest.mark.slow
def test_a_terminal_shows_what_every_command_is_doing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bars, "tqdm", functools.partial(bars.tqdm, mininterval=0))  # each update is shown
    jax.clear_caches()  # of other tests: then there is nothing to compile
    terminal, model = look_at_a_terminal(monkeypatch), tmp_path / "model"

    def config(name, **changes):
        few = {"trainer.total_training_steps": 1, "actor.optim.lr_warmup_steps": 1, "data.train_batch_size": 2}
        return small_config(tmp_path / name, **few, **changes)

    def seen(command, *arguments):
        """What the command shows."""
        terminal.seek(0)
        terminal.truncate()
        command(*arguments)
        return terminal.getvalue()

    shown = seen(train, config("first"))
    assert re.search(r"sampling; round \d+, \d of 2 groups kept", shown) and "compiling, " in shown
    assert "evaluating:   0%" in shown and "updating the policy" in shown and "filtering groups" in shown
    assert "writing the weights: 100%" in seen(export, config("first"), model)
    shown = seen(bench, config("first", **{"model.path": str(model)}), tmp_path / "evaluation")
    assert "loading the model: 100%" in shown and "evaluating: 100%" in shown
    assert "\r" not in seen(train, config("quiet", **{"model.path": str(model), "monitor.console": "quiet"}))
    assert "\r" not in capsys.readouterr().out
