"""Takes the two pictures of the tutorial: `python -m docs.tools.screenshots FOLDER`, after a tutorial in that folder.

Serves `FOLDER/runs/first` and `FOLDER/runs/short` as `stretto view` does, and writes the charts of the overview and of
the comparison to `docs/images`. Needs Chromium and the package `playwright` (the extra `browser`).
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.view_browser import FLAGS, PAINTED, chromium
from docs.tools.pictures import IMAGES
from stretto.view.api import Api
from stretto.view.runs import open_runs
from stretto.view.server import ViewServer

WIDTH, HEIGHT = 1280, 1400  # of the window; a picture is a part of it
MARGIN = 8


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Serves runs, and yields the address of the page."""
    server = ViewServer(Api(open_runs(list(folders))), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()


def take(page: Any, url: str, view: str, first: str, file: Path) -> None:
    """Writes a picture of a view, from the top of the element `first` to the end of its eight charts."""
    page.goto(f"{url}#/{view}")
    page.wait_for_selector("html[data-ready]")
    cards = page.locator(".charts .card:visible")
    cards.nth(7).wait_for()
    page.evaluate(PAINTED)
    top, last = page.locator(first).first.bounding_box(), cards.nth(7).bounding_box()
    begin = top["y"] - MARGIN
    page.mouse.move(0, 0)  # no chart is pointed at
    page.screenshot(
        path=file,
        clip={"x": 0, "y": begin, "width": WIDTH, "height": last["y"] + last["height"] + MARGIN - begin},
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="take the pictures of the tutorial")
    parser.add_argument("folder", type=Path, help="the folder in which the tutorial was followed")
    take_both(parser.parse_args().folder / "runs", IMAGES)


def take_both(runs: Path, images: Path) -> None:
    """Takes the pictures of the runs `first` and `short` in a folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        with served(runs / "first") as url:
            take(page, url, "overview", ".charts .card", images / "tutorial-curves.png")
        with served(runs / "first", runs / "short") as url:
            take(page, url, "compare", "main .card", images / "tutorial-compare.png")
        browser.close()


if __name__ == "__main__":
    main()
