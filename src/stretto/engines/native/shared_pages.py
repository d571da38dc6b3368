"""The rows that share the first pages of their context, as lists that an attention kernel reads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engines.native.cache import PAGE
from stretto.engines.native.device_memory import to_device
from stretto.engines.native.kernels.decode_work_list import Sharing
from stretto.engines.native.sequence import SequenceState

PEERS = 8  # rows of a group that read their common pages together


class SharedPages:
    """Groups the rows by the full pages of their prompts. The host changes the groups when rows come and go."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._rows_of: dict[int, set[int]] = {}  # the last page that rows have in common -> those rows
        self._pages: NDArray[np.int64] = np.zeros(size, dtype=np.int64)  # full pages of each row's prompt
        self._changed = False
        self.sharing = Sharing(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.full((size, PEERS), -1, dtype=torch.int32, device=device),
        )
        self.saved = 0  # tokens of context that need not be read again by rows that share them

    def add(self, row: int, trajectory: SequenceState) -> None:
        """Notes the last full page of a row's prompt: two rows that have it in common have all pages before it too."""
        full = len(trajectory.request.prompt) // PAGE
        self._pages[row] = full
        if full:
            self._rows_of.setdefault(trajectory.pages[full - 1], set()).add(row)
            self._changed = True

    def discard(self, row: int, trajectory: SequenceState) -> None:
        """Forgets a row. Its trajectory still has its pages."""
        full = int(self._pages[row])
        if full:
            page = trajectory.pages[full - 1]
            self._rows_of[page].discard(row)
            if not self._rows_of[page]:
                del self._rows_of[page]
            self._changed = True
        self._pages[row] = 0

    def upload(self) -> None:
        """Writes the lists to the device, up to `PEERS` rows each, at the lowest row of the list."""
        if not self._changed:
            return
        size = len(self._pages)
        pages = np.zeros(size, dtype=np.int32)
        peers = np.full((size, PEERS), -1, dtype=np.int32)
        self.saved = 0
        for rows in self._rows_of.values():
            ordered = sorted(rows)
            for start in range(0, len(ordered), PEERS):
                own = ordered[start : start + PEERS]
                if len(own) > 1:
                    pages[own] = self._pages[own[0]]
                    peers[own[0], : len(own)] = own
                    self.saved += (len(own) - 1) * int(self._pages[own[0]]) * PAGE
        self.sharing.pages.copy_(to_device(pages, self._device))
        self.sharing.peers.copy_(to_device(peers, self._device))
        self._changed = False
