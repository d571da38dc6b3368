"""Divides the instances between the versions, and evens out the work of each version. Pure functions.

`rebalance` turns a view of the pool into changes: which instance holds which versions.

1. Every version with trajectories needs a slot, earliest deadline first. So does the newest version, last, as soon as
   a group may start under it; before that, an instance that holds it would be idle. If there are fewer slots than
   versions that need one, the trajectories of the remaining versions are suspended until a slot is free.
2. Slots are divided in proportion to the trajectories of each version, by largest remainder, at least one each. The
   trajectories that are about to start under the newest version count too. A version whose instances are all short of
   KV memory gets one more instance.
3. Instances are assigned to versions so that the fewest tokens of KV have to move, and then so that the fewest versions
   have to be loaded.

Nothing changes unless a version that needs a slot has none, a version is short of memory, or a version has a whole
instance more than its share: rounding alone moves nothing. Slots that no other version needs are left alone. So
instances that can hold every version never move anything here, and load an older version only if trajectories wait for
it.

`moves_to_even_out` decides which trajectories of a version move to another instance that holds it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from stretto.core.apportionment import exact_shares, whole_shares
from stretto.core.assignment import assign

LEAST_GAP = 4  # the loads of two instances must differ by so many trajectories before one gives any to the other


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance that is not leaving."""

    id: int
    slots: int
    resident: frozenset[int] = frozenset()
    loading: frozenset[int] = frozenset()
    evaluates: int | None = None  # the version that is evaluated here
    counts: Mapping[int, int] = field(default_factory=dict)  # version -> trajectories that run, never 0
    tokens: Mapping[int, int] = field(default_factory=dict)  # version -> their context, at least 1 each
    short_of_memory: bool = False

    @property
    def held(self) -> frozenset[int]:
        return self.resident | self.loading

    @property
    def fixed(self) -> frozenset[int]:
        """The versions that cannot be unloaded now."""
        return self.loading if self.evaluates is None else self.loading | {self.evaluates}


@dataclass(frozen=True, slots=True)
class PoolView:
    """All instances and the work that there is for them, at one moment."""

    instances: Sequence[InstanceView]
    newest: int
    waiting: Mapping[int, int] = field(default_factory=dict)  # version -> trajectories that need another instance
    deadlines: Mapping[int, int] = field(default_factory=dict)  # version -> the earliest deadline of its trajectories
    top_up: int = 0  # trajectories that are about to start under the newest version
    admits: bool = True  # the run will admit more groups
    min_instances: Mapping[int, int] = field(default_factory=dict)  # version -> instances that its KV memory needs

    def needs(self) -> dict[int, int]:
        """Returns the number of trajectories to serve, by version."""
        needs = dict(self.waiting)
        for instance in self.instances:
            for version, count in instance.counts.items():
                needs[version] = needs.get(version, 0) + count
        if self.top_up or self.newest in needs:
            needs[self.newest] = needs.get(self.newest, 0) + self.top_up
        return needs


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the versions that one instance holds: suspend trajectories, unload, load, in this order."""

    instance: int
    suspend: tuple[int, ...]  # the versions whose trajectories are suspended
    unload: tuple[int, ...]
    load: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Trajectories of one version that move from one instance to another that holds it."""

    source: int
    target: int
    version: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Division:
    """The number of instances that each version gets."""

    versions: list[int]
    exact: list[Fraction]  # the exact share, as if no version were fixed
    whole: list[int]  # the instances that it gets
    places: list[int]  # the usable slots of each instance, without those of fixed versions
    suspended: list[int]  # the versions that get no slot

    def describe(self, version: int) -> str:
        index = self.versions.index(version)
        return f"version {version} has work for {float(self.exact[index]):.1f} of {sum(self.whole)} slots"


def divide(pool: PoolView) -> Division:
    """Divides the slots between the versions: steps 1 and 2."""
    needs = pool.needs()
    # Nothing starts while a version waits for a slot. So the newest version comes last if nothing of it runs or waits,
    # even if groups of it that are being scored are due first: so they may be once the bound of staleness was lowered.
    to_start = {pool.newest: pool.top_up}
    urgent = sorted(
        needs,
        key=lambda version: (
            needs[version] == to_start.get(version, 0),
            pool.deadlines.get(version, math.inf),
            version,
        ),
    )
    fixed_counts: dict[int, int] = {}
    for instance in pool.instances:
        for version in instance.fixed:
            fixed_counts[version] = fixed_counts.get(version, 0) + 1
    room = sum(instance.slots - len(instance.fixed) for instance in pool.instances)
    served: list[int] = []
    for version in urgent:
        if version in fixed_counts:
            served.append(version)
        elif room > 0:
            served.append(version)
            room -= 1
    suspended = [version for version in urgent if version not in served]
    served.sort()
    columns = frozenset(served)
    places = [
        min(instance.slots - len(instance.fixed), len(columns) - len(instance.fixed & columns))
        for instance in pool.instances
    ]
    if not served:
        return Division([], [], [], places, suspended)
    total = sum(places) + sum(fixed_counts.get(version, 0) for version in served)
    most = [
        sum(version in instance.fixed or places[number] > 0 for number, instance in enumerate(pool.instances))
        for version in served
    ]
    counts = [needs[version] for version in served]
    min_instances = [min(pool.min_instances.get(version, 0), most[index]) for index, version in enumerate(served)]
    exact = exact_shares(counts, total, _raise([1] * len(served), min_instances, total), most)
    # An instance where a version is fixed counts for it, whatever its share.
    least = _raise([fixed_counts.get(version, 1) for version in served], min_instances, total)
    whole = whole_shares(exact_shares(counts, total, least, most), total, most)
    return Division(served, exact, whole, places, suspended)


def _raise(least: list[int], min_instances: Sequence[int], total: int) -> list[int]:
    """Raises lower bounds to `min_instances`, as far as that leaves the others theirs within `total`."""
    raised = list(least)
    for index, more in enumerate(min_instances):
        raised[index] += max(0, min(more - raised[index], total - sum(raised)))
    return raised


def rebalance(pool: PoolView) -> list[Change]:
    """Returns the changes to make; none if none is worth it."""
    division = divide(pool)
    if not division.versions:
        return []
    held = {version for instance in pool.instances for version in instance.held}
    lacking = [version for version in division.versions if version not in held]
    short = _short_of_memory(pool)
    if not lacking and not short and not _has_surplus(pool, division):
        return []
    assigned = _assign(pool, division)
    loads = _loads(pool, assigned)
    for version in short:
        _load_once(pool, assigned, loads, version)
    # A version may lose its last slot to a load. It is then loaded on an instance that was assigned to it.
    while left := _left_without_slot(pool, division, assigned, loads):
        for version in left:
            _load_once(pool, assigned, loads, version)
    return [
        _change(division, instance, _unloads(instance, own, wanted), wanted)
        for instance, own, wanted in zip(pool.instances, assigned, loads, strict=True)
        if wanted
    ]


def _short_of_memory(pool: PoolView) -> list[int]:
    """The versions that need more instances for their KV memory than hold them now."""
    return [
        version
        for version, least in pool.min_instances.items()
        if sum(version in instance.held for instance in pool.instances) < min(least, len(pool.instances))
    ]


def _has_surplus(pool: PoolView, division: Division) -> bool:
    """Returns True if some version runs on at least one instance more than its share."""
    return any(
        sum(version in instance.counts for instance in pool.instances) - exact >= 1
        for version, exact in zip(division.versions, division.exact, strict=True)
    )


def _assign(pool: PoolView, division: Division) -> list[frozenset[int]]:
    """Assigns versions to instances: step 3. Returns the versions of each instance."""
    versions = division.versions
    shape = (len(pool.instances), len(versions))
    column = {version: index for index, version in enumerate(versions)}
    tokens, there, fixed = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, instance in enumerate(pool.instances):
        for version, count in instance.tokens.items():
            if version in column:
                tokens[row, column[version]] = count
        for version in instance.held:
            if version in column:
                there[row, column[version]] = 1
        for version in instance.fixed:
            if version in column:
                fixed[row, column[version]] = True
    places = np.array(division.places, np.int64)
    wanted = np.array(division.whole, np.int64) - fixed.sum(axis=0)
    kept = tokens * (int(places.sum()) + 1) + there  # one token of KV outweighs all loads together
    chosen = assign(kept, places, wanted, fixed)
    return [frozenset(versions[index] for index in np.flatnonzero(line).tolist()) for line in chosen]


def _loads(pool: PoolView, assigned: Sequence[frozenset[int]]) -> list[list[int]]:
    """Returns the versions that each instance loads now, of those assigned to it.

    The newest version is loaded on every instance that it is assigned to. An older version is loaded only on an
    instance that would hold nothing otherwise, the one with the most trajectories first: a second instance for it costs
    a load, and gains nothing while the first can run its trajectories.
    """
    needs = pool.needs()
    loads: list[list[int]] = []
    for instance, own in zip(pool.instances, assigned, strict=True):
        missing = own - instance.held
        if pool.newest in own:
            loads.append([pool.newest] if pool.newest in missing and pool.admits else [])
        elif own & instance.held or not missing:
            loads.append([])
        else:
            loads.append([max(missing, key=lambda version: (needs[version], version))])
    return loads


def _load_once(pool: PoolView, assigned: Sequence[frozenset[int]], loads: list[list[int]], version: int) -> None:
    """Adds the load of a version on the least loaded instance that it is assigned to and that does not hold it."""
    able = [
        row
        for row, own in enumerate(assigned)
        if version in own and version not in pool.instances[row].held and version not in loads[row]
    ]
    if able:
        loads[min(able, key=lambda row: (sum(pool.instances[row].counts.values()), row))].append(version)


def _left_without_slot(
    pool: PoolView, division: Division, assigned: Sequence[frozenset[int]], loads: Sequence[Sequence[int]]
) -> list[int]:
    """The versions with trajectories that no instance would hold after these loads."""
    needs = pool.needs()
    held: set[int] = set()
    for instance, own, wanted in zip(pool.instances, assigned, loads, strict=True):
        held |= instance.held.difference(_unloads(instance, own, wanted))
        held.update(wanted)
    return [version for version in division.versions if needs[version] > 0 and version not in held]


def _unloads(instance: InstanceView, own: frozenset[int], loads: Sequence[int]) -> list[int]:
    """The versions that an instance unloads for its loads: idle ones first, then those with the fewest tokens."""
    lacking = len(loads) - (instance.slots - len(instance.held))
    if lacking <= 0:
        return []
    able = instance.resident - own - instance.fixed
    return sorted(able, key=lambda version: (instance.tokens.get(version, 0), version))[:lacking]


def _change(division: Division, instance: InstanceView, out: Sequence[int], loads: Sequence[int]) -> Change:
    suspend = tuple(version for version in out if version in instance.counts)
    if division.suspended:
        why = f"there are not enough slots for version {_and(division.suspended)}: the earliest deadlines come first"
    elif suspend:
        why = "; ".join(division.describe(version) for version in (*suspend, *loads) if version in division.versions)
    else:
        why = "nothing has to move for it"
    old = f" instead of version {_and(out)}" if out else ""
    reason = f"instance {instance.id} takes version {_and(loads)}{old}: {why}"
    return Change(instance.id, suspend, tuple(out), tuple(loads), reason)


def _and(versions: Iterable[int]) -> str:
    return " and ".join(str(version) for version in versions)


def moves_to_even_out(
    version: int,
    running: Mapping[int, int],
    loads: dict[int, int],
    targets: Iterable[int],
    short_of_memory: Collection[int] = (),
    paces: Mapping[int, float] = MappingProxyType({}),
) -> list[Move]:
    """Returns the moves that even out the work of one version, and updates `loads` as if they were made.

    `running` is the number of movable trajectories of the version on each instance, and `loads` the number of all its
    trajectories. `targets` hold the version and have enough KV memory. The instance with the largest load begins to
    give trajectories to the one with the smallest only if the two differ by `LEAST_GAP` and by half of the larger load,
    so that small differences move nothing; it then gives until they are even. An instance that is short of memory gives
    to any that has less to do. A load is compared over the pace of its instance, 1 if `paces` does not name it.
    """

    def over_pace(instance: int, more: int = 0) -> float:
        return (loads[instance] + more) / paces.get(instance, 1.0)

    left, before = dict(running), dict(loads)
    sources = [(instance not in short_of_memory, -over_pace(instance), instance) for instance in left]
    sinks = [(over_pace(instance, 1), instance) for instance in targets]
    heapq.heapify(sources)
    heapq.heapify(sinks)
    gives = {instance for instance in left if instance in short_of_memory}
    counts: dict[tuple[int, int], int] = {}
    while sources and sinks:
        has_memory, load, source = sources[0]
        if load != -over_pace(source):
            heapq.heapreplace(sources, (has_memory, -over_pace(source), source))
            continue
        if sinks[0][0] != over_pace(sinks[0][1], 1):
            heapq.heapreplace(sinks, (over_pace(sinks[0][1], 1), sinks[0][1]))
            continue
        target = sinks[0][1]
        small = source not in gives and -load - over_pace(target) < max(LEAST_GAP, -load / 2)
        if not left[source] or small or over_pace(target, 1) >= -load:
            heapq.heappop(sources)  # the smallest load only grows: a move will not be worth it later either
            continue
        gives.add(source)
        counts[source, target] = counts.get((source, target), 0) + 1
        left[source] -= 1
        loads[source] -= 1
        loads[target] += 1
    return [
        Move(source, target, version, count, _why(source, target, before, short_of_memory))
        for (source, target), count in counts.items()
    ]


def _why(source: int, target: int, loads: Mapping[int, int], short_of_memory: Collection[int]) -> str:
    memory = " and is short of KV memory" if source in short_of_memory else ""
    return f"instance {source} runs {loads[source]} trajectories{memory}, instance {target} {loads[target]}"
