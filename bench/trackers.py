"""CPU time that trackers take of a run. `python bench/trackers.py`.

Runs the quickstart with TensorBoard and Prometheus, whose page is read every 15 seconds. Prints the CPU seconds of all
threads that trackers start (theirs, and those of their packages) and of the whole process, evaluations included.
`time.thread_time` of each thread is read when the thread ends.

`--samples N` sends samples of each update too. `--steps N` makes the run shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from stretto.assembly.train import train
from stretto.recipe.schema import load_recipe

PORT = 9_479
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


@contextlib.contextmanager
def cpu_by_thread() -> Iterator[dict[str, float]]:
    """Measures the CPU seconds of every thread that begins and ends inside, by the module of its code or its name."""
    seconds: dict[str, float] = {}
    run = threading.Thread._bootstrap_inner  # also of threads that override `run`

    def measured(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        module = getattr(target, "__module__", None) or type(thread).__module__
        try:
            run(thread)
        finally:
            name = thread.name if thread.name.startswith("listener") else module
            seconds[name] = seconds.get(name, 0.0) + time.thread_time()

    threading.Thread._bootstrap_inner = measured
    try:
        yield seconds
    finally:
        threading.Thread._bootstrap_inner = run


def scrape(until: threading.Event) -> None:
    """Reads the page of Prometheus, as often as a server usually does."""
    while not until.wait(15.0):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=0)
    options = parser.parse_args()
    recipe = load_recipe(
        RECIPE,
        [
            f"training.steps={options.steps}",
            'observe.sinks=["tensorboard", "prometheus"]',
            f"observe.prometheus.port={PORT}",
            *([f"observe.samples={options.samples}"] if options.samples else []),
        ],
    )
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder, cpu_by_thread() as seconds:
        reader = threading.Thread(target=scrape, args=(ended,), name="reader")
        reader.start()
        before, began = time.process_time(), time.monotonic()
        train(recipe, Path(folder) / "run")
        process_s, wall_s = time.process_time() - before, time.monotonic() - began
        ended.set()
        reader.join()
        trackers = {
            name: spent
            for name, spent in seconds.items()
            if name.startswith("listener") or name.partition(".")[0] in ("tensorboard", "torch", "prometheus_client")
            or "server" in name
        }  # fmt: skip
    total = sum(trackers.values())
    result = {
        "machine": platform.processor() or platform.machine(),
        "steps": options.steps,
        "samples": options.samples,
        "wall_s": round(wall_s, 2),
        "process_cpu_s": round(process_s, 2),
        "trackers_cpu_s": {name: round(spent, 4) for name, spent in sorted(trackers.items())},
        "share": round(total / process_s, 5),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
