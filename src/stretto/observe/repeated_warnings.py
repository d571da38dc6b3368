"""Limits repeated warnings: logs the first of each kind, and counts the others."""

from __future__ import annotations

import logging
import re

MOST_KINDS = 20  # kinds that are logged; further ones are counted together

OTHERS = "of other kinds"

_VARYING = re.compile(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"|\d+(\.\d+)?")


class Repeats:
    """Logs the first warning of each kind at once, and the number of the others at `close`."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._more: dict[str, int] = {}  # by kind, beyond the first
        self._first: dict[str, str] = {}

    def warn(self, text: str) -> None:
        """Logs or counts a warning. Two are of one kind if they differ only in numbers, addresses and quoted text."""
        kind = _VARYING.sub("#", text)
        if kind not in self._first and len(self._first) >= MOST_KINDS:
            kind = OTHERS
        if kind in self._first:
            self._more[kind] = self._more.get(kind, 0) + 1
            return
        self._first[kind] = text
        self._log.warning("%s (further ones like it are counted and reported at the end)", text)

    def close(self) -> None:
        """Logs the counts. Safe to call twice."""
        for kind, count in self._more.items():
            if kind == OTHERS:
                self._log.warning("and %d more %s", count, kind)
            elif kind == self._first[kind]:
                self._log.warning("and %d more like it: %s", count, kind)
            else:  # each has its own numbers
                self._log.warning("and %d more like it: %s", count, kind.replace("#", "..."))
        self._more.clear()
