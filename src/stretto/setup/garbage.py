"""Keeps Python's garbage collector from stopping a run.

A full collection looks at every object of the process. The libraries alone have millions: on a GPU host one collection
took 1.8 s, during which no thread ran. What exists when the loop begins lives until its end, so it is left out.
"""

from __future__ import annotations

import gc


def spare_from_collection() -> None:
    """Collects once, and leaves everything that there is now out of all later collections."""
    gc.collect()
    gc.freeze()


def collect_earlier_runs() -> None:
    """Frees what earlier runs of this process, such as a notebook's, have left out of collections."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
