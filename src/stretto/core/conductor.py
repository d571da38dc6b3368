"""Gives every trajectory a place, as `orchestration` plans it, on the state of a run, and starts new ones.

Why this never deadlocks: a trajectory that waits resumes at once where its version is resident on an instance that
stays, so one that still waits has its version on none, or on one that is loading it. A version that is on none is
*stranded*. `repartition` gives it a slot unless all are taken by loads, by an evaluation, or by versions that have
trajectories and an earlier deadline; each of these ends by itself, and while any version is stranded nothing new is
admitted. What was suspended for an earlier deadline is not resumed in its place before that has ended, so suspensions
cannot chase each other. An instance that runs nothing always takes the newest version in the end.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from stretto.core import admission, placement
from stretto.core.ledger import Group, State
from stretto.core.messages import Load, Release, Resume, Retire, Start, Surveyed, Suspend, Swap, Unload
from stretto.core.orchestration import Scene, Shift, Site, evened, repartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.core.brain import Brain
    from stretto.core.ledger import Trajectory
    from stretto.core.placement import Instance

REST = 2  # surveys for which a trajectory that was moved is not moved again to even out the work


def place(brain: Brain) -> None:
    """Resume what waits, divide the instances between the versions, load, hand over, release and retire."""
    brain.place_due = brain.ledger.freed = False
    resume(brain)
    if brain.next_update == brain.plan.updates:
        pass  # the last batch is taken: nothing will run any more, so nothing is loaded
    elif not brain.plan.paradigm.pinned:
        for command in placement.place_in_one_slot(brain.staying, brain.newest, brain.evaluating):
            give(brain, command)
    else:
        if brain.cycle_due or placement.stranded(brain.staying, brain.ledger.pending):
            _repartition(brain)
        _take_newest(brain)
    brain.cycle_due = False
    _hand_over(brain)
    _release(brain)
    for version in brain.window.retirable(brain.needs):
        _retire(brain, version)
    brain.stranded = placement.stranded(brain.staying, brain.ledger.pending) if brain.plan.paradigm.pinned else []


def resume(brain: Brain) -> None:
    """Give every trajectory that waits the least crowded instance that holds its version, the oldest version first."""
    staying = brain.staying
    pinned = brain.plan.paradigm.pinned
    for version in sorted(brain.ledger.pending):
        holders = [each for each in staying if (version in each.resident if pinned else each.resident)]
        if not pinned and holders:
            newest = max(max(each.resident) for each in holders)
            holders = [each for each in holders if newest in each.resident]
        if not holders:
            continue
        queue = [(each.crowded, each.load, each.id) for each in holders]
        heapq.heapify(queue)
        for trajectory in list(brain.ledger.pending[version].values()):
            crowded, load, id = queue[0]
            instance = brain.instances[id]
            under = version if pinned else max(instance.resident)
            brain.ledger.run(trajectory, instance, under)
            reason, trajectory.why = trajectory.why, ""
            brain.commands.append(Resume(trajectory.id, under, id, reason))
            heapq.heapreplace(queue, (crowded, load + 1, id))


def admit(brain: Brain) -> None:
    """Start groups while something allows it. What closes admission for longer also closes `open`."""
    plan, ledger = brain.plan, brain.ledger
    if ledger.num_active >= plan.rows or len(ledger.groups) >= plan.in_flight:
        return
    most = min(plan.in_flight, (plan.updates - brain.next_update) * plan.batch)
    places = candidates(brain)
    while ledger.num_active < plan.rows and len(ledger.groups) < most:
        place = None if brain.stranded else places.best(lambda version: allows(brain, version))
        if place is None:
            # What is loading keeps a place for its share, which others take over as their own work ends.
            brain.open = any(each.loading for each in brain.instances.values())
            return
        instance, version = place
        group = Group(brain.next_group, version, version + brain.staleness)
        brain.next_group += 1
        ids = tuple(range(group.id * plan.group_size, (group.id + 1) * plan.group_size))
        ledger.admit(group, ids, instance)
        places.started()
        brain.commands.append(Start(group.id, version, group.deadline, instance.id, ids))


def candidates(brain: Brain) -> placement.Candidates:
    """Where new groups could go by what the instances hold.

    Where the newest version has not come yet, an older one takes new groups only if half of the updates that a group
    may wait are left to them: one that is due at once would have the trainer wait for its whole tail.
    """
    oldest = brain.newest - brain.staleness // 2 if brain.plan.paradigm.pinned else 0
    return placement.Candidates(brain.staying, brain.plan.most_running, oldest)


def allows(brain: Brain, version: int) -> bool:
    """Whether the rules let a group of this version start now."""
    deadline = version + brain.staleness
    if brain.plan.paradigm.bounded_by == "in_flight":
        return deadline >= brain.next_update
    return admission.admits(brain.ledger.outstanding_at, deadline, brain.next_update, brain.plan.batch)


def survey(brain: Brain, event: Surveyed) -> None:
    """Take in how far everything is, and relieve whoever has much more to do than others, or too little memory."""
    for id, trajectory in brain.ledger.trajectories.items():
        if trajectory.state is State.RUNNING:
            trajectory.tokens = event.tokens.get(id, 0)
            trajectory.ending = id in event.ending
    for instance in brain.instances.values():
        instance.crowded = instance.id in event.crowded
    if brain.plan.paradigm.pinned and brain.next_update < brain.plan.updates and not brain.stopping:
        _relieve(brain)


def _relieve(brain: Brain) -> None:
    """Even out the work of each version. One whose instances are all short of memory is to have one more of them."""
    staying = brain.staying
    loads = {each.id: each.load for each in staying}
    for version in sorted(brain.ledger.running):
        _carry_out(brain, _evened(brain, version, loads, staying))
        holders = [each for each in staying if version in each.resident or version in each.loading]
        if holders and all(each.crowded for each in holders):
            brain.granted[version] = len(holders) + 1


def give(brain: Brain, command: Load | Swap | Unload) -> None:
    brain.instances[command.instance].apply(command)
    brain.commands.append(command)


def survey_scene(brain: Brain) -> Scene:
    """The pool as the cycle sees it."""
    evaluating = brain.evaluating
    waiting = {version: len(each) for version, each in brain.ledger.pending.items()}
    for instance in brain.instances.values():
        if instance.leaving:
            for version, count in instance.running.items():
                waiting[version] = waiting.get(version, 0) + count
    sites = [
        Site(
            id=each.id,
            slots=each.slots,
            resident=frozenset(each.resident),
            loading=frozenset(each.loading),
            evaluates=evaluating[1] if evaluating is not None and evaluating[0] == each.id else None,
            counts=dict(each.running),
            tokens=_tokens(each),
            crowded=each.crowded,
        )
        for each in brain.staying
    ]
    deadlines: dict[int, int] = {}
    for group in brain.ledger.groups.values():
        if group.unfinished:
            deadlines[group.version] = min(group.deadline, deadlines.get(group.version, group.deadline))
    return Scene(sites, brain.newest, waiting, deadlines, _top_up(brain), brain.admits_more, brain.granted)


def newest_is_missed(brain: Brain) -> bool:
    """Whether something could start under the newest version, and no instance has it or is loading it."""
    newest, instances = brain.newest, brain.instances.values()
    if any(newest in each.resident or newest in each.loading for each in instances if not each.leaving):
        return False
    return _top_up(brain) > 0


def _tokens(instance: Instance) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for each in instance.trajectories.values():
        tokens[each.version] = tokens.get(each.version, 0) + max(1, each.tokens)
    return tokens


def _top_up(brain: Brain) -> int:
    """The trajectories that the rules would let start under the newest version now."""
    plan, ledger = brain.plan, brain.ledger
    outstanding = len(ledger.groups)
    most = min(plan.in_flight, (plan.updates - brain.next_update) * plan.batch) - outstanding
    groups = min(most, -(-(plan.rows - ledger.num_active) // plan.group_size))
    if plan.paradigm.bounded_by == "deadlines":
        deadline = brain.newest + brain.staleness
        groups = min(groups, admission.room(ledger.outstanding_at, deadline, brain.next_update, plan.batch))
    return max(0, groups) * plan.group_size


def _repartition(brain: Brain) -> None:
    changes = repartition(survey_scene(brain))
    for change in changes:
        instance = brain.instances[change.instance]
        moving = [each for each in instance.trajectories.values() if each.version in change.suspend]
        _suspend(brain, instance, moving, change.reason)
    for change in changes:
        for version in change.unload:
            give(brain, Unload(change.instance, version))
        for version in change.load:
            give(brain, Load(change.instance, version))
    if changes:
        resume(brain)


def _take_newest(brain: Brain) -> None:
    """Load the newest version where a slot is free or idle, unless a version that is short of instances needs it."""
    newest, hold = brain.newest, brain.evaluating
    for instance in brain.staying:
        if newest in instance.resident or newest in instance.loading:
            continue
        if instance.free <= 0:
            idle = placement.evictable(instance, hold)
            if not idle or (instance.load == 0 and any(_takes_over(brain, instance, each) for each in idle)):
                continue
            give(brain, Unload(instance.id, idle[0]))
        give(brain, Load(instance.id, newest))


def _takes_over(brain: Brain, instance: Instance, version: int) -> bool:
    """Have an idle instance relieve others of a version that would be short of instances without it."""
    running, staying = brain.ledger.running.get(version, 0), brain.staying
    holders = sum(version in each.running for each in staying)
    if not holders:
        return False
    short = running * len(staying) > holders * brain.ledger.num_active or brain.granted.get(version, 0) > holders
    if not short and brain.admits_more:
        return False
    loads = {each.id: each.load for each in staying}
    return _carry_out(brain, _evened(brain, version, loads, [instance]))


def _evened(brain: Brain, version: int, loads: dict[int, int], targets: Iterable[Instance]) -> list[Shift]:
    running = {each.id: len(able) for each in brain.staying if (able := _movable(brain, each, version))}
    holders = [each.id for each in targets if version in each.resident and not each.crowded]
    return evened(version, running, loads, holders, {each.id for each in brain.staying if each.crowded})


def _movable(brain: Brain, instance: Instance, version: int) -> list[Trajectory]:
    """What is worth moving to even out the work: neither just moved nor about to end."""
    if version not in instance.running:
        return []
    return [
        each
        for each in instance.trajectories.values()
        if each.version == version and not each.ending and each.rests_until <= brain.surveys
    ]


def _carry_out(brain: Brain, shifts: Iterable[Shift]) -> bool:
    """Move trajectories as planned; whether any was."""
    moved = False
    for shift in shifts:
        source, target = brain.instances[shift.source], brain.instances[shift.target]
        able = _movable(brain, source, shift.version)
        # The fewest bytes, unless memory is what is short.
        able.sort(key=lambda each: (-each.tokens if source.crowded else each.tokens, each.id))
        moving = able[: shift.count]
        _suspend(brain, source, moving, shift.reason)
        for trajectory in moving:
            trajectory.why = ""
            brain.ledger.run(trajectory, target, shift.version)
            brain.commands.append(Resume(trajectory.id, shift.version, target.id, shift.reason))
        moved = True
    return moved


def _suspend(brain: Brain, instance: Instance, trajectories: Iterable[Trajectory], reason: str) -> None:
    moving = list(trajectories)
    if not moving:
        return
    for trajectory in moving:
        brain.ledger.interrupt(trajectory)
        trajectory.why, trajectory.rests_until = reason, brain.surveys + REST
        brain.counters.moved += 1
    brain.commands.append(Suspend(instance.id, tuple(each.id for each in moving), reason))


def _hand_over(brain: Brain) -> None:
    """Take from instances that leave what can go on elsewhere. The rest runs on there until it can, or ends."""
    staying = brain.staying
    for instance in [each for each in brain.instances.values() if each.leaving and each.trajectories]:
        if brain.plan.paradigm.pinned:
            elsewhere = {version for version in instance.running if any(version in each.resident for each in staying)}
        else:
            elsewhere = set(instance.running) if any(each.resident for each in staying) else set()
        moving = [each for each in instance.trajectories.values() if each.version in elsewhere]
        _suspend(brain, instance, moving, f"instance {instance.id} leaves")
    resume(brain)


def _release(brain: Brain) -> None:
    """Let go whoever was asked to and has nothing left to do."""
    for instance in [each for each in brain.instances.values() if each.leaving and not each.trajectories]:
        if brain.evaluating is None or brain.evaluating[0] != instance.id:
            del brain.instances[instance.id]
            brain.commands.append(Release(instance.id))


def _retire(brain: Brain, version: int) -> None:
    for instance in brain.instances.values():
        if version in instance.resident:
            give(brain, Unload(instance.id, version))
    brain.window.retire(version)
    brain.commands.append(Retire(version))
    brain.forget_evaluation(version)
