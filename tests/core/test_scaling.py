"""The work of one event does not grow with the number of instances."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bench.core import simulate
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import resolve_plan


def instructions(work: Callable[[], object]) -> int:
    """The number of bytecode instructions that some work takes: a measure that no neighbour on the machine changes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def cost(paradigm: str, instances: int, slots: int) -> dict[str, float]:
    """Instructions for each kind of event, on average over a run."""
    plan = resolve_plan(paradigm, batch=instances, group_size=2, staleness=2, updates=2, retries=2, rows=3 * instances)
    events, _ = simulate(plan, instances, seed=0, slots=slots)
    controller, total, counts = Controller(plan), dict[str, int](), dict[str, int]()
    for event in events:
        kind = type(event).__name__
        total[kind] = total.get(kind, 0) + instructions(lambda event=event: controller.handle(event))
        counts[kind] = counts.get(kind, 0) + 1
    return {kind: total[kind] / counts[kind] for kind in counts}


@pytest.mark.parametrize(("paradigm", "slots"), [("multi-version", 1), ("multi-version", 4), ("partial", 1)])
def test_an_event_costs_the_same_in_a_pool_that_is_eight_times_as_large(paradigm: str, slots: int) -> None:
    small, large = cost(paradigm, 16, slots), cost(paradigm, 128, slots)
    ordinary = small.keys() - {m.Updated.__name__, m.GenerationFailed.__name__}  # one of these may do others' work
    assert {m.Joined.__name__, m.Loaded.__name__, m.Generated.__name__, m.Scored.__name__} <= ordinary
    for kind in ordinary:
        assert large[kind] < 1.5 * small[kind], f"{kind}: {small[kind]:.0f} instructions, then {large[kind]:.0f}"
