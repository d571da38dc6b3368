"""How many events a second the core decides on: `python bench/core.py [--out FILE]`.

A synthetic cluster with log-normal lengths drives the brain through a priority queue of simulated times: instances that
decode, rewards, loads, updates, and now and then a failed request. Only the time inside `Brain.handle` counts.
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
from stretto.core.plan import resolve_plan

MEDIAN_S, SIGMA, CAP_S = 20.0, 1.0, 300.0  # of one trajectory
SCORE_S, LOAD_S, UPDATE_S = 0.05, 1.0, 25.0
FAILURES = 0.001  # of requests


def drive(updates: int, batch: int, group: int, staleness: int, instances: int, seed: int) -> dict[str, float]:
    """Run to the end; how many events it took, and how long the brain took over them."""
    plan = resolve_plan("multi-version", batch=batch, group_size=group, staleness=staleness, updates=updates)
    brain, rng = Brain(plan), random.Random(seed)
    queue: list[tuple[float, int, m.Event]] = []
    now, order, events, commands_given, handling_s = 0.0, 0, 0, 0, 0.0
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
        begin = time.perf_counter()
        commands = brain.handle(event)
        handling_s += time.perf_counter() - begin
        events += 1
        commands_given += len(commands)
        if isinstance(event, m.Generated):
            after(SCORE_S, m.Scored(event.trajectory))
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
                ages += [command.update - versions[each // group] for each in command.trajectories]
                after(UPDATE_S, m.Updated(command.update))
            elif isinstance(command, m.Finish):
                queue.clear()
    assert brain.counters.trained_groups == updates * batch
    return {
        "events": events,
        "commands": commands_given,
        "handling_s": handling_s,
        "events_per_s": events / handling_s,
        "simulated_s": now,
        "mean_age": sum(ages) / len(ages),
        "max_age": max(ages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=64, help="groups per update (B)")
    parser.add_argument("--group", type=int, default=8, help="trajectories per group (G)")
    parser.add_argument("--staleness", type=int, default=4, help="K")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="all are reported; the middle one is the figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    sizes = (options.updates, options.prompts, options.group, options.staleness, options.instances)
    runs = [drive(*sizes, seed=options.seed) for _ in range(options.repeats)]
    rates = sorted(run["events_per_s"] for run in runs)
    middle = rates[len(rates) // 2]
    print(f"{runs[0]['events']:,} events: {middle:,.0f} events/s (from {rates[0]:,.0f} to {rates[-1]:,.0f})")
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        record = {"events_per_s": middle, "settings": settings, "on": machine, "runs": runs}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
