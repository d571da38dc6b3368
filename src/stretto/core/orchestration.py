"""The cycle that divides the instances between the versions: from a snapshot of the pool to a plan. Pure functions.

`repartition` decides which instance holds which versions:

1. Every version with trajectories needs a slot, earliest deadline first; so does the newest, as soon as anything may
   start under it: before that an instance would only wait. Where there are fewer slots than that, the rest is suspended
   until one is free.
2. Slots are divided in proportion to the trajectories of each version, those about to start under the newest included,
   by largest remainder, at least one each. A version whose instances are all short of KV memory gets one more.
3. Which instance is whose: the choice that moves the fewest tokens of KV, then the one that loads the least.

It changes nothing unless a version that needs a slot has none, one is short of memory, or one has a whole instance more
than its share: what rounding alone would move stays. Slots that are not contended for are not touched, so instances
that can hold every version never move anything here, and load an older version only where it is waited for.

`evened` decides which trajectories of a version go from a crowded instance to another that holds it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from stretto.core.shares import exact_shares, whole_shares
from stretto.core.transport import assign

LEAST_GAP = 4  # trajectories by which two instances must differ at least before one hands any to the other


@dataclass(frozen=True, slots=True)
class Site:
    """One instance that stays, as the plan sees it."""

    id: int
    slots: int
    resident: frozenset[int] = frozenset()
    loading: frozenset[int] = frozenset()
    evaluates: int | None = None  # a version that is evaluated here
    counts: Mapping[int, int] = field(default_factory=dict)  # version -> trajectories that run, never 0
    tokens: Mapping[int, int] = field(default_factory=dict)  # version -> their context, at least 1 each
    crowded: bool = False

    @property
    def held(self) -> frozenset[int]:
        return self.resident | self.loading

    @property
    def pinned(self) -> frozenset[int]:
        """What cannot leave its slot now."""
        return self.loading if self.evaluates is None else self.loading | {self.evaluates}


@dataclass(frozen=True, slots=True)
class Scene:
    """The pool and what is asked of it at one moment."""

    sites: Sequence[Site]
    newest: int
    waiting: Mapping[int, int] = field(default_factory=dict)  # version -> trajectories on no instance that stays
    deadlines: Mapping[int, int] = field(default_factory=dict)  # version -> the earliest of its trajectories
    top_up: int = 0  # trajectories that are about to start under the newest version
    admits: bool = True  # whether the run is to admit anything more
    granted: Mapping[int, int] = field(default_factory=dict)  # version -> instances at least, for want of KV memory

    def needs(self) -> dict[int, int]:
        """Version -> trajectories that are to be served."""
        needs = dict(self.waiting)
        for site in self.sites:
            for version, count in site.counts.items():
                needs[version] = needs.get(version, 0) + count
        if self.top_up or self.newest in needs:
            needs[self.newest] = needs.get(self.newest, 0) + self.top_up
        return needs


@dataclass(frozen=True, slots=True)
class Change:
    """What one instance is to hold from now on: suspend what runs under some versions, unload, load. In this order."""

    instance: int
    suspend: tuple[int, ...]  # versions
    unload: tuple[int, ...]
    load: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Shift:
    """Trajectories of one version go from one instance to another that holds it."""

    source: int
    target: int
    version: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Division:
    """How many instances each version that is served gets."""

    versions: list[int]
    exact: list[Fraction]  # its share, whatever is pinned
    whole: list[int]  # what it gets
    places: list[int]  # a site's slots that are not pinned and can be used
    suspended: list[int]  # versions for which there is no slot

    def describe(self, version: int) -> str:
        index = self.versions.index(version)
        return f"version {version} has work for {float(self.exact[index]):.1f} of {sum(self.whole)} slots"


def divide(scene: Scene) -> Division:
    """Steps 1 and 2 of the cycle."""
    needs = scene.needs()
    urgent = sorted(needs, key=lambda version: (needs[version] == 0, scene.deadlines.get(version, math.inf), version))
    pins: dict[int, int] = {}
    for site in scene.sites:
        for version in site.pinned:
            pins[version] = pins.get(version, 0) + 1
    room = sum(site.slots - len(site.pinned) for site in scene.sites)
    served: list[int] = []
    for version in urgent:
        if version in pins:
            served.append(version)
        elif room > 0:
            served.append(version)
            room -= 1
    suspended = [version for version in urgent if version not in served]
    served.sort()
    columns = frozenset(served)
    places = [min(site.slots - len(site.pinned), len(columns) - len(site.pinned & columns)) for site in scene.sites]
    if not served:
        return Division([], [], [], places, suspended)
    total = sum(places) + sum(pins.get(version, 0) for version in served)
    most = [
        sum(version in site.pinned or places[number] > 0 for number, site in enumerate(scene.sites))
        for version in served
    ]
    counts = [needs[version] for version in served]
    granted = [min(scene.granted.get(version, 0), most[index]) for index, version in enumerate(served)]
    exact = exact_shares(counts, total, _raised([1] * len(served), granted, total), most)
    pinned = _raised([pins.get(version, 1) for version in served], granted, total)  # is had, whatever the share
    whole = whole_shares(exact_shares(counts, total, pinned, most), total, most)
    return Division(served, exact, whole, places, suspended)


def _raised(least: list[int], granted: Sequence[int], total: int) -> list[int]:
    """Lower bounds raised to what is granted, as far as that leaves the others theirs."""
    raised = list(least)
    for index, more in enumerate(granted):
        raised[index] += max(0, min(more - raised[index], total - sum(raised)))
    return raised


def repartition(scene: Scene) -> list[Change]:
    """The changes of one cycle, none where none is worth it."""
    division = divide(scene)
    if not division.versions:
        return []
    held = {version for site in scene.sites for version in site.held}
    lacking = [version for version in division.versions if version not in held]
    pressed = _pressed(scene)
    if not lacking and not pressed and not _surplus(scene, division):
        return []
    given = _choose(scene, division)
    loads = _loads(scene, given)
    for version in pressed:
        _load_once(scene, given, loads, version)
    # What is taken out for a load may leave a version nowhere; it then gets a place that it was given.
    while homeless := _homeless(scene, division, given, loads):
        for version in homeless:
            _load_once(scene, given, loads, version)
    return [
        _change(division, site, _out(site, chosen, wanted), wanted)
        for site, chosen, wanted in zip(scene.sites, given, loads, strict=True)
        if wanted
    ]


def _pressed(scene: Scene) -> list[int]:
    """The versions that are to have more instances than hold them, for want of KV memory."""
    return [
        version
        for version, least in scene.granted.items()
        if sum(version in site.held for site in scene.sites) < min(least, len(scene.sites))
    ]


def _surplus(scene: Scene, division: Division) -> bool:
    """Whether some version runs on at least one instance more than its share."""
    return any(
        sum(version in site.counts for site in scene.sites) - exact >= 1
        for version, exact in zip(division.versions, division.exact, strict=True)
    )


def _choose(scene: Scene, division: Division) -> list[frozenset[int]]:
    """Step 3: the versions that each site is to have room for."""
    versions = division.versions
    shape = (len(scene.sites), len(versions))
    column = {version: index for index, version in enumerate(versions)}
    tokens, there, fixed = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, site in enumerate(scene.sites):
        for version, count in site.tokens.items():
            if version in column:
                tokens[row, column[version]] = count
        for version in site.held:
            if version in column:
                there[row, column[version]] = 1
        for version in site.pinned:
            if version in column:
                fixed[row, column[version]] = True
    places = np.array(division.places, np.int64)
    wanted = np.array(division.whole, np.int64) - fixed.sum(axis=0)
    kept = tokens * (int(places.sum()) + 1) + there  # a token outweighs all loads that could be spared
    chosen = assign(kept, places, wanted, fixed)
    return [frozenset(versions[index] for index in np.flatnonzero(line).tolist()) for line in chosen]


def _loads(scene: Scene, given: Sequence[frozenset[int]]) -> list[list[int]]:
    """What each site is to load now of what it is given.

    The newest version is loaded wherever it is given. An older one only where the site would have nothing else, the one
    with the most to run: a second place for it costs a load and gives nothing while the first can run it.
    """
    needs = scene.needs()
    loads: list[list[int]] = []
    for site, chosen in zip(scene.sites, given, strict=True):
        missing = chosen - site.held
        if scene.newest in chosen:
            loads.append([scene.newest] if scene.newest in missing and scene.admits else [])
        elif chosen & site.held or not missing:
            loads.append([])
        else:
            loads.append([max(missing, key=lambda version: (needs[version], version))])
    return loads


def _load_once(scene: Scene, given: Sequence[frozenset[int]], loads: list[list[int]], version: int) -> None:
    """Have the site with the least to do, of those that were given a version and do not hold it, load it."""
    able = [
        row
        for row, chosen in enumerate(given)
        if version in chosen and version not in scene.sites[row].held and version not in loads[row]
    ]
    if able:
        loads[min(able, key=lambda row: (sum(scene.sites[row].counts.values()), row))].append(version)


def _homeless(
    scene: Scene, division: Division, given: Sequence[frozenset[int]], loads: Sequence[Sequence[int]]
) -> list[int]:
    """The versions with something to run that no site would hold after these loads."""
    needs = scene.needs()
    held: set[int] = set()
    for site, chosen, wanted in zip(scene.sites, given, loads, strict=True):
        held |= site.held.difference(_out(site, chosen, wanted))
        held.update(wanted)
    return [version for version in division.versions if needs[version] > 0 and version not in held]


def _out(site: Site, chosen: frozenset[int], loads: Sequence[int]) -> list[int]:
    """What a site unloads so that it can load: first what is idle, then what moves the least."""
    lacking = len(loads) - (site.slots - len(site.held))
    if lacking <= 0:
        return []
    return sorted(site.resident - chosen - site.pinned, key=lambda each: (site.tokens.get(each, 0), each))[:lacking]


def _change(division: Division, site: Site, out: Sequence[int], loads: Sequence[int]) -> Change:
    suspend = tuple(version for version in out if version in site.counts)
    if division.suspended:
        why = f"there are not slots enough for version {_and(division.suspended)}, so the earliest deadlines are served"
    elif suspend:
        why = "; ".join(division.describe(version) for version in (*suspend, *loads) if version in division.versions)
    else:
        why = "nothing has to move for it"
    old = f" instead of version {_and(out)}" if out else ""
    reason = f"instance {site.id} takes version {_and(loads)}{old}: {why}"
    return Change(site.id, suspend, tuple(out), tuple(loads), reason)


def _and(versions: Iterable[int]) -> str:
    return " and ".join(str(version) for version in versions)


def evened(
    version: int,
    running: Mapping[int, int],
    loads: dict[int, int],
    targets: Iterable[int],
    crowded: Collection[int] = (),
) -> list[Shift]:
    """The shifts that even out the work of one version; `loads` follows them.

    `running` has what can be moved of the version on each instance and `loads` all of an instance's trajectories;
    `targets` hold the version and are not short of KV memory, `crowded` are. The instance with the most begins to give
    to the one with the least only if they differ by `LEAST_GAP` and by half of the larger load, so that small
    differences move nothing, and goes on until they are even. One that is short of memory gives to whoever has less.
    """
    left, before = dict(running), dict(loads)
    sources = [(instance not in crowded, -loads[instance], instance) for instance in left]
    sinks = [(loads[instance], instance) for instance in targets]
    heapq.heapify(sources)
    heapq.heapify(sinks)
    gives = {instance for instance in left if instance in crowded}
    counts: dict[tuple[int, int], int] = {}
    while sources and sinks:
        calm, load, source = sources[0]
        if -load != loads[source]:
            heapq.heapreplace(sources, (calm, -loads[source], source))
            continue
        if sinks[0][0] != loads[sinks[0][1]]:
            heapq.heapreplace(sinks, (loads[sinks[0][1]], sinks[0][1]))
            continue
        target = sinks[0][1]
        least = 2 if source in gives else max(LEAST_GAP, -(-loads[source] // 2))
        if not left[source] or loads[source] - loads[target] < least:
            heapq.heappop(sources)  # the least that anyone has only grows: it will not be worth it later
            continue
        gives.add(source)
        counts[source, target] = counts.get((source, target), 0) + 1
        left[source] -= 1
        loads[source] -= 1
        loads[target] += 1
    return [
        Shift(source, target, version, count, _why(source, target, before, crowded))
        for (source, target), count in counts.items()
    ]


def _why(source: int, target: int, loads: Mapping[int, int], crowded: Collection[int]) -> str:
    memory = " and is short of KV memory" if source in crowded else ""
    return f"instance {source} runs {loads[source]} trajectories{memory}, instance {target} {loads[target]}"
