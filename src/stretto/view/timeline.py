"""The timeline: how many trajectories ran in each lane at each moment, aggregated to what the page can draw.

A lane is a version or an instance. The page asks for a window of time, a number of bins (its pixels) and a number of
rows. If more lanes are active in the window than there are rows, neighbouring lanes share a row. So the size of an
answer depends on the page and not on the run. If few trajectories are in the window, they come one by one.

Bins have equal lengths on the clock of `pauses.py`, on which the time between two sessions is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RunError
from stretto.store.schema import ADMISSION
from stretto.view.columns import NUM_UNDER_WAY, Columns
from stretto.view.pauses import Pause, squeezed
from stretto.view.runs import RunSource

MOST_BARS = 1_500  # trajectories that come one by one
MOST_MOVES = 1_500
MOST_CLOSED = 1_000  # times without admission
ROUNDING = 1e-6  # sums of many lengths leave such rests where nothing runs
MOST_BINS, MOST_ROWS = 4_000, 400


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the timeline that the page asks for. Times are in seconds since 1970."""

    start: float
    end: float
    bins: int
    version_rows: int
    instance_rows: int
    versions: tuple[int, int] | None = None  # only lanes from the first to the second
    instances: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.start < self.end:
            raise RunError(f"`from` is {self.start:g} and `to` is {self.end:g}: the window has no length")
        if not 1 <= self.bins <= MOST_BINS:
            raise RunError(f"`bins` is {self.bins}: give 1 to {MOST_BINS}")
        if not all(1 <= rows <= MOST_ROWS for rows in (self.version_rows, self.instance_rows)):
            raise RunError(f"`version_rows` and `instance_rows` must be from 1 to {MOST_ROWS}")


def timeline(run: RunSource, window: Window, now: float) -> dict[str, Any]:
    """Returns the rows of versions and of instances in a window, its moves, and its trajectories if they are few."""
    with run.reading():
        return _timeline(run, window, now)


def starts_and_ends(run: RunSource, window: Window, now: float) -> dict[str, list[int]]:
    """Returns how many trajectories began and how many ended in each bin of a window that has all of them in it.

    A report counts by them: those that began before the end of a part of the window, less those that ended before it.
    """
    pauses = run.pauses()
    start, end = squeezed(np.array([window.start, window.end]), pauses).tolist()
    with run.columns() as (columns, _):
        started, ends = columns["started"], _ends(columns, now)
        known = ~np.isnan(started)
        counts = []
        for times in (started[known], ends[known]):
            places = ((squeezed(times, pauses) - start) * (window.bins / (end - start))).astype(np.int64)
            counts.append(np.bincount(np.clip(places, 0, window.bins - 1), minlength=window.bins).tolist())
    return {"starts": counts[0], "ends": counts[1]}


def _ends(columns: Columns, now: float) -> NDArray[np.float64]:
    """Returns the end of each trajectory: `now` if it still generates, its start if nothing is known of its end."""
    started, finished = columns["started"], columns["finished"]
    ends = np.where(np.isnan(finished), now, finished)
    if len(started):  # of trajectories that ended without a completion nothing is known
        ends = np.where(np.isnan(finished) & (columns["state"] >= NUM_UNDER_WAY), started, ends)
    return ends


def _timeline(run: RunSource, window: Window, now: float) -> dict[str, Any]:
    pauses = run.pauses()
    with run.columns(wanted=_wanted(run, window)) as (columns, progress):
        started, ends = columns["started"], _ends(columns, now)
        with np.errstate(invalid="ignore"):
            inside = np.flatnonzero((started < window.end) & (ends > window.start))
        begin = float(np.nanmin(started)) if len(started) and not np.isnan(started).all() else None
        spans = _Spans.on_the_clock(started[inside], ends[inside], window, pauses)
        answer: dict[str, Any] = {
            "from": window.start,
            "to": window.end,
            "bins": window.bins,
            "begin": begin,
            "read": progress.num_read,
            "all": progress.num_all,
            "count": len(inside),
            "versions": _lanes(columns["version"][inside], spans, window, "versions"),
            "instances": _lanes(columns["instance"][inside], spans, window, "instances"),
            "bars": _bars(columns, inside, ends, window) if len(inside) <= MOST_BARS else None,
        }
    answer["moves"] = _moves(run, window, pauses)
    answer["closed"] = _closed(run, window, pauses, now)
    return answer


def _wanted(run: RunSource, window: Window) -> tuple[int, int] | None:
    """Returns the trajectories around a window, by the updates that trained on them; None if they are many."""
    with run.reading() as db:
        found = db.execute(
            "SELECT MIN(update_id), MAX(update_id) FROM updates WHERE taken_at <= ? AND finished_at >= ?",
            (window.end, window.start),
        ).fetchone()
    return None if found[0] is None else run.trained_in(found[0] - 1, found[1] + 2)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Starts and ends of trajectories, and the bounds of the window, on the clock without pauses."""

    started: NDArray[np.float64]
    ended: NDArray[np.float64]
    start: float
    end: float

    @classmethod
    def on_the_clock(
        cls, started: NDArray[np.float64], ended: NDArray[np.float64], window: Window, pauses: Sequence[Pause]
    ) -> _Spans:
        start, end = squeezed(np.array([window.start, window.end]), pauses).tolist()
        return cls(squeezed(started, pauses), squeezed(ended, pauses), start, end)


def _lanes(lanes: NDArray[np.int32], spans: _Spans, window: Window, kind: str) -> dict[str, Any]:
    """Returns the rows of lanes of one kind: their bounds, and the mean number of trajectories in each bin."""
    bounds, most = (
        (window.versions, window.version_rows) if kind == "versions" else (window.instances, window.instance_rows)
    )
    low, high = bounds or (0, np.iinfo(np.int32).max)
    chosen = (lanes >= max(0, low)) & (lanes <= high)
    started, ended = spans.started, spans.ended
    if not chosen.all():
        lanes, started, ended = lanes[chosen], started[chosen], ended[chosen]
    present = np.flatnonzero(np.bincount(lanes)) if len(lanes) else lanes  # a sort would take longer
    if not len(present):
        return {"rows": [], "lanes": 0, "peak": 0}
    per_row = -(-len(present) // most)
    row_of = np.arange(len(present)) // per_row
    row_of_lane = np.zeros(int(present[-1]) + 1, dtype=np.int64)
    row_of_lane[present] = row_of
    rows = row_of_lane[lanes]
    num_rows = int(row_of[-1]) + 1
    values = occupancy(rows, num_rows, started, ended, spans.start, spans.end, window.bins)
    values[values < ROUNDING] = 0.0
    counts = np.bincount(rows, minlength=num_rows)
    found = []
    for row in range(num_rows):
        own, line = present[row_of == row], values[row]
        filled = np.flatnonzero(line > 0.004)
        first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
        found.append(
            {"from": int(own[0]), "to": int(own[-1]), "lanes": len(own), "count": int(counts[row]), "first": first,
             "values": [float(f"{value:.3g}") for value in line[first:last].tolist()]}
        )  # fmt: skip
    return {"rows": found, "lanes": len(present), "peak": float(f"{values.max():.4g}")}


def occupancy(
    rows: NDArray[np.int64],
    num_rows: int,
    started: NDArray[np.float64],
    ended: NDArray[np.float64],
    start: float,
    end: float,
    bins: int,
) -> NDArray[np.float64]:
    """Returns [rows, bins]: the mean number of intervals that cover each bin of the window.

    An interval from `a` to `b` covers bin `i` by the length of their intersection, over that of a bin.
    """
    scale = bins / (end - start)
    a = np.clip((started - start) * scale, 0.0, bins)
    b = np.clip((ended - start) * scale, 0.0, bins)
    # The integral of a step at `x` is 0 before its bin, `i + 1 - x` in it and 1 for each bin after it: second
    # differences of two entries, so that one cumulative sum over bins gives the coverage.
    edges = np.zeros((num_rows, bins + 2))
    for x, sign in ((a, 1.0), (b, -1.0)):
        place = np.minimum(x.astype(np.int64), bins)
        inside = sign * (place + 1 - x)
        flat = rows * (bins + 2) + place
        size = num_rows * (bins + 2)
        edges += np.bincount(flat, weights=inside, minlength=size).reshape(num_rows, -1)
        edges += np.bincount(flat + 1, weights=sign - inside, minlength=size).reshape(num_rows, -1)
    return np.clip(np.cumsum(edges, axis=1)[:, :bins], 0.0, None)


def _bars(
    columns: Columns, inside: NDArray[np.int64], ends: NDArray[np.float64], window: Window
) -> list[list[float | int | None]]:
    """Returns trajectory, version, instance, start, end, reward and state of each."""
    rewards = columns["reward"][inside]
    return [
        [int(id), int(version), int(instance), float(start), float(end), None if reward != reward else float(reward),
         int(state)]
        for id, version, instance, start, end, reward, state in zip(
            inside.tolist(), columns["version"][inside].tolist(), columns["instance"][inside].tolist(),
            columns["started"][inside].tolist(), ends[inside].tolist(), rewards.tolist(),
            columns["state"][inside].tolist(), strict=True,
        )
    ]  # fmt: skip


def _closed(
    run: RunSource, window: Window, pauses: Sequence[Pause], now: float
) -> list[tuple[float, float, str]] | None:
    """Returns start, end and reason of each time in the window in which no group could start; the longest if many.

    None if the journal has no record of it: older versions of stretto wrote none.
    """
    with run.reading() as db:
        rows = db.execute("SELECT at, text FROM notes WHERE kind = ? ORDER BY at", (ADMISSION,)).fetchall()
        (ended,) = db.execute("SELECT MAX(ended_at) FROM sessions WHERE outcome IS NOT NULL").fetchone()
    if not rows:
        return None
    stops = [pause.start for pause in pauses] + ([ended] if ended is not None else [])
    found = []
    for place, (start, reason) in enumerate(rows):
        end = rows[place + 1][0] if place + 1 < len(rows) else max(start, now)
        end = min([end, *(stop for stop in stops if stop >= start)])
        if reason and start < window.end and end > window.start:
            found.append((start, end, reason))
    longest = sorted(found, key=lambda span: span[0] - span[1])[:MOST_CLOSED]
    return sorted(longest)


def _moves(run: RunSource, window: Window, pauses: Sequence[Pause]) -> dict[str, Any]:
    """Returns the moves in a window one by one, or their number in each bin if there are many."""
    between = "FROM moves WHERE at BETWEEN ? AND ?"
    bounds = (window.start, window.end)
    with run.reading() as db:
        (count,) = db.execute(f"SELECT COUNT(*) {between}", bounds).fetchone()
        if count > MOST_MOVES:
            times = np.fromiter((at for (at,) in db.execute(f"SELECT at {between}", bounds)), dtype=np.float64)
            start, end = squeezed(np.array(bounds), pauses).tolist()
            bins = ((squeezed(times, pauses) - start) * (window.bins / (end - start))).astype(np.int64)
            in_bin = np.bincount(np.minimum(bins, window.bins - 1))
            return {
                "count": count,
                "bins": [[place, int(in_bin[place])] for place in np.flatnonzero(in_bin).tolist()],
                "moves": None,
            }
        rows = db.execute(
            f"SELECT at, trajectory, version, source, target, context, num_bytes, prefilled, reason {between} "
            "ORDER BY at",
            bounds,
        )
        return {"count": count, "bins": None, "moves": [list(row) for row in rows]}
