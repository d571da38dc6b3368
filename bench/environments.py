"""Episodes whose worlds are slow: throughput, the cost of a turn, and idle rows. `python -m bench.environments`.

Three measurements, over the real run loop, core and journal, with a fake engine whose steps take a fixed time:

- *Throughput.* 2,000 episodes of eight turns are in flight, in groups of eight. A world answers after N(10, 10) s,
  truncated at 0 and scaled down by 10. The figure is trained episodes a second between two updates in the middle of the
  run. It is compared with `lock_step`, in which all episodes wait for the slowest world after each turn, and with
  `ideal`, the real core under a virtual clock, where nothing but generation and worlds takes time. `lock_step` is given
  a row for each episode. How much the staleness bound matters is shown by the ideal under other bounds. The run is made
  twice: with the worlds in the driver, and with `--workers` worker processes that play them.
- *Overhead of a turn.* Processor time of the loop's thread for each turn of that run, and the time that a turn of one
  episode alone takes in all, with a world that answers at once and an engine that does not sleep.
- *Idle rows.* Worlds take ten times as long as a turn is decoded, and twelve episodes for each row are in flight: the
  share of time in which a row decodes nothing, with rows that are freed between turns and with rows that are not.

`--quick` runs all of it in a few seconds with few episodes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import heapq
import json
import math
import os
import pickle
import platform
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.paced import PacedEngine, run_paced
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan, resolve_plan
from stretto.engines.threaded import ThreadedEngine
from stretto.environments.custom import EnvironmentSpec, close_environment, start_environment
from stretto.environments.data import Row
from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions
from stretto.environments.protocol import Environment, Policy
from stretto.environments.worker_process import WorkerOptions
from stretto.observe.progress import Silent
from stretto.run import rollout_runner
from stretto.run.task_play import TaskPlay
from stretto.training.fake import FakeTrainer
from stretto.types import EngineStats, Prompt, Request, Sampling

MEAN_S, DEVIATION_S = 10.0, 10.0  # of a world, before it is scaled down
LOCK_STEP_FLOOR, IDEAL_FLOOR, TURN_FLOOR_MS, IDLE_FLOOR = 2.0, 0.85, 1.0, 0.5
NEVER_S = 1e9


@dataclass(frozen=True)
class Setting:
    """One run: its episodes, its worlds and its engine."""

    groups: int = 250  # in flight
    group_size: int = 8
    batch: int = 32  # groups
    staleness: int = 15  # twice what the groups in flight need
    updates: int = 40
    turns: int = 8
    tokens: int = 8  # of a turn
    step_s: float = 0.02
    rows: int = 384
    mean_s: float = MEAN_S / 10  # of a world
    deviation_s: float = DEVIATION_S / 10

    @property
    def plan(self) -> Plan:
        return resolve_plan(
            "multi-version", batch=self.batch, group_size=self.group_size, updates=self.updates, retries=2,
            staleness=self.staleness, rows=self.rows, in_flight=self.groups,
        )  # fmt: skip

    @property
    def window(self) -> tuple[int, int]:
        """Two updates between which as many episodes are in flight as may be."""
        ahead = -(-self.groups // self.batch)
        first, last = 2 * ahead, self.updates - ahead - 2
        if last <= first:
            raise ValueError(f"{self.updates} updates are too few for {ahead} batches in flight")
        return first, last

    def world_s(self, trajectory: int, turn: int) -> float:
        """How long a world takes after a turn; the same whoever asks."""
        draw = random.Random(trajectory * 1000 + turn)
        while (seconds := draw.gauss(self.mean_s, self.deviation_s)) < 0:
            pass
        return seconds


def paced_engine(setting: Setting, rows: int, name: str) -> ThreadedEngine:
    """Returns an engine whose turns have one length."""

    def make() -> PacedEngine:
        slots, tokens = setting.plan.slots, setting.tokens
        return PacedEngine(rows=rows, slots=slots, median_tokens=tokens, sigma=0.0, step_s=setting.step_s)

    return ThreadedEngine(make, name=name)


class SlowWorld:
    """An environment of several turns. After each of them its world takes some time. Made with a `Setting`."""

    def __init__(self, tokenizer: Any, **setting: Any) -> None:
        self._setting = Setting(**setting)

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        context, turn = list(prompt.tokens), None
        for number in range(self._setting.turns):
            turn = await policy.generate(context)
            context += [*turn.tokens.tolist(), 1]
            if (seconds := self._setting.world_s(turn.id, number)) > 0:
                await asyncio.sleep(seconds)
        assert turn is not None
        return float(turn.tokens[-1] % 5)


@dataclass(frozen=True)
class Mark:
    """The state of a run at the end of an update."""

    at: float
    thread_s: float  # of the loop
    load: EngineStats


class Marks(Silent):
    """Notes the state of a run at the end of each update."""

    def __init__(self, engine: ThreadedEngine) -> None:
        self._engine = engine
        self.marks: list[Mark] = []

    def updated(self, line: Mapping[str, Any]) -> None:
        at, thread_s = time.perf_counter(), time.thread_time()
        self.marks.append(Mark(at, thread_s, self._engine.report()))


def environment_of(setting: Setting, workers: int) -> Environment:
    """Returns the worlds of a setting: in this process, or played by so many others."""
    spec = EnvironmentSpec("bench.environments:SlowWorld", setting.turns + 1, asdict(setting))
    if not workers:
        return SlowWorld(None, **spec.config)
    options = EpisodePoolOptions(spec, pickle.dumps(None), workers=workers)
    return EpisodePool(options, WorkerOptions(print))


async def run(setting: Setting, folder: Path, workers: int = 0) -> list[Mark]:
    """Runs to the last update, and verifies the run."""
    rows = [Row(text=f"{number}+{number}=", columns={}) for number in range(64)]
    sampling = Sampling(max_tokens=(setting.tokens + 1) * setting.turns)
    world = environment_of(setting, workers)
    try:
        await start_environment(world)
        engine = paced_engine(setting, setting.rows, "paced")
        observer = Marks(engine)
        play = TaskPlay(world, sampling, max_turns=setting.turns + 1, episode_s=600.0)
        await run_paced(
            setting.plan, play, rows, folder, engine=engine, trainer=FakeTrainer(), observer=observer, interval_s=0.02
        )
    finally:
        await close_environment(world)
    return observer.marks


def measure(setting: Setting, workers: int = 0) -> dict[str, float]:
    """A run of a setting, between the two updates of its window."""
    with tempfile.TemporaryDirectory() as folder:
        marks = asyncio.run(run(setting, Path(folder), workers))
    first, last = (marks[update] for update in setting.window)
    seconds, num_turns = last.at - first.at, (last.load.tokens - first.load.tokens) / setting.tokens
    num_episodes = (setting.window[1] - setting.window[0]) * setting.batch * setting.group_size
    return {
        "episodes_per_s": num_episodes / seconds,
        "turns_per_s": num_turns / seconds,
        "thread_ms_per_turn": 1e3 * (last.thread_s - first.thread_s) / num_turns,
        "step_ms": 1e3 * seconds / (last.load.steps - first.load.steps),
        "row_idle_share": 1.0 - (last.load.row_s - first.load.row_s) / (setting.rows * seconds),
        "seconds": seconds,
    }


async def lock_step(setting: Setting) -> float:
    """Episodes a second if all episodes in flight take each turn together, and wait for the slowest world."""
    count = setting.groups * setting.group_size
    engine = paced_engine(setting, count, "lock-step")
    sampling = Sampling(max_tokens=(setting.tokens + 1) * setting.turns)
    try:
        await engine.load(FakeTrainer().weights(0))
        contexts = {id: [id % 100, 2, 3] for id in range(count)}
        began = time.perf_counter()
        for number in range(setting.turns):
            asked = [Request(id, 0, tuple(context), id, sampling) for id, context in contexts.items()]
            for done in await asyncio.gather(*map(engine.generate, asked)):
                contexts[done.id] += [*done.tokens.tolist(), 1]
            await asyncio.gather(*(asyncio.sleep(setting.world_s(id, number)) for id in contexts))
        return count / (time.perf_counter() - began)
    finally:
        await engine.close()


def lock_step_closed_form(setting: Setting) -> float:
    """The same if nothing but generation and worlds takes time: a busy machine slows `lock_step` too."""
    count = setting.groups * setting.group_size
    worlds_s = sum(max(setting.world_s(id, number) for id in range(count)) for number in range(setting.turns))
    return count / (worlds_s + setting.turns * setting.tokens * setting.step_s)


class VirtualRun:
    """The real core under a virtual clock: generation, worlds, and nothing else takes time."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.controller = setting, Controller(setting.plan)
        self.now, self._order = 0.0, 0
        self._events: list[tuple[float, int, m.Event | int]] = []  # an `int`: that trajectory has a turn
        self._turns: dict[int, int] = {}  # trajectory -> turns that are done
        self._queue: deque[int] = deque()
        self._num_rows = 0  # in use
        self.updated_at: list[float] = []

    def run(self) -> float:
        """Returns the episodes a second between the updates of the window."""
        self._after(0.0, m.Joined(0, self.setting.plan.slots))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._end_turn(event)
                continue
            if isinstance(event, m.TurnAsked):
                self._ask(event.trajectory)
            elif isinstance(event, m.Updated):
                self.updated_at.append(self.now)
            for command in self.controller.handle(event):
                self._execute(command)
            if isinstance(event, m.Generated):
                self._after(0.0, m.Scored(event.trajectory, float(event.trajectory % 5)))
        first, last = self.setting.window
        count = (last - first) * self.setting.batch * self.setting.group_size
        return count / (self.updated_at[last] - self.updated_at[first])

    def _after(self, delay_s: float, event: m.Event | int) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay_s, self._order, event))

    def _execute(self, command: m.Command) -> None:
        if isinstance(command, m.Start):
            for trajectory in command.trajectories:
                self._turns[trajectory] = 0
                self._ask(trajectory)
        elif isinstance(command, m.LoadVersion):
            self._after(0.0, m.Loaded(command.instance, command.version))
        elif isinstance(command, m.Train):
            self._after(0.0, m.Updated(command.update))

    def _ask(self, trajectory: int) -> None:
        self._queue.append(trajectory)
        self._fill_rows()

    def _fill_rows(self) -> None:
        step_s = self.setting.step_s
        while self._queue and self._num_rows < self.setting.rows:
            self._num_rows += 1
            begins_at = math.ceil(self.now / step_s - 1e-9) * step_s  # with the next step
            self._after(begins_at - self.now + self.setting.tokens * step_s, self._queue.popleft())

    def _end_turn(self, trajectory: int) -> None:
        setting = self.setting
        self._num_rows -= 1
        number = self._turns[trajectory]
        self._turns[trajectory] += 1
        seconds = setting.world_s(trajectory, number)
        if seconds > rollout_runner.WORLD_S:
            self._after(rollout_runner.WORLD_S, m.TurnEnded(trajectory))
        last = number + 1 == setting.turns
        self._after(seconds, m.Generated(trajectory, setting.tokens) if last else m.TurnAsked(trajectory))
        self._fill_rows()


def turn_alone(turns: int) -> float:
    """Milliseconds that a turn of one episode alone takes outside of the engine's steps: the middle of six episodes.

    A turn is one token long, and nothing sleeps.
    """
    setting = Setting(
        groups=1, group_size=1, batch=1, staleness=0, updates=7, turns=turns, tokens=1, step_s=0.0, rows=1, mean_s=0.0,
        deviation_s=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        marks = asyncio.run(run(setting, Path(folder)))
    spent = [(after.at - before.at) - (after.load.busy_s - before.load.busy_s) for before, after in pairwise(marks)]
    return 1e3 * statistics.median(spent) / turns


def idle_rows(setting: Setting) -> dict[str, float]:
    """The idle share of rows with rows that are freed between turns, and with rows that are not."""
    freed = measure(setting)["row_idle_share"]
    world_s, rollout_runner.WORLD_S = rollout_runner.WORLD_S, NEVER_S
    try:
        held = measure(setting)["row_idle_share"]
    finally:
        rollout_runner.WORLD_S = world_s
    return {"freed": freed, "held": held, "ratio": freed / held}


def settings(*, quick: bool) -> tuple[Setting, Setting, int]:
    """The setting of throughput, that of idle rows, and the turns of the episode alone."""
    decode_s = 8 * 0.01
    slow = Setting(
        groups=24, group_size=4, batch=4, updates=24, turns=4, step_s=0.01, rows=8, mean_s=10 * decode_s,
        deviation_s=decode_s,
    )  # fmt: skip
    if not quick:
        return Setting(), slow, 100
    small = replace(Setting(), groups=6, group_size=2, batch=2, updates=14, turns=2, tokens=2, step_s=0.002, rows=4)
    small = replace(small, mean_s=0.04, deviation_s=0.04)
    return small, replace(small, rows=2, mean_s=0.03, deviation_s=0.003), 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument(
        "--out", type=Path, help="where the figures go as JSON, such as bench/results/environments.json"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of the second run (default: %(default)s)")
    options = parser.parse_args(arguments)
    setting, slow, turns = settings(quick=options.quick)
    ours, in_workers = measure(setting), measure(setting, options.workers)
    locked, ideal = asyncio.run(lock_step(setting)), VirtualRun(setting).run()
    least = -(-setting.groups // setting.batch) - 1
    bounds = {bound: VirtualRun(replace(setting, staleness=bound)).run() for bound in (least, 2 * least, 4 * least)}
    alone_ms = turn_alone(turns)
    idle = idle_rows(slow)
    floors = {
        "against_lock_step": (ours["episodes_per_s"] / locked, ">=", LOCK_STEP_FLOOR),
        "against_its_closed_form": (ours["episodes_per_s"] / lock_step_closed_form(setting), ">=", LOCK_STEP_FLOOR),
        "against_ideal": (ours["episodes_per_s"] / ideal, ">=", IDEAL_FLOOR),
        "workers_against_lock_step": (in_workers["episodes_per_s"] / locked, ">=", LOCK_STEP_FLOOR),
        "workers_against_ideal": (in_workers["episodes_per_s"] / ideal, ">=", IDEAL_FLOOR),
        "turn_alone_ms": (alone_ms, "<", TURN_FLOOR_MS),
        "thread_ms_per_turn": (ours["thread_ms_per_turn"], "<", TURN_FLOOR_MS),
        "workers_thread_ms_per_turn": (in_workers["thread_ms_per_turn"], "<", TURN_FLOOR_MS),
        "idle_freed_to_held": (idle["ratio"], "<", IDLE_FLOOR),
    }
    met = {name: got >= floor if sign == ">=" else got < floor for name, (got, sign, floor) in floors.items()}
    for name, (got, sign, floor) in floors.items():
        print(f"{name:>26}: {got:7.3f}   floor {sign} {floor:g}   {'met' if met[name] else 'NOT met'}")
    result = {
        "command": "python -m bench.environments" + (" --quick" if options.quick else ""),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine(),
            "load": os.getloadavg(),
        },
        "setting": asdict(setting), "ours": ours, "in_workers": {"workers": options.workers, **in_workers},
        "lock_step_episodes_per_s": locked, "ideal_episodes_per_s": ideal,
        "lock_step_closed_form_episodes_per_s": lock_step_closed_form(setting),
        "ideal_against_closed_form_by_staleness": {
            bound: rate / lock_step_closed_form(setting) for bound, rate in bounds.items()
        },
        "turn_alone_ms": alone_ms, "idle_setting": asdict(slow), "idle_rows": idle,
        "floors": {name: {"got": got, "floor": f"{sign} {floor:g}", "met": met[name]}
                   for name, (got, sign, floor) in floors.items()},
    }  # fmt: skip
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if options.quick or all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
