"""Host: the page about a run in a real browser: light and dark, on a wide screen and on a phone."""

import pytest
from chromium import BROWSER, keep_screenshot, launched, page_without_errors  # noqa: F401
from run_folder import sample, write_run

from dapo_jax.tools.report.report import report

pytestmark = BROWSER
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
LONG = "x" * 400  # a word that no line is wide enough for
SIZES = {"wide": (1440, 900), "phone": (390, 844)}
WIDER_THAN_THE_PAGE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The lowest ratio of contrast (WCAG 2.2, 1.4.3) of a text with what is behind it, and that text.
LEAST_CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = numbers(getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((one) => one.checkVisibility())
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((one) => {
      const style = getComputedStyle(one), ink = one.closest("svg") ? style.fill : style.color;
      const [low, high] = [light(numbers(ink)), light(behind(one))].sort((a, b) => a - b);
      return [(high + 0.05) / (low + 0.05), one.textContent.slice(0, 40)];
    })
    .reduce((least, one) => (one[0] < least[0] ? one : least));
}"""


@pytest.fixture(scope="module", params=[1, 4], ids=["one run", "two seeds of two settings"])
def address(request, tmp_path_factory):
    texts = [sample("held_out", response=HOSTILE) | {"task": LONG}, sample(prompt=LONG, response=LONG, acc=0.0)]
    options = {"data.val_files": (f"/data/{LONG}.parquet",)}
    folders = [tmp_path_factory.mktemp("run") for _ in range(request.param)]
    for number, folder in enumerate(folders):
        options |= {"seed": number // 2, "rollout.n": 8 + number % 2}
        write_run(folder, samples={0: texts[:1], 1: texts, 4: texts}, options=options, log=f"[1] WARNING: {LONG}")
    return report([("", str(folder)) for folder in folders], folders[0] / "page.html").as_uri()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_and_nothing_is_wider_than_the_page(browser, address, scheme, size):
    width, height = SIZES[size]
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": height}}
    with page_without_errors(browser, **options) as page:
        page.goto(address)
        assert page.evaluate(WIDER_THAN_THE_PAGE) <= 0
        ratio, text = page.evaluate(LEAST_CONTRAST)
        assert ratio >= 4.5, text
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, paper[4:-1].split(", "))) < 60) == (scheme == "dark")
        keep_screenshot(page, f"report_{scheme}_{size}", full_page=True)


def test_the_values_under_the_pointer_are_read_out(browser, address):
    with page_without_errors(browser) as page:
        page.goto(address)
        figure = page.locator("figure").first
        picture, readout = figure.locator("svg:visible"), figure.locator("output:visible")
        last = readout.inner_text()
        picture.hover(position={"x": 1, "y": 50})
        assert readout.inner_text().startswith("step 0:") and last.startswith("step 4:")
        page.mouse.move(0, 0)
        assert readout.inner_text() == last
        picture.focus()
        page.keyboard.press("ArrowRight")
        assert readout.inner_text().startswith("step 1:")


def test_another_axis_is_chosen_with_a_click(browser, address):
    with page_without_errors(browser) as page:
        page.goto(address)
        for axis in ("tokens sampled", "seconds of training", "training steps"):
            page.get_by_role("radio", name=axis).check()
            assert axis in page.locator("figure").first.inner_text()
