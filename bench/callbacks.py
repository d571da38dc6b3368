"""Measures the processor time that callbacks cost a run: `python bench/callbacks.py [RECIPE] [--out FILE]`.

Runs a recipe, the quickstart by default, with one callback that has every method and does nothing. Prints the processor
time of its thread, which waits for events and copies lines, that of handing events over to it, and that of the whole
process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import stretto
from stretto.observe.listeners import Callback, Listeners, LiveRun


class Counts(Callback):
    """Counts its calls, and measures its thread."""

    def __init__(self) -> None:
        self.calls = 0
        self.thread_s = 0.0

    def on_start(self, run: LiveRun) -> None:
        self.calls += 1

    def on_update(self, line: dict[str, Any]) -> None:
        self.calls += 1

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self.calls += 1

    def on_message(self, text: str) -> None:
        self.calls += 1

    def on_end(self, run: LiveRun) -> None:
        self.calls += 1
        self.thread_s = time.thread_time()


def handing_over_s(line: dict[str, Any], count: int = 1_000) -> float:
    """Returns the processor time of handing over one event, in the thread that does it."""
    listeners = Listeners([Counts()], most_queued=count + 1)
    listeners.start(stretto.Run("none"))
    began = time.thread_time()
    for _ in range(count):
        listeners.write(line)
    spent = time.thread_time() - began
    listeners.close(stretto.Run("none"))
    return spent / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.toml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        run = stretto.train(options.recipe, options.overrides, out=Path(folder) / "run", callbacks=[counts])
        process_s = time.process_time() - began
        line = run.metrics()[-1]
    handing_s = handing_over_s(line) * counts.calls
    share = (counts.thread_s + handing_s) / process_s
    result = {
        "command": "python bench/callbacks.py",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
                    "load": os.getloadavg()},
        "recipe": options.recipe,
        "overrides": options.overrides,
        "calls": counts.calls,
        "callback_thread_cpu_s": round(counts.thread_s, 4),
        "handing_over_cpu_s": round(handing_s, 4),
        "process_cpu_s": round(process_s, 1),
        "share": round(share, 6),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
