"""Chromium, for tests that look at a page. CHROMIUM names the executable, unless it is on the PATH.

CHROMIUM=/usr/bin/chromium python -m pytest -m browser tests; SCREENSHOTS=FOLDER keeps what was seen.
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
_EXECUTABLE = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(_EXECUTABLE is None, reason="no Chromium: CHROMIUM names the executable"),
]
_OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-background-networking"]


@pytest.fixture(scope="module", name="browser")
def launched():
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=_EXECUTABLE, args=_OPTIONS)
        yield browser
        browser.close()


@contextmanager
def page_without_errors(browser, **options):
    """A page none of whose scripts fails, and which shows no dialog."""
    page = browser.new_page(**options)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    yield page
    page.close()
    assert not errors


def keep_screenshot(page, name, *, after_ms=0, **options):
    if "SCREENSHOTS" in os.environ:
        page.wait_for_timeout(after_ms)
        page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"{name}.png", **options)
