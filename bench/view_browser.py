"""How long the page of `stretto view` takes in Chromium: `python -m bench.view --browser` calls this.

Opens the real page of a real server in headless Chromium, a new browser context for each measurement. For each view it
takes the time from the request to the first drawing with the view's data (`drawn_s`), and the time that scripts took
(`script_s`, from Chromium's own counter, which other work on the machine changes least). Also the first contentful
paint, a zoom of the timeline, and the four views of a report.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZE = {"width": 1440, "height": 900}
WAIT_MS = 120_000
VIEWS = {
    "overview": "document.querySelectorAll('.charts canvas').length >= 8 && window.stretto.runs[0].curves",
    "timeline": "window.stretto.timelineView && window.stretto.timelineView.answer",
    "trajectories": "document.querySelector('.list tbody tr')",
    "compare": "document.querySelector('main .charts, main .empty')",
}  # what is there when a view is drawn
PAINTED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"
FIRST_PAINT = (
    "() => performance.getEntriesByName('first-contentful-paint').map(each => each.startTime / 1000)[0] || null"
)


def chromium() -> str:
    """Returns the path of Chromium. Exits with words if there is none."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        raise SystemExit("there is no Chromium: install it, or name it with CHROMIUM=path")
    return found


def measure_browser(url: str, report: Path | None) -> dict[str, Any]:
    """Returns the seconds of each view of the page at `url`, of a zoom, and of a report if one is given."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        found["chromium"] = browser.version
        with _page(browser) as page:  # so that what Chromium does once is not counted
            page.goto("about:blank")
        for view, drawn in VIEWS.items():
            with _page(browser) as page:
                found[view] = _view(page, f"{url}#/{view}", drawn)
                if view == "timeline":
                    found["timeline, zoomed to an update"] = _zoom(page)
                    found["timeline, one drawing again"] = _redraw(page)
        if report is not None:
            for view, drawn in VIEWS.items():
                with _page(browser) as page:
                    found[f"report, {view}"] = _view(page, f"{report.resolve().as_uri()}#/{view}", drawn)
                    if view == "timeline":
                        found["report, timeline, zoomed to an update"] = _zoom(page)
        browser.close()
    return found


@contextmanager
def _page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.counters = context.new_cdp_session(page)
    page.counters.send("Performance.enable")
    try:
        yield page
    finally:
        context.close()


def _scripts_s(page: Any) -> float:
    values = {each["name"]: each["value"] for each in page.counters.send("Performance.getMetrics")["metrics"]}
    return float(values["ScriptDuration"])


def _timed(page: Any, act: Callable[[], None], drawn: str) -> dict[str, float]:
    began, before = time.perf_counter(), _scripts_s(page)
    act()
    page.wait_for_function(f"() => Boolean({drawn})", polling=20)
    page.evaluate(PAINTED)
    return {"drawn_s": round(time.perf_counter() - began, 3), "script_s": round(_scripts_s(page) - before, 3)}


def _view(page: Any, url: str, drawn: str) -> dict[str, Any]:
    found: dict[str, Any] = _timed(page, lambda: page.goto(url, wait_until="commit"), f"window.stretto && ({drawn})")
    found["script_s"] = round(_scripts_s(page), 3)  # of a new page: its counter begins at 0
    paint = page.evaluate(FIRST_PAINT)
    return {"first_paint_s": None if paint is None else round(paint, 3), **found}


def _zoom(page: Any) -> dict[str, float]:
    """Goes to the next update, until the lanes of the new window are drawn."""
    page.evaluate("() => { window.before = window.stretto.timelineView.answer; }")
    page.wait_for_function("() => window.stretto.timelineView.answer.read >= window.stretto.timelineView.answer.all")
    page.evaluate("() => { window.before = window.stretto.timelineView.answer; }")
    return _timed(page, lambda: page.keyboard.press("n"), "window.stretto.timelineView.answer !== window.before")


def _redraw(page: Any) -> dict[str, float]:
    """Draws the whole run once more. All of it is script."""
    page.keyboard.press("0")
    page.wait_for_function("() => !window.stretto.timelineView.window && !window.stretto.timelineView.busy")
    page.wait_for_timeout(300)
    draw = "const began = performance.now(); window.stretto.timelineView.draw(); return performance.now() - began;"
    return {"script_s": round(page.evaluate(f"() => {{ {draw} }}") / 1000, 4)}
