"""What a run on a Ray cluster costs its driver: `python bench/ray_driver.py [--instances 4] [--out FILE]`.

A whole run of the tiny model on a cluster of this machine's own, with trainer and rewards in actors, so that the driver
is the control plane and nothing else. Two figures, both from the run itself:

- processor time of the driver, all of its threads, for each trajectory that was trained on, from the end of the first
  update to the end of the last; the floor is `FLOOR_MS`;
- from the publication of a version to the first token of it: by the journal, from `published_at` to the moment when the
  first prefill under that version began, so one decode step is missing. Weights are on the disk before that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.assembly.train import train
from stretto.observe.progress import Silent
from stretto.recipe.reading import load_recipe
from stretto.store.verify import exit_code, verify

FLOOR_MS = 3.0
RECIPE = Path(__file__).parent.parent / "recipes" / "ray.toml"


class Clock(Silent):
    """Reads the driver's processor time at the end of every update."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []  # by the clock, and of the processor

    def updated(self, line: Mapping[str, Any]) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


def first_tokens(journal: Path) -> list[float]:
    """Seconds from the publication of each version to its first prefill, of those that were generated from."""
    query = """SELECT min(c.started_at) - v.published_at FROM versions v JOIN completions c ON c.version = v.version
               WHERE v.version > 0 GROUP BY v.version"""
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
        return sorted(seconds for (seconds,) in db.execute(query))


def measure(folder: Path, instances: int, steps: int) -> dict[str, Any]:
    share = min(1.0, (os.cpu_count() or 1) / (instances + 1))
    recipe = load_recipe(
        RECIPE,
        (
            'runtime.address="local"',
            f"runtime.instances={instances}",
            f"runtime.instance_cpus={share:.2f}",
            f"runtime.trainer_cpus={share:.2f}",
            "runtime.instance_seconds=120.0",
            f"training.steps={steps}",
            "evaluation.prompts=0",
        ),
    )
    clock = Clock()
    summary = train(recipe, folder / "run", observer=clock)
    findings = verify(folder / "run")
    assert exit_code(findings) == 0, findings
    (clock_0, processor_0), (clock_1, processor_1) = clock.marks[0], clock.marks[-1]
    trajectories = (steps - 1) * recipe.rollout.prompts * recipe.rollout.group
    waits = first_tokens(folder / "run" / "journal.sqlite")
    return {
        "instances": instances,
        "updates": steps,
        "trajectories": trajectories,
        "driver_ms_per_trajectory": 1e3 * (processor_1 - processor_0) / trajectories,
        "floor_ms": FLOOR_MS,
        "driver_busy_share": (processor_1 - processor_0) / (clock_1 - clock_0),
        "publish_to_first_prefill_s": {
            "median": waits[len(waits) // 2], "least": waits[0], "most": waits[-1], "versions": len(waits)
        },
        "seconds": clock_1 - clock_0,
        "tokens_per_second": summary["tokens_per_second"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.instances, options.steps)
    versions = {name: importlib.metadata.version(name) for name in ("ray", "torch", "transformers")}
    record = {
        "command": f"python bench/ray_driver.py --instances {options.instances} --steps {options.steps}",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg(), **versions},
        **result,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if result["driver_ms_per_trajectory"] >= FLOOR_MS:
        raise SystemExit(f"{result['driver_ms_per_trajectory']:.2f} ms a trajectory is above the floor of {FLOOR_MS}")


if __name__ == "__main__":
    main()
