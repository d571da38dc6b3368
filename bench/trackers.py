"""CPU time that trackers take of a run. `python bench/trackers.py [--out FILE]`.

Runs the quickstart with TensorBoard and Prometheus, whose page is read every 15 seconds. Prints the CPU seconds of all
threads that trackers start (theirs, and those of their packages) and of the whole process, evaluations included.
`time.thread_time` of each thread is read when the thread ends.

`--samples 0,4` are the runs to make, each with so many samples of each update. `--steps N` makes them shorter. The
floor is 1 % of the CPU time.

`--sinks wandb,trackio,mlflow` measures these instead, each in runs of its own, without a network. Their packages must
be installed: `make test-trackers` has an environment with them. Programs that a tracker starts count too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from stretto.assembly.train import train
from stretto.recipe.reading import load_recipe

PORT = 9_479
FLOOR = 0.01
BENCH = Path(__file__)
OFFLINE = {
    "wandb": ["observe.wandb.mode=offline"],
    "trackio": [],
    "mlflow": ["observe.mlflow.uri=sqlite:///{folder}/mlflow.db"],
}
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


@contextlib.contextmanager
def cpu_by_thread() -> Iterator[dict[str, float]]:
    """Measures the CPU seconds of every thread that begins and ends inside, by the module of its code or its name."""
    seconds: dict[str, float] = {}
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # also of threads that override `run`

    def measured(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        module = getattr(target, "__module__", None) or type(thread).__module__
        try:
            run(thread)
        finally:
            name = thread.name if thread.name.startswith("listener") else module
            seconds[name] = seconds.get(name, 0.0) + time.thread_time()

    threading.Thread._bootstrap_inner = measured  # type: ignore[attr-defined]
    try:
        yield seconds
    finally:
        threading.Thread._bootstrap_inner = run  # type: ignore[attr-defined]


def scrape(until: threading.Event) -> None:
    """Reads the page of Prometheus, as often as a server usually does."""
    while not until.wait(15.0):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read()


def watch_programs(name: str, seconds: dict[str, float], until: threading.Event) -> None:
    """Reads the CPU seconds of the processes of a tracker's package, by their command, until they or the run end."""
    tick = os.sysconf("SC_CLK_TCK")
    while not until.wait(0.2):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                words = " ".join(command[:4])
                if BENCH.name in words or name not in words:
                    continue
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                seconds[f"process {folder.name} {Path(command[0]).name}"] = (int(fields[11]) + int(fields[12])) / tick


def measure(steps: int, samples: int, sink: str | None) -> dict[str, object]:
    """Runs the quickstart with trackers, and returns the CPU seconds of their threads and programs, and of all."""
    ended = threading.Event()
    programs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, cpu_by_thread() as seconds:
        if sink is None:
            sinks = ['observe.sinks=["tensorboard", "prometheus"]', f"observe.prometheus.port={PORT}"]
            reader = threading.Thread(target=scrape, args=(ended,), name="reader")
        else:
            os.chdir(folder)  # MLflow writes files into the working directory
            os.environ["TRACKIO_DIR"] = f"{folder}/trackio"
            sinks = [f'observe.sinks=["{sink}"]', *(each.format(folder=folder) for each in OFFLINE[sink])]
            reader = threading.Thread(target=watch_programs, args=(sink, programs, ended), name="reader")
        recipe = load_recipe(
            RECIPE,
            [f"training.steps={steps}", *sinks, *([f"observe.samples={samples}"] if samples else [])],
        )
        reader.start()
        before, began = time.process_time(), time.monotonic()
        train(recipe, Path(folder) / "run")
        process_s, wall_s = time.process_time() - before, time.monotonic() - began
        ended.set()
        reader.join()
        packages = ("tensorboard", "torch", "prometheus_client") if sink is None else (sink,)
        trackers = programs | {
            name: spent
            for name, spent in seconds.items()
            if name.startswith("listener") or name.partition(".")[0] in packages or "server" in name
        }
    return {
        **({} if sink is None else {"sink": sink}),
        "samples": samples,
        "wall_s": round(wall_s, 2),
        "process_cpu_s": round(process_s, 2),
        "trackers_cpu_s": {name: round(spent, 4) for name, spent in sorted(trackers.items())},
        "share": round(sum(trackers.values()) / process_s, 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", default="0,4", help="runs to make, by the samples of each update")
    parser.add_argument("--run", type=int, metavar="SAMPLES", help=argparse.SUPPRESS)
    parser.add_argument("--sinks", help="trackers to measure one by one, instead of TensorBoard and Prometheus")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(measure(options.steps, options.run, options.sinks)))
        return 0
    runs = []
    sinks = [["--sinks", sink] for sink in options.sinks.split(",")] if options.sinks else [[]]
    for sink, samples in itertools.product(sinks, options.samples.split(",")):
        # Each in a process of its own, which imports everything.
        command = [sys.executable, __file__, "--steps", str(options.steps), "--run", samples, *sink]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    result = {
        "command": "python bench/trackers.py" + (f" --sinks {options.sinks}" if options.sinks else ""),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
                    "load": os.getloadavg()},
        "steps": options.steps,
        "runs": runs,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(run["share"] > FLOOR for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
