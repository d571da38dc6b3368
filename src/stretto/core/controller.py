"""Makes every decision of a run: an event goes in, commands come out, and the three laws hold after each event.

The contract with the run loop, which carries the commands out:

- The commands of one reply are carried out in their order. Those for one instance are also carried out in the order of
  the replies: an `UnloadVersion` before the `LoadVersion` that takes its slot. A slot counts as free from the command
  to unload on, and as taken from the command to load on.
- After `Lost(i)` or `ReleaseInstance(i)` nothing that happened on instance `i` is reported, and the id is not used
  again. The failure of one request on an instance that still works is `GenerationFailed`.
- A trajectory waits for an instance from its `Suspend` on. Its `Resume` may be in the same reply.
- After `Drop`, reports about its trajectories are ignored. After `Finish`, all reports are.
- `first_version` counts as published at the start. The run ends with the publish of version `plan.updates`, which is
  not loaded. These two versions are evaluated outside of the core, if at all; `Evaluate` is for those in between.

Who waits for what, and which event ends the wait:

| who waits | for what | ended by |
|---|---|---|
| trainer | the unfinished groups that the batch rule names, or `B` finished groups | `Scored`, or a failure for good |
| trainer | a version that is not published yet | the publish, below |
| admission | `rows` trajectories run or wait for an instance | `Generated`, `TurnEnded` |
| admission | `ramps` only: one batch of them does, and none was taken yet | the first batch; `Generated`, `TurnEnded` |
| admission | `rows` with those between turns, if memory is short | `Generated`; `LoadSampled` with enough memory |
| admission | `in_flight` groups are due, or all that the run needs | the next batch; one replaced, filtered |
| admission | the deadline invariant | the next batch; `Updated` (a newer version has a later deadline) |
| admission | there is no instance, or none has confirmed a version | `Joined`, `Loaded` |
| admission | all instances but those that are loading have their share of the work | `Loaded`, `Lost`, `Generated` |
| admission | an instance that is to take members of the group is loading its version | `Loaded`, `Lost` |
| admission | all instances hold versions that are too old to start a group | `Generated`, `Evaluated`: idle ones load |
| admission | a version with waiting trajectories has no slot | running trajectories end and free a slot; `Joined` |
| admission, publish | `drain` only: due trajectories must end before the publish | `Generated`, or a failure for good |
| a trajectory between turns | its world | `TurnAsked`, `Generated`, or a failure: the world has a deadline |
| a trajectory | an instance that holds its version | `Loaded` |
| a trajectory | a slot; all are taken by versions that are due earlier | the end of their trajectories; `Joined` |
| a trajectory | `continue` only: an instance with a version no older than it has run under | `Loaded`, `Evaluated` |
| an instance | `continue` only: the swap waits for the evaluation that runs there | `Evaluated` |
| an instance that leaves | the evaluation that runs there | `Evaluated`, `Lost` |
| an instance that leaves | another instance for its trajectories | `Loaded`, their end, `Joined` |
| the end of the run | the evaluation that runs | `Evaluated`, `Lost` |

There is no deadlock, because every wait is ended by an event that work in progress brings about:

- A trajectory runs to its end whatever else waits, or is suspended for one with an earlier deadline that does
  (`scheduling.py` has the argument). The trainer waits only for trajectories.
- One that comes back from its world needs no admission. While more want tokens than there are `rows`, they share the
  engines, which serve them in the order in which they ask, and no group starts.
- Admission is open if nothing is in progress and fewer than `B` groups are outstanding: the invariant then holds with
  any group of the newest version, and an idle instance loads that version.
- Groups in reserve (`redundancy.py`) are waited for by nobody, and each ends: it is trained, or dropped by its limit.
- Filtering removes finished groups, which the invariant allows, and at most `filter_limit` of them before each batch.
  So a data set without any signal is trained as it is, and the run ends.

Under `continue`, a trajectory never continues under an older version than it has run under: a token could be older than
the version that its age is counted from. The wait for a version that is new enough ends. The versions that it has run
under are published, so the newest version is new enough. An instance that stays holds the newest version, is loading,
or evaluates the older version that it holds; any other is told to load the newest at once. A load is confirmed, or its
instance is lost. An evaluation ends, because it needs nothing but its instance, and no group starts there once the
version that it holds is too old; then the instance loads the newest version. If the last instance that stays is lost,
those that were to leave stay, or another joins. A trajectory on an instance that leaves does not wait: it keeps running
there.

An event costs no more than the logarithm of the number of instances (`instance_index.py`). The exceptions look at the
whole pool: a publish, `LoadSampled`, `Lost`, `Leaving`, and any event while a version is without a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stretto.core import admission, redundancy, scheduling, snapshots
from stretto.core import messages as m
from stretto.core.instance_index import InstanceIndex
from stretto.core.instances import InstanceState, RunningEvaluation
from stretto.core.ledger import Counters, Group, Ledger, Trajectory, TrajectoryState
from stretto.core.plan import Plan
from stretto.core.reuse import ReuseBuffer
from stretto.core.spreading import GroupCosts
from stretto.core.versions import VersionWindow
from stretto.core.waits import Wait, explain
from stretto.errors import TransitionError

NEW_SHARE = 0.02  # the weight of the last completion in their mean length


class Controller:
    """The state of a run, and its rules. Not thread-safe. `handle` is the only method that changes the state."""

    def __init__(self, plan: Plan, first_version: int = 0) -> None:
        if not 0 <= first_version <= plan.updates:
            raise ValueError(f"`first_version` is {first_version}; it must lie between 0 and {plan.updates} updates")
        self.plan = plan
        self.ledger = Ledger()
        self.window = VersionWindow(first_version)
        self.instances = InstanceIndex(pinned=plan.paradigm.pinned)
        self.staleness = min(plan.staleness, 1) if plan.auto else plan.staleness  # K for groups admitted from now on
        self.next_update = first_version  # the next update whose batch is not yet taken
        self.next_group = 0
        self.ramping = plan.ramps  # no batch was taken since the run began, or since it continued with less than one
        self.filtered_in_a_row = 0  # groups filtered since the last batch was taken
        self.reuse = ReuseBuffer(plan.replay_groups, plan.replay_uses)
        self.training: int | None = None  # the update that runs
        self.unpublished: int | None = None  # a version that is trained and not published yet
        self.evaluating: RunningEvaluation | None = None
        self.evaluations_due: set[int] = set()  # published versions; the first instance that loads one evaluates it
        self.without_slot: list[int] = []  # the versions of waiting trajectories that no instance holds or is loading
        self.stopping = False
        self.finished = False
        self._redo_due = False  # after a restore: score and train again once an instance has joined
        self.placement_due = False  # there may be something to resume, load, release or retire
        self.rebalancing_due = False  # the instances may have to be divided again between the versions
        self.costs: GroupCosts | None = None  # of starting a group, as measured last
        self.length = 0.0  # the mean number of tokens of a completion, over the last few; 0 before the first
        self.min_instances: dict[int, int] = {}  # version -> instances for its KV memory; until the next publish
        self._batch_due = False  # a batch may be ready
        self.admission_open = False  # a group may be allowed to start
        self.commands: list[m.Command] = []
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            m.Joined: self._on_joined,
            m.Lost: self._on_lost,
            m.Leaving: self._on_leaving,
            m.LoadSampled: self._on_load_sampled,
            m.Loaded: self._on_loaded,
            m.TurnEnded: self._on_turn_ended,
            m.TurnAsked: self._on_turn_asked,
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
        """Handles an event. Returns the commands that follow from it, in the order in which to carry them out."""
        if self.finished:
            return []
        commands = self.commands = []
        self._handlers[type(event)](event)
        self._settle()
        return commands

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The newest version that is published."""
        return self.window.newest

    @property
    def counters(self) -> Counters:
        return self.ledger.counters

    @property
    def versions(self) -> dict[int, int]:
        """The live versions, each with the number of its trajectories that do not have their last token."""
        ledger = self.ledger
        return {v: ledger.running.get(v, 0) + len(ledger.waiting.get(v, ())) for v in sorted(self.window.live)}

    @property
    def rows(self) -> int:
        """The number of trajectories that should want tokens at once now."""
        return self.plan.first_rows if self.ramping else self.plan.rows

    @property
    def most_running(self) -> int:
        """The number of trajectories that want tokens at most now, approximately."""
        return min(self.rows, self.plan.most_trajectories)

    @property
    def admits_more(self) -> bool:
        """True if the run has to admit more groups, as far as is known now."""
        return self.ledger.num_due < self.most_due

    @property
    def most_due(self) -> int:
        """The number of due groups that all updates whose batches are not yet taken can train on."""
        return (self.plan.updates - self.next_update) * self.plan.batch

    @property
    def needed_versions(self) -> list[int]:
        """The versions whose weights the run needs to continue: after a restore, those to bring back."""
        return sorted(v for v in self.window.live if v == self.newest or self.needs(v))

    @property
    def started_under(self) -> set[int]:
        """The versions of the groups that updates will be trained on, as far as they have started or are reused."""
        started = {group.version for group in (*self.ledger.groups.values(), *self.ledger.batch)}
        return started | {group.version for group in self.reuse.kept.values()}

    def is_retired(self, version: int) -> bool:
        """True if no engine needs a version any more. One that is not published yet is not retired."""
        return version < self.newest and version not in self.window.live

    def waits(self) -> list[Wait]:
        """Returns who waits for what now, as text."""
        return explain(self)

    @classmethod
    def restore(cls, plan: Plan, snapshot: snapshots.Snapshot) -> Controller:
        """Returns a controller that continues a run from a snapshot. It has no instances until they join.

        Trajectories that ran are waiting. As soon as the first instance joins, those that were being scored are scored
        again, and the batch that was in training is trained again with the same members. An evaluation that ran is due
        again.
        """
        controller = cls(plan)
        snapshots.restore(controller, snapshot)
        controller._redo_due = controller.placement_due = controller._batch_due = True
        return controller

    # -- events --------------------------------------------------------------------------------------------------------

    def _on_joined(self, event: m.Joined) -> None:
        if event.instance in self.instances:
            raise TransitionError(f"instance {event.instance} joined, but it has joined before")
        if event.slots < 1:
            raise ValueError(f"`slots` of instance {event.instance} is {event.slots}; it must be at least 1")
        self.instances.add(InstanceState(event.instance, event.slots))
        self.placement_due = True
        if self._redo_due and not self.stopping:
            self._redo_due = False
            self._redo()

    def _on_lost(self, event: m.Lost) -> None:
        if event.instance not in self.instances:
            return  # it was released before the report arrived
        instance = self.instances.remove(event.instance)
        for trajectory in list(instance.trajectories.values()):
            self.ledger.interrupt(trajectory)
            self.counters.interrupted += 1
        if self.evaluating is not None and self.evaluating.instance == event.instance:
            self._skip_evaluation(self.evaluating.version, f"instance {event.instance} was lost")
            self.evaluating = None
        self._keep_instances()
        self.placement_due = self.rebalancing_due = True

    def _on_leaving(self, event: m.Leaving) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        instance.leave(True)
        self._keep_instances()
        self.placement_due = self.rebalancing_due = True

    def _keep_instances(self) -> None:
        """Keeps all instances that were asked to leave, if no other instance would stay."""
        if not self.instances.num_staying:
            for each in self.instances.values():
                each.leave(False)
                self.commands.append(m.KeepInstance(each.id))

    def _on_load_sampled(self, event: m.LoadSampled) -> None:
        self.placement_due = self.rebalancing_due = True
        scheduling.take_load_sample(self, event)

    def _on_loaded(self, event: m.Loaded) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        if event.version not in instance.loading:
            raise TransitionError(f"instance {event.instance} was not told to load version {event.version}")
        instance.confirm(event.version)
        if not self.plan.paradigm.pinned:
            self.ledger.continue_under(instance, event.version)
        self.placement_due = True
        if event.version in self.evaluations_due and not self.stopping and not instance.leaving:
            self._evaluate(event.version, instance)

    def _on_turn_ended(self, event: m.TurnEnded) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None and trajectory.state is TrajectoryState.RUNNING:
            self.ledger.end_turn(trajectory)

    def _on_turn_asked(self, event: m.TurnAsked) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None and trajectory.state is TrajectoryState.BETWEEN_TURNS:
            self.ledger.ask_turn(trajectory)

    def _on_generated(self, event: m.Generated) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None:
            self.ledger.generate(trajectory)
            share = NEW_SHARE if self.length else 1.0
            self.length += share * (event.num_tokens - self.length)

    def _on_scored(self, event: m.Scored) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is not None and self.ledger.score(trajectory, event.reward):
            self._finished(trajectory.group)

    def _on_generation_failed(self, event: m.GenerationFailed) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is None or (event.instance is not None and not trajectory.runs_on(event.instance)):
            return  # it has been told to leave that instance since
        trajectory.generation_failures += 1
        if trajectory.generation_failures > self.plan.retries:
            self._fail(trajectory, event.reason)
        else:
            self.ledger.interrupt(trajectory)
            self.counters.generation_retries += 1
            self.placement_due = True

    def _on_scoring_failed(self, event: m.ScoringFailed) -> None:
        trajectory = self._find(event.trajectory)
        if trajectory is None:
            return
        if trajectory.state is not TrajectoryState.SCORING:
            raise TransitionError(f"trajectory {trajectory.id} is {trajectory.state.label}, not being scored")
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
        if forgotten := self.reuse.trained(self.ledger.batch, self.next_update):
            self.commands.append(m.EndReuse(forgotten))
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
        self.admission_open = True

    def _on_evaluated(self, event: m.Evaluated) -> None:
        if self.evaluating is not None and self.evaluating.version == event.version:
            self.evaluating = None
            self.counters.evaluations += 1
            self.placement_due = True

    def _on_stop_requested(self, _: m.StopRequested) -> None:
        self.stopping = True

    # -- consequences --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Does everything that is possible now. A step depends only on the steps before it."""
        if self.training is None and self.unpublished is not None:
            self._publish(self.unpublished)
        if not self.stopping:
            if self._batch_due and self.training is None and self.unpublished is None:
                self._take_batch()
            if self.admission_open and self.unpublished is None and scheduling.newest_is_needed(self):
                self.placement_due = self.rebalancing_due = True
            if self.placement_due or self.ledger.slot_freed:
                scheduling.place(self)
                self.admission_open = True
            if self.admission_open and self.unpublished is None:
                scheduling.admit(self)
        if self.training is None:
            self._finish()

    def _publish(self, version: int) -> None:
        """Publishes a version, unless trajectories have to end first. A run that stops does not wait for them."""
        drains = self.plan.paradigm.on_publish == "drain" and not self.stopping
        if drains and self.ledger.num_unfinished:
            running = [group for group in self.ledger.groups.values() if group.is_running]
            if not all(group.in_reserve for group in running):
                return
            self._drop_from_reserve(running, f"version {version} was published before it had finished")
        self.window.publish(version)
        self.commands.append(m.Publish(version))
        every = self.plan.evaluate_every
        if every and version % every == 0 and version < self.plan.updates:
            self.evaluations_due.add(version)
        self.unpublished = None
        self.min_instances.clear()
        self.placement_due = self.rebalancing_due = self._batch_due = self.admission_open = True

    def _take_batch(self) -> None:
        """Starts the next update if its batch is ready, and drops groups that are too old, if the paradigm does so."""
        self._batch_due = False
        plan, ledger, update = self.plan, self.ledger, self.next_update
        if ledger.batch or update == plan.updates or ledger.num_finished_due < plan.batch:
            return
        if plan.paradigm.at_limit == "drop":
            groups = ledger.finished_due[: plan.batch]
        elif admission.batch_ready(ledger.outstanding_at, ledger.finished_at, update, plan.batch):
            groups = sorted(ledger.finished_due, key=lambda each: (each.deadline, each.id))[: plan.batch]
        else:
            return
        for group in groups:
            if group.deadline < update:
                raise TransitionError(f"group {group.id} was due by update {group.deadline}, not update {update}")
        ledger.take(groups)
        self.ramping = False
        self.filtered_in_a_row = 0
        self.counters.replayed_groups += self.reuse.choose(update)
        self._train(update)
        self.next_update = update + 1
        if plan.paradigm.at_limit == "drop":
            for group in [each for each in ledger.groups.values() if each.deadline <= update]:
                self.commands.append(m.Drop(group.id, ledger.drop(group), "past its age limit"))
        else:
            last = update + 1 == plan.updates
            late = [each for each in ledger.reserve.values() if last or each.deadline <= update]
            self._drop_from_reserve(late, f"in reserve: the batch of update {update} was taken without it")
            self._use_reserve()
        self.admission_open = True

    def _train(self, update: int) -> None:
        self.training = update
        self.commands.append(m.Train(update, self.ledger.batch_members(), self.reuse.members()))

    def _finish(self) -> None:
        if self.unpublished is not None:
            return
        done = self.next_update == self.plan.updates and not self.ledger.batch
        if self.stopping or (done and self.evaluating is None):
            self.finished = True
            if done:  # a stop during the last update does not wait for an evaluation
                running = set() if self.evaluating is None else {self.evaluating.version}
                for version in sorted(self.evaluations_due | running):
                    self._skip_evaluation(version, "the run ended")
                self.evaluations_due.clear()
                self.evaluating = None
            self.commands.append(m.Finish(stopped=not done))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _find(self, trajectory: int) -> Trajectory | None:
        """Returns a trajectory in progress; None if it was dropped before the report arrived."""
        found = self.ledger.trajectories.get(trajectory)
        if found is None and not self.plan.drops:
            raise TransitionError(f"trajectory {trajectory} is not in progress: it has ended, or was never started")
        return found

    def _fail(self, trajectory: Trajectory, reason: str) -> None:
        """Ends a trajectory as failed."""
        self.commands.append(m.Fail(trajectory.id, reason))
        if self.ledger.fail(trajectory):
            self.admission_open = True
            self._finished(trajectory.group)

    def _finished(self, group: Group) -> None:
        """Handles a group that is finished or replaced. One without signal is filtered, if the plan asks for it."""
        self._batch_due = True
        limit = self.plan.filter_limit
        if group.unfinished:
            reason = f"surplus: {group.scored} others of its group were scored first"
            self.commands.append(m.Drop(group.id, self.ledger.drop_surplus(group), reason, surplus=True))
        if limit and group.id in self.ledger.finished and not group.has_signal:
            if self.filtered_in_a_row < limit:
                self.filtered_in_a_row += 1
                self.commands.append(m.Filter(group.id, self.ledger.filter(group)))
                self.admission_open = True
            else:
                self.counters.spared_groups += 1
                self.commands.append(m.SpareFromFilter(group.id, self.next_update))
        self._use_reserve()

    def _use_reserve(self) -> None:
        """Lets finished groups in reserve become due: each in the place of an unfinished one, or as one more."""
        plan, ledger = self.plan, self.ledger
        if not ledger.reserve:
            return
        ready = [group for group in ledger.reserve.values() if group.id in ledger.finished]
        for group in sorted(ready, key=lambda each: (each.deadline, each.id)):
            unfinished = [each for each in ledger.groups.values() if each.unfinished and not each.in_reserve]
            slowest = min(unfinished, key=lambda each: (each.deadline, each.id), default=None)
            if slowest is not None and redundancy.may_exchange(
                ledger.outstanding_at, group.deadline, slowest.deadline, self.next_update, plan.batch
            ):
                ledger.put_in_reserve(slowest)
                ledger.take_from_reserve(group)
            elif ledger.num_due < min(plan.in_flight, self.most_due) and admission.admits(
                ledger.outstanding_at, group.deadline, self.next_update, plan.batch
            ):
                ledger.take_from_reserve(group)
        self._batch_due = True

    def _drop_from_reserve(self, groups: Iterable[Group], reason: str) -> None:
        """Drops groups in reserve."""
        for group in groups:
            self.commands.append(m.Drop(group.id, self.ledger.drop(group), reason))

    def _evaluate(self, version: int, instance: InstanceState) -> None:
        """Starts an evaluation that is due, or skips it if another one runs."""
        self.evaluations_due.remove(version)
        if self.evaluating is not None:
            self._skip_evaluation(version, f"the evaluation of version {self.evaluating.version} still runs")
            return
        self.evaluating = RunningEvaluation(instance.id, version)
        self.commands.append(m.Evaluate(version, instance.id))

    def forget_evaluation(self, version: int) -> None:
        """Skips the evaluation of a version that is retired, if it was due."""
        if version in self.evaluations_due:
            self.evaluations_due.remove(version)
            self._skip_evaluation(version, "nothing needed the version any more before it was loaded")

    def _skip_evaluation(self, version: int, reason: str) -> None:
        self.counters.evaluations_skipped += 1
        self.commands.append(m.SkipEvaluation(version, reason))

    def _redo(self) -> None:
        """Starts again what a restored run had begun: decisions on finished groups, scoring, the update."""
        for group in list(self.ledger.groups.values()):
            if not group.unfinished and group.id not in self.ledger.finished:
                self.ledger.restore_finished(group)
                self._finished(group)
        for trajectory in self.ledger.trajectories.values():
            if trajectory.state is TrajectoryState.SCORING:
                self.commands.append(m.Rescore(trajectory.id))
        if self.ledger.batch:
            self._train(self.next_update - 1)

    def needs(self, version: int) -> bool:
        """Returns True if a version other than the newest is needed: for rollout, by an evaluation, or by a load."""
        if version in self.ledger.running or (self.plan.paradigm.pinned and version in self.ledger.waiting):
            return True
        if self.evaluating is not None and self.evaluating.version == version:
            return True
        return self.instances.is_loading(version)
