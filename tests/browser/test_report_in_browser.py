"""report.html in a real browser: no error, no request, no sideways scrolling on a phone, tables that sort.

Screenshots are left in DEEPSPEC_SCREENSHOTS, where that names a folder.
"""

import os
import shutil
from pathlib import Path
from typing import Iterator

import pytest

from deepspec.report.build import build_report
from deepspec.report.inputs import read_run_files
from tests.unit.report.make_run import make_run

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'deepspec[browser]' for these tests")
CHROMIUM = os.environ.get("DEEPSPEC_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path: install one, or name it in DEEPSPEC_CHROMIUM")]
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of one run and one that compares two; of the runs in DEEPSPEC_REPORT_RUNS, where it names some."""
    folder = tmp_path_factory.mktemp("reports")
    named = [Path(name) for name in os.environ.get("DEEPSPEC_REPORT_RUNS", "").split(",") if name]
    runs = [read_run_files(path) for path in named or [make_run(folder / name, name=name) for name in ("a", "b")]]
    (folder / "one.html").write_text(build_report(runs[0]))
    (folder / "two.html").write_text(build_report(runs[0], runs[1:] or runs))
    return {"one": folder / "one.html", "two": folder / "two.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_page_shows_without_errors(browser, pages: dict[str, Path], name: str, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    assert said == [] and asked == [pages[name].as_uri()]
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    charts = page.locator("svg[role=img]")
    assert charts.count() > 3
    for index in range(charts.count()):
        box = charts.nth(index).bounding_box()
        assert box["width"] > 200 and box["height"] > 60 and box["x"] >= 0 and box["x"] + box["width"] <= width
    clipped = page.evaluate("""() => [...document.querySelectorAll("svg[role=img]")].flatMap(svg => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].filter(text => {
            const box = text.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1;
        }).map(text => text.textContent);
    })""")
    assert clipped == [] and page.evaluate("document.documentElement.scrollWidth") <= width
    if os.environ.get("DEEPSPEC_SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["DEEPSPEC_SCREENSHOTS"]) / f"{name}-{size}-{scheme}.png", full_page=True)
    page.close()


def test_tables_sort_by_any_column(browser, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["two"].as_uri())
    table = page.locator("table").first
    rows = table.locator("tbody tr").count()
    assert rows >= 2
    for column in range(table.locator("th").count()):
        head = table.locator("th").nth(column)
        orders = []
        for press in ("click", "Enter"):
            head.click() if press == "click" else head.press(press)
            cells = table.locator(f"tbody tr td:nth-child({column + 1})").all_text_contents()
            orders.append([cell for cell in cells if cell != "\N{EN DASH}"])
            assert len(cells) == rows
        assert orders[0] == orders[1][::-1] or len(set(orders[0])) < len(orders[0])
    assert head.get_attribute("aria-sort") == "ascending"
    page.close()
