"""Capture and the release of cached memory exclude each other."""

from __future__ import annotations

import threading

import pytest
import torch

from stretto.engines.native.capture import CAPTURE, release_cached


def test_cached_memory_is_released_only_when_nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(torch.cuda, "empty_cache", released.set)
    thread = threading.Thread(target=release_cached)
    with CAPTURE:
        thread.start()
        assert not released.wait(0.1)
    assert released.wait(10.0)
    thread.join()
