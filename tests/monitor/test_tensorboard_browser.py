"""Host: a real TensorBoard, in a real browser, shows a run that was stopped and resumed as one run.

CHROMIUM=/usr/bin/chromium python -m pytest -m browser tests/monitor; SCREENSHOTS=FOLDER keeps what was seen.
"""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import LAYOUT, histogram

pytest.importorskip("tensorboard")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: CHROMIUM names the executable"),
]
STEPS = 40


def write(workdir, first, end, *, resume_step=None):
    rng = np.random.default_rng(0)
    with RunRecords(workdir, resume_step=resume_step) as records:
        records.describe({"actor.optim.lr": 1e-6, "seed": 0}, ["eval/math/acc/mean@4"])
        for step in range(first, end):
            rate = 1 - math.exp(-step / 15)
            metrics = {
                "rollout/acc/mean": 0.2 + 0.5 * rate, "critic/rewards/mean": 0.1 + 0.5 * rate, "actor/lr": 1e-6,
                "response_length/mean": 200 + 80 * rate, "response_length/max": 512.0, "actor/pg_loss": 0.01 * step,
                "response_length/clip_ratio": 0.1 * rate, "actor/entropy": 1.2 - rate, "timing_s/gen": 20.0,
                "dynamic_sampling/num_evaluated_prompts": 48.0, "train/num_kept_prompts": 18.0,
            }  # fmt: skip
            records.write(step, metrics | ({"eval/math/acc/mean@4": 0.1 + 0.5 * rate} if step % 5 == 0 else {}))
            records.write_histograms(step, {"critic/advantages": histogram(rng.normal(size=200))})
            records.write_samples(step, [{"kind": "best", "response": f"so the answer is {step}", "score": 1.0}])


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where TensorBoard serves a run that was killed after step 29 and went on from the checkpoint of step 20."""
    workdir = tmp_path_factory.mktemp("runs")
    write(workdir, 0, 30)
    write(workdir, 21, STEPS, resume_step=20)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(workdir), "--port", str(port)]
    with subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.DEVNULL) as server:
        try:
            yield wait_for(f"http://localhost:{port}")
        finally:
            server.terminate()


def wait_for(url):
    for _ in range(240):
        try:
            if get(url, "data/plugin/scalars/tags"):
                return url
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(url)


def get(url, path, **query):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as player:
        options = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
        browser = player.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def look(address, browser):
    """A dashboard by its name, without an error of its scripts."""
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(error))

    def look(name):
        page.goto(f"{address}/#{name}", timeout=120_000)
        return page

    yield look
    if "SCREENSHOTS" in os.environ:
        page.wait_for_timeout(3000)
        page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"{page.url.rpartition('#')[2].partition('&')[0]}.png")
    page.close()
    assert not errors


def see(page, text):
    page.get_by_text(text, exact=False).first.wait_for(timeout=60_000)


def test_a_resumed_run_is_one_curve(address):
    [run] = get(address, "data/plugin/scalars/tags")
    points = get(address, "data/plugin/scalars/scalars", run=run, tag="actor/pg_loss")
    assert [step for _, step, _ in points] == list(range(STEPS))
    assert [value for _, _, value in points] == pytest.approx([0.01 * step for step in range(STEPS)])


def test_the_overview_shows_every_chart(look):
    page = look("custom_scalars")
    for title in LAYOUT["Overview"]:
        see(page, title)


def test_responses_can_be_read(look):
    see(look("text"), f"so the answer is {STEPS - 1}")


def test_histograms_are_shown(look):
    see(look("histograms"), "critic/advantages")


def test_the_table_of_runs_shows_options_and_results(look):
    page = look("hparams")
    see(page, "actor.optim.lr")
    see(page, "mean_4")
