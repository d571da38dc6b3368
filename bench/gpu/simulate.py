"""Simulate: what updates would take on one GPU, from measured costs and the decisions of the real core.

    python -m bench.gpu.simulate --check
    python -m bench.gpu.simulate --tail published --groups 16 --staleness 4,8 --in-flight 2,4,9 --updates 20

The core is the real one; time passes as the cells under `--known` say: a decode step costs `a + b * rows + c * context`
(`costs`), a token of training what it costs alone (`sharing`), and while both run each keeps the share of its speed
that `sharing` measured for two at once, in groups where there are such cells. Prefill is taken as half of training a
token, which is two of its four operations; `partial` prefills all that runs when a version is published. Publishing is
free, and so is the host. `--check` makes again every run with forced lengths that was measured, and prints both. So a
tail, `K` and `in_flight` are tried in seconds, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.cells import integers, read_cells, words
from bench.gpu.costs import StepCost, ideal_gain
from bench.gpu.lengths import TAILS
from bench.gpu.report import step_cost
from bench.gpu.sharing import shares
from bench.gpu.tables import Record, decimal, rate, share, table
from bench.gpu.timeline import Timeline
from bench.gpu.update import GROUP, while_admitting
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import Plan, resolve_plan

STRIDE = 16  # decode steps at once at most: contexts are taken as they were at the first of them


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on the device, and the shares of their speed that decode and training keep while both run."""

    step: StepCost
    training: float  # a token of a completion
    decode_share: float
    training_share: float

    @property
    def prefill(self) -> float:
        return self.training / 2


def costs_of(records: Sequence[Record], size: str) -> Costs:
    """Costs of one size from cells; raises `ValueError` that says which bench is missing."""
    step = step_cost(records, size)
    if step is None:
        raise ValueError(f"no three `step` cells of {size}: run `python -m bench.gpu.costs --parts step`")
    alone = [
        (record["parameters"].get("group", 0), record["results"]["trained_per_s"])
        for record in records
        if (record["bench"], record["parameters"].get("mode"), record["parameters"].get("size"))
        == ("sharing", "training", size)
    ]
    both = [each for each in shares(records) if each["mode"] == "both" and each["size"] == size]
    if not alone or not both:
        raise ValueError(f"no `sharing` cells of {size}, alone and both: run `python -m bench.gpu.sharing`")
    shared = max(both, key=lambda each: each.get("group", 0))
    return Costs(step, 1 / max(alone)[1], shared["decode_share"], shared["training_share"])


class Run:
    """One run: the core, and a device that does what it is told in the time that it takes."""

    def __init__(self, plan: Plan, lengths: Sequence[int], prompt: int, costs: Costs) -> None:
        self._plan, self._lengths, self._prompt, self._costs = plan, lengths, prompt, costs
        self._controller = Controller(plan)
        self._now = 0.0
        self._made: dict[int, int] = {}  # tokens of what runs, in the order of its start
        self._versions: dict[int, int] = {}  # of groups
        self._training: tuple[int, float] | None = None  # the update, and the seconds that it still takes alone
        self._training_began = 0.0
        self._owed = 0.0  # seconds of prefill that decode has to make first
        self._events: list[m.Event] = [m.Joined(0, plan.slots)]
        self._generated = self._trained = self._dropped = self._started = 0
        self._admitted = self._training_s = self._row_s = 0.0
        self._ended: list[float] = []
        self._ages: list[int] = []
        self.batches: list[tuple[float, list[int]]] = []  # when each was taken, and the lengths of its trajectories
        self._done = False
        self._timeline = Timeline()

    def run(self) -> dict[str, Any]:
        """To the last update; the names are those of `bench.gpu.update`."""
        while not self._done:
            while self._events and not self._done:
                for command in self._controller.handle(self._events.pop(0)):
                    self._carry_out(command)
            if not self._done:
                self._pass_time()
        rows, updates = self._plan.rows, self._plan.updates
        return {
            "tokens_per_s": self._trained / self._now,
            **while_admitting(self._timeline, self._ended, self._admitted, rows / 2),
            "seconds_per_update": self._now / updates,
            "wall_s": self._now,
            "training_s_per_update": self._training_s / updates,
            "half_rows_share": self._timeline.share_at_least(rows / 2, 0.0, self._now),
            "row_idle_share": 1 - self._row_s / (rows * self._now),
            "staleness_mean": float(np.mean(self._ages)),
            "staleness_max": max(self._ages),
            "dropped_share": self._dropped / self._started,
            "rows": rows,
            "in_flight": self._plan.in_flight,
        }

    def _length(self, trajectory: int) -> int:
        return self._lengths[trajectory % len(self._lengths)]  # as `runs.ForcedLengths`

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Start():
                self._versions[command.group] = command.version
                self._made |= dict.fromkeys(command.trajectories, 0)
                self._started += len(command.trajectories)
                self._admitted = self._now
                self._owed += self._prompt * self._costs.prefill
            case m.LoadVersion():
                self._events.append(m.Loaded(command.instance, command.version))
            case m.SwapVersion():
                contexts = sum(self._prompt + made for made in self._made.values())
                self._owed += contexts * self._costs.prefill
                self._events.append(m.Loaded(command.instance, command.version))
            case m.Train():
                lengths = [self._length(each) for each in command.trajectories]
                tokens = sum(lengths)
                self.batches.append((self._now, lengths))
                self._ages += [command.update - self._versions[each // GROUP] for each in command.trajectories]
                self._trained += tokens
                self._training, self._training_began = (command.update, tokens * self._costs.training), self._now
            case m.Drop():
                for each in command.trajectories:
                    self._made.pop(each, None)
                self._dropped += len(command.trajectories)
            case m.Finish():
                self._done = True
            case m.UnloadVersion() | m.Publish() | m.Retire():
                pass
            case _:
                raise ValueError(f"a run on one device without failures has no {command}")

    def _pass_time(self) -> None:
        """Some steps, up to the end of what ends first; or training alone, where nothing runs."""
        running = list(self._made)[: self._plan.rows]
        if not running and self._training is None:
            raise RuntimeError(f"nothing runs: {self._controller.waits()}")
        if not running:
            assert self._training is not None
            self._advance(self._training[1], [], 0)
            return
        contexts = sum(self._prompt + self._made[each] for each in running)
        step = self._costs.step.seconds(len(running), contexts)
        both = self._training is not None
        slower = 1 / self._costs.decode_share if both else 1.0
        steps = min(STRIDE, *(self._length(each) - self._made[each] for each in running))
        seconds = (self._owed + steps * step) * slower
        self._owed = 0.0
        self._advance(seconds, running, steps)

    def _advance(self, seconds: float, running: Sequence[int], steps: int) -> None:
        self._timeline.note(self._now, len(running), self._generated)
        self._now += seconds
        self._row_s += seconds * len(running)
        self._generated += steps * len(running)
        for each in running:
            self._made[each] += steps
            if self._made[each] >= self._length(each):
                del self._made[each]
                self._events += [m.Generated(each, self._length(each)), m.Scored(each, float(each % 2))]
        if self._training is not None:
            update, left = self._training
            left -= seconds * (self._costs.training_share if running else 1.0)
            self._training = (update, left)
            if left <= 0:
                self._training = None
                self._training_s += self._now - self._training_began
                self._ended.append(self._now)
                self._events.append(m.Updated(update))
        self._timeline.note(self._now, len(running), self._generated)


def simulate(plan: Plan, tail: str, prompt: int, costs: Costs) -> dict[str, Any]:
    """One run over the lengths of `bench.gpu.update`, and its share of the ideal of rows that are always full."""
    lengths = TAILS[tail].draw(plan.updates * plan.batch * GROUP, seed=0)
    results = Run(plan, lengths.tolist(), prompt, costs).run()
    batches = lengths.reshape(plan.updates, -1).tolist()
    ideal = ideal_gain(costs.step, batches, prompt, plan.rows, float(lengths.sum()) * costs.training)
    return {**results, "ideal_s": ideal["full_rows_s"], "ideal_share": ideal["full_rows_s"] / results["wall_s"]}


def plan_of(paradigm: str, groups: int, updates: int, staleness: int, in_flight: float) -> Plan:
    """A plan as `bench.gpu.update` makes it: `in_flight` in batches, where the paradigm leaves it open."""
    row = PARADIGMS[paradigm]
    return resolve_plan(
        paradigm,
        batch=groups,
        group_size=GROUP,
        updates=updates,
        staleness=None if row.staleness is not None else staleness,
        in_flight=None if row.one_batch else int(in_flight * groups),
        retries=0,
    )


# -- tables ------------------------------------------------------------------------------------------------------------

COLUMNS = {
    "tokens_per_s": ("tok/s", rate),
    "seconds_per_update": ("s an update", decimal),
    "training_s_per_update": ("training s", decimal),
    "row_idle_share": ("rows idle", share),
    "half_rows_share_while_admitting": ("half of rows, while admitting", share),
    "staleness_mean": ("mean age", decimal),
    "dropped_share": ("dropped", share),
}


def measured_runs(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["bench"] == "update" and r["side"] == "native" and r["parameters"]["tail"] in TAILS]


def check(records: Sequence[Record], size: str) -> list[dict[str, Any]]:
    """Every measured run of forced lengths, and what the simulation says of it."""
    costs, found = costs_of(records, size), []
    for record in measured_runs(records):
        given = record["parameters"]
        in_flight = record["results"]["in_flight"] / given["groups"]
        plan = plan_of(given["paradigm"], given["groups"], given["updates"], given["staleness"], in_flight)
        found.append(
            {
                "parameters": given,
                "in_flight": in_flight,
                "measured": record["results"],
                "simulated": simulate(plan, given["tail"], given["prompt"], costs),
            }
        )
    return found


def print_check(found: Sequence[Mapping[str, Any]]) -> None:
    head = ["paradigm", "K", "groups", "in flight", "updates", "seconds", "simulated", "error", "of the ideal"]
    rows = []
    for each in found:
        given, made, told = each["parameters"], each["measured"], each["simulated"]
        names = [str(given[name]) for name in ("paradigm", "staleness", "groups")]
        seconds = [f"{one['wall_s']:.1f}" for one in (made, told)]
        error = f"{told['wall_s'] / made['wall_s'] - 1:+.1%}"
        reached = share(told["ideal_s"] / made["wall_s"])
        rows.append([*names, f"{each['in_flight']:g} batches", str(given["updates"]), *seconds, error, reached])
    print(table("Measured and simulated", head, rows), flush=True)


def print_simulated(found: Sequence[Mapping[str, Any]]) -> None:
    head = ["paradigm", "K", "in flight", *(name for name, _ in COLUMNS.values()), "of the ideal"]
    rows = []
    for each in found:
        results, given = each["results"], each["parameters"]
        values = [show(results[name]) if name in results else "-" for name, (_, show) in COLUMNS.items()]
        names = [given["paradigm"], str(given["staleness"]), f"{given['in_flight']:g} batches"]
        rows.append([*names, *values, share(results["ideal_share"])])
    print(table("Simulated", head, rows), flush=True)


def every(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All paradigms, each with every `K` and `in_flight` that it leaves open and allows."""
    costs = costs_of(read_cells(options.known), options.size)
    found, seen = [], set()
    for paradigm in options.paradigms:
        for staleness in options.staleness:
            for in_flight in options.in_flight:
                try:
                    plan = plan_of(paradigm, options.groups, options.updates, staleness, in_flight)
                except ValueError:
                    continue  # more in flight than this K can hold
                key = (paradigm, plan.staleness, plan.in_flight)
                if key in seen:
                    continue
                seen.add(key)
                print(f"{paradigm}, K = {plan.staleness}, {plan.in_flight} groups in flight ...", file=sys.stderr)
                given = {"paradigm": paradigm, "staleness": plan.staleness, "in_flight": plan.in_flight / plan.batch}
                given |= {"tail": options.tail, "groups": options.groups, "updates": options.updates}
                results = simulate(plan, options.tail, options.prompt, costs)
                found.append({"parameters": given, "results": results})
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=Path, action="append", help="folders of cells; default: bench/results/gpu")
    parser.add_argument("--check", action="store_true", help="make measured runs again, instead of what follows")
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--tail", choices=list(TAILS), default="published")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 an update")
    parser.add_argument("--paradigms", type=words, default=list(PARADIGMS))
    parser.add_argument("--staleness", type=integers, default=[4])
    parser.add_argument("--in-flight", type=lambda text: [float(each) for each in text.split(",")], default=[2.0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    options.known = options.known or [Path(__file__).parents[1] / "results" / "gpu"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.check:
        found = check(read_cells(options.known), options.size)
        print_check(found)
    else:
        found = every(options)
        print_simulated(found)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
