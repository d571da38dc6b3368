"""Why anything waits, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.core import admission, conductor
from stretto.core.ledger import Group, State

if TYPE_CHECKING:
    from stretto.core.brain import Brain

MOST_NAMED = 8  # groups or trajectories named in one reason


@dataclass(frozen=True, slots=True)
class Wait:
    """`owner` ("trainer", "admission", "publish" or "finish") waits, and why."""

    owner: str
    reason: str
    groups: tuple[int, ...] = ()  # the unfinished groups that it waits for, where the rule names some


def explain(brain: Brain) -> list[Wait]:
    """Every wait of a run, at most one an owner."""
    if brain.finished:
        return []
    waits = (_publish(brain), _trainer(brain), _admission(brain), _finish(brain))
    return [wait for wait in waits if wait is not None]


def waited_groups(brain: Brain) -> list[Group]:
    """The unfinished groups that the next batch waits for, earliest deadline first."""
    ledger, plan = brain.ledger, brain.plan
    latest = None
    if plan.paradigm.at_limit == "wait":
        latest = admission.waited_deadline(ledger.outstanding_at, ledger.finished_at, brain.next_update, plan.batch)
    elif len(ledger.finished) >= plan.batch:
        return []
    unfinished = (
        group
        for group in ledger.groups.values()
        if group.unfinished and (latest is None or len(ledger.finished) < plan.batch or group.deadline <= latest)
    )
    return sorted(unfinished, key=lambda group: (group.deadline, group.id))


def _publish(brain: Brain) -> Wait | None:
    if brain.unpublished is None:
        return None
    running = [group for group in brain.ledger.groups.values() if group.unfinished]
    reason = (
        f"version {brain.unpublished} is published when nothing runs: {brain.ledger.num_active} trajectories still do, "
        f"of {_describe(running)}"
    )
    return Wait("publish", reason, tuple(group.id for group in running))


def _trainer(brain: Brain) -> Wait | None:
    plan, ledger = brain.plan, brain.ledger
    if brain.training is not None or brain.next_update == plan.updates or brain.stopping:
        return None
    if brain.unpublished is not None:
        return Wait("trainer", f"update {brain.next_update}: version {brain.unpublished} is not published yet")
    if ledger.batch:
        return Wait("trainer", f"update {brain.next_update - 1} starts again when the first instance joins")
    groups = waited_groups(brain)
    finished = len(ledger.finished)
    have = f"update {brain.next_update}: {finished} of {plan.batch} groups are finished"
    if finished >= plan.batch:
        have = f"update {brain.next_update}: {finished} finished groups are enough for it, but older ones are due first"
    if not groups:
        return Wait("trainer", f"{have}, and no other is under way")
    return Wait("trainer", f"{have}: {_describe(groups)}", tuple(group.id for group in groups))


def _admission(brain: Brain) -> Wait | None:
    reason = _closed(brain)
    return None if reason is None else Wait("admission", reason)


def _closed(brain: Brain) -> str | None:
    plan, ledger = brain.plan, brain.ledger
    if brain.stopping:
        return "the run was asked to stop"
    if len(ledger.groups) >= (plan.updates - brain.next_update) * plan.batch:
        return f"every group that {plan.updates} updates need is admitted"
    if brain.unpublished is not None:
        return f"draining: version {brain.unpublished} waits to be published"
    if not brain.staying:
        return "there is no instance"
    if brain.stranded:
        waiting = ", ".join(f"{version} ({len(ledger.pending[version])} trajectories)" for version in brain.stranded)
        return f"no slot: versions {waiting} are on no instance and wait for one that is free"
    if ledger.num_active >= plan.rows:
        return f"`rows`: {ledger.num_active} trajectories run or wait for an instance, the target is {plan.rows}"
    if len(ledger.groups) >= plan.in_flight:
        return f"`in_flight`: {len(ledger.groups)} groups are outstanding"
    if not any(instance.resident for instance in brain.staying):
        loading = ", ".join(f"{i.id} ({', '.join(map(str, sorted(i.loading)))})" for i in brain.staying)
        return f"no version is loaded yet; instances (and what they load): {loading}"
    candidates = conductor.candidates(brain)
    if not list(candidates):
        if loading := ", ".join(str(each.id) for each in brain.staying if each.loading):
            return f"instances {loading} are loading, and the others have their share of the work"
        return f"no instance holds version {brain.newest} yet, and those with older ones run them to their end first"
    if candidates.best(lambda version: conductor.allows(brain, version)) is not None:
        return None
    newest = max(max(instance.resident) for instance in brain.staying if instance.resident)
    return (
        f"deadlines: a group of version {newest} would be due by update {newest + brain.staleness}, and "
        f"{len(ledger.groups)} outstanding groups fill the batches from update {brain.next_update} until then"
    )


def _finish(brain: Brain) -> Wait | None:
    if brain.next_update < brain.plan.updates or brain.training is not None or brain.evaluating is None:
        return None
    instance, version = brain.evaluating
    return Wait("finish", f"the evaluation of version {version} runs on instance {instance}")


def _describe(groups: Iterable[Group]) -> str:
    """Groups with their version, and where each of their trajectories is."""
    words = []
    for group in groups:
        states: dict[str, int] = {}
        for trajectory in group.trajectories:
            if trajectory.state > State.SCORING:
                continue
            where = "" if trajectory.instance is None else f" on instance {trajectory.instance.id}"
            state = trajectory.state.name.lower() + where
            states[state] = states.get(state, 0) + 1
        inside = ", ".join(f"{count} {state}" for state, count in states.items())
        words.append(f"group {group.id} (version {group.version}, due {group.deadline}: {inside})")
    named = words[:MOST_NAMED]
    if len(words) > len(named):
        named.append(f"and {len(words) - len(named)} more")
    return "; ".join(named)
