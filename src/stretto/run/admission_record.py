"""Records when groups could start and when not, and why not: the timeline shows it as the reason of idle instances."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto import clock
from stretto.core.waits import Wait
from stretto.store.journal import Journal
from stretto.store.schema import ADMISSION

_NUMBERS = re.compile(r"\d+")


class AdmissionRecord:
    """Writes a note whenever the reason becomes another one. Numbers in a reason do not make it another one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._kept: str | None = None

    def note(self, waits: Sequence[Wait]) -> None:
        """Takes the waits of this moment. Without one of admission, a group can start."""
        reason = next((wait.reason for wait in waits if wait.owner == "admission"), "")
        if (kind := _NUMBERS.sub("", reason)) != self._kept:
            self._journal.note(ADMISSION, reason, at=clock.now())
            self._kept = kind
