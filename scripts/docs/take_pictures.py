"""Trains `tiny` with two learning rates and writes docs/tensorboard.png and docs/report.png.

    CHROMIUM=/usr/bin/chromium python scripts/docs/take_pictures.py --folder /tmp/pictures

Needs the extras `browser` and `plots`. Runs that are in FOLDER already are not trained again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import command

from dapo_jax.tools.report.report import report

DOCS = Path(__file__).parents[2] / "docs"
RATES = {"tiny": "3e-3", "tiny_lr_1e-3": "1e-3"}  # by run
PORT = 6106
OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
HIDDEN = "#what, #filter, #time, #alarms, #options, .figures > :nth-child(n+7), .pair ~ .pair ~ *"


def train(folder: Path) -> None:
    for name, rate in RATES.items():
        options = [f"--config.actor.optim.lr={rate}", f"--config.workdir={folder / name}"]
        subprocess.run([sys.executable, "-m", "dapo_jax.train", "--config=tiny", *options], check=True)
    report([("", str(folder / "tiny"))])


@contextmanager
def tensorboard(folder: Path) -> Any:
    """The address where TensorBoard serves the runs of a folder, once it has read them."""
    arguments = ["--logdir", str(folder), "--port", str(PORT), "--load_fast=false"]
    url = f"http://localhost:{PORT}"
    with subprocess.Popen([sys.executable, "-m", "tensorboard.main", *arguments], stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(120):
                time.sleep(0.5)
                if server.poll() is not None:
                    raise ValueError(f"TensorBoard does not start at {url}: pip install tensorboard, or free the port")
                try:
                    if all(name in urllib.request.urlopen(f"{url}/data/runs").read().decode() for name in RATES):
                        break
                except OSError:  # it is starting
                    pass
            yield url
        finally:
            server.terminate()


def take(
    browser: Any, address: str, output: Path, *, size: tuple[int, int], press: Sequence[str] = (), hide: str = ""
) -> None:
    """A picture of a page after buttons were pressed, without what `hide` selects."""
    page = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)), bypass_csp=True)
    page.goto(address)
    for button in press:
        page.locator(button).first.click()
    if hide:
        page.add_style_tag(content=f"{hide} {{display: none}}")
    page.wait_for_timeout(5000)  # curves are drawn a moment later
    page.screenshot(path=output, full_page=True)
    page.close()
    Image.open(output).quantize(256, Image.Quantize.MAXCOVERAGE).save(output, optimize=True)  # a third of the size
    print(output)


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs")
    folder = parser.parse_args(arguments).folder.resolve()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    train(folder)
    with sync_playwright() as player, tensorboard(folder) as url:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = player.chromium.launch(executable_path=chromium, args=OPTIONS)
        press = "text=Ignore outliers in chart scaling", "button[aria-label='Close side pane']"
        take(browser, f"{url}/#timeseries", DOCS / "tensorboard.png", size=(1480, 1085), press=press)
        report = (folder / "tiny" / "report.html").as_uri()
        take(browser, report, DOCS / "report.png", size=(1200, 800), hide=HIDDEN)
        browser.close()


if __name__ == "__main__":
    command(main)
