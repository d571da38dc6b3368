"""Measures how many events a second the core handles, and how that depends on the number of instances.

`python bench/core.py [--out FILE]`. A synthetic cluster with log-normal lengths drives the controller through a
priority queue of simulated times: instances that decode, rewards, loads, updates, and now and then a failed request.
The core decides the same on the same events, so they are recorded once and played to a new controller for the timing.
The figure is events per second of processor time, which neighbours on the machine disturb least; wall-clock time is in
the record too.

`scaling`: pools of one-slot instances, each pool eight times as large as the one before, with two groups of four
trajectories an instance and update. An event should cost the same in each, or grow with the logarithm of the size.
`Updated` is listed apart: a publish divides all instances between the versions, once an update.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan, resolve_plan

MEDIAN_S, SIGMA, CAP_S = 20.0, 1.0, 300.0  # of one trajectory
SCORE_S, LOAD_S, UPDATE_S = 0.05, 1.0, 25.0
FAILURES = 0.001  # of requests


def simulate(plan: Plan, instances: int, seed: int, slots: int | None = None) -> tuple[list[m.Event], dict[str, float]]:
    """Run to the end; every event in its order, and what the run was like."""
    controller, rng = Controller(plan), random.Random(seed)
    queue: list[tuple[float, int, m.Event]] = []
    now, order, commands_given = 0.0, 0, 0
    events: list[m.Event] = []
    ages: list[int] = []
    generating: dict[int, tuple[int, float]] = {}  # trajectory -> the number of the event that ends it, its time
    left: dict[int, float] = {}  # trajectory -> seconds to generate when it was suspended

    def after(delay: float, event: m.Event) -> None:
        nonlocal order
        order += 1
        heapq.heappush(queue, (now + delay, order, event))

    def generate(trajectory: int) -> None:
        length = left.pop(trajectory, 0.0) or min(CAP_S, MEDIAN_S * math.exp(rng.gauss(0, SIGMA)))
        failed = rng.random() < FAILURES
        after(length, m.GenerationFailed(trajectory, "cut off") if failed else m.Generated(trajectory, int(length)))
        generating[trajectory] = (order, now + length)

    for each in range(instances):
        after(0.0, m.Joined(each, plan.slots if slots is None else slots))
    versions: dict[int, int] = {}
    while queue:
        now, number, event = heapq.heappop(queue)
        if isinstance(event, m.Generated | m.GenerationFailed):
            if generating.get(event.trajectory, (0, 0.0))[0] != number:
                continue  # it was suspended before
            del generating[event.trajectory]
        commands = controller.handle(event)
        events.append(event)
        commands_given += len(commands)
        if isinstance(event, m.Generated):
            after(SCORE_S, m.Scored(event.trajectory, 1.0))
        for command in commands:
            if isinstance(command, m.Start):
                versions[command.group] = command.version
                for trajectory in command.trajectories:
                    generate(trajectory)
            elif isinstance(command, m.Resume):
                generate(command.trajectory)
            elif isinstance(command, m.Suspend):
                for trajectory in command.trajectories:
                    _, ends_at = generating.pop(trajectory)
                    left[trajectory] = ends_at - now
            elif isinstance(command, m.LoadVersion | m.SwapVersion):
                after(LOAD_S, m.Loaded(command.instance, command.version))
            elif isinstance(command, m.Train):
                ages += [command.update - versions[each // plan.group_size] for each in command.trajectories]
                after(UPDATE_S, m.Updated(command.update))
            elif isinstance(command, m.Finish):
                queue.clear()
    assert controller.counters.trained_groups == plan.updates * plan.batch
    return events, {
        "events": len(events),
        "commands": commands_given,
        "simulated_s": now,
        "mean_age": sum(ages) / len(ages),
        "max_age": max(ages),
    }


def replay(plan: Plan, events: list[m.Event]) -> dict[str, float]:
    """Measures how long a new controller takes over the same events."""
    controller = Controller(plan)
    handle = controller.handle
    wall, processor = time.perf_counter(), time.process_time()
    for event in events:
        handle(event)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert controller.finished
    return {"processor_s": processor, "wall_s": wall}


def scaling(sizes: list[int], updates: int, seed: int) -> list[dict[str, Any]]:
    """The processor time of an event in pools of one-slot instances of these sizes."""
    results: list[dict[str, Any]] = []
    for size in sizes:
        plan = resolve_plan("multi-version", batch=2 * size, group_size=4, staleness=2, updates=updates, retries=2)
        events, run = simulate(plan, size, seed, slots=1)
        controller = Controller(plan)
        seconds: dict[str, float] = {}
        counts: dict[str, int] = {}
        gc.collect()
        gc.freeze()  # the recorded events are no part of the core: collections need not look at them
        for event in events:
            kind = type(event).__name__
            began = time.process_time()
            controller.handle(event)
            seconds[kind] = seconds.get(kind, 0.0) + time.process_time() - began
            counts[kind] = counts.get(kind, 0) + 1
        gc.unfreeze()
        ordinary = len(events) - counts["Updated"]
        results.append(
            {
                "instances": size,
                "us_per_event": 1e6 * (sum(seconds.values()) - seconds["Updated"]) / ordinary,
                "us_per_kind": {kind: 1e6 * seconds[kind] / counts[kind] for kind in counts},
                "count_per_kind": counts,
                "run": run,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=64, help="groups per update (B)")
    parser.add_argument("--group", type=int, default=8, help="trajectories per group (G)")
    parser.add_argument("--staleness", type=int, default=4, help="K")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="all are reported; the middle one is the figure")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 2048, 8192], help="instances of `scaling`")
    parser.add_argument("--scaling-updates", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    plan = resolve_plan(
        "multi-version",
        batch=options.prompts,
        group_size=options.group,
        staleness=options.staleness,
        updates=options.updates,
        retries=2,
    )
    events, run = simulate(plan, options.instances, options.seed)
    times = [replay(plan, events) for _ in range(options.repeats)]
    rates = sorted(len(events) / each["processor_s"] for each in times)
    walls = sorted(len(events) / each["wall_s"] for each in times)
    middle = rates[len(rates) // 2]
    print(
        f"{len(events):,} events: {middle:,.0f} events per second of processor time (from {rates[0]:,.0f} to "
        f"{rates[-1]:,.0f}); by the clock {walls[len(walls) // 2]:,.0f}"
    )
    pools = scaling(options.sizes, options.scaling_updates, options.seed)
    first = pools[0]["us_per_event"] if pools else 0.0
    for pool in pools:
        own, kinds = pool["us_per_event"], pool["us_per_kind"]
        print(
            f"{pool['instances']:>6,} one-slot instances: {own:8.1f} us an event, {own / first:5.2f} x; "
            f"{kinds['Updated'] / 1e3:,.0f} ms a publish"
        )
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        figures = {"events_per_s": middle, "run": run, "times": times, "scaling": pools}
        record = {**figures, "settings": settings, "on": machine}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
