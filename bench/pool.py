"""Four one-slot instances under `synchronous` and `multi-version`: how idle the pool is, and the time of an update.

    python bench/pool.py --out bench/results/pool.json

Whole runs by `stretto.assembly.train.train` over the tiny model with full weights: instances, versions, moves,
trainer and journal are what they always are. Two things are modelled, because idle time is a matter of scheduling and
this is to run on two cores, where four engines would step in turn: a decode step takes `--step-ms` whatever its rows,
as it does on a device of its own (what it really takes is less, and the rest is slept), and lengths are log-normal,
drawn from the seed of each trajectory, so that both runs are given the same tail. What a step took on average is in
the result.

Floors: idle share of the pool at most a third of that of `synchronous`, time per update at most half.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

import stretto.local.components as parts
from stretto.assembly.train import train
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import Failed
from stretto.observe.progress import Silent
from stretto.recipe.reading import parse_recipe
from stretto.store.verify import exit_code, verify
from stretto.types import Completion, Request, Suspended

INSTANCES, STALENESS = 4, 3
MEDIAN, SIGMA, LONGEST = 24.0, 1.0, 256
IDLE_FLOOR, TIME_FLOOR = 1 / 3, 1 / 2


class PacedEngine(NativeEngine):
    """A native engine whose steps take a fixed time and whose trajectories have the length that their seed says."""

    step_s = 0.04
    took_s: ClassVar[list[float]] = []  # of every step, over all instances

    def add(self, work: Request | Suspended) -> None:
        request = work.request if isinstance(work, Suspended) else work
        self._asked[request.id] = request
        length = round(random.Random(request.seed).lognormvariate(math.log(MEDIAN), SIGMA))
        sampling = replace(request.sampling, max_tokens=min(max(1, length), LONGEST), stop_tokens=())
        request = replace(request, sampling=sampling)
        super().add(replace(work, request=request) if isinstance(work, Suspended) else request)

    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """With each request as it was asked, which is compared with what comes back."""
        return [replace(each, request=self._asked[each.request.id]) for each in super().suspend(ids, kv=kv)]

    def step(self) -> list[Completion | Failed]:
        began = time.perf_counter()
        ended = super().step()
        if self._steps_are_paced:
            time.sleep(max(0.0, self.step_s - (time.perf_counter() - began)))
            self.took_s.append(time.perf_counter() - began)
        return ended

    _steps_are_paced = False
    _asked: dict[int, Request]


def paced(*arguments: Any) -> NativeEngine:
    """An instance as a run makes it, paced once it is made."""
    engine: NativeEngine = parts_make_core(*arguments)
    engine.__class__ = PacedEngine
    engine._steps_are_paced, engine._asked = True, {}  # type: ignore[attr-defined]
    return engine


parts_make_core = parts.make_native_engine  # type: ignore[attr-defined]


def recipe(paradigm: str, steps: int) -> Any:
    rollout: dict[str, Any] = {"paradigm": paradigm, "prompts": 8, "group": 4, "max_tokens": LONGEST, "rows": 32}
    if paradigm == "multi-version":
        rollout |= {"staleness": STALENESS, "in_flight": 16}
    return parse_recipe(
        {
            "model": {"path": "tiny", "warm_start": {"steps": 0}},
            "task": {"type": "countdown-chain"},
            "rollout": rollout,
            "training": {"steps": steps, "learning_rate": 1e-6},
            "evaluation": {"prompts": 0},
            "runtime": {
                "device": "cpu",
                "instances": INSTANCES,
                "slots": 1,
                "engine_threads": 1,
                "trainer_threads": 1,
                "rebalance_seconds": 1.0,
            },
        }
    )


def measure(paradigm: str, steps: int, folder: Path) -> dict[str, Any]:
    PacedEngine.took_s.clear()
    summary = train(recipe(paradigm, steps), folder, observer=Silent())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "paradigm": paradigm,
        "updates": summary["steps"],
        "seconds_per_update": summary["wall_seconds"] / summary["steps"],
        "pool_idle_share": summary["rollout_idle_share"],
        "row_idle_share": summary["row_idle_share"],
        "trainer_idle_share": summary["trainer_idle_share"],
        "update_seconds": sum(line["update_seconds"] for line in lines) / len(lines),
        "tokens_per_update": summary["tokens"] / summary["steps"],
        "staleness": summary["staleness"],
        "moves": summary["moves"],
        "moved_bytes": summary["moved_bytes"],
        "prefilled_again_tokens": summary["prefilled_again_tokens"],
        "step_ms_mean": 1e3 * sum(PacedEngine.took_s) / len(PacedEngine.took_s),
        "verifies": exit_code(verify(folder)) == 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    PacedEngine.step_s = options.step_ms / 1e3
    parts.make_native_engine = paced  # type: ignore[assignment, attr-defined]
    with tempfile.TemporaryDirectory() as scratch:
        cells = {
            paradigm: measure(paradigm, options.updates, Path(scratch) / paradigm)
            for paradigm in ("synchronous", "multi-version")
        }
    before, after = cells["synchronous"], cells["multi-version"]
    idle = after["pool_idle_share"] / before["pool_idle_share"]
    seconds = after["seconds_per_update"] / before["seconds_per_update"]
    result = {
        "what": f"{INSTANCES} instances of one slot, tiny model with full weights, K = {STALENESS}",
        "modelled": f"a decode step of {options.step_ms:g} ms; lengths log-normal, median {MEDIAN:g}, sigma {SIGMA:g}",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
        "cells": list(cells.values()),
        "idle_ratio": idle,
        "idle_floor": IDLE_FLOOR,
        "time_ratio": seconds,
        "time_floor": TIME_FLOOR,
        "met": idle <= IDLE_FLOOR and seconds <= TIME_FLOOR and before["verifies"] and after["verifies"],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
