"""A trace of a run for Perfetto or `chrome://tracing`: the trainer, versions, instances, evaluations.

A trace is JSON in the Trace Event Format. Spans that overlap are asynchronous events, which viewers put on lines of
their own. Beyond `limit` trajectories, whole groups are chosen evenly; counters have all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RunError
from stretto.view.columns import STATES, Columns
from stretto.view.runs import RunSource

TRAINER, VERSIONS, INSTANCES = 1, 2, 3  # process ids of the trace
MOST_COUNTS = 20_000  # points of one counter

Event = dict[str, Any]


def write_trace(run: RunSource, out: Path, limit: int) -> int:
    """Writes the trace of a run and returns the number of its events. Raises `RunError` if the file cannot be written.

    `limit`: most trajectories with spans of their own.
    """
    events = list(trace_events(run, limit))
    document = {"displayTimeUnit": "ms", "otherData": {"run": run.name}, "traceEvents": events}
    try:
        out.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise RunError(f"`-o {out}` cannot be written: {error.strerror or error}") from error
    return len(events)


def trace_events(run: RunSource, limit: int) -> Iterator[Event]:
    """Yields the events of a run. Times are in microseconds since it began."""
    curves, state = run.curves(), run.state()
    starts = [session["started_at"] for session in state["sessions"]]
    begin = min([*starts, *(at for _, at, _ in curves["versions"])], default=0.0)

    def micros(at: float) -> float:
        return round((at - begin) * 1e6, 1)

    for process, name in ((TRAINER, "trainer"), (VERSIONS, "versions"), (INSTANCES, "instances")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, name in ((1, "updates"), (2, "waits"), (3, "evaluations")):
        yield {"ph": "M", "pid": TRAINER, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield from _updates(curves, micros)
    for each in curves["evaluations"]:
        if each["seconds"]:
            args = {"score": each["score"], "prompts": each["num"]}
            yield _span(TRAINER, 3, f"evaluation of version {each['version']}", micros(each["at"] - each["seconds"]),
                        each["seconds"] * 1e6, args)  # fmt: skip
    for version, published, _ in curves["versions"]:
        yield {"ph": "i", "s": "g", "pid": VERSIONS, "tid": 0, "ts": micros(published), "name": f"publish {version}"}
    for each in curves["instances"]:
        for name in ("joined_at", "left_at"):
            if each[name] is not None:
                words = f"instance {each['instance']} {'joins' if name == 'joined_at' else each['outcome'] or 'leaves'}"
                yield {"ph": "i", "s": "p", "pid": INSTANCES, "tid": 0, "ts": micros(each[name]), "name": words}
    with run.reading() as db:
        moves = db.execute("SELECT at, trajectory, source, target, num_bytes, prefilled, reason FROM moves ORDER BY at")
        for at, trajectory, source, target, num_bytes, prefilled, reason in moves:
            args = {"from": source, "bytes": num_bytes, "prefilled": prefilled, "reason": reason}
            yield {"ph": "i", "s": "p", "pid": INSTANCES, "tid": target, "ts": micros(at),
                   "name": f"move of trajectory {trajectory}", "args": args}  # fmt: skip
    while True:
        with run.columns(5.0) as (columns, progress):
            if progress.is_whole:
                break
    yield from _trajectories(columns, limit, micros)


def _updates(curves: dict[str, Any], micros: Any) -> Iterator[Event]:
    u = curves["updates"]
    for place, update in enumerate(u["update"]):
        taken, finished = u["taken_at"][place], u["finished_at"][place]
        args = {name: u[name][place] for name in ("reward_mean", "tokens", "staleness_mean", "staleness_max", "loss")}
        yield _span(TRAINER, 1, f"update {update}", micros(taken), (finished - taken) * 1e6, args)
        if idle := u["trainer_idle_seconds"][place]:
            why = curves["waited_for"].get(update, "")
            yield _span(TRAINER, 2, f"wait before update {update}", micros(taken - idle), idle * 1e6, {"for": why})


def _trajectories(columns: Columns, limit: int, micros: Any) -> Iterator[Event]:
    whole = np.flatnonzero(~np.isnan(columns["started"]) & ~np.isnan(columns["finished"]))
    for process, name in ((VERSIONS, "version"), (INSTANCES, "instance")):
        for lane in np.unique(columns[name][whole]).tolist():
            if lane >= 0:
                own = whole[columns[name][whole] == lane]
                yield from _running(
                    process, f"{name} {lane}", columns["started"][own], columns["finished"][own], micros
                )
    groups = np.unique(columns["group"][whole])
    step = max(1, -(-len(whole) // max(1, limit)))
    chosen = whole[np.isin(columns["group"][whole], groups[::step])] if limit else whole[:0]
    for id in chosen.tolist():
        version, instance = int(columns["version"][id]), int(columns["instance"][id])
        reward = float(columns["reward"][id])
        args = {"version": version, "instance": instance, "tokens": int(columns["length"][id]),
                "reward": None if reward != reward else reward, "state": STATES[int(columns["state"][id])],
                "update": int(columns["update"][id])}  # fmt: skip
        started, finished = micros(float(columns["started"][id])), micros(float(columns["finished"][id]))
        for process, lane in ((VERSIONS, f"version {version}"), (INSTANCES, f"instance {instance}")):
            common = {"pid": process, "tid": version if process == VERSIONS else max(0, instance), "cat": lane,
                      "id": id, "name": f"{lane}: trajectory {id}"}  # fmt: skip
            yield {"ph": "b", "ts": started, **common, "args": args}
            yield {"ph": "e", "ts": max(started, finished), **common}


def _running(
    process: int, lane: str, started: NDArray[np.float64], finished: NDArray[np.float64], micros: Any
) -> Iterator[Event]:
    """Yields a counter of the trajectories that run in a lane."""
    times = np.concatenate([started, finished])
    steps = np.concatenate([np.ones(len(started)), -np.ones(len(finished))])
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.cumsum(steps[order])
    for place in range(0, len(times), max(1, len(times) // MOST_COUNTS)):
        yield {"ph": "C", "pid": process, "name": f"{lane} running", "ts": micros(float(times[place])),
               "args": {"trajectories": int(counts[place])}}  # fmt: skip


def _span(process: int, thread: int, name: str, start: float, length: float, args: dict[str, Any]) -> Event:
    return {"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": round(max(0.0, length), 1), "name": name,
            "args": args}  # fmt: skip
