"""Host: a real TensorBoard, in a real browser, shows a run that was stopped and resumed as one run."""

import dataclasses
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
from chromium import BROWSER, keep_screenshot, launched, page_without_errors  # noqa: F401
from ports import free_port
from waiting import wait_until

from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import LAYOUT, MAIN_CURVES, histogram

pytest.importorskip("tensorboard")
pytestmark = BROWSER
STEPS = 40
RUNS = {"slow": 1e-6, "fast": 4e-6}  # learning rate by name
STAGES = ("gen", "reward", "update_actor")
EVAL = "eval/math/acc/mean@4"
METRICS = (
    *(f"timing_s/{stage}" for stage in ("step", "testing", *STAGES)),
    *("train/filter_rate", "dynamic_sampling/generated_tokens"),
    *(f"response_length/{name}" for name in ("mean", "max", "clip_ratio")),
    *("rollout/acc/mean", "critic/rewards/mean", "actor/entropy", "actor/pg_loss", "perf/throughput"),
    *("alarm/truncation", "alarm/entropy"),
)


def write(workdir, rate, first, end, *, resume_step=None):
    config = dataclasses.replace(Config(), workdir=str(workdir))
    actor = dataclasses.replace(config.actor, optim=dataclasses.replace(config.actor.optim, lr=rate))
    with RunRecords(workdir, resume_step=resume_step) as records:
        records.describe(flat(dataclasses.replace(config, actor=actor)), [EVAL])
        for step in range(first, end):
            records.write(step, dict.fromkeys([*METRICS, EVAL] if step % 5 == 0 else METRICS, 0.01 * step))
            records.write_histograms(step, {"critic/advantages": histogram(np.random.default_rng(0).normal(size=200))})
            texts = [{"kind": kind, "response": f"a {kind}\n| <b>answer</b> of {step}"} for kind in ("any", "best")]
            records.write_samples(step, texts)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where TensorBoard serves two runs; one was killed after step 29 and went on from the checkpoint of step 20."""
    runs = tmp_path_factory.mktemp("runs")
    for name, rate in RUNS.items():
        (runs / name / "checkpoints" / "10").mkdir(parents=True)
        write(runs / name, rate, 0, 30)
        write(runs / name, rate, 21 if name == "slow" else 30, STEPS, resume_step=20 if name == "slow" else 29)
    port = free_port()
    url = f"http://localhost:{port}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    with subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: len(curves(url)) == len(RUNS))
            yield url
        finally:
            server.terminate()


def get(url, path, **query):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


def curves(url):
    """By run; of none while the server starts."""
    with suppress(OSError):
        return get(url, "data/plugin/scalars/tags")
    return {}


@pytest.fixture
def look(address, browser):
    """A dashboard by its name, without an error of its scripts."""
    with page_without_errors(browser, viewport={"width": 1360, "height": 900}) as page:

        def look(name):
            page.goto(f"{address}/#{name}", timeout=120_000)
            return page

        yield look
        keep_screenshot(page, page.url.rpartition("#")[2].partition("&")[0], after_ms=3000)


def see(page, text):
    page.get_by_text(text, exact=False).first.wait_for(timeout=60_000)


def test_a_resumed_run_is_one_curve_and_has_the_name_of_its_directory(address):
    assert set(curves(address)) == set(RUNS)
    for run in RUNS:
        points = get(address, "data/plugin/scalars/scalars", run=run, tag="actor/pg_loss")
        assert [step for _, step, _ in points] == list(range(STEPS))
        assert [value for _, _, value in points] == pytest.approx([0.01 * step for step in range(STEPS)])


@pytest.mark.parametrize("category", ["Overview", "Time", "Alarms"])
def test_every_chart_of_a_category_has_curves_and_a_legend(look, category):
    """The legend is below a chart, under "Matches": a line per curve with its marker, its metric and its run."""
    page = look("custom_scalars")
    see(page, category)
    for title in LAYOUT[category]:
        card = page.locator("tf-custom-scalar-multi-line-chart-card").filter(has_text=title)
        card.get_by_text("Matches", exact=False).wait_for(timeout=60_000)
        card.locator(".toggle-matches-button").click(timeout=60_000)
        legend = card.locator(".match-list-entry")
        legend.first.wait_for(timeout=60_000)
        entries = legend.all_inner_texts()
        assert all(any(run in entry for entry in entries) for run in RUNS), (title, entries)
        if title == "seconds per stage of a step":
            assert all(sum(stage in entry for entry in entries) == len(RUNS) for stage in STAGES), entries


def test_the_main_curves_are_the_first_cards(look):
    tags = look("timeseries").locator("card-view [title]").filter(has_text="/")
    tags.nth(5).wait_for(timeout=60_000)
    titles = tags.evaluate_all("tags => tags.map(tag => tag.title)")
    assert [title.split(",")[0] for title in titles[:6]] == [
        f"Main/{number} {title.split(',')[0]}" for number, title in enumerate(MAIN_CURVES, start=1)
    ]


def test_responses_of_a_step_are_one_table(look):
    rows = look("text").locator("tr tr").filter(has_text=f"| <b>answer</b> of {STEPS - 1}")
    rows.nth(3).wait_for(timeout=60_000)
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["best", "any"] * len(RUNS)


def test_histograms_are_shown(look):
    see(look("histograms"), "critic/advantages")


def test_the_table_of_runs_ticks_what_differs_and_the_main_curves(look):
    page = look("hparams")
    see(page, "actor.optim.lr")
    boxes = page.locator("paper-checkbox").evaluate_all("boxes => boxes.map(box => [box.innerText, box.checked])")
    assert boxes[:2] == [["actor.optim.lr", True], ["seed", True]]
    assert [name.partition(" ")[0] for name, shown in boxes if shown and "/" in name] == [
        f"Main/{n}" for n in range(1, 6)
    ]
    for rate in ("0.0000010000", "0.0000040000"):
        see(page, rate)
