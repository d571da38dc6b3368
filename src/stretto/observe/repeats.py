"""Warnings that come by the hundred: one line for the first of a kind, a count for the others."""

from __future__ import annotations

import logging
import re

MOST_KINDS = 20  # lines; what differs in more than its numbers and quotations is another kind

_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?")


class Repeats:
    """Says the first warning of each kind at once, and at `close` how many more there were of it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._more: dict[str, int] = {}  # by kind, beyond the first
        self._first: dict[str, str] = {}

    def warn(self, text: str) -> None:
        """`text` is of the kind of another that differs only in numbers and in what stands in quotation marks."""
        kind = _VARYING.sub("#", text)
        if kind not in self._first and len(self._first) >= MOST_KINDS:
            kind = "of other kinds"
        if kind in self._first:
            self._more[kind] = self._more.get(kind, 0) + 1
            return
        self._first[kind] = text
        self._log.warning("%s (others like it are counted, and told at the end)", text)

    def close(self) -> None:
        """Tell the counts. Safe to call twice."""
        for kind, count in self._more.items():
            self._log.warning("and %d more like it: %s", count, self._first[kind])
        self._more.clear()
