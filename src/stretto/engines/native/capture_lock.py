"""Keeps the capture of graphs apart from calls in other threads that would break it.

While any thread captures, two calls are errors in every thread: emptying the cache of torch's allocator, and waiting
for the whole device (which a compiler does when it times its kernels). Waiting for a stream that is not captured is
allowed, and so is allocating if captures are made in the mode `thread_local`.
"""

from __future__ import annotations

import gc
import threading

import torch

# Held while a thread captures, empties the cache or waits for the whole device. An engine that finds it taken runs its
# step uncaptured instead of waiting: a compiler may hold it for a long time.
CAPTURE = threading.RLock()


def release_cached() -> None:
    """Returns the memory in the allocator's cache to the device, once no thread captures. Not for use in a capture."""
    gc.collect()
    with CAPTURE:
        torch.cuda.empty_cache()
