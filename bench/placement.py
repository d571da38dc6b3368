"""Measures how long one rebalancing takes: `python bench/placement.py [--out FILE]`.

A pool of instances, several versions behind one another, trajectories with log-normal contexts. `publish`: one slot
each, and a new version wants its share. `contended`: two slots each, so that most versions have to give something up.
`alike`: nothing runs, so every choice is as good as any other, which is the worst for the exact part. `event`: a whole
run's state, and the event of a publish from its arrival to the last command. The floor is that 4,096 instances and 8
versions plan in under 250 ms.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.instances import InstanceState
from stretto.core.ledger import Group
from stretto.core.plan import resolve_plan
from stretto.core.rebalancing import Change, InstanceView, PoolView, rebalance

FLOOR_S = 0.25


def contexts(rng: random.Random, count: int) -> int:
    return sum(int(rng.lognormvariate(7, 1)) for _ in range(count))


def view(instances: int, versions: int, slots: int, running: int, rng: random.Random) -> PoolView:
    """A pool just after version `versions - 1` was published: younger versions run more."""
    older = range(versions - 1)
    views = []
    for number in range(instances):
        held = set(rng.choices(older, [2.0**version for version in older], k=slots)) if running else {0}
        counts = {version: rng.randint(1, 2 * running - 1) for version in held} if running else {}
        tokens = {version: contexts(rng, count) for version, count in counts.items()}
        views.append(InstanceView(number, slots, frozenset(held), counts=counts, tokens=tokens))
    deadlines = {version: version + versions for version in range(versions)}
    total = sum(sum(each.counts.values()) for each in views)
    waiting = {} if running else dict.fromkeys(older, instances)
    return PoolView(views, versions - 1, waiting, deadlines, top_up=max(instances, total // 4))


def describe(pool: PoolView, changes: list[Change]) -> dict[str, int]:
    tokens = {each.id: each.tokens for each in pool.instances}
    return {
        "instances_that_change": len(changes),
        "tokens_of_kv": sum(sum(each.values()) for each in tokens.values()),
        "tokens_of_kv_moved": sum(tokens[each.instance][version] for each in changes for version in each.suspend),
    }


def publish_event(instances: int, versions: int, running: int, rng: random.Random) -> tuple[Controller, m.Event]:
    """A run in which every instance serves one version, and the event with which the next is published."""
    newest = versions - 2
    plan = resolve_plan(
        "multi-version",
        batch=instances * running,
        group_size=1,
        staleness=versions - 1,
        updates=2 * versions,
        retries=2,
        rows=2 * instances * running,
    )
    controller = Controller(plan, first_version=newest)
    controller.window.live.update(range(newest))
    controller.training, controller.next_update = newest, newest + 1
    for number in range(instances):
        (version,) = rng.choices(range(newest + 1), [2.0**version for version in range(newest + 1)])
        instance = InstanceState(number, 1, {version})
        controller.instances.add(instance)
        for _ in range(rng.randint(1, 2 * running - 1)):
            group = Group(controller.next_group, version, version + plan.staleness)
            controller.ledger.admit(group, [group.id], [instance])
            controller.next_group += 1
            controller.ledger.trajectories[group.id].tokens = contexts(rng, 1)
    assert controller.instances.num_staying == instances  # which enters them: in a run that is no part of the event
    return controller, m.Updated(newest)


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=4096)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--running", type=int, default=16, help="trajectories of an instance")
    parser.add_argument("--repeats", type=int, default=5, help="the middle one is the figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/placement.json"))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    pools = {
        "publish": view(options.instances, options.versions, 1, options.running, rng),
        "contended": view(options.instances, options.versions, 2, options.running, rng),
        "alike": view(options.instances, options.versions, 1, 0, rng),
    }
    results: dict[str, dict[str, object]] = {}
    for name, pool in pools.items():
        times = [timed(lambda pool=pool: rebalance(pool)) for _ in range(options.repeats)]  # type: ignore[misc]
        results[name] = {"times": times, **describe(pool, rebalance(pool))}
    events = [publish_event(options.instances, options.versions, options.running, rng) for _ in range(3)]
    counts: list[dict[str, int]] = []
    times = []
    for controller, event in events:
        moved = controller.counters.moved
        times.append(timed(lambda controller=controller, event=event: controller.handle(event)))  # type: ignore[misc]
        counts.append({"versions": len(controller.versions), "moved": controller.counters.moved - moved})
    results["event"] = {"times": times, "of": counts}
    holds = True
    for name, result in results.items():
        times = sorted(result["times"], key=lambda each: each["processor_s"])  # type: ignore[call-overload]
        middle = times[len(times) // 2]
        result["middle"] = middle
        holds = holds and (name == "event" or middle["processor_s"] < FLOOR_S)
        own, wall = 1e3 * middle["processor_s"], 1e3 * middle["wall_s"]
        print(f"{name:>10}: {own:6.1f} ms of processor time, {wall:6.1f} by the clock")
    print(f"{options.instances:,} instances, {options.versions} versions: under {1e3 * FLOOR_S:g} ms: {holds}")
    record = {
        "date": datetime.date.today().isoformat(),
        "command": f"python {' '.join(sys.argv)}",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "holds": holds,
        **results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
