"""The site builds without a warning, shows every page, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doc_pages import LANGUAGES, PAGES, ROOT, all_blocks

ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice about later versions of its packages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A strict build fails at the first warning: a link or an anchor without a target, a lost page."""
    folder = tmp_path_factory.mktemp("site")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert time.monotonic() - started < 60
    return folder


class Page(HTMLParser):
    """The resources of a page, its links, and the names that others can link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.linked.append(str(values["href"]))
        elif tag == "link" and values.get("href"):
            self.loaded.append(str(values["href"]))
        elif values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "img":
            self.pictures.append(values)


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in PAGES[1:]:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page


def test_the_site_loads_nothing_from_other_hosts_and_everything_it_loads_is_there(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue  # its links are absolute
        for target in Page(path).loaded:
            assert not re.match(r"(https?:)?//", target), (path, target)
            if not target.startswith("data:"):
                assert (path.parent / re.sub(r"[#?].*", "", target)).is_file(), (path, target)


def test_every_picture_says_what_it_shows(site: Path) -> None:
    silent = [
        (path.name, picture["src"])
        for path in site.rglob("*.html")
        for picture in Page(path).pictures
        if not picture.get("alt")
    ]
    assert not silent


def test_a_page_that_is_named_by_its_path_is_linked(site: Path) -> None:
    text = (site / "architecture.html").read_text(encoding="utf-8")
    assert 'href="recovery.html"' in text
    assert not re.search(r"<code>docs/[\w/-]+\.md</code>", text)


def test_a_picture_with_two_files_follows_the_palette(site: Path) -> None:
    sources = [picture["src"] for picture in Page(site / "architecture.html").pictures]
    assert "images/trajectory.svg#only-light" in sources
    assert "images/trajectory-dark.svg#only-dark" in sources


def test_a_bar_in_the_code_of_a_table_is_one_bar(site: Path) -> None:
    text = (site / "algorithms.html").read_text(encoding="utf-8")
    assert "<code>KL(pi || reference)</code>" in text
    assert not re.search(r"<code>[^<]*\\\|[^<]*</code>", text)


def test_every_block_says_its_language() -> None:
    wrong = [f"{block.where}: {block.language!r}" for block in all_blocks() if block.language not in LANGUAGES]
    assert not wrong, f"write one of {sorted(LANGUAGES)} behind the three backticks"
