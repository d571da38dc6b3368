"""Rollout features of ROLL Flash, simulated with the real core: `python -m bench.rollout_scheduling [--out FILE]`.

The core is the real one, and time is virtual. A decode step of an instance takes `a + b * rows + c * context`, and a
prompt is prefilled once on each instance that has members of its group. Both costs are those measured for a 1.7B model
on an H200 (`bench.gpu.costs`, cells under `--known`). Every instance is such a device, and the trainer another one.
Loading a version, and the host, take no time.

Lengths are log-normal with a cap. Members of a group have similar lengths: the logarithm is the sum of a part that the
group shares (its prompt is hard) and one of the member's own, and `--alike` is the share of the variance in the first.

- *Queue scheduling*, 8 x 8: half of the groups have no signal and are replaced, and a reward takes 2 s. `batch rollout`
  generates a batch to its end, scores it, filters it and begins another until 8 groups are kept. With queue scheduling
  every response is scored as it ends, and a filtered group is replaced at once; with 16 spare, 24 groups run.
- *Replication*, 64 x 16 over several instances, under `synchronous`: a group starts on one instance, or is spread.
- *Redundancy*, 32 x 8 against 36 x 9 and other points, under `synchronous` and `multi-version`. Here the true length of
  what was dropped is known, so the true bias is: `true ratio` is the mean length of what was trained over that of all
  that was started. `length_ratio` is what a run can report, where most of what is dropped has been cut short.
- *A slower instance*: one of several takes longer for each of its steps, and the core is told the speeds or not.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.cells import read_cells
from bench.gpu.lengths import TAILS, Tail
from bench.gpu.simulate import Costs, costs_of
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan, resolve_plan
from stretto.core.spreading import GroupCosts, Spread

STRIDE = 16  # decode steps at once: what starts or ends meanwhile waits for the last of them
SIZE = "1.7B"


@dataclass(frozen=True)
class Setting:
    """What is simulated, but for the plan of the core."""

    instances: int = 1
    tail: str = "published"
    alike: float = 0.5
    prompt: int = 256  # tokens
    reward_s: float = 0.0
    no_signal: float = 0.0  # share of the groups
    trains: bool = True  # an update takes time
    samples_load: bool = False  # every 5 s, so that the core evens out the work of instances
    slowdown: float = 1.0  # a step of instance 0 takes so many times as long
    tells_speeds: bool = False  # load samples have the speeds of the instances
    seed: int = 0


class Lengths:
    """The length of each trajectory, whoever asks and however many there are in a group."""

    def __init__(self, setting: Setting, members: int) -> None:
        self._tail: Tail = TAILS[setting.tail]
        self._alike, self._seed, self._members = setting.alike, setting.seed, members
        self._of_group: dict[int, list[int]] = {}

    def __call__(self, trajectory: int) -> int:
        group, member = divmod(trajectory, self._members)
        if group not in self._of_group:
            # Drawn member by member, so that members of a group are the same in settings with more of them.
            draw = np.random.default_rng([self._seed, group])
            shared, own = draw.standard_normal(), draw.standard_normal(64)
            log = np.log(self._tail.median) + self._tail.sigma * (
                np.sqrt(self._alike) * shared + np.sqrt(1 - self._alike) * own
            )
            self._of_group[group] = np.clip(np.rint(np.exp(log)), 1, self._tail.cap).astype(int).tolist()
        return self._of_group[group][member]


@dataclass
class Device:
    """One instance."""

    made: dict[int, int] = field(default_factory=dict)  # trajectory -> tokens so far
    prefilled: set[int] = field(default_factory=set)  # groups whose prompt has been prefilled here
    owed_s: float = 0.0  # of prefill, before the next step
    busy: bool = False


class Run:
    """One run: the core, and devices that do what they are told in the time that it takes."""

    def __init__(self, plan: Plan, setting: Setting, costs: Costs) -> None:
        self._plan, self._setting, self._costs = plan, setting, costs
        self.length = Lengths(setting, plan.members)
        self._controller = Controller(plan)
        self._devices = [Device() for _ in range(setting.instances)]
        self._now, self._order = 0.0, 0
        self._later: list[tuple[float, int, m.Event | tuple[int, list[int], int]]] = []
        self._events: list[m.Event] = [m.Joined(each, plan.slots) for each in range(setting.instances)]
        self._suspended: dict[int, int] = {}  # trajectory -> tokens
        self.ended: list[float] = []  # the end of each update
        self.trained: list[int] = []  # lengths
        self.trained_until: list[int] = []  # tokens, up to each update
        self.dropped: list[tuple[int, int]] = []  # (true length, tokens when it was dropped)
        self.started: list[int] = []
        self.prefills = self.moves = 0
        self._done = False

    def run(self) -> Run:
        # A running row has on average so much context: it is met in proportion to its length, half-way.
        lengths = TAILS[self._setting.tail].draw(100_000, self._setting.seed).astype(float)
        context = self._setting.prompt + float((lengths**2).mean() / lengths.mean()) / 2
        row_s = self._costs.step.b + self._costs.step.c * context  # what a run measures as the slope of its steps
        costs = GroupCosts(self._setting.prompt * self._costs.prefill, row_s)
        self._events.append(m.LoadSampled({}, costs=costs, speeds=self._speeds))
        if self._setting.samples_load:
            self._after(5.0, m.LoadSampled({}))
        while not self._done:
            while self._events and not self._done:
                for command in self._controller.handle(self._events.pop(0)):
                    self._carry_out(command)
            for number, device in enumerate(self._devices):
                if device.made and not device.busy:
                    self._step(number, device)
            if self._done:
                break
            if not self._later:
                raise RuntimeError(f"nothing happens: {self._controller.waits()}")
            self._now, _, what = heapq.heappop(self._later)
            if isinstance(what, tuple):
                self._stepped(*what)
            else:
                if isinstance(what, m.LoadSampled):
                    self._after(5.0, what)
                    made = {t: n for device in self._devices for t, n in device.made.items()}
                    what = m.LoadSampled(made, speeds=self._speeds)
                self._events.append(what)
        return self

    @property
    def _speeds(self) -> dict[int, float]:
        if not self._setting.tells_speeds:
            return {}
        return {each: 1.0 if each else 1 / self._setting.slowdown for each in range(self._setting.instances)}

    def _after(self, seconds: float, what: m.Event | tuple[int, list[int], int]) -> None:
        self._order += 1
        heapq.heappush(self._later, (self._now + seconds, self._order, what))

    def _step(self, number: int, device: Device) -> None:
        """Some steps of an instance, up to the end of what ends first."""
        rows = list(device.made)
        context = sum(self._setting.prompt + device.made[each] for each in rows)
        steps = min(STRIDE, *(self.length(each) - device.made[each] for each in rows))
        seconds = device.owed_s + steps * self._costs.step.seconds(len(rows), context)
        seconds *= 1.0 if number else self._setting.slowdown
        device.owed_s, device.busy = 0.0, True
        self._after(seconds, (number, rows, steps))

    def _stepped(self, number: int, rows: list[int], steps: int) -> None:
        device = self._devices[number]
        device.busy = False
        for each in rows:
            if each not in device.made:
                continue  # dropped or moved meanwhile
            device.made[each] += steps
            if device.made[each] >= self.length(each):
                del device.made[each]
                self._events.append(m.Generated(each, self.length(each)))
                group = each // self._plan.members
                equal = np.random.default_rng([self._setting.seed, group, 1]).random() < self._setting.no_signal
                scored = m.Scored(each, 0.0 if equal else float(each % 2))
                if self._setting.reward_s:
                    self._after(self._setting.reward_s, scored)
                else:
                    self._events.append(scored)

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Start():
                for each, instance in zip(command.trajectories, command.instances, strict=True):
                    self._place(each, instance, 0)
                self.started += [self.length(each) for each in command.trajectories]
            case m.Suspend():
                for each in command.trajectories:
                    self._suspended[each] = self._devices[command.instance].made.pop(each, 0)
                    self.moves += 1
            case m.Resume():
                self._place(command.trajectory, command.instance, self._suspended.pop(command.trajectory))
            case m.LoadVersion() | m.SwapVersion():
                self._events.append(m.Loaded(command.instance, command.version))
            case m.Train():
                lengths = [self.length(each) for each in command.trajectories]
                self.trained += lengths
                self.trained_until.append(sum(self.trained))
                self._after(sum(lengths) * self._costs.training * self._setting.trains, m.Updated(command.update))
            case m.Drop():
                for each in command.trajectories:
                    made = [device.made.pop(each) for device in self._devices if each in device.made]
                    whole = self.length(each)
                    self.dropped.append((whole, made[0] if made else self._suspended.pop(each, whole)))
            case m.Publish():
                self.ended.append(self._now)
            case m.Finish():
                self._done = True
            case m.UnloadVersion() | m.Retire() | m.Filter() | m.SpareFromFilter() | m.EndReuse():
                pass
            case _:
                raise ValueError(f"a run without failures has no {command}")

    def _place(self, trajectory: int, instance: int, made: int) -> None:
        device, group = self._devices[instance], trajectory // self._plan.members
        device.made[trajectory] = made
        if not made and group not in device.prefilled:  # KV is taken along when one moves
            device.prefilled.add(group)
            device.owed_s += self._setting.prompt * self._costs.prefill
            self.prefills += 1


def figures(run: Run, first: int) -> dict[str, float]:
    """What a run came to, from the end of update `first` on."""
    seconds = run.ended[-1] - run.ended[first]
    cut = [made for _, made in run.dropped]
    sampled = [*run.trained, *(each for each in cut if each)]
    trained, started = float(np.mean(run.trained)), float(np.mean(run.started))
    return {
        "seconds_per_update": seconds / (len(run.ended) - 1 - first),
        "tokens_per_s": (run.trained_until[-1] - run.trained_until[first]) / seconds,
        "dropped_share": len(run.dropped) / len(run.started),
        "length_ratio": trained / float(np.mean(sampled)),
        "true_ratio": trained / started,
        "trained_length": trained,
        "dropped_length": float(np.mean(cut)) if cut else 0.0,
        "true_dropped_length": float(np.mean([whole for whole, _ in run.dropped])) if cut else 0.0,
        "prefills": run.prefills,
        "moves": run.moves,
    }


# -- queue scheduling --------------------------------------------------------------------------------------------------


def batch_rollout(setting: Setting, costs: Costs, updates: int, batch: int, size: int, at_once: int) -> float:
    """Seconds an update without queue scheduling: batches of `at_once` groups to their end, until enough are kept."""
    length, group, total = Lengths(setting, size), 0, 0.0
    for _ in range(updates):
        kept = 0
        while kept < batch:
            lengths = [length(each) for each in range(group * size, (group + at_once) * size)]
            total += drained(lengths, setting.prompt, costs) + at_once * setting.prompt * costs.prefill
            total += setting.reward_s
            for each in range(group, group + at_once):
                kept += np.random.default_rng([setting.seed, each, 1]).random() >= setting.no_signal
            group += at_once
    return total / updates


def drained(lengths: Sequence[int], prompt: int, costs: Costs) -> float:
    """Seconds of one device until all rows that start together have ended."""
    seconds, before, rows = 0.0, 0, len(lengths)
    for each in sorted(lengths):
        context = rows * (prompt + (before + each) / 2)
        seconds += (each - before) * costs.step.seconds(rows, context)
        before, rows = each, rows - 1
    return seconds


def queue_scheduling(costs: Costs, base: Setting, updates: int) -> list[dict[str, Any]]:
    setting = replace(base, reward_s=2.0, no_signal=0.5, trains=False)
    rows: list[dict[str, Any]] = [
        {"name": "batch rollout", "seconds_per_update": batch_rollout(setting, costs, updates, 8, 8, 8)},
        {"name": "batch rollout, 16 spare", "seconds_per_update": batch_rollout(setting, costs, updates, 8, 8, 24)},
    ]
    for name, paradigm, options in (
        ("queue scheduling", "synchronous", {}),
        ("queue scheduling, 16 spare", "synchronous", {"reserve_groups": 16}),
        ("queue scheduling, 16 more in flight, none dropped", "multi-version", {"staleness": 2, "in_flight": 24}),
    ):
        given: dict[str, Any] = {"rows": 24 * 8 if paradigm == "multi-version" else None, **options}
        plan = resolve_plan(
            paradigm, batch=8, group_size=8, updates=updates + 1, retries=0, filter_limit=1_000, **given
        )
        rows.append({"name": name, **figures(Run(plan, setting, costs).run(), 0)})
    for row in rows:
        row["speed"] = rows[0]["seconds_per_update"] / row["seconds_per_update"]
    return rows


# -- replication -------------------------------------------------------------------------------------------------------


def replication(costs: Costs, base: Setting, updates: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        setting = replace(base, trains=False, **case)
        kept = 0.0
        ways: tuple[tuple[str, Spread, bool], ...] = (
            ("on one instance", "never", False),
            ("on one instance, evened out later", "never", True),
            ("spread by cost", "auto", False),
            ("spread always", "always", False),
        )
        for name, spread, samples_load in ways:
            found = figures(replicated(spread, replace(setting, samples_load=samples_load), costs, updates), 0)
            kept = kept or found["seconds_per_update"]
            rows.append({"name": name, **asdict(setting), **found, "speed": kept / found["seconds_per_update"]})
    return rows


def replicated(spread: Spread, setting: Setting, costs: Costs, updates: int) -> Run:
    plan = resolve_plan("synchronous", batch=64, group_size=16, updates=updates + 1, retries=0, spread=spread)
    return Run(plan, setting, costs).run()


# -- redundancy --------------------------------------------------------------------------------------------------------

POINTS = ((32, 8), (33, 8), (34, 8), (36, 8), (40, 8), (32, 9), (32, 10), (33, 9), (36, 9), (40, 10), (48, 12))


def redundancy(costs: Costs, base: Setting, updates: int, points: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for paradigm, staleness in (("synchronous", None), ("multi-version", 1), ("multi-version", 2)):
        without: dict[str, float] = {}
        for groups, members in points:
            plan = resolve_plan(
                paradigm, batch=32, group_size=8, updates=updates + 1, retries=0, staleness=staleness,
                reserve_groups=groups - 32, reserve_members=members - 8,
            )  # fmt: skip
            found = figures(Run(plan, base, costs).run(), 0)
            without = without or found
            row = {"paradigm": paradigm, "staleness": plan.staleness, "groups": groups, "members": members, **found}
            row["speed"] = without["seconds_per_update"] / found["seconds_per_update"]
            row["token_speed"] = found["tokens_per_s"] / without["tokens_per_s"]
            rows.append(row)
    return rows


# -- a slower instance -------------------------------------------------------------------------------------------------


def slower_instance(costs: Costs, base: Setting, updates: int, instances: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for count in instances:
        for paradigm, staleness in (("synchronous", None), ("multi-version", 2)):
            for slowdown in (1.0, 1.5, 2.0, 4.0):
                setting = replace(base, instances=count, slowdown=slowdown, samples_load=True, trains=False)
                plan = resolve_plan(
                    paradigm, batch=64, group_size=16, updates=updates + 1, retries=0, staleness=staleness
                )
                without, told = (
                    figures(Run(plan, replace(setting, tells_speeds=tells), costs).run(), 0) for tells in (False, True)
                )
                rows.append(
                    {
                        "paradigm": paradigm, "instances": count, "slowdown": slowdown,
                        "seconds_without": without["seconds_per_update"], "seconds_told": told["seconds_per_update"],
                        "speed": without["seconds_per_update"] / told["seconds_per_update"],
                        "moves_without": without["moves"], "moves_told": told["moves"],
                    }
                )  # fmt: skip
    return rows


# -- the command -------------------------------------------------------------------------------------------------------


def say(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    print(f"\n{title}")
    texts = [
        [name.replace("_", " ") for name in columns],
        *([_text(row.get(name)) for name in columns] for row in rows),
    ]
    widths = [max(len(text[place]) for text in texts) for place in range(len(columns))]
    for text in texts:
        print("  " + "  ".join(each.rjust(width) for each, width in zip(text, widths, strict=True)), flush=True)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two updates of a few points, to see that it runs")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--tail", choices=list(TAILS), default="published")
    parser.add_argument("--alike", type=float, default=0.5, help="share of the variance that members of a group share")
    parser.add_argument("--known", type=Path, action="append", help="folders of cells; default: bench/results/gpu")
    parser.add_argument("--slower", action="store_true", help="the part of a slower instance alone")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    costs = costs_of(read_cells(options.known or [Path(__file__).parent / "results" / "gpu"]), SIZE)
    base = Setting(tail="tiny" if options.quick else options.tail, alike=options.alike)
    updates = 2 if options.quick else options.updates
    slower = slower_instance(costs, base, min(updates, 10), (2,) if options.quick else (2, 4, 8))
    columns: Sequence[str] = ("paradigm", "instances", "slowdown", "seconds_without", "seconds_told", "speed")
    say("a slower instance, 64 x 16", slower, (*columns, "moves_without", "moves_told"))
    if options.slower:
        write(options.out, arguments, costs, base, updates, {"slower_instance": slower})
        return 0
    cases: list[dict[str, Any]] = [{"instances": 2, "prompt": 256}]
    if not options.quick:
        cases = [{"instances": each, "prompt": 256} for each in (2, 4, 8, 16)]
        cases += [{"instances": 8, "prompt": prompt} for prompt in (4_096, 32_768)]
        cases += [{"instances": 8, "prompt": 256, "alike": alike} for alike in (0.0, 0.9)]
    queue = queue_scheduling(costs, base, updates)
    say("queue scheduling, 8 x 8", queue, ("name", "seconds_per_update", "speed", "dropped_share", "true_ratio"))
    spread = replication(costs, base, min(updates, 10), cases)
    shown = ("instances", "prompt", "alike", "name", "seconds_per_update", "speed", "prefills", "moves")
    say("replication, 64 x 16", spread, shown)
    points = redundancy(costs, base, updates, POINTS[:2] if options.quick else POINTS)
    columns = (
        "paradigm", "staleness", "groups", "members", "seconds_per_update", "speed", "token_speed", "dropped_share",
        "length_ratio", "true_ratio",
    )  # fmt: skip
    say("redundancy, of 32 x 8", points, columns)
    found = {"queue_scheduling": queue, "replication": spread, "redundancy": points, "slower_instance": slower}
    write(options.out, arguments, costs, base, updates, found)
    return 0


def write(
    out: Path | None,
    arguments: Sequence[str] | None,
    costs: Costs,
    base: Setting,
    updates: int,
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Writes the figures as JSON, if `out` says where."""
    if out is None:
        return
    result = {
        "command": " ".join(["python -m bench.rollout_scheduling", *(arguments or sys.argv[1:])]),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "simulated": "time is virtual; costs as measured on one H200 for a 1.7B model",
        "versions": {"numpy": np.__version__},
        "step_seconds": asdict(costs.step), "prefill_s_per_token": costs.prefill,
        "training_s_per_token": costs.training, "lengths": asdict(TAILS[base.tail]), "updates": updates, **found,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
