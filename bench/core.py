"""How many events a second the core decides on: `python bench/core.py [--out FILE]`.

A synthetic cluster with log-normal lengths drives the brain through a priority queue of simulated times: instances that
decode, rewards, loads, updates, and now and then a failed request. The core decides the same on the same events, so
they are recorded once and played to a new brain for the timing. The figure is events per second of processor time,
which neighbours on the machine disturb least; wall-clock time is in the record too.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
import random
import time
from pathlib import Path

from stretto.core import messages as m
from stretto.core.brain import Brain
from stretto.core.plan import Plan, resolve_plan

MEDIAN_S, SIGMA, CAP_S = 20.0, 1.0, 300.0  # of one trajectory
SCORE_S, LOAD_S, UPDATE_S = 0.05, 1.0, 25.0
FAILURES = 0.001  # of requests


def simulate(plan: Plan, instances: int, seed: int) -> tuple[list[m.Event], dict[str, float]]:
    """Run to the end; every event in its order, and what the run was like."""
    brain, rng = Brain(plan), random.Random(seed)
    queue: list[tuple[float, int, m.Event]] = []
    now, order, commands_given = 0.0, 0, 0
    events: list[m.Event] = []
    ages: list[int] = []

    def after(delay: float, event: m.Event) -> None:
        nonlocal order
        order += 1
        heapq.heappush(queue, (now + delay, order, event))

    def generate(trajectory: int) -> None:
        length = min(CAP_S, MEDIAN_S * math.exp(rng.gauss(0, SIGMA)))
        failed = rng.random() < FAILURES
        after(length, m.GenerationFailed(trajectory, "cut off") if failed else m.Generated(trajectory, int(length)))

    for each in range(instances):
        after(0.0, m.Joined(each, plan.slots))
    versions: dict[int, int] = {}
    while queue:
        now, _, event = heapq.heappop(queue)
        commands = brain.handle(event)
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
            elif isinstance(command, m.Load):
                after(LOAD_S, m.Loaded(command.instance, command.version))
            elif isinstance(command, m.Train):
                ages += [command.update - versions[each // plan.group_size] for each in command.trajectories]
                after(UPDATE_S, m.Updated(command.update))
            elif isinstance(command, m.Finish):
                queue.clear()
    assert brain.counters.trained_groups == plan.updates * plan.batch
    return events, {
        "events": len(events),
        "commands": commands_given,
        "simulated_s": now,
        "mean_age": sum(ages) / len(ages),
        "max_age": max(ages),
    }


def replay(plan: Plan, events: list[m.Event]) -> dict[str, float]:
    """How long a new brain takes over the same events."""
    brain = Brain(plan)
    handle = brain.handle
    wall, processor = time.perf_counter(), time.process_time()
    for event in events:
        handle(event)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert brain.finished
    return {"processor_s": processor, "wall_s": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=64, help="groups per update (B)")
    parser.add_argument("--group", type=int, default=8, help="trajectories per group (G)")
    parser.add_argument("--staleness", type=int, default=4, help="K")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="all are reported; the middle one is the figure")
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
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        record = {"events_per_s": middle, "settings": settings, "on": machine, "run": run, "times": times}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
