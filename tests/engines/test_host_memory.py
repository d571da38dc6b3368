"""The memory of the host that an engine may count on."""

from __future__ import annotations

import pytest

from stretto.engines import host_memory


@pytest.mark.parametrize(("limit", "expected"), [("max\n", 1 << 40), (f"{1 << 30}\n", 1 << 30), (None, 1 << 40)])
def test_memory_is_that_of_the_container_if_it_has_a_limit(limit, expected, tmp_path, monkeypatch):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(host_memory, "LIMIT_FILES", (str(tmp_path / "memory.max"),))
    monkeypatch.setattr(host_memory.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else (1 << 40) // 4096)
    assert host_memory.usable_memory() == expected
