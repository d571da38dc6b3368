"""The time of day as a run records it: seconds since 1970 that never go back, whatever is done to the machine's clock.

Read from that clock when the process begins, and counted from there. Durations are differences of it.
"""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    return _AT_ZERO + time.monotonic()
