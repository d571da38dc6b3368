"""Keeps the capture of graphs and the release of cached memory apart.

While any thread captures, torch's allocator can hand nothing back to the device: emptying its cache is an error then,
in whichever thread. Allocating is not, where captures are made in the mode `thread_local`.
"""

from __future__ import annotations

import gc
import threading

import torch

CAPTURE = threading.Lock()  # held by whoever captures, and by whoever empties the cache


def release_cached() -> None:
    """Give back to the device what only the allocator's cache holds, once nobody captures. Not while capturing."""
    gc.collect()
    with CAPTURE:
        torch.cuda.empty_cache()
