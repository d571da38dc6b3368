"""Runs the real scheduler on made-up lengths, so that pictures show what it decides and not what somebody believes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import resolve_plan


@dataclass(slots=True)
class Bar:
    """A trajectory in time."""

    trajectory: int
    group: int
    row: int  # of the engine
    start: float
    pieces: list[tuple[float, int]]  # (from when, version): one, except where a trajectory continues under new weights
    end: float | None = None
    deadline: int = 0
    update: int | None = None  # that trained it
    dropped: bool = False

    @property
    def version(self) -> int:
        return self.pieces[0][1]


@dataclass(slots=True)
class Schedule:
    """The events of a schedule: trajectories, updates as (number, start, end), and when each version was published."""

    bars: dict[int, Bar] = field(default_factory=dict)
    updates: list[tuple[int, float, float]] = field(default_factory=list)
    published: dict[int, float] = field(default_factory=dict)
    end: float = 0.0


def schedule(
    paradigm: str, lengths: list[float], *, batch: int, group: int, staleness: int | None, updates: int,
    update_s: float, in_flight: int | None = None,
) -> Schedule:  # fmt: skip
    """Runs `updates` updates. Trajectory `i` takes `lengths[i]` seconds, and an update takes `update_s`."""
    plan = resolve_plan(
        paradigm, batch=batch, group_size=group, staleness=staleness, updates=updates, retries=0, in_flight=in_flight
    )
    controller, made = Controller(plan), Schedule(published={0: 0.0})
    queue: list[tuple[float, int, m.Event]] = [(0.0, 0, m.Joined(0, plan.slots))]
    order, rows = 0, set(range(plan.in_flight * group))

    def after(delay: float, event: m.Event) -> None:
        nonlocal order
        order += 1
        heapq.heappush(queue, (now + delay, order, event))

    while queue:
        now, _, event = heapq.heappop(queue)
        if isinstance(event, m.Generated):
            bar = made.bars[event.trajectory]
            if bar.dropped:
                continue
            bar.end = now
            rows.add(bar.row)
            after(0.0, m.Scored(event.trajectory, float(event.trajectory % 2)))
        for command in controller.handle(event):
            if isinstance(command, m.Start):
                for trajectory in command.trajectories:
                    row = min(rows)
                    rows.remove(row)
                    made.bars[trajectory] = Bar(
                        trajectory, command.group, row, now, [(now, command.version)], deadline=command.deadline
                    )
                    after(lengths[trajectory], m.Generated(trajectory, 1))
            elif isinstance(command, m.LoadVersion | m.SwapVersion):
                after(0.0, m.Loaded(command.instance, command.version))
            elif isinstance(command, m.Publish):
                made.published[command.version] = now
                if not plan.paradigm.pinned:
                    for bar in made.bars.values():
                        if bar.end is None:
                            bar.pieces.append((now, command.version))
            elif isinstance(command, m.Drop):
                for trajectory in command.trajectories:
                    bar = made.bars[trajectory]
                    bar.dropped = True
                    if bar.end is None:
                        bar.end = now
                        rows.add(bar.row)
            elif isinstance(command, m.Train):
                made.updates.append((command.update, now, now + update_s))
                for trajectory in command.trajectories:
                    made.bars[trajectory].update = command.update
                after(update_s, m.Updated(command.update))
            elif isinstance(command, m.Finish):
                queue.clear()
        made.end = now
    return made
