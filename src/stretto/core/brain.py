"""Everything that a run decides, and nothing that it does: an event in, commands out, the laws hold after each.

Contract with whoever carries the commands out:

- The commands of one reply are carried out in their order; those for one instance also in order from reply to reply (an
  `Unload` before the `Load` that takes its slot). A slot counts as free from the `Unload` on, as taken from the `Load`.
- After `Lost(i)` or `Release(i)` nothing that happened on `i` is reported any more, and `i` is not used again as an id.
  A failure of one request on an instance that lives on is `GenerationFailed`.
- A trajectory waits for an instance from its `Suspend` on; a `Resume` for it may be in the same reply.
- After `Drop`, what is still reported about its trajectories is ignored. After `Finish`, everything is.
- Version `first_version` counts as published at the start; the run ends with the publish of version `plan.updates`,
  which is loaded nowhere. These two are evaluated outside, if at all: `Evaluate` is for those between.

Who waits for what, and who ends it:

| who waits | for what | who ends it |
|---|---|---|
| trainer | the unfinished groups that the batch rule names, or `B` finished ones | `Scored`, or a failure for good |
| trainer | a version that is not yet published | publish, below |
| admission | `rows` trajectories run or wait for an instance | `Generated` |
| admission | `in_flight` groups are outstanding, or all that the run needs | the next batch; one replaced, filtered |
| admission | the deadline invariant | the next batch; `Updated` (a newer version has a later deadline) |
| admission | no instance, or none has confirmed a version | `Joined`, `Loaded` |
| admission | all but instances that are loading have their share of the work | `Loaded`, `Lost`, `Generated` |
| admission | the instances hold versions too old to start anything | `Generated`, `Evaluated`: what is idle loads |
| admission | a version with waiting trajectories has no slot anywhere | what runs ends and frees a slot; `Joined` |
| admission, publish | `drain` only: running work must end before the publish | `Generated`, or a failure for good |
| a trajectory | an instance that holds its version | `Loaded` |
| a trajectory | a slot, all being taken by versions that are due earlier | their end; `Joined` |
| an instance | `continue` only: the swap waits for the evaluation that runs there | `Evaluated` |
| an instance that leaves | the evaluation that runs there | `Evaluated`, `Lost` |
| an instance that leaves | a place for what runs there | `Loaded`, its end, `Joined` |
| the end of the run | the evaluation that runs | `Evaluated`, `Lost` |

Every wait ends with an event that comes from work already under way, so there is no cycle: work runs to its end
whatever else waits, or is suspended for work with an earlier deadline that does (`conductor.py` has that argument); the
trainer waits only for such work; admission is open whenever nothing is under way and fewer than `B` groups are
outstanding, as the invariant holds with any group of the newest version then, and an idle instance takes that version.
Filtering takes finished groups away, which the invariant allows, and at most `filter_limit` of them before each batch:
a data set without any signal is trained as it is, and the run comes to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.core import admission, conductor, snapshots
from stretto.core import messages as m
from stretto.core.ledger import Counters, Group, Ledger, State, Trajectory
from stretto.core.placement import Hold, Instance
from stretto.core.plan import Plan
from stretto.core.replay import Replay
from stretto.core.waits import Wait, explain
from stretto.core.window import Window
from stretto.errors import TransitionError


class Brain:
    """The state of a run and its rules. Not thread-safe; `handle` is the only method that changes anything."""

    def __init__(self, plan: Plan, first_version: int = 0) -> None:
        if not 0 <= first_version <= plan.updates:
            raise ValueError(f"`first_version` is {first_version}; it must lie between 0 and {plan.updates} updates")
        self.plan = plan
        self.ledger = Ledger()
        self.window = Window(first_version)
        self.instances: dict[int, Instance] = {}
        self.staleness = min(plan.staleness, 1) if plan.auto else plan.staleness  # K for groups admitted from now on
        self.next_update = first_version  # the next update whose batch is not yet taken
        self.next_group = 0
        self.filtered_in_a_row = 0  # groups, since the last batch was taken
        self.replay = Replay(plan.replay_groups, plan.replay_uses)
        self.training: int | None = None  # the update that runs
        self.unpublished: int | None = None  # a version whose publish waits
        self.evaluating: Hold | None = None
        self.evaluations_due: set[int] = set()  # published, to be evaluated where first loaded
        self.stranded: list[int] = []  # versions that trajectories wait for and that have no slot
        self.stopping = False
        self.finished = False
        self._again = False  # after a restore: score and train again once an instance is there
        self.place_due = False  # trajectories or versions may want a place
        self.cycle_due = False  # the division of the instances between the versions is to be looked at
        self.surveys = 0
        self.granted: dict[
            int, int
        ] = {}  # version -> instances at least, for want of KV memory, until the next publish
        self._batch_due = False  # whether to look if a batch is ready
        self.open = False  # whether admission is worth trying
        self.commands: list[m.Command] = []
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            m.Joined: self._on_joined,
            m.Lost: self._on_lost,
            m.Leaving: self._on_leaving,
            m.Surveyed: self._on_surveyed,
            m.Loaded: self._on_loaded,
            m.Generated: self._on_generated,
            m.Scored: self._on_scored,
            m.GenerationFailed: self._on_generation_failed,
            m.ScoringFailed: self._on_scoring_failed,
            m.Updated: self._on_updated,
            m.Measured: self._on_measured,
            m.Evaluated: self._on_evaluated,
            m.StopRequested: self._on_stop_requested,
        }

    def handle(self, event: m.Event) -> list[m.Command]:
        """Take in what happened; what to do about it, in an order in which it can be done."""
        if self.finished:
            return []
        commands = self.commands = []
        self._handlers[type(event)](event)
        self._settle()
        return commands

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        return self.window.newest

    @property
    def counters(self) -> Counters:
        return self.ledger.counters

    @property
    def versions(self) -> dict[int, int]:
        """The live versions, with the trajectories of each that are still to be generated to their end."""
        ledger = self.ledger
        return {v: ledger.running.get(v, 0) + len(ledger.pending.get(v, ())) for v in sorted(self.window.live)}

    @property
    def staying(self) -> list[Instance]:
        """The instances that may take something new."""
        return [instance for instance in self.instances.values() if not instance.leaving]

    @property
    def admits_more(self) -> bool:
        """Whether the run is yet to admit anything, as far as is known now."""
        return len(self.ledger.groups) < (self.plan.updates - self.next_update) * self.plan.batch

    @property
    def needed_versions(self) -> list[int]:
        """The versions whose weights must be there for the run to go on: after a restore, those to bring back."""
        return sorted(v for v in self.window.live if v == self.newest or self.needs(v))

    def waits(self) -> list[Wait]:
        """Who waits for what right now, in words."""
        return explain(self)

    @classmethod
    def restore(cls, plan: Plan, snapshot: Mapping[str, Any]) -> Brain:
        """Go on from what a run was, as its journal tells it. There are no instances until they join.

        What ran is pending; what was being scored is scored again and what was being trained on is trained on again,
        with the same members, as soon as the first instance joins; an evaluation that ran is due again.
        """
        brain = cls(plan)
        snapshots.restore(brain, snapshot)
        brain._again = brain.place_due = brain._batch_due = True
        return brain

    # -- events --------------------------------------------------------------------------------------------------------

    def _on_joined(self, event: m.Joined) -> None:
        if event.instance in self.instances:
            raise TransitionError(f"instance {event.instance} joined, but it is there already")
        if event.slots < 1:
            raise ValueError(f"`slots` of instance {event.instance} is {event.slots}; it must be at least 1")
        self.instances[event.instance] = Instance(event.instance, event.slots)
        self.place_due = True
        if self._again and not self.stopping:
            self._again = False
            self._do_again()

    def _on_lost(self, event: m.Lost) -> None:
        instance = self.instances.pop(event.instance, None)
        if instance is None:
            return  # it was released before the report came
        for trajectory in list(instance.trajectories.values()):
            self.ledger.interrupt(trajectory)
            self.counters.interrupted += 1
        if self.evaluating is not None and self.evaluating[0] == event.instance:
            self._skip_evaluation(self.evaluating[1], f"instance {event.instance} was lost")
            self.evaluating = None
        self._keep_somebody()
        self.place_due = self.cycle_due = True

    def _on_leaving(self, event: m.Leaving) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        instance.leaving = True
        self._keep_somebody()
        self.place_due = self.cycle_due = True

    def _keep_somebody(self) -> None:
        """Where nobody would stay, whoever was asked to go does."""
        if not self.staying:
            for each in self.instances.values():
                each.leaving = False
                self.commands.append(m.Keep(each.id))

    def _on_surveyed(self, event: m.Surveyed) -> None:
        self.surveys += 1
        self.place_due = self.cycle_due = True
        conductor.survey(self, event)

    def _on_loaded(self, event: m.Loaded) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        if event.version not in instance.loading:
            raise TransitionError(f"instance {event.instance} was not told to load version {event.version}")
        instance.loading.remove(event.version)
        instance.resident.add(event.version)
        if not self.plan.paradigm.pinned:
            self.ledger.continue_under(instance, event.version)
        self.place_due = True
        if event.version in self.evaluations_due and not self.stopping and not instance.leaving:
            self._evaluate(event.version, instance)

    def _on_generated(self, event: m.Generated) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None:
            self.ledger.generate(trajectory)

    def _on_scored(self, event: m.Scored) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None and self.ledger.score(trajectory, event.reward):
            self._finished(trajectory.group)

    def _on_generation_failed(self, event: m.GenerationFailed) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is None or (event.instance is not None and not trajectory.runs_on(event.instance)):
            return  # it has been told to go on elsewhere since
        trajectory.generation_failures += 1
        if trajectory.generation_failures > self.plan.retries:
            self._fail(trajectory, event.reason)
        else:
            self.ledger.interrupt(trajectory)
            self.counters.generation_retries += 1
            self.place_due = True

    def _on_scoring_failed(self, event: m.ScoringFailed) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is None:
            return
        if trajectory.state is not State.SCORING:
            raise TransitionError(f"trajectory {trajectory.id} is {trajectory.state.name.lower()}, not being scored")
        trajectory.scoring_failures += 1
        if trajectory.scoring_failures > self.plan.retries:
            self._fail(trajectory, event.reason)
        else:
            self.counters.scoring_retries += 1
            if not self.stopping:
                self.commands.append(m.Rescore(trajectory.id))

    def _on_updated(self, event: m.Updated) -> None:
        if event.update != self.training:
            raise TransitionError(f"update {event.update} was reported as done, but the trainer runs {self.training}")
        self.training = None
        if forgotten := self.replay.trained(self.ledger.batch, self.next_update):
            self.commands.append(m.Forget(forgotten))
        self.ledger.train()
        self.unpublished = event.update + 1
        self._batch_due = True

    def _on_measured(self, event: m.Measured) -> None:
        if not self.plan.auto:
            return
        wanted = admission.wanted_staleness(event.tail_s, event.update_s, self.plan.staleness)
        if wanted < self.staleness:
            wanted = admission.lowest_staleness(
                self.ledger.outstanding_of, wanted, self.staleness, self.next_update, self.plan.batch
            )
        self.staleness = wanted
        self.open = True

    def _on_evaluated(self, event: m.Evaluated) -> None:
        if self.evaluating is not None and self.evaluating[1] == event.version:
            self.evaluating = None
            self.counters.evaluations += 1
            self.place_due = True

    def _on_stop_requested(self, _: m.StopRequested) -> None:
        self.stopping = True

    # -- what follows --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do all that is possible now. Each step only needs those before it."""
        if self.training is None and self.unpublished is not None:
            self._publish(self.unpublished)
        if not self.stopping:
            if self._batch_due and self.training is None and self.unpublished is None:
                self._take_batch()
            if self.open and self.unpublished is None and conductor.newest_is_missed(self):
                self.place_due = self.cycle_due = True
            if self.place_due or self.ledger.freed:
                conductor.place(self)
                self.open = True
            if self.open and self.unpublished is None:
                conductor.admit(self)
        if self.training is None:
            self._finish()

    def _publish(self, version: int) -> None:
        """Publish what waits for it, unless running work has to end before; a run that stops does not wait."""
        drains = self.plan.paradigm.on_publish == "drain"
        if drains and self.ledger.num_active and not self.stopping:
            return
        self.window.publish(version)
        self.commands.append(m.Publish(version))
        every = self.plan.evaluate_every
        if every and version % every == 0 and version < self.plan.updates:
            self.evaluations_due.add(version)
        self.unpublished = None
        self.granted.clear()
        self.place_due = self.cycle_due = self._batch_due = self.open = True

    def _take_batch(self) -> None:
        """Start the next update if its batch is ready, and throw away what is too old where the paradigm does so."""
        self._batch_due = False
        plan, ledger, update = self.plan, self.ledger, self.next_update
        if ledger.batch or update == plan.updates or len(ledger.finished) < plan.batch:
            return
        if plan.paradigm.at_limit == "drop":
            groups = list(ledger.finished.values())[: plan.batch]
        elif admission.batch_ready(ledger.outstanding_at, ledger.finished_at, update, plan.batch):
            groups = sorted(ledger.finished.values(), key=lambda each: (each.deadline, each.id))[: plan.batch]
        else:
            return
        for group in groups:
            if group.deadline < update:
                raise TransitionError(f"group {group.id} was due by update {group.deadline}, not update {update}")
        ledger.take(groups)
        self.filtered_in_a_row = 0
        self.counters.replayed_groups += self.replay.choose(update)
        self._train(update)
        self.next_update = update + 1
        if plan.paradigm.at_limit == "drop":
            for group in [each for each in ledger.groups.values() if each.deadline <= update]:
                self.commands.append(m.Drop(group.id, ledger.drop(group)))
        self.open = True

    def _train(self, update: int) -> None:
        self.training = update
        self.commands.append(m.Train(update, self.ledger.batch_members(), self.replay.members()))

    def _finish(self) -> None:
        if self.unpublished is not None:
            return
        done = self.next_update == self.plan.updates and not self.ledger.batch
        if self.stopping or (done and self.evaluating is None):
            self.finished = True
            if done:  # a stop during the last update does not wait for an evaluation
                running = set() if self.evaluating is None else {self.evaluating[1]}
                for version in sorted(self.evaluations_due | running):
                    self._skip_evaluation(version, "the run ended")
                self.evaluations_due.clear()
                self.evaluating = None
            self.commands.append(m.Finish(stopped=not done))

    # -- parts of the above --------------------------------------------------------------------------------------------

    def _find(self, trajectory: int) -> Trajectory | None:
        """A trajectory that is in flight; None: it was dropped before the report came."""
        found = self.ledger.trajectories.get(trajectory)
        if found is None and self.plan.paradigm.at_limit != "drop":
            raise TransitionError(f"trajectory {trajectory} is not in flight: it has ended, or was never started")
        return found

    def _fail(self, trajectory: Trajectory, reason: str) -> None:
        self.commands.append(m.Fail(trajectory.id, reason))
        if self.ledger.fail(trajectory):
            self.open = True
            self._finished(trajectory.group)

    def _finished(self, group: Group) -> None:
        """A group has ended its way; where the plan asks for it, one without signal makes room for the next prompt."""
        self._batch_due = True
        limit = self.plan.filter_limit
        if not limit or group.id not in self.ledger.finished or group.has_signal:
            return
        if self.filtered_in_a_row < limit:
            self.filtered_in_a_row += 1
            self.commands.append(m.Filter(group.id, self.ledger.filter(group)))
            self.open = True
        else:
            self.counters.spared_groups += 1
            self.commands.append(m.Spare(group.id, self.next_update))

    def _evaluate(self, version: int, instance: Instance) -> None:
        self.evaluations_due.remove(version)
        if self.evaluating is not None:
            self._skip_evaluation(version, f"that of version {self.evaluating[1]} still runs")
            return
        self.evaluating = (instance.id, version)
        self.commands.append(m.Evaluate(version, instance.id))

    def forget_evaluation(self, version: int) -> None:
        """A version is gone: if its evaluation was due, it does not happen."""
        if version in self.evaluations_due:
            self.evaluations_due.remove(version)
            self._skip_evaluation(version, "nothing needed the version any more before it was loaded")

    def _skip_evaluation(self, version: int, reason: str) -> None:
        self.counters.evaluations_skipped += 1
        self.commands.append(m.SkipEvaluation(version, reason))

    def _do_again(self) -> None:
        for group in list(self.ledger.groups.values()):
            if not group.unfinished and group.id not in self.ledger.finished:
                self.ledger.finish_again(group)
                self._finished(group)
        for trajectory in self.ledger.trajectories.values():
            if trajectory.state is State.SCORING:
                self.commands.append(m.Rescore(trajectory.id))
        if self.ledger.batch:
            self._train(self.next_update - 1)

    def needs(self, version: int) -> bool:
        """Whether a version other than the newest is needed by rollout, by an evaluation, or by a load under way."""
        if version in self.ledger.running or (self.plan.paradigm.pinned and version in self.ledger.pending):
            return True
        if self.evaluating is not None and self.evaluating[1] == version:
            return True
        return any(version in instance.loading for instance in self.instances.values())
