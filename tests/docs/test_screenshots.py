"""The pictures of the tutorial. Skipped without Chromium and `playwright`; `make test-browser` needs both."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from view_cases import record_run

from docs.tools.screenshots import WIDTH, take_both

pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_both_pictures_are_taken_and_hold_two_rows_of_charts(tmp_path: Path) -> None:
    for name in ("first", "short"):
        record_run(tmp_path / "runs" / name)
    take_both(tmp_path / "runs", tmp_path)
    heights = []
    for name in ("tutorial-curves.png", "tutorial-compare.png"):
        width, height = struct.unpack(">II", (tmp_path / name).read_bytes()[16:24])
        assert width == WIDTH
        heights.append(height)
    assert 400 < heights[0] < heights[1] < 900, "the comparison has its buttons above the charts"
