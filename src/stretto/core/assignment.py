"""Assigns versions to instances so that as much as possible stays where it is. Exact, for many rows and few columns.

Rows are instances and columns are versions. A row takes as many different columns as it has places, and a column is
taken by as many rows as wanted. Each row has a value for each column, which is lost if it does not take the column.
Rows with the same choice are interchangeable, so only the graph of the columns matters: an arc from one column to
another costs what the cheapest row that can change from the one to the other loses.

1. *Prices.* Every row takes the columns that are worth the most to it. The price of a column that too many rows take
   rises until those that lose the least have left for their next best column. At any prices, the choice of the rows is
   the best one for its counts.
2. *Paths.* If too many rows still take a column, one row is moved along each arc of the cheapest path from it to a
   column that too few take. The choice stays the best one for its counts (successive shortest paths).

Prices do nearly all of the work, on whole arrays. Paths make the result exact, in a time that grows with the number of
rows left to them.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

ROUNDS = 32  # of prices, at most: they may alternate for long if the last few rows are contested
NEVER = np.iinfo(np.int64).min // 4

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


def assign(kept: Integers, places: Integers, wanted: Integers, fixed: Booleans) -> Booleans:
    """Returns the choice of columns for every row that keeps the most value, as a matrix like `kept`.

    A row has `places` besides its `fixed` columns, and a column is to have `wanted` rows besides those where it is
    fixed; both add up to the same. If no choice meets all counts (rows may differ in places), as many as possible are
    met, and a column that wants any row gets one.
    """
    if (places > (~fixed).sum(axis=1)).any():
        raise ValueError("`places` of a row are more than the columns that it could take")
    if places.sum() != wanted.sum():
        raise ValueError(f"`places` add up to {places.sum()} and `wanted` to {wanted.sum()}; they must be equal")
    taken = _by_prices(kept, places, wanted, fixed)
    _by_paths(kept, taken, wanted, fixed)
    taken |= fixed
    return taken


def _by_prices(kept: Integers, places: Integers, wanted: Integers, fixed: Booleans) -> Booleans:
    """Returns a choice that is the best for its counts, with counts close to those wanted."""
    worth = np.where(fixed, NEVER, kept)
    order = np.argsort(-worth, axis=1, kind="stable")
    taken = np.zeros_like(fixed)
    np.put_along_axis(taken, order, np.arange(kept.shape[1]) < places[:, None], axis=1)
    counts = taken.sum(axis=0)
    for _ in range(ROUNDS):
        column = int(np.argmax(counts - wanted))
        excess = int(counts[column] - wanted[column])
        if excess <= 0:
            break
        rows = np.flatnonzero(taken[:, column])
        # Of columns that are worth the same to a row, one that too few rows take is better.
        others = np.where(taken[rows] | fixed[rows], NEVER, worth[rows] * 2 + (counts < wanted))
        best = np.argmax(others, axis=1)
        next_worth = worth[rows, best]
        can = ~(taken | fixed)[rows, best]
        margin = np.where(can, worth[rows, column] - next_worth, np.iinfo(np.int64).max)
        excess = min(excess, int(can.sum()))
        if excess == 0:
            break
        leave = np.argpartition(margin, excess - 1)[:excess]
        worth[:, column] -= int(margin[leave].max())
        taken[rows[leave], column] = False
        taken[rows[leave], best[leave]] = True
        counts = taken.sum(axis=0)
    return taken


def _by_paths(kept: Integers, taken: Booleans, wanted: Integers, fixed: Booleans) -> None:
    """Moves rows along the cheapest paths between columns until the counts are met as far as possible."""
    surplus = (taken.sum(axis=0) - wanted).tolist()
    if not any(surplus):
        return
    graph = _Columns(kept, taken, fixed)
    while any(each > 0 for each in surplus):
        path = graph.cheapest_path(surplus)
        if path is None:
            return
        first, last, loss = path[0], path[-1], graph.loss(path)
        # Paths only become more expensive: while this one costs the same, none is cheaper.
        while surplus[first] > 0 > surplus[last] and graph.loss(path) == loss:
            graph.move_along(path)
            surplus[first] -= 1
            surplus[last] += 1


class _Columns:
    """The graph of the columns: for each pair, the rows that can change from one to the other, cheapest first."""

    def __init__(self, kept: Integers, taken: Booleans, fixed: Booleans) -> None:
        self._kept = kept.tolist()
        self._taken = taken  # changed in place
        self._open = ~fixed
        self._columns = range(kept.shape[1])
        self._heaps: list[list[list[tuple[int, int]]]] = []
        for one in self._columns:
            line: list[list[tuple[int, int]]] = []
            for other in self._columns:
                rows = np.flatnonzero(taken[:, one] & ~taken[:, other] & self._open[:, other])
                losses = kept[rows, one] - kept[rows, other]
                order = np.argsort(losses, kind="stable")
                line.append(list(zip(losses[order].tolist(), rows[order].tolist(), strict=True)))  # sorted: a heap
            self._heaps.append(line)

    def _cheapest(self, one: int, other: int) -> tuple[int, int] | None:
        """Returns (loss, row) of the cheapest change from one column to another; None if no row can change."""
        heap = self._heaps[one][other]
        while heap:
            row = heap[0][1]
            if self._taken[row, one] and not self._taken[row, other]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def cheapest_path(self, surplus: list[int]) -> list[int] | None:
        """Returns the columns of the cheapest path from a surplus to a lack. No cycle costs less than 0."""
        arcs = [
            (one, other, top[0])
            for one in self._columns
            for other in self._columns
            if one != other and (top := self._cheapest(one, other)) is not None
        ]
        cost: dict[int, int] = {each: 0 for each in self._columns if surplus[each] > 0}
        before: dict[int, int] = {}
        for _ in self._columns:
            changed = False
            for one, other, loss in arcs:
                if one in cost and (other not in cost or cost[one] + loss < cost[other]):
                    cost[other], before[other] = cost[one] + loss, one
                    changed = True
            if not changed:
                break
        ends = [each for each in cost if surplus[each] < 0]
        if not ends:
            return None
        path = [min(ends, key=lambda each: (cost[each], each))]
        while path[-1] in before:
            path.append(before[path[-1]])
        return path[::-1]

    def loss(self, path: list[int]) -> int | None:
        """Returns the cost of moving one row along each arc of a path; None if an arc has no row left."""
        tops = [self._cheapest(one, other) for one, other in itertools.pairwise(path)]
        return None if None in tops else sum(top[0] for top in tops if top is not None)

    def move_along(self, path: list[int]) -> None:
        """Moves one row along each arc of a path."""
        steps = []
        for one, other in itertools.pairwise(path):
            top = self._cheapest(one, other)
            assert top is not None, "the path has arcs that exist"
            steps.append((one, other, top[1]))
        for one, other, row in steps:
            self._taken[row, one], self._taken[row, other] = False, True
        for row in {row for _, _, row in steps}:
            self._offer(row)

    def _offer(self, row: int) -> None:
        """Adds every change that a row can make now. A duplicate does no harm: its loss never changes."""
        kept, taken, free = self._kept[row], self._taken[row].tolist(), self._open[row].tolist()
        ones = [each for each in self._columns if taken[each]]
        others = [each for each in self._columns if free[each] and not taken[each]]
        for one in ones:
            for other in others:
                heapq.heappush(self._heaps[one][other], (kept[one] - kept[other], row))
