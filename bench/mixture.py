"""Realised shares of several tasks over 50 updates: `python -m bench.mixture [--out FILE]`.

Two parts. *Simulated*: the real core and the real assignment of tasks under a virtual clock, with tasks that take ten
times as long as others, that lose most of their groups to the filter, or whose requests fail. *Measured*: whole runs of
a tiny model on the CPU, each verified, with the shares of trained groups from the journal.

The worst deviation is the largest difference between the share that a recipe asks for and that of the trained groups.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import stretto
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import resolve_plan
from stretto.environments.task_shares import Share, TaskShares

UPDATES = 50
UPDATE_S = 1.0


@dataclass(frozen=True)
class SimulatedTask:
    """One task of a simulated mixture."""

    share: float
    seconds: float = 1.0  # median of a trajectory's time, log-normal
    without_signal: float = 0.0  # share of its groups
    fails: float = 0.0  # share of its groups whose requests all fail
    oversample: float | None = None


@dataclass(frozen=True)
class Realised:
    """The shares of a mixture after its last update."""

    asked: Mapping[str, float]
    trained: Mapping[str, float]
    by_update: Mapping[str, float]  # the worst deviation of any update from the 10th on, in the groups so far
    drawn: Mapping[str, int]
    seconds: float  # virtual

    @property
    def worst(self) -> float:
        """The worst deviation of a task at the end."""
        return max(abs(self.trained[label] - share) for label, share in self.asked.items())


def simulate(
    tasks: Mapping[str, SimulatedTask],
    *,
    paradigm: str = "multi-version",
    staleness: int = 4,
    batch: int = 16,
    group: int = 4,
    updates: int = UPDATES,
    seed: int = 0,
) -> Realised:
    """Runs the core over tasks that differ in their times, signals and failures."""
    filters = any(task.without_signal for task in tasks.values())
    plan = resolve_plan(
        paradigm, batch=batch, group_size=group, updates=updates, retries=0,
        staleness=None if paradigm in ("synchronous", "one-step-off") else staleness,
        filter_limit=100 * batch if filters else 0,
    )  # fmt: skip
    controller, rng = Controller(plan), np.random.default_rng(seed)
    shares = TaskShares({label: Share(task.share, task.oversample) for label, task in tasks.items()})
    events: list[tuple[float, int, m.Event]] = []  # at, number, event
    task_of: dict[int, str] = {}  # group -> label
    members: Counter[int] = Counter()  # group -> trajectories in progress
    group_of: dict[int, int] = {}
    gone: set[int] = set()  # trajectories that were dropped
    trained, drawn, worst = Counter[str](), Counter[str](), dict.fromkeys(tasks, 0.0)
    asked = {label: task.share / sum(each.share for each in tasks.values()) for label, task in tasks.items()}
    now, number = 0.0, 0

    def later(seconds: float, event: m.Event) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + seconds, number, event))

    def lose(id: int) -> None:
        shares.lost(task_of[id])

    def start(command: m.Start) -> None:
        label = shares.next()
        shares.drawn(label)
        drawn[label] += 1
        task_of[command.group] = label
        task, fails = tasks[label], rng.random() < tasks[label].fails
        same = rng.random() < task.without_signal
        for place, trajectory in enumerate(command.trajectories):
            group_of[trajectory] = command.group
            members[command.group] += 1
            took = float(task.seconds * rng.lognormal(0.0, 0.5))
            if fails:
                later(took, m.GenerationFailed(trajectory, "it always fails"))
                continue
            later(took, m.Generated(trajectory, 100))
            later(took, m.Scored(trajectory, 1.0 if same else float(place % 2)))

    def carry_out(command: m.Command) -> None:
        match command:
            case m.LoadVersion():
                later(0.0, m.Loaded(command.instance, command.version))
            case m.SwapVersion():
                later(0.0, m.Loaded(command.instance, command.version))
            case m.Start():
                start(command)
            case m.Filter():
                lose(command.group)
            case m.Drop(surplus=False):
                gone.update(command.trajectories)
                lose(command.group)
            case m.Fail():
                own = group_of[command.trajectory]
                members[own] -= 1
                if not members[own]:
                    lose(own)
            case m.Train():
                trained.update(task_of[each] for each in {group_of[id] for id in command.trajectories})
                for label, share in asked.items():
                    if command.update >= 9:
                        worst[label] = max(worst[label], abs(trained[label] / trained.total() - share))
                later(UPDATE_S, m.Updated(command.update))

    later(0.0, m.Joined(0, plan.slots))
    while not controller.finished:
        now, _, event = heapq.heappop(events)
        if getattr(event, "trajectory", None) in gone:
            continue
        for command in controller.handle(event):
            carry_out(command)
    return Realised(
        asked, {label: trained[label] / trained.total() for label in tasks}, worst, dict(drawn), round(now, 1)
    )


SIMULATED: Mapping[str, tuple[Mapping[str, SimulatedTask], str]] = {
    "alike": ({"a": SimulatedTask(0.7), "b": SimulatedTask(0.3)}, "multi-version"),
    "one is ten times as slow": ({"a": SimulatedTask(0.7), "slow": SimulatedTask(0.3, seconds=10.0)}, "multi-version"),
    "the slow one is rare": ({"a": SimulatedTask(0.95), "slow": SimulatedTask(0.05, seconds=10.0)}, "multi-version"),
    "one loses 80 % to the filter": (
        {"a": SimulatedTask(0.5), "easy": SimulatedTask(0.5, without_signal=0.8)},
        "multi-version",
    ),
    "one loses 80 % to the filter, oversample = 2": (
        {"a": SimulatedTask(0.5), "easy": SimulatedTask(0.5, without_signal=0.8, oversample=2.0)},
        "multi-version",
    ),
    "a third of one fails": ({"a": SimulatedTask(0.6), "bad": SimulatedTask(0.4, fails=0.33)}, "multi-version"),
    "five tasks, slow and filtered": (
        {
            "a": SimulatedTask(0.4),
            "b": SimulatedTask(0.25, seconds=3.0),
            "c": SimulatedTask(0.2, without_signal=0.5),
            "d": SimulatedTask(0.1, seconds=10.0, without_signal=0.5),
            "e": SimulatedTask(0.05, fails=0.2),
        },
        "multi-version",
    ),
    "synchronous, one is ten times as slow": (
        {"a": SimulatedTask(0.7), "slow": SimulatedTask(0.3, seconds=10.0)},
        "synchronous",
    ),
    "drop, one is three times as slow": (
        {"a": SimulatedTask(0.7), "slow": SimulatedTask(0.3, seconds=3.0)},
        "drop",
    ),
}

RECIPE = """
seed = 1
[model]
path = "tiny"
lora = { rank = 4 }
warm_start = { steps = 20 }
[[task]]
label = "chain"
share = 0.55
type = "countdown-chain"
max_tokens = 16
[[task]]
label = "guess"
share = 0.3
type = "guess"
turns = 3
[[task]]
label = "slow"
share = 0.15
type = "guess"
turns = 3
wait_seconds = 0.02
[rollout]
prompts = 8
group = 4
max_tokens = 24
stop = ["!"]
staleness = 3
[training]
steps = 50
learning_rate = 1e-3
[evaluation]
prompts = 0
[runtime]
device = "cpu"
engine_threads = 1
trainer_threads = 1
"""


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Runs the mixture of `RECIPE`, verifies it, and returns its shares."""
    import tomllib

    from stretto.assembly.train import train
    from stretto.recipe.reading import load_recipe
    from stretto.store.reader import JournalReader
    from stretto.store.verify import exit_code, format_findings, verify

    recipe = load_recipe(tomllib.loads(RECIPE), overrides)
    with tempfile.TemporaryDirectory() as folder:
        summary = train(recipe, Path(folder) / "run")
        findings = verify(Path(folder) / "run")
        assert exit_code(findings) == 0, format_findings(findings)
        with JournalReader(Path(folder) / "run") as reader:
            drawn = {record.label: record.drawn for record in reader.tasks()}
    total = sum(task.share or 1.0 for task in recipe.tasks)
    asked = {str(task.label): (task.share or 1.0) / total for task in recipe.tasks}
    trained = {label: own["share"] for label, own in summary["tasks"].items()}
    return {
        "overrides": list(overrides),
        "updates": summary["steps"],
        "asked": asked,
        "trained": trained,
        "drawn": drawn,
        "worst": max(abs(trained[label] - share) for label, share in asked.items()),
        "laws": "hold",
    }


MEASURED: Mapping[str, Sequence[str]] = {
    "three tasks": (),
    "with the filter": ('rollout.filter="no-signal"',),
    "synchronous": ('rollout.paradigm="synchronous"', "rollout.staleness="),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    simulated, measured = {}, {}
    for name, (tasks, paradigm) in SIMULATED.items():
        found = simulate(tasks, paradigm=paradigm)
        simulated[name] = {"paradigm": paradigm, "tasks": {k: asdict(v) for k, v in tasks.items()}} | asdict(found)
        simulated[name]["worst"] = found.worst
        during = max(found.by_update.values())
        print(f"simulated, {name}: worst deviation {found.worst:.2%}, during the run {during:.2%}, drawn {found.drawn}")
    for name, overrides in MEASURED.items():
        measured[name] = measure(overrides)
        print(
            f"measured, {name}: worst deviation {measured[name]['worst']:.2%} over {measured[name]['updates']} updates"
        )
    if arguments.out:
        report = {
            "date": datetime.date.today().isoformat(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "stretto": stretto.__version__,
            "command": f"python -m bench.mixture {' '.join(sys.argv[1:])}",
            "simulated": simulated,
            "measured": measured,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
