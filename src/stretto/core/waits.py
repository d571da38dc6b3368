"""Explains why anything waits, in text that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.core import admission, scheduling
from stretto.core.instance_index import NO_VERSION
from stretto.core.ledger import Group, TrajectoryState

if TYPE_CHECKING:
    from stretto.core.controller import Controller

MOST_NAMED = 3  # groups or instances named in one reason


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait. `owner` is "trainer", "admission", "publish", "trajectories" or "finish"."""

    owner: str
    reason: str
    groups: tuple[int, ...] = ()  # the unfinished groups that it waits for, if the rule names any


def explain(controller: Controller) -> list[Wait]:
    """Returns every wait of a run, at most one for each owner."""
    if controller.finished:
        return []
    waits = (
        _publish(controller),
        _trainer(controller),
        _admission(controller),
        _trajectories(controller),
        _finish(controller),
    )
    return [wait for wait in waits if wait is not None]


def waited_groups(controller: Controller) -> list[Group]:
    """Returns the unfinished groups that the next batch waits for, earliest deadline first."""
    ledger, plan = controller.ledger, controller.plan
    latest = None
    if plan.paradigm.at_limit == "wait":
        latest = admission.waited_deadline(
            ledger.outstanding_at, ledger.finished_at, controller.next_update, plan.batch
        )
    elif ledger.num_finished_due >= plan.batch:
        return []
    too_few = ledger.num_finished_due < plan.batch
    unfinished = (
        group
        for group in ledger.groups.values()
        if group.unfinished and (too_few or (not group.in_reserve and (latest is None or group.deadline <= latest)))
    )
    return sorted(unfinished, key=lambda group: (group.deadline, group.id))


def _publish(controller: Controller) -> Wait | None:
    if controller.unpublished is None:
        return None
    running = [group for group in controller.ledger.groups.values() if group.unfinished and not group.in_reserve]
    reason = (
        f"version {controller.unpublished} is published when nothing runs any more: {controller.ledger.num_unfinished} "
        f"trajectories still run, of {_describe(running)}"
    )
    return Wait("publish", reason, tuple(group.id for group in running))


def _trainer(controller: Controller) -> Wait | None:
    plan, ledger = controller.plan, controller.ledger
    if controller.training is not None or controller.next_update == plan.updates or controller.stopping:
        return None
    if controller.unpublished is not None:
        return Wait(
            "trainer", f"update {controller.next_update}: version {controller.unpublished} is not published yet"
        )
    if ledger.batch:
        return Wait("trainer", f"update {controller.next_update - 1} starts again when the first instance joins")
    groups = waited_groups(controller)
    finished = ledger.num_finished_due
    have = f"update {controller.next_update}: {finished} of {plan.batch} groups are finished"
    if finished >= plan.batch:
        have = (
            f"update {controller.next_update}: {finished} groups are finished, which is enough, "
            "but older groups must be trained first"
        )
    if not groups:
        return Wait("trainer", f"{have}, and no other has started yet")
    return Wait("trainer", f"{have}; unfinished: {_describe(groups)}", tuple(group.id for group in groups))


def _admission(controller: Controller) -> Wait | None:
    reason = _closed(controller)
    return None if reason is None else Wait("admission", reason)


def _closed(controller: Controller) -> str | None:
    """Returns why no group may start now; None if one may."""
    plan, ledger = controller.plan, controller.ledger
    if controller.stopping:
        return "the run was asked to stop"
    reserve = f", and {len(ledger.reserve)} more in reserve" if plan.reserve_groups else ""
    if not controller.admits_more and not scheduling.has_room_in_reserve(controller):
        return f"all groups that the {plan.updates} updates of the run need have started{reserve}"
    if controller.unpublished is not None:
        return f"version {controller.unpublished} is published first, when nothing runs any more"
    if not controller.instances.num_staying:
        return "there is no instance"
    if controller.without_slot:
        waiting = ", ".join(
            f"{version} ({len(ledger.waiting[version])} trajectories)" for version in controller.without_slot
        )
        return f"trajectories of older versions go first, and no instance has a free slot for version {waiting}"
    limit = f"`rollout.rows` is {plan.rows}"
    if controller.rows < plan.rows:
        limit = f"there are {controller.rows} until the first batch is taken"
    if ledger.num_active >= controller.rows:
        taken = f"{ledger.num_active} trajectories run or wait to run"
        return f"all rows are taken: {taken}, and {limit}"
    if scheduling.rows_taken(controller) >= controller.rows:
        return (
            f"all rows are taken: {ledger.num_active} trajectories run or wait to run, {ledger.num_between_turns} are "
            f"between turns, and {limit}; those between turns keep their rows, because instances are short of KV memory"
        )
    if ledger.num_due >= plan.in_flight and not scheduling.has_room_in_reserve(controller):
        return (
            f"{ledger.num_due} groups have started and are not trained yet{reserve}, and `rollout.in_flight` is "
            f"{plan.in_flight}"
        )
    if controller.instances.newest_resident == NO_VERSION:
        loading = ", ".join(f"{i.id} ({', '.join(map(str, sorted(i.loading)))})" for i in controller.instances.staying)
        return f"no instance has loaded a version yet; instances (and the versions that they load): {loading}"
    if scheduling.best_place(controller, lambda version: True) is None:
        if loading := ", ".join(str(each.id) for each in controller.instances.staying if each.loading):
            return f"instances that have room are still loading a version ({loading}), and the others have their share"
        return (
            f"no instance holds version {controller.newest} yet, and those with older ones run them to their end first"
        )
    place = scheduling.best_place(controller, lambda version: scheduling.allows(controller, version))
    if place is not None:
        if scheduling.places_of(controller, *place) is not None:
            return None
        loading = ", ".join(str(each.id) for each in controller.instances.staying if place[1] in each.loading)
        return f"the next group is spread over several instances, and some still load version {place[1]} ({loading})"
    newest = controller.instances.newest_resident
    return (
        f"a new group would be too old when its turn comes: of version {newest}, it must be trained by update "
        f"{newest + controller.staleness} (`rollout.staleness`), and the {ledger.num_due} groups that have started "
        f"fill the batches from update {controller.next_update} until then{reserve}"
    )


def _trajectories(controller: Controller) -> Wait | None:
    """Trajectories of versions that are not pinned, which could continue only under an older version."""
    waiting = controller.ledger.waiting
    if controller.plan.paradigm.pinned or not waiting or controller.stopping:
        return None
    groups = {each.group.id: each.group for of_version in waiting.values() for each in of_version.values()}
    counts = ", ".join(f"{len(waiting[version])} of version {version}" for version in sorted(waiting))
    reason = f"no instance has their version or a newer one yet ({counts}): {_coming(controller)}"
    return Wait("trajectories", reason, tuple(sorted(groups)))


def _coming(controller: Controller) -> str:
    """Says when each instance will have the newest version, if versions are not pinned."""
    words = []
    for each in controller.instances.staying:
        if each.loading:
            words.append(f"instance {each.id} loads version {max(each.loading)}")
        elif controller.evaluating is not None and controller.evaluating.instance == each.id:
            words.append(
                f"instance {each.id} takes version {controller.newest} when its evaluation of version "
                f"{controller.evaluating.version} has ended"
            )
    return "; ".join(_named(words)) or "there is no instance"


def _finish(controller: Controller) -> Wait | None:
    if (
        controller.next_update < controller.plan.updates
        or controller.training is not None
        or controller.evaluating is None
    ):
        return None
    instance, version = controller.evaluating
    return Wait("finish", f"the evaluation of version {version} runs on instance {instance}")


def _describe(groups: Iterable[Group]) -> str:
    """Describes groups: version, deadline, and the states and instances of their trajectories."""
    words = []
    for group in groups:
        states: dict[str, int] = {}
        for trajectory in group.trajectories:
            if trajectory.state > TrajectoryState.SCORING:
                continue
            where = "" if trajectory.instance is None else f" on instance {trajectory.instance.id}"
            state = trajectory.state.label + where
            states[state] = states.get(state, 0) + 1
        inside = ", ".join(f"{count} {state}" for state, count in states.items())
        words.append(f"group {group.id} (version {group.version}, due by update {group.deadline}: {inside})")
    return "; ".join(_named(words))


def _named(words: list[str]) -> list[str]:
    """Returns the first few, and how many more there are."""
    named = words[:MOST_NAMED]
    if len(words) > len(named):
        named.append(f"and {len(words) - len(named)} more")
    return named
