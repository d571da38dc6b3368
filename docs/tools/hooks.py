"""Fits the pages of `docs/` to the site. They are written so that they also read well on GitHub.

- A page that is named by its path, such as `docs/recovery.md` in backticks, becomes a link with the page's title.
- A bar inside of code in a table, which GitHub wants as `\\|`, loses its backslash.
- A `<picture>` with a light and a dark file follows the palette of the site, not that of the operating system.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

log = logging.getLogger("mkdocs.hooks.pages")  # a warning fails a strict build

NAMED_PAGE = re.compile(r"`docs/([\w/-]+\.md)`")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns the page with links and pictures as the site needs them."""
    here = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        target = found[1]
        file = files.get_file_from_path(target)
        if file is None:
            log.warning("%s names `docs/%s`, which does not exist", here, target)
            return found[0]
        title = TITLE.search(file.content_string)
        return f"[{title[1] if title else target}]({posixpath.relpath(target, posixpath.dirname(here))})"

    def change(text: str) -> str:
        return TABLE_ROW.sub(_plain_bars, NAMED_PAGE.sub(link, text))

    return outside_of_fences(PICTURE.sub(_both_pictures, markdown), change)


def outside_of_fences(markdown: str, change: Any) -> str:
    """Returns a page with `change` made to everything but its blocks of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _plain_bars(row: re.Match[str]) -> str:
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _both_pictures(found: re.Match[str]) -> str:
    light, dark, alt = found["light"], found["dark"], found["alt"]
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)\n"
