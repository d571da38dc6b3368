"""The instances of a run, indexed so that an event costs no more than the logarithm of their number.

Decisions ask the same few questions at nearly every event: which instance that holds a version has the least to do,
where a new group may start, which instances have a slot for the newest version. `InstanceIndex` keeps the answers up to
date as instances change. Each instance is a member of *rankings*, one for each kind and version, which follow from its
own state alone. A change only marks its instance. The next question updates the rankings of the marked instances, so an
instance that has changed many times in between is updated once, and an event pays for earlier ones at most once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice

from stretto.core.instances import InstanceState
from stretto.core.rebalancing import LEAST_GAP


class Kind(IntEnum):
    """The property that the members of a ranking share. Unless it says otherwise, members are not leaving."""

    # These are ranked by work: the load with one more trajectory, over the pace.
    RESIDENT = 0  # hold the version, and have enough KV memory
    RESIDENT_SHORT_OF_MEMORY = 1  # hold the version, and are short of KV memory
    ADMITTING = 2  # the version is the newest that they hold, and they are not loading a newer one
    ADMITTING_SHORT_OF_MEMORY = 3
    MOVABLE = 4  # run trajectories of the version that may be moved; the most work comes first
    MOVABLE_SHORT_OF_MEMORY = 5
    LOADING = 6  # are loading some version; entered under version 0
    # These are sets: their order does not matter.
    STAYING = 7  # entered under version 0
    HOLDING = 8  # hold the version or are loading it
    RUNNING = 9  # run trajectories of the version
    WITH_ROOM = 10  # the version is the newest that they hold or are loading, and they have a slot for a newer one
    LEAVING_RUNNING = 11  # are leaving, and run trajectories whose newest token may be of the version
    LEAVING_IDLE = 12  # are leaving, and run nothing; entered under version 0
    ANY_RESIDENT = 13  # hold the version, leaving or not
    ANY_LOADING = 14  # are loading the version, leaving or not


_LAST_RANKED = Kind.LOADING
_LARGEST_FIRST = (Kind.MOVABLE, Kind.MOVABLE_SHORT_OF_MEMORY)
NO_VERSION = -1  # stands for the newest version of an instance that holds none


class Ranking:
    """A set of instances that finds the one with the least (or the most) work; of equal ones, the lowest id.

    The heap has (work, id) of every member, and outdated entries, which are skipped. `reload` has to be called for a
    member whose load or pace has changed.
    """

    __slots__ = ("_heap", "_reloaded", "_sign", "members")

    def __init__(self, *, largest_first: bool = False) -> None:
        self.members: dict[int, InstanceState] = {}
        self._sign = -1 if largest_first else 1
        self._heap: list[tuple[float, int]] = []
        self._reloaded: set[int] = set()  # members whose work may not be in the heap yet

    def add(self, instance: InstanceState) -> None:
        self.members[instance.id] = instance
        self._reloaded.add(instance.id)

    def remove(self, instance: InstanceState) -> None:
        del self.members[instance.id]

    def reload(self, instance: InstanceState) -> None:
        """Records that the work of a member has changed."""
        self._reloaded.add(instance.id)

    @property
    def first(self) -> InstanceState | None:
        """The first member; None if there is no member."""
        self._enter_reloaded()
        while self._heap:
            if (member := self._valid(self._heap[0])) is not None:
                return member
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Generator[InstanceState, None, None]:
        """Yields the members in order. Loads must not change before the generator is closed."""
        self._enter_reloaded()
        seen: dict[int, tuple[float, int]] = {}
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if (member := self._valid(entry)) is not None and member.id not in seen:
                    seen[member.id] = entry
                    yield member
        finally:
            for entry in seen.values():
                heapq.heappush(self._heap, entry)

    def _valid(self, entry: tuple[float, int]) -> InstanceState | None:
        work, id = entry
        member = self.members.get(id)
        return member if member is not None and self._sign * member.work == work else None

    def _enter_reloaded(self) -> None:
        if not self._reloaded:
            return
        members, sign = self.members, self._sign
        if len(self._heap) + len(self._reloaded) > 2 * len(members) + 16:  # most entries would be outdated
            self._heap = [(sign * member.work, id) for id, member in members.items()]
            heapq.heapify(self._heap)
        else:
            for id in self._reloaded:
                if id in members:
                    heapq.heappush(self._heap, (sign * members[id].work, id))
        self._reloaded.clear()


Rank = tuple[Kind, int]  # (kind, version)


class InstanceIndex(Mapping[int, InstanceState]):
    """All instances by id, in the order in which they joined, and the answers to questions about them.

    `pinned`: a trajectory keeps its version, so that an instance may hold several (see `Paradigm`).
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._instances: dict[int, InstanceState] = {}
        self._changed: set[InstanceState] = set()
        self._reloaded: set[InstanceState] = set()
        self._ranks: dict[int, tuple[Rank, ...]] = {}  # instance -> the rankings that it is in
        self._rankings: dict[Kind, dict[int, Ranking]] = {kind: {} for kind in Kind}
        self._num_joined = 0
        self._total_pace = 0.0  # of the instances that stay, as far as the rankings are up to date

    # -- the instances -------------------------------------------------------------------------------------------------

    def __getitem__(self, id: int) -> InstanceState:
        return self._instances[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)

    def add(self, instance: InstanceState) -> None:
        """Adds an instance that has joined. From now on it reports its changes here."""
        instance.order, self._num_joined = self._num_joined, self._num_joined + 1
        self._instances[instance.id] = instance
        instance.changed, instance.reloaded = self._changed, self._reloaded
        self._changed.add(instance)

    def remove(self, id: int) -> InstanceState:
        """Removes an instance that is gone, and returns it."""
        instance = self._instances.pop(id)
        instance.changed, instance.reloaded = set(), set()
        self._changed.discard(instance)
        self._reloaded.discard(instance)
        for kind, version in self._ranks.pop(id, ()):
            self._take_out(instance, kind, version)
        return instance

    def report_paces(self, paces: Mapping[int, float]) -> None:
        """Records how fast instances are beside the fastest. One that is not named has the pace 1."""
        if self._changed:
            self._enter_changed()
        for instance in self._instances.values():
            pace = paces.get(instance.id, 1.0)
            if pace != instance.pace:
                self._total_pace += 0.0 if instance.leaving else pace - instance.pace
                instance.pace = pace
                self._reloaded.add(instance)

    @property
    def staying(self) -> list[InstanceState]:
        """The instances that are not leaving, in the order in which they joined. Looks at every instance."""
        return [instance for instance in self._instances.values() if not instance.leaving]

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def num_staying(self) -> int:
        """The number of instances that are not leaving."""
        return len(self._members(Kind.STAYING, 0))

    def holds(self, version: int) -> bool:
        """Returns True if an instance that stays holds a version or is loading it."""
        return bool(self._members(Kind.HOLDING, version))

    def has_resident(self, version: int) -> bool:
        """Returns True if an instance that stays holds a version, confirmed."""
        return bool(self._members(Kind.RESIDENT, version) or self._members(Kind.RESIDENT_SHORT_OF_MEMORY, version))

    def holders(self, version: int) -> Ranking | None:
        """Returns the instances that stay and hold a version. Those short of memory are left out, unless all are."""
        return self._ranking(Kind.RESIDENT, version) or self._ranking(Kind.RESIDENT_SHORT_OF_MEMORY, version)

    def admitting(self, version: int, most: int) -> list[InstanceState]:
        """Returns the instances on which a group of a version could start, least work first, at most so many.

        Those that are short of KV memory are left out.
        """
        if (ranking := self._ranking(Kind.ADMITTING, version)) is None:
            return []
        in_order = ranking.in_order()
        found = list(islice(in_order, most))
        in_order.close()
        return found

    def about_to_admit(self, version: int, most: int) -> list[InstanceState]:
        """Returns the instances that are loading a version and could then take a group of it; at most so many.

        They are among the `most` least loaded that are loading anything. Those short of KV memory are left out.
        """
        if (ranking := self._ranking(Kind.LOADING, 0)) is None:
            return []
        in_order = ranking.in_order()
        found = [
            each
            for each in islice(in_order, most)
            if version in each.loading and not each.short_of_memory and max(each.resident, default=version) <= version
        ]
        in_order.close()
        return found

    @property
    def newest_resident(self) -> int:
        """The newest version that any instance which stays holds, confirmed; `NO_VERSION` if there is none."""
        return max((*self._versions(Kind.RESIDENT), *self._versions(Kind.RESIDENT_SHORT_OF_MEMORY)), default=NO_VERSION)

    def num_running(self, version: int) -> int:
        """Returns the number of instances that stay and run a version."""
        return len(self._members(Kind.RUNNING, version))

    @property
    def short_of_memory(self) -> bool:
        """True if every instance on which a group could start is short of KV memory, and there is one."""
        return bool(self._versions(Kind.ADMITTING_SHORT_OF_MEMORY)) and not self._versions(Kind.ADMITTING)

    @property
    def any_loads(self) -> bool:
        """True if any instance is loading any version."""
        return bool(self._versions(Kind.ANY_LOADING))

    def is_loading(self, version: int) -> bool:
        """Returns True if any instance is loading a version."""
        return bool(self._members(Kind.ANY_LOADING, version))

    def with_resident(self, version: int) -> list[InstanceState]:
        """Returns the instances that hold a version, leaving or not."""
        return _by_order(self._members(Kind.ANY_RESIDENT, version).values())

    def with_room_for(self, newest: int) -> list[InstanceState]:
        """Returns the instances that stay and could load the newest version at once, but have not been told to."""
        versions = [version for version in self._versions(Kind.WITH_ROOM) if version != newest]
        return _by_order(each for version in versions for each in self._members(Kind.WITH_ROOM, version).values())

    def leaving_with(self, continues: Callable[[int], bool]) -> list[InstanceState]:
        """Returns the instances that leave and run trajectories of a version that `continues` on another instance."""
        versions = [version for version in self._versions(Kind.LEAVING_RUNNING) if continues(version)]
        found = {id for version in versions for id in self._members(Kind.LEAVING_RUNNING, version)}
        return _by_order(self._instances[id] for id in found)

    @property
    def leaving_idle(self) -> list[InstanceState]:
        """The instances that are leaving and run nothing."""
        return _by_order(self._members(Kind.LEAVING_IDLE, 0).values())

    def movable_sources(self, version: int) -> list[InstanceState]:
        """Returns the instances that stay and could give trajectories of a version to an instance that runs nothing.

        They are those that `moves_to_even_out` would take from, and maybe a few more. It takes from the most
        work first, and from another instance only if that has at least `LEAST_GAP` more than the target (2 more if it
        is short of memory). By then the target has at least one trajectory of each instance before it. So the number
        of instances returned is at most the most work of an instance, for those short of memory and for the others.
        """
        found = []
        for kind, gap in ((Kind.MOVABLE_SHORT_OF_MEMORY, 2), (Kind.MOVABLE, LEAST_GAP)):
            if (ranking := self._ranking(kind, version)) is None:
                continue
            in_order = ranking.in_order()
            for number, each in enumerate(in_order):
                if each.work < number + gap:
                    break
                found.append(each)
            in_order.close()
        return found

    def best_place(self, target: int, oldest: int, allows: Callable[[int], bool]) -> tuple[InstanceState, int] | None:
        """Returns the best instance for a new group, and the version that the group gets there; None if there is none.

        Each instance has a share of `target`, the trajectories that should run, in proportion to its pace. Instances
        below their share come first, so that one that has just loaded the newest version is not given everything; of
        those, the one with the newest version, then the one with the least work. Instances that have their share or are
        short of KV memory come last, and only if no instance below its share is loading a version: the work is kept for
        that one.

        An instance that is loading a newer version is left out until it has it: a group that starts now would be a
        version older for all of its life. An instance whose newest version is older than `oldest` is left out too: a
        group that starts there would be due too soon.

        `allows(version)` is True if a group of that version may start. If a version is refused, so are all older ones.
        """
        share = 1 + target / (self._total_pace if self.num_staying else 1.0)  # in work: one that has less is below it
        below = self._best_below(share, oldest)
        if below is not None and allows(below[1]):
            return below
        loading = self._ranking(Kind.LOADING, 0)
        if loading is not None and (first := loading.first) is not None and first.work < share:
            return None
        newest = max(
            (*self._versions(Kind.ADMITTING), *self._versions(Kind.ADMITTING_SHORT_OF_MEMORY)), default=NO_VERSION
        )
        if newest == NO_VERSION or newest < oldest or not allows(newest):
            return None
        # Every instance that holds this version has its share. One below its share would have been found above.
        firsts = [
            ranking.first
            for kind in (Kind.ADMITTING, Kind.ADMITTING_SHORT_OF_MEMORY)
            if (ranking := self._ranking(kind, newest)) is not None
        ]
        return min((each for each in firsts if each is not None), key=lambda each: (each.work, each.id)), newest

    def _best_below(self, share: float, oldest: int) -> tuple[InstanceState, int] | None:
        """The instance with the least work below its share, of the newest version that has such an instance."""
        for version in sorted(self._versions(Kind.ADMITTING), reverse=True):
            if version < oldest:
                return None
            ranking = self._ranking(Kind.ADMITTING, version)
            if ranking is not None and (first := ranking.first) is not None and first.work < share:
                return first, version
        return None

    # -- the rankings --------------------------------------------------------------------------------------------------

    def _versions(self, kind: Kind) -> Collection[int]:
        """The versions for which there are members of a kind."""
        if self._changed:
            self._enter_changed()
        return self._rankings[kind].keys()

    def _members(self, kind: Kind, version: int) -> Mapping[int, InstanceState]:
        if self._changed:
            self._enter_changed()
        ranking = self._rankings[kind].get(version)
        return {} if ranking is None else ranking.members

    def _ranking(self, kind: Kind, version: int) -> Ranking | None:
        """The ranking of a kind and version, up to date; None if it has no members."""
        if self._changed:
            self._enter_changed()
        for instance in self._reloaded:
            for each, of_version in self._ranks[instance.id]:
                if each <= _LAST_RANKED:
                    self._rankings[each][of_version].reload(instance)
        self._reloaded.clear()
        return self._rankings[kind].get(version)

    def _enter_changed(self) -> None:
        """Moves the instances that have changed to the rankings that they belong to now."""
        for instance in self._changed:
            old, new = self._ranks.get(instance.id, ()), tuple(ranks_of(instance, pinned=self._pinned))
            for kind, version in set(old).difference(new):
                self._take_out(instance, kind, version)
            for kind, version in set(new).difference(old):
                self._put_in(instance, kind, version)
            self._ranks[instance.id] = new
        self._changed.clear()

    def _put_in(self, instance: InstanceState, kind: Kind, version: int) -> None:
        rankings = self._rankings[kind]
        if version not in rankings:
            rankings[version] = Ranking(largest_first=kind in _LARGEST_FIRST)
        rankings[version].add(instance)
        if kind is Kind.STAYING:
            self._total_pace += instance.pace

    def _take_out(self, instance: InstanceState, kind: Kind, version: int) -> None:
        rankings = self._rankings[kind]
        rankings[version].remove(instance)
        if kind is Kind.STAYING:
            self._total_pace -= instance.pace
        if not rankings[version].members:
            del rankings[version]


def ranks_of(instance: InstanceState, *, pinned: bool) -> Iterator[Rank]:
    """Yields the rankings that an instance belongs to."""
    resident, loading, short_of_memory = instance.resident, instance.loading, instance.short_of_memory
    for version in resident:
        yield Kind.ANY_RESIDENT, version
    for version in loading:
        yield Kind.ANY_LOADING, version
    if instance.leaving:
        if not instance.trajectories:
            yield Kind.LEAVING_IDLE, 0
        for version in {instance.newest_under(each) for each in instance.running}:
            yield Kind.LEAVING_RUNNING, version
        return
    yield Kind.STAYING, 0
    for version in resident:
        yield Kind.RESIDENT_SHORT_OF_MEMORY if short_of_memory else Kind.RESIDENT, version
        yield Kind.HOLDING, version
    for version in loading:
        yield Kind.HOLDING, version
    if loading:
        yield Kind.LOADING, 0
    if resident and not instance.awaits_newer:
        yield Kind.ADMITTING_SHORT_OF_MEMORY if short_of_memory else Kind.ADMITTING, max(resident)
    for version in instance.running:
        yield Kind.RUNNING, version
    for version in instance.movable:
        yield Kind.MOVABLE_SHORT_OF_MEMORY if short_of_memory else Kind.MOVABLE, version
    has_room = instance.free > 0 or not resident <= instance.running.keys() if pinned else not loading
    if has_room:
        yield Kind.WITH_ROOM, max((*resident, *loading), default=NO_VERSION)


def _by_order(instances: Iterable[InstanceState]) -> list[InstanceState]:
    """Sorts instances by the order in which they joined."""
    return sorted(instances, key=lambda each: each.order)
