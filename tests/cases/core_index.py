"""The answers of an `InstanceIndex`, found again by looking at every instance."""

from __future__ import annotations

from collections.abc import Callable

from stretto.core.instance_index import NO_VERSION, InstanceIndex, Ranking
from stretto.core.instances import InstanceState
from stretto.core.rebalancing import Move, moves_to_even_out


def check_index(index: InstanceIndex, *, pinned: bool, target: int, oldest: int, refused: int) -> None:
    """Compares every answer with what the instances say. `refused` is the newest version that may not start."""
    everyone = list(index.values())
    staying = [each for each in everyone if not each.leaving]
    leaving = [each for each in everyone if each.leaving]
    versions = range(2 + max((version for each in everyone for version in (*each.resident, *each.loading)), default=0))
    assert index.num_staying == len(staying)
    assert index.staying == staying
    assert index.any_loads == any(each.loading for each in everyone)
    assert index.newest_resident == max((version for each in staying for version in each.resident), default=NO_VERSION)
    assert index.leaving_idle == [each for each in leaving if not each.trajectories]
    for version in versions:
        resident = [each for each in staying if version in each.resident]
        assert index.holds(version) == any(version in each.resident or version in each.loading for each in staying)
        assert index.has_resident(version) == bool(resident)
        assert index.num_running(version) == sum(version in each.running for each in staying)
        assert index.is_loading(version) == any(version in each.loading for each in everyone)
        assert index.with_resident(version) == [each for each in everyone if version in each.resident]
        has_memory = [each for each in resident if not each.short_of_memory]
        assert in_order(index.holders(version)) == sorted(has_memory or resident, key=lambda each: (each.work, each.id))
        for later in (version, version + 1):
            runs = [each for each in leaving if any(each.newest_under(one) < later for one in each.running)]
            assert index.leaving_with(lambda each, later=later: each < later) == runs
        check_sources(index, version)
    for newest in versions[-2:]:  # nobody holds a newer one
        assert index.with_room_for(newest) == _with_room(staying, newest, pinned=pinned)
    for limit in (-3, refused):
        allows = _newer_than(limit)
        assert index.best_place(target, oldest, allows) == best_place(staying, target, oldest, allows)


def in_order(ranking: Ranking | None) -> list[InstanceState]:
    """All members of a ranking; the first is asked for before and after, as the order is found by changing a heap."""
    if ranking is None:
        return []
    first, found = ranking.first, list(ranking.in_order())
    assert ranking.first is first is found[0]
    return found


def _newer_than(limit: int) -> Callable[[int], bool]:
    return lambda version: version > limit


def _with_room(staying: list[InstanceState], newest: int, *, pinned: bool) -> list[InstanceState]:
    if not pinned:
        return [each for each in staying if not each.loading and newest not in each.resident]
    return [
        each
        for each in staying
        if not each.holds(newest) and (each.free > 0 or any(version not in each.running for version in each.resident))
    ]


def check_sources(index: InstanceIndex, version: int) -> None:
    """An idle instance is given the same by the few sources that the index names as by all."""
    target = -1
    assert moves(index.movable_sources(version), version, target) == moves(index.staying, version, target)


def moves(sources: list[InstanceState], version: int, target: int) -> list[Move]:
    return moves_to_even_out(
        version,
        running={each.id: each.movable[version] for each in sources if version in each.movable},
        loads={**{each.id: each.load for each in sources}, target: 0},
        targets=[target],
        short_of_memory={each.id for each in sources if each.short_of_memory},
        paces={each.id: each.pace for each in sources},
    )


def best_place(
    staying: list[InstanceState], target: int, oldest: int, allows: Callable[[int], bool]
) -> tuple[InstanceState, int] | None:
    """The first of all places in their order that the rules allow."""
    share = 1 + target / (sum(each.pace for each in staying) or 1.0)
    hopeful = any(each.loading and each.work < share for each in staying)
    ranked = []
    for each in staying:
        if each.resident and not each.awaits_newer and max(each.resident) >= oldest:
            full = each.work >= share or each.short_of_memory
            if not (full and hopeful):
                ranked.append((full, -max(each.resident), each.work, each.id, each))
    for _, negative, _, _, each in sorted(ranked, key=lambda place: place[:4]):
        if allows(-negative):
            return each, -negative
    return None
