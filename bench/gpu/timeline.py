"""Rows that ran and tokens that were made, step by step: what the rate or share of any window is read from."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from stretto.types import EngineStats


class Timeline:
    """Notes in the order of time. What was noted holds until the next note."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._running: list[int] = []
        self._tokens: list[int] = []

    def note(self, at: float, running: int, tokens: int) -> None:
        """`running` rows from now on, `tokens` made so far."""
        self._at.append(at)
        self._running.append(running)
        self._tokens.append(tokens)

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens made in a window, between two notes in proportion to time."""
        first, last = np.interp([start, end], self._at, self._tokens)
        return float(last - first)

    def share_at_least(self, rows: float, start: float, end: float) -> float:
        """The share of a window in which `rows` or more ran."""
        if end <= start:
            raise ValueError(f"a window from {start} to {end} has no extent")
        bounds = np.clip([*self._at, max(end, self._at[-1])], start, end)
        held = np.diff(bounds)
        return float(held[np.asarray(self._running) >= rows].sum() / (end - start))


class Watched:
    """An engine's core that notes its load whenever it is asked for it, which `ThreadedEngine` does at every step."""

    def __init__(self, core: Any, timeline: Timeline) -> None:
        self._core, self._timeline = core, timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def report(self) -> EngineStats:
        load: EngineStats = self._core.report()
        self._timeline.note(time.time(), load.running, load.tokens)
        return load
