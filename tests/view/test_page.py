"""The page in a real browser. Skipped without Chromium and the package `playwright`; `make test-browser` needs both."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from view_cases import CONFIG, record_extended_run, record_run, record_second_update, record_tool_run, served_folders

from bench.view import make_journal
from bench.view_browser import VIEWS
from stretto.store.journal import Journal
from stretto.view.report import write_report
from stretto.view.runs import open_runs
from stretto.view.server import ViewServer

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_MS = 20_000

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if a script raises, or the policy of the server is violated."""
    context = browser.new_context(viewport={"width": 1300, "height": 850}, color_scheme="light")
    made = context.new_page()
    made.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    yield made
    assert problems == []
    assert made.evaluate("window.hacked") is None, "text of a model ran as a script"
    context.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., ViewServer]]:
    with served_folders() as start:
        yield start


def visit(page: Any, server: ViewServer, view: str) -> None:
    page.goto(f"{server.url}#/{view}")
    page.wait_for_selector("html[data-ready]")


def test_the_overview_shows_state_curves_and_laws(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), "overview")
    assert page.locator(".pill").inner_text() == "finished"
    assert page.locator(".charts .card:visible").count() == 8
    assert "4 of 4 updates" in page.inner_text("main")
    page.click("text=Verify")
    page.wait_for_selector("text=Verified")
    assert page.locator(".verdict.good").count() == 4
    assert page.locator("span.verdict.bad").inner_text() == "BROKEN 11", "its metrics are invented"
    assert page.locator(".notice").first.inner_text().startswith("<script>"), "a warning with markup stays text"


@pytest.mark.parametrize("view", VIEWS)
def test_a_measurement_of_a_view_sees_that_it_is_drawn(
    view: str, page: Any, serve: Callable[..., ViewServer], tmp_path: Path
) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), view)
    page.wait_for_function(f"() => Boolean({VIEWS[view]})")


def test_the_timeline_zooms_by_key_wheel_and_click(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), "timeline")
    words = page.locator("[role=status]")
    playwright.expect(words).to_contain_text("24 trajectories, 4 versions")
    page.focus("canvas")
    page.keyboard.press("n")
    playwright.expect(page).to_have_url(re.compile("from="))
    playwright.expect(words).not_to_contain_text("24 trajectories")
    page.keyboard.press("0")
    playwright.expect(words).to_contain_text("24 trajectories")
    box = page.locator("canvas").bounding_box()
    whole = page.evaluate("window.stretto.timelineView.answer.to")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.mouse.wheel(0, -400)
    playwright.expect(page).to_have_url(re.compile("from="))
    page.wait_for_function("whole => window.stretto.timelineView.answer.to < whole", arg=whole)
    box = page.locator("canvas").bounding_box()  # fewer lanes make it lower
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 30)
    page.wait_for_selector("#tip:not([hidden])")


def test_trajectories_are_searched_and_read_by_keyboard(
    page: Any, serve: Callable[..., ViewServer], tmp_path: Path
) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), "trajectories")
    page.wait_for_selector(".list tbody tr")
    assert page.locator(".list tbody tr").count() == 24
    page.fill("[name=update]", "0")
    page.press("[name=update]", "Enter")
    playwright.expect(page.locator(".list tbody tr")).to_have_count(6)
    page.locator(".list tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Trajectory 4")
    assert page.locator(".tokens span.observed").count() == 2
    assert page.locator(".turn-mark").all_inner_texts() == ["turn 0", "environment", "turn 1"]
    page.click("text=ratio")
    page.hover(".tokens span >> nth=1")
    tip = page.locator("#tip").inner_text()
    assert "ratio" in tip
    assert "clipped or masked" in tip
    page.click("text=Group 1 side by side")
    page.wait_for_selector(".members article")
    assert "<script>" in page.locator(".members").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector(".members", state="detached")
    page.keyboard.press("/")
    page.keyboard.type("<img")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".list tbody tr")).to_have_count(1)


def test_answers_of_evaluations_are_read_too(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), "trajectories?evaluation=2")
    page.wait_for_selector(".list tbody tr")
    assert page.locator(".list tbody tr").count() == 3
    page.click(".list tbody tr >> nth=0")
    page.wait_for_selector("text=Answer to held-out prompt 0")
    assert "<script>" in page.locator(".details").inner_text()


def test_runs_are_compared(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", config=CONFIG.replace("0.001", "0.002"))
    record_run(tmp_path / "c", config=CONFIG.replace("seed = 7", "seed = 8"))
    visit(page, serve(tmp_path / "a", tmp_path / "b", tmp_path / "c"), "compare")
    page.wait_for_selector("text=training.learning_rate")
    assert page.locator("text=seeds of one recipe as a band").count() == 1
    page.click("text=by token")
    page.keyboard.press("1")
    page.wait_for_selector("text=Laws")


def test_a_run_that_goes_on_is_followed(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=1)
    visit(page, serve(tmp_path), "overview")
    assert page.locator(".pill").inner_text() == "running"
    assert "waits: update 4: group 9" in page.inner_text("main")
    record_second_update(recorder)
    page.wait_for_selector("text=2 / 4")
    recorder.journal.finished(stopped=True, at=recorder.now())
    recorder.journal.close()
    page.wait_for_selector(".pill.stopped")


def test_the_page_is_never_blank(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Journal.open(tmp_path / "empty" / "journal.sqlite").close()
    record_run(tmp_path / "bad")
    server = serve(tmp_path / "empty", tmp_path / "bad")
    for view, words in (
        ("overview", "0 of 0 updates"),
        ("timeline", "has done nothing yet"),
        ("trajectories", "No trajectory has started yet"),
    ):
        visit(page, server, view)
        page.wait_for_selector(f"text={words}")
    (tmp_path / "bad" / "journal.sqlite").write_bytes(b"x" * 4096)
    visit(page, server, "overview?run=1")
    page.wait_for_selector(".notice.bad")
    assert "journal.sqlite" in page.locator(".notice.bad").inner_text()


def test_a_server_that_is_gone_is_named(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None)
    server = serve(tmp_path)
    visit(page, server, "overview")
    page.context.set_offline(True)
    page.wait_for_selector("text=The server does not answer")
    assert page.locator(".charts .card:visible").count() == 8, "what was read stays"
    recorder.journal.close()


def test_the_theme_is_a_choice_that_is_kept(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_run(tmp_path)
    server = serve(tmp_path)
    visit(page, server, "overview")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")


def test_a_report_is_the_page_in_one_file(page: Any, tmp_path: Path) -> None:
    for name in "ab":
        record_run(tmp_path / name)
    out = tmp_path / "report.html"
    write_report(open_runs([tmp_path / "a", tmp_path / "b"]), out, verified=False, tokenizer=None, say=print)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{out.as_uri()}#/overview")
    page.wait_for_selector("html[data-ready]")
    assert "4 of 4 updates" in page.inner_text("main")
    page.keyboard.press("2")
    playwright.expect(page.locator("[role=status]")).to_contain_text("24 trajectories")
    page.keyboard.press("3")
    page.wait_for_selector(".list tbody tr")
    page.click("tr[data-id='4']")
    page.wait_for_selector(".tokens span.observed")
    page.keyboard.press("4")
    page.wait_for_selector("text=Recipes")
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def test_an_extended_run_is_shown_without_its_pause(
    page: Any, serve: Callable[..., ViewServer], tmp_path: Path
) -> None:
    stopped_at = record_extended_run(tmp_path / "a")
    record_run(tmp_path / "b")
    server = serve(tmp_path / "a", tmp_path / "b")
    visit(page, server, "overview")
    words = page.inner_text("main")
    for part in ("40.0 s", "3 tokens/s", "trainer 75 % of the training time", "training.learning_rate: 0.001 → 0.0005"):
        assert part in words
    page.keyboard.press("2")
    playwright.expect(page.locator("[role=status]")).to_contain_text("24 trajectories")
    assert (
        page.evaluate("S => window.stretto.timelineView.x(S + 1000) - window.stretto.timelineView.x(S)", stopped_at)
        < 60
    )
    for at in (2.0, stopped_at + 300.0, stopped_at + 1_003.0):
        back = "at => { const view = window.stretto.timelineView; return view.unclock(view.clock(at)); }"
        assert page.evaluate(back, at) == pytest.approx(at)
    page.keyboard.press("4")
    page.wait_for_selector("text=0.001, from update 2: 0.0005")
    assert "40.0 s" in page.inner_text("main")


def test_listed_trajectories_follow_the_run(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=1)
    visit(page, serve(tmp_path), "trajectories")
    cells = page.locator("tr[data-id='6'] td")
    playwright.expect(cells.nth(1)).to_have_text("-")
    record_second_update(recorder)
    playwright.expect(cells.nth(1)).to_have_text("1", timeout=WAIT_MS)
    recorder.journal.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_every_view_fits_its_window_in_light_and_dark(
    browser: Any, serve: Callable[..., ViewServer], tmp_path: Path, theme: str, width: int, height: int
) -> None:
    record_run(tmp_path / "a")
    record_run(tmp_path / "a-run-with-a-long-name", config=CONFIG.replace("0.001", "0.002"))
    record_tool_run(tmp_path / "tools")
    server = serve(tmp_path / "a", tmp_path / "a-run-with-a-long-name", tmp_path / "tools")
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    for view, shown in (
        ("overview", ".charts canvas"),
        ("overview?run=1", ".charts canvas"),
        ("timeline", ".lanes canvas"),
        ("trajectories", ".list tbody tr"),
        ("trajectories?run=2&id=7", ".tokens span.call"),
        ("trajectories?group_of=1", ".members article"),
        ("compare", "text=training.learning_rate"),
    ):
        visit(page, server, view)
        page.wait_for_selector(shown)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{view} is {wide} pixels wide in a window of {width}"
        assert page.evaluate("document.querySelector('header').offsetHeight") <= (95 if width < 760 else 60), view
        lies_over = "document.querySelector('.headline > *').getBoundingClientRect().left"
        brand = "document.querySelector('.brand > :first-child').getBoundingClientRect().right"
        assert page.evaluate(f"{lies_over} >= {brand}"), f"{view}: the name of the run lies over the mark"
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert problems == []
    context.close()


def test_tools_are_marked_in_the_tokens_and_listed(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    record_tool_run(tmp_path)
    visit(page, serve(tmp_path), "trajectories")
    page.wait_for_selector(".list tbody tr")
    page.fill("[name=tool]", "calculator")
    page.press("[name=tool]", "Enter")
    playwright.expect(page.locator(".list tbody tr")).to_have_count(1)
    page.click("tr[data-id='7']")
    page.wait_for_selector(".tokens span.call")
    marks = ["turn 0", "calls calculator", "environment: result of calculator", "turn 1"]
    assert page.locator(".turn-mark").all_inner_texts() == marks
    assert page.locator(".tokens span.call").count() == 4
    assert page.locator(".calls pre").all_inner_texts() == ['{"expression": "1 + 1"}', "2"]


def test_a_timeline_of_a_thousand_updates_is_drawn_at_once(
    page: Any, serve: Callable[..., ViewServer], tmp_path: Path
) -> None:
    make_journal(tmp_path / "journal.sqlite", updates=1_000, trajectories=16_000, instances=4_096)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "api/timeline" in request.url else None)
    visit(page, serve(tmp_path), "timeline")
    words = page.locator("[role=status]")
    playwright.expect(words).to_contain_text("16,000 trajectories, 999 versions")
    page.wait_for_timeout(400)
    assert len(asked) == 1, "an answer that changes the height of the drawing is not asked for again"
    draw = "view.draw(); return performance.now() - began;"
    spent = page.evaluate(f"() => {{ const view = window.stretto.timelineView, began = performance.now(); {draw} }}")
    assert spent < 600, (
        "milliseconds, on a machine that may be busy: it was 1,200 and more when each place took a search"
    )
    out = tmp_path / "report.html"
    write_report(open_runs([tmp_path]), out, verified=False, tokenizer=None, say=print)
    page.goto(f"{out.as_uri()}#/timeline")
    playwright.expect(words).to_contain_text("16,000 trajectories, 999 versions, 4,0")
    playwright.expect(words).to_contain_text("20,000 moves")
    page.focus("canvas")
    page.keyboard.press("n")
    playwright.expect(words).not_to_contain_text("16,000 trajectories")
    count = int(words.inner_text().partition("·")[2].split()[0].replace(",", ""))
    assert 0 < count < 100
    spent = page.evaluate(f"() => {{ const view = window.stretto.timelineView, began = performance.now(); {draw} }}")
    assert spent < 600


def test_colours_of_a_comparison_follow_the_band_and_the_theme(
    page: Any, serve: Callable[..., ViewServer], tmp_path: Path
) -> None:
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", config=CONFIG.replace("seed = 7", "seed = 8"))
    visit(page, serve(tmp_path / "a", tmp_path / "b"), "compare")
    page.wait_for_selector("text=seeds of one recipe as a band")
    swatches = "() => [...document.querySelectorAll('label .swatch')].map(each => each.style.background)"
    first = page.evaluate(swatches)
    assert first[0] == first[1]
    page.uncheck("text=seeds of one recipe as a band")
    second = page.evaluate(swatches)
    assert second[0] == first[0] != second[1]
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("t")
    assert set(page.evaluate(swatches)).isdisjoint(second)


def test_results_of_a_comparison_follow_the_runs(page: Any, serve: Callable[..., ViewServer], tmp_path: Path) -> None:
    recorder = record_run(tmp_path / "a", end=None, updates=1)
    record_run(tmp_path / "b")
    visit(page, serve(tmp_path / "a", tmp_path / "b"), "compare")
    row = page.locator("tr", has_text="updates").first
    playwright.expect(row.locator("td").nth(1)).to_have_text("1")
    record_second_update(recorder)
    playwright.expect(row.locator("td").nth(1)).to_have_text("2", timeout=WAIT_MS)
    recorder.journal.close()


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 2_400, ["0 s", "10 min", "20 min", "30 min", "40 min"]),
        (2_007, 2_010, ["33 min 27 s", "33 min 28 s", "33 min 29 s", "33 min 30 s"]),
        (2_007, 2_009, ["33 min 27.0 s", "33 min 27.5 s", "33 min 28.0 s", "33 min 28.5 s", "33 min 29.0 s"]),
        (0, 30_000, ["0 s", "2 h", "4 h", "6 h", "8 h"]),
        (9.83, 10.24, ["9.9 s", "10.0 s", "10.1 s", "10.2 s"]),
    ],
)
def test_marks_of_time_are_round_in_the_unit_that_they_show(
    page: Any, serve: Callable[..., ViewServer], tmp_path: Path, low: float, high: float, labels: list[str]
) -> None:
    record_run(tmp_path)
    visit(page, serve(tmp_path), "overview")
    marks = "const [marks, step] = S.timeTicks(low, high, 5); return marks.map(each => S.moment(each, step));"
    assert page.evaluate(f"([low, high]) => {{ const S = window.stretto; {marks} }}", [low, high]) == labels
