"""Places trajectories on instances and versions in slots, and starts new groups. Changes the state of the controller.

Why this never deadlocks. A waiting trajectory is resumed as soon as an instance that stays holds its version. So the
version of a trajectory that still waits is either being loaded, or on no instance: it is *without a slot*. `rebalance`
gives such a version a slot unless all slots are taken by loads, by an evaluation, or by versions that have trajectories
with an earlier deadline. Each of these ends by itself, and no new group is admitted while a version is without a slot.
A trajectory that was suspended for one with an earlier deadline is not resumed in its place before that one has ended,
so suspensions cannot alternate. An instance that runs nothing always loads the newest version in the end.

If versions are not pinned, a trajectory waits while all resident versions are older than its own. Every instance that
stays then loads the newest version, whatever waits or runs (`load_in_one_slot`); only an evaluation delays one.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from stretto.core import admission, instances
from stretto.core.ledger import Group
from stretto.core.messages import (
    LoadSampled,
    LoadVersion,
    ReleaseInstance,
    Resume,
    Retire,
    Start,
    Suspend,
    SwapVersion,
    UnloadVersion,
)
from stretto.core.paces import paces_of
from stretto.core.rebalancing import InstanceView, Move, PoolView, moves_to_even_out, rebalance
from stretto.core.spreading import division

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.core.controller import Controller
    from stretto.core.instances import InstanceState
    from stretto.core.ledger import Trajectory

COOLDOWN = 2  # load samples for which a trajectory that was moved is not moved again to even out the work


def place(controller: Controller) -> None:
    """Resumes waiting trajectories, rebalances and loads versions, hands over, releases instances, retires versions."""
    controller.placement_due = controller.ledger.slot_freed = False
    resume(controller)
    if controller.next_update == controller.plan.updates:
        pass  # the last batch is taken: nothing will run again, so nothing is loaded
    elif not controller.plan.paradigm.pinned:
        outdated = controller.instances.with_room_for(controller.newest)
        for command in instances.load_in_one_slot(outdated, controller.newest, controller.evaluating):
            issue(controller, command)
    else:
        if controller.rebalancing_due or without_slot(controller):
            _rebalance(controller)
        _load_newest(controller)
    controller.rebalancing_due = False
    _hand_over(controller)
    _release(controller)
    for version in controller.window.retirable(controller.needs):
        _retire(controller, version)
    controller.without_slot = without_slot(controller) if controller.plan.paradigm.pinned else []


def without_slot(controller: Controller) -> list[int]:
    """Returns the versions of waiting trajectories that no instance which stays holds or is loading."""
    return [version for version in controller.ledger.waiting if not controller.instances.holds(version)]


def resume(controller: Controller) -> None:
    """Resumes every waiting trajectory on the instance with the least work that holds its version, oldest first.

    If versions are not pinned, a trajectory continues under the newest version that is resident on any instance, and
    waits while that is older than its own: its tokens would be of one version and then of an older one.
    """
    for version in sorted(controller.ledger.waiting):
        under = version if controller.plan.paradigm.pinned else controller.instances.newest_resident
        holders = controller.instances.holders(under) if under >= version else None
        if holders is None:
            continue
        for trajectory in list(controller.ledger.waiting[version].values()):
            instance = holders.first
            assert instance is not None, "a ranking has members"
            controller.ledger.run(trajectory, instance, under)
            holders.reload(instance)
            reason, trajectory.suspend_reason = trajectory.suspend_reason, ""
            controller.commands.append(Resume(trajectory.id, under, instance.id, reason))


def admit(controller: Controller) -> None:
    """Starts groups while the rules and the instances allow it. Closes admission if only another event can open it."""
    plan, ledger, rows = controller.plan, controller.ledger, controller.rows
    if ledger.num_active >= rows or not (has_room_for_due(controller) or has_room_in_reserve(controller)):
        return
    while rows_taken(controller) < rows and (has_room_for_due(controller) or has_room_in_reserve(controller)):
        place = None
        if not controller.without_slot:
            place = best_place(controller, lambda version: allows(controller, version))
        chosen = None if place is None else places_of(controller, *place)
        if place is None or chosen is None:
            # The share of an instance that is loading is kept for it; as their own work ends, others may take it over.
            controller.admission_open = controller.instances.any_loads
            return
        version = place[1]
        group = Group(controller.next_group, version, version + controller.staleness, wanted=plan.group_size)
        group.in_reserve = not allows_due(controller, version)
        controller.next_group += 1
        ids = tuple(range(group.id * plan.members, (group.id + 1) * plan.members))
        ledger.admit(group, ids, chosen)
        controller.commands.append(Start(group.id, version, group.deadline, tuple(each.id for each in chosen), ids))


def places_of(controller: Controller, best: InstanceState, version: int) -> list[InstanceState] | None:
    """Returns the instance of each member of a new group, whose best instance is `best`.

    The others have the least work among those on which the group could start too, under the same version. Returns None
    if one of them is still loading the version: the group waits for it.
    """
    plan, index = controller.plan, controller.instances
    whole = [best] * plan.members
    if plan.members == 1 or plan.spread == "never" or best.short_of_memory or index.num_staying == 1:
        return whole
    if plan.spread == "auto" and (controller.costs is None or not controller.length):
        return whole
    able = [*index.admitting(version, plan.members), *index.about_to_admit(version, plan.members)]
    able.sort(key=lambda each: (each.work, each.id))
    counts = division(
        [each.load for each in able], plan.members, plan.spread, controller.costs, controller.length,
        [each.pace for each in able],
    )  # fmt: skip
    if len(counts) == 1:
        return whole
    chosen = [instance for instance, count in zip(able, counts, strict=False) for _ in range(count)]
    return chosen if all(version in each.resident for each in chosen) else None


def has_room_for_due(controller: Controller) -> bool:
    """Returns True if another due group may be outstanding, as far as their number goes."""
    return controller.ledger.num_due < min(controller.plan.in_flight, controller.most_due)


def has_room_in_reserve(controller: Controller) -> bool:
    """Returns True if another group may be in reserve, as far as their number goes."""
    return len(controller.ledger.reserve) < controller.plan.reserve_groups and controller.most_due > 0


def rows_taken(controller: Controller) -> int:
    """Returns the number of trajectories that count against `rows`.

    One between turns frees its row while there is memory for another. If instances are short of memory, it does not:
    what would start in its row would need the memory in which its KV stays.
    """
    ledger = controller.ledger
    if ledger.num_between_turns and controller.instances.short_of_memory:
        return ledger.num_unfinished
    return ledger.num_active


def best_place(controller: Controller, allows: Callable[[int], bool]) -> tuple[InstanceState, int] | None:
    """Returns the best instance for a new group, and the version that the group gets there.

    On an instance that does not have the newest version yet, a group starts under an older version only if half of the
    updates that a group may wait are left to it. The trainer would have to wait for a group that is due at once.
    """
    oldest = controller.newest - controller.staleness // 2 if controller.plan.paradigm.pinned else 0
    return controller.instances.best_place(controller.most_running, oldest, allows)


def allows(controller: Controller, version: int) -> bool:
    """Returns True if a group of this version may start now: as due, or in reserve."""
    in_time = version + controller.staleness >= controller.next_update
    return allows_due(controller, version) or (in_time and has_room_in_reserve(controller))


def allows_due(controller: Controller, version: int) -> bool:
    """Returns True if a due group of this version may start now."""
    if not has_room_for_due(controller):
        return False
    deadline = version + controller.staleness
    if controller.plan.paradigm.bounded_by == "in_flight":
        return deadline >= controller.next_update
    return admission.admits(controller.ledger.outstanding_at, deadline, controller.next_update, controller.plan.batch)


def take_load_sample(controller: Controller, event: LoadSampled) -> None:
    """Records a load sample. Moves work off instances that have much more of it than others, or too little memory."""
    controller.ledger.sample(event.tokens, event.ending)
    controller.costs = event.costs or controller.costs
    controller.instances.report_paces(paces_of(event.speeds))
    for instance in controller.instances.values():
        instance.report_memory(instance.id in event.short_of_memory)
    if controller.plan.paradigm.pinned and controller.next_update < controller.plan.updates and not controller.stopping:
        _even_out(controller)


def _even_out(controller: Controller) -> None:
    """Evens out the work of each version. A version whose instances are all short of memory needs one more of them."""
    staying = controller.instances.staying
    loads, paces = {each.id: each.load for each in staying}, {each.id: each.pace for each in staying}
    short_of_memory = {each.id for each in staying if each.short_of_memory}
    for version in sorted(controller.ledger.running):
        running = {each.id: each.movable[version] for each in staying if version in each.movable}
        targets = [each.id for each in staying if version in each.resident and not each.short_of_memory]
        _carry_out(controller, moves_to_even_out(version, running, loads, targets, short_of_memory, paces))
        holders = [each for each in staying if each.holds(version)]
        if holders and all(each.short_of_memory for each in holders):
            controller.min_instances[version] = len(holders) + 1


def issue(controller: Controller, command: LoadVersion | SwapVersion | UnloadVersion) -> None:
    """Gives a command that changes the versions of an instance, and records it there."""
    controller.instances[command.instance].apply(command)
    controller.commands.append(command)


def view_pool(controller: Controller) -> PoolView:
    """Returns the state of the pool, for `rebalance`."""
    evaluating = controller.evaluating
    waiting = {version: len(each) for version, each in controller.ledger.waiting.items()}
    for instance in controller.instances.values():
        if instance.leaving:
            for version, count in instance.running.items():
                waiting[version] = waiting.get(version, 0) + count
    staying = [
        InstanceView(
            id=each.id,
            slots=each.slots,
            resident=frozenset(each.resident),
            loading=frozenset(each.loading),
            evaluates=evaluating.version if evaluating is not None and evaluating.instance == each.id else None,
            counts=dict(each.running),
            tokens=_tokens(each),
            short_of_memory=each.short_of_memory,
        )
        for each in controller.instances.staying
    ]
    deadlines: dict[int, int] = {}
    for group in controller.ledger.groups.values():
        if group.unfinished:
            deadlines[group.version] = min(group.deadline, deadlines.get(group.version, group.deadline))
    return PoolView(
        staying,
        controller.newest,
        waiting,
        deadlines,
        _top_up(controller),
        controller.admits_more,
        controller.min_instances,
    )


def newest_is_needed(controller: Controller) -> bool:
    """Returns True if groups could start under the newest version, and no instance holds or is loading it."""
    return not controller.instances.holds(controller.newest) and _top_up(controller) > 0


def _tokens(instance: InstanceState) -> dict[int, int]:
    """The context that runs on an instance, by version; at least 1 token for each trajectory."""
    tokens: dict[int, int] = {}
    for each in instance.trajectories.values():
        tokens[each.version] = tokens.get(each.version, 0) + max(1, each.tokens)
    return tokens


def _top_up(controller: Controller) -> int:
    """Returns the number of trajectories that may start under the newest version now."""
    plan, ledger = controller.plan, controller.ledger
    deadline = controller.newest + controller.staleness
    groups = min(plan.in_flight, controller.most_due) - ledger.num_due
    if plan.paradigm.bounded_by == "deadlines":
        groups = min(groups, admission.room(ledger.outstanding_at, deadline, controller.next_update, plan.batch))
    groups = max(0, groups)
    if deadline >= controller.next_update and has_room_in_reserve(controller):
        groups += plan.reserve_groups - len(ledger.reserve)
    groups = min(groups, -(-(controller.rows - rows_taken(controller)) // plan.members))
    return max(0, groups) * plan.members


def _rebalance(controller: Controller) -> None:
    """Divides the instances between the versions, and carries the changes out."""
    changes = rebalance(view_pool(controller))
    for change in changes:
        instance = controller.instances[change.instance]
        moving = [each for each in instance.trajectories.values() if each.version in change.suspend]
        _suspend(controller, instance, moving, change.reason)
    for change in changes:
        for version in change.unload:
            issue(controller, UnloadVersion(change.instance, version))
        for version in change.load:
            issue(controller, LoadVersion(change.instance, version))
    if changes:
        resume(controller)


def _load_newest(controller: Controller) -> None:
    """Loads the newest version into free and idle slots, unless a version that is short of instances needs the slot."""
    newest, evaluation = controller.newest, controller.evaluating
    by_order = {each.order: each for each in controller.instances.with_room_for(newest)}
    queue = list(by_order)  # sorted, and so a heap
    while queue:
        instance = by_order.pop(heapq.heappop(queue))
        if instance.holds(newest):
            continue
        if instance.free <= 0:
            idle = instances.evictable(instance, evaluation)
            if not idle:
                continue
            if instance.load == 0 and (relieved := _take_over(controller, instance, idle)):
                for each in relieved:  # they may have an idle slot now
                    if each.order > instance.order and each.order not in by_order:
                        by_order[each.order] = each
                        heapq.heappush(queue, each.order)
                continue
            issue(controller, UnloadVersion(instance.id, idle[0]))
        issue(controller, LoadVersion(instance.id, newest))


def _take_over(controller: Controller, instance: InstanceState, versions: Iterable[int]) -> list[InstanceState]:
    """Moves trajectories to an idle instance, of the first of `versions` that would be short of instances without it.

    Returns the instances that gave trajectories.
    """
    index, ledger = controller.instances, controller.ledger
    for version in versions:
        holders = index.num_running(version)
        if not holders:
            continue
        short = (
            ledger.running.get(version, 0) * index.num_staying > holders * ledger.num_unfinished
            or controller.min_instances.get(version, 0) > holders
        )
        if (not short and controller.admits_more) or instance.short_of_memory:
            continue
        sources = index.movable_sources(version)
        moves = moves_to_even_out(
            version,
            running={each.id: each.movable[version] for each in sources},
            loads={each.id: each.load for each in (*sources, instance)},
            targets=[instance.id],
            short_of_memory={each.id for each in sources if each.short_of_memory},
            paces={each.id: each.pace for each in (*sources, instance)},
        )
        if moves:
            _carry_out(controller, moves)
            return [index[move.source] for move in moves]
    return []


def _carry_out(controller: Controller, moves: Iterable[Move]) -> None:
    """Moves trajectories as planned."""
    for move in moves:
        source, target = controller.instances[move.source], controller.instances[move.target]
        able = [each for each in source.trajectories.values() if each.version == move.version and each.movable]
        # Those with the fewest bytes of KV move, unless the source is short of memory.
        able.sort(key=lambda each: (-each.tokens if source.short_of_memory else each.tokens, each.id))
        moving = able[: move.count]
        _suspend(controller, source, moving, move.reason)
        for trajectory in moving:
            trajectory.suspend_reason = ""
            controller.ledger.run(trajectory, target, move.version)
            controller.commands.append(Resume(trajectory.id, move.version, target.id, move.reason))


def _suspend(controller: Controller, instance: InstanceState, trajectories: Iterable[Trajectory], reason: str) -> None:
    """Takes trajectories off their instance; they wait."""
    moving = list(trajectories)
    if not moving:
        return
    for trajectory in moving:
        controller.ledger.interrupt(trajectory)
        trajectory.suspend_reason, trajectory.movable_from = reason, controller.ledger.num_samples + COOLDOWN
        controller.counters.moved += 1
    controller.commands.append(Suspend(instance.id, tuple(each.id for each in moving), reason))


def _hand_over(controller: Controller) -> None:
    """Moves trajectories off instances that leave, if they can continue elsewhere. The others keep running there."""
    index, pinned = controller.instances, controller.plan.paradigm.pinned

    def continues(version: int) -> bool:
        return index.has_resident(version) if pinned else index.newest_resident >= version

    for instance in index.leaving_with(continues):
        elsewhere = {version for version in instance.running if continues(instance.newest_under(version))}
        moving = [each for each in instance.trajectories.values() if each.version in elsewhere]
        _suspend(controller, instance, moving, f"instance {instance.id} leaves")
    resume(controller)


def _release(controller: Controller) -> None:
    """Releases the instances that leave and have nothing left to do."""
    for instance in controller.instances.leaving_idle:
        if controller.evaluating is None or controller.evaluating.instance != instance.id:
            controller.instances.remove(instance.id)
            controller.commands.append(ReleaseInstance(instance.id))


def _retire(controller: Controller, version: int) -> None:
    """Unloads a version that nothing needs from all instances, and forgets it."""
    for instance in controller.instances.with_resident(version):
        issue(controller, UnloadVersion(instance.id, version))
    controller.window.retire(version)
    controller.commands.append(Retire(version))
    controller.forget_evaluation(version)
