"""The pages in a real browser: no error, no request, no sideways scrolling on a phone, and every figure is drawn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planlife import CapacityLadder, PlanManager, PlanSpec
from planlife.commands import planlife as command

DATA = Path(__file__).resolve().parents[1] / "data"
TRACE = str(DATA / "mooncake_conversation_excerpt.csv")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra browser: pip install 'planlife[browser]'"
)
pytest.importorskip("matplotlib", reason="pictures need the extra sim")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def pages(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "simulate", ("simulate", "--trace", TRACE, "--no-capture")
    yield "fit-ladder", ("fit-ladder", "--trace", TRACE, "--classes", "4")
    with PlanManager(
        PlanSpec(4, 2, 32, 16, max_context_tokens=512), ladder=CapacityLadder([2, 8]), device="cpu"
    ) as manager:
        with manager.capture_phase():
            manager.warm()
        report = folder / "report.json"
        report.write_text(manager.report().to_json())
    yield "report", ("report", str(report))


def visit(browser: Any, path: Path, width: int) -> tuple[Any, list[str]]:
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.on("request", lambda request: complaints.append(f"request: {request.url}") if request.url[:4] == "http" else 0)
    page.goto(path.as_uri())
    return page, complaints


@pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
def test_a_page_is_drawn_without_a_complaint_at_any_width(browser, tmp_path, width):
    for name, arguments in pages(tmp_path):
        path = tmp_path / f"{name}.html"
        result = CliRunner().invoke(command, [*arguments, "--html", str(path)])
        assert result.exit_code == 0, result.output
        page, complaints = visit(browser, path, width)
        assert complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.evaluate(
            "[...document.querySelectorAll('figure svg')].map(svg => [svg.getBoundingClientRect().width, "
            "svg.getBoundingClientRect().height, svg.querySelectorAll('text').length, svg.getAttribute('aria-label')])"
        )
        assert boxes
        for box_width, box_height, num_texts, label in boxes:
            assert 0.7 * min(width, 540) < box_width <= width
            assert box_height > 100
            assert num_texts > 5
            assert label
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('figure svg text')].map(text => "
            "text.getBoundingClientRect().height))"
        )
        assert smallest > 7  # pixels: readable on a phone
        page.close()


def test_a_page_with_an_error_is_noticed(browser, tmp_path):
    """Positive control of the listeners above."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><script>console.error('no'); throw new Error('oops')</script><img src='none.png'>")
    page, complaints = visit(browser, path, DESK)
    assert {complaint.split(":")[0] for complaint in complaints} >= {"console error", "error", "failed"}
    page.close()
