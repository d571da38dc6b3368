"""The rows that share the first pages of their context, as lists that an attention kernel reads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.decode_work_list import Sharing
from stretto.engines.native.sequence import SequenceState

PEERS = 8  # rows of a group that read their common pages together


class SharedPages:
    """Groups the rows by the full pages of their prompts. The host changes the groups when rows come and go."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._rows_of: dict[int, set[int]] = {}  # the last page that rows have in common -> those rows
        self._full: NDArray[np.int64] = np.zeros(size, dtype=np.int64)  # full pages of each row's prompt
        self._stale: set[int] = set()  # the keys of `_rows_of` whose lists are to be made again
        self._listed: dict[int, tuple[list[int], int]] = {}  # the rows of the lists of a key, and what they save
        self._pages: NDArray[np.int32] = np.zeros(size, dtype=np.int32)  # as on the device
        self._peers: NDArray[np.int32] = np.full((size, PEERS), -1, dtype=np.int32)
        self.sharing = Sharing(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.full((size, PEERS), -1, dtype=torch.int32, device=device),
        )
        self.saved = 0  # tokens of context that need not be read again by rows that share them

    def add(self, row: int, trajectory: SequenceState) -> None:
        """Notes the last full page of a row's prompt: two rows that have it in common have all pages before it too."""
        full = len(trajectory.request.prompt) // PAGE
        self._full[row] = full
        if full:
            self._rows_of.setdefault(trajectory.pages[full - 1], set()).add(row)
            self._stale.add(trajectory.pages[full - 1])

    def discard(self, row: int, trajectory: SequenceState) -> None:
        """Forgets a row. Its trajectory still has its pages."""
        full = int(self._full[row])
        if full:
            page = trajectory.pages[full - 1]
            self._rows_of[page].discard(row)
            if not self._rows_of[page]:
                del self._rows_of[page]
            self._stale.add(page)
        self._full[row] = 0

    def changes(self) -> list[NDArray[np.int32]]:
        """Returns the lists for `sharing`, if rows have come or gone: up to `PEERS` rows each, at the lowest of them.

        The caller brings them to the device.
        """
        if not self._stale:
            return []
        for key in self._stale:  # all of them first: a row may have left one list for another
            rows, saved = self._listed.pop(key, ((), 0))
            if rows:
                self._pages[rows], self._peers[rows] = 0, -1
                self.saved -= saved
        for key in self._stale & self._rows_of.keys():
            self._list(key)
        self._stale.clear()
        return [self._pages, self._peers]

    def _list(self, key: int) -> None:
        ordered, listed, saved = sorted(self._rows_of[key]), list[int](), 0
        for start in range(0, len(ordered), PEERS):
            own = ordered[start : start + PEERS]
            if len(own) > 1:
                full = int(self._full[own[0]])
                self._pages[own] = full
                self._peers[own[0], : len(own)] = own
                saved += (len(own) - 1) * full * PAGE
                listed += own
        self._listed[key] = listed, saved
        self.saved += saved
