"""The memory of the host that an engine may count on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def usable_memory() -> int:
    """Returns the bytes of memory of this machine, or of the container that this process runs in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in LIMIT_FILES:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is `max`
            memory = min(memory, int(Path(path).read_text(encoding="ascii")))
    return memory
