"""Keeps the capture of graphs apart from what breaks it in whichever thread.

While any thread captures, torch's allocator can hand nothing back to the device: emptying its cache is an error then.
So is waiting for the whole device, which a compiler does that times its kernels; waiting for a stream that is not
captured is none. Nor is allocating, where captures are made in the mode `thread_local`.
"""

from __future__ import annotations

import gc
import threading

import torch

# Held by whoever captures, empties the cache or waits for the whole device. An engine that finds it taken does not wait
# for it, and runs its step uncaptured: it may be taken for as long as a compiler needs.
CAPTURE = threading.RLock()


def release_cached() -> None:
    """Give back to the device what only the allocator's cache holds, once nobody captures. Not while capturing."""
    gc.collect()
    with CAPTURE:
        torch.cuda.empty_cache()
