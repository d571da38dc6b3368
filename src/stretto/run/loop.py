"""The run loop: whatever happens becomes an event, the core answers with commands, and the loop carries these out.

```
                     an instance      the environment
   prompts --Start--> generate ---------> score --Scored--> core --Train--> trainer
                       ^    |               |               ^  |
                       |    +- GenerationFailed,            |  |
                       |       ScoringFailed ---------------+  |
                       +------ Suspend, Resume, Rescore -------+

   trainer --Updated--> core --Publish, LoadVersion, Retire--> instances, version files
   pool --Joined, Lost--> core        `stretto pool` --Leaving--> core --Release--> pool
```

The core decides everything; the loop chooses nothing. The loop's thread never blocks: instances and the trainer have
threads or processes, rewards have processes, and the journal has a writer thread.

| who waits                | for what                                    | ended by          | deadline                |
|--------------------------|---------------------------------------------|-------------------|-------------------------|
| the loop                 | an event other than a timer's               | any task below    | `stall_s`               |
| a new group              | rows, in_flight, deadlines, a slot, a drain | core, at an event | reason in `waits`       |
| the trainer              | unfinished groups that the batch rule names | their rollouts    | reason in `waits`       |
| a batch before it trains | its members on disk in the journal          | its writer        | the journal's           |
| a version's first token  | its checksum and weights on disk            | both writers      | the writers'            |
| the loop                 | an update, or the trainer's state           | the trainer       | `update_s`              |
| an update                | the trainer's state while it is saved       | the trainer       | the update's            |
| a rollout                | its tokens                                  | its instance      | `instance_s`, no token  |
| a rollout that moves     | the instance that it left, to hand it over  | that instance     | `instance_s`, then lost |
| a trajectory in between  | an instance that holds its version          | core, at an event | reason in `waits`       |
| load, swap, unload       | the instance, and earlier calls in order    | the instance      | `instance_s`, then lost |
| a damaged version        | being sent again                            | the instance      | three times, then lost  |
| a lost instance's place  | another instance                            | the pool          | `replacements` attempts |
| an instance that leaves  | earlier calls in order, an evaluation       | it, then the core | `instance_s`, then lost |
| the maker of an instance | the instance's model                        | the pool          | the pool's              |
| a checkpoint, a stop     | the last files of a checkpoint              | the disk          | `COMPLETE_S`, a warning |
| `stretto pool`           | that its request is done                    | a task for it     | its own                 |
| a rollout, an evaluation | its reward, after those asked for before    | the reward pool   | `task.reward_seconds`   |
| a rollout, an evaluation | a judge that is away                        | the judge         | its `outage_seconds`    |
| a rollout, an evaluation | an environment that the task brings         | the environment   | `stall_s`               |

An error at a deadline names what was waited for. `stall_s` is `runtime.stall_seconds` (`run/stall_watchdog.py`),
`update_s` is `runtime.update_seconds` (`local/trainer.py`), and `instance_s` is `runtime.instance_seconds`
(`run/instance.py`). `controller.waits` gives the reason of a wait at any time; if nothing at all happens for `stall_s`,
the run ends with these reasons.

A failure of a request, a reward or an environment is data and goes to the core. So does the loss of an instance, as
long as another is there or can be made. A failure of the trainer, the journal, the reward pool itself or this package
is stored once, wakes the loop, and ends the run with that error; one `finally` leaves no task behind. If scoring cannot
go on (`ScoringHaltedError`), the run stops at the next update boundary, and is resumed with what has no reward.

`run/rollout_runner.py` carries a trajectory from its prompt to its reward, `run/instance_membership.py` knows the
instances, `run/updates.py` trains batches, and `run/untrained_trajectories.py` ends what is not trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.core.controller import Controller
from stretto.engines.protocol import Engine
from stretto.environments.mixed_prompts import MixedPrompts, Prompts
from stretto.environments.single_turn import Decode
from stretto.errors import EngineError, ScoringHaltedError
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer, Status
from stretto.observe.tail_latency import Tail
from stretto.run.admission_record import AdmissionRecord
from stretto.run.checkpoint_schedule import CheckpointSchedule
from stretto.run.evaluation import Evaluator
from stretto.run.evaluation_requests import Evaluations
from stretto.run.first_reward import FirstReward
from stretto.run.group_start import Admissions
from stretto.run.instance_membership import Instances
from stretto.run.pool_requests import Control
from stretto.run.protocols import FixedPool, Pool, TrainerBackend, VersionStore
from stretto.run.rollout import Rollout
from stretto.run.rollout_runner import Rollouts
from stretto.run.settings import Settings
from stretto.run.stall_watchdog import StallWatchdog
from stretto.run.task_group import TaskGroup
from stretto.run.task_play import Tasks
from stretto.run.untrained_trajectories import Terminations
from stretto.run.updates import Updates
from stretto.run.version_loader import VersionLoader
from stretto.run.version_retention import VersionRetention
from stretto.store.journal import Journal
from stretto.store.schema import Attempt
from stretto.types import Weights, WeightsRef

__all__ = ["Checkpointing", "Loop", "Settings"]

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5


Checkpointing = Callable[["Loop"], Coroutine[Any, Any, None]]
"""Captures the state of a run at once. The coroutine that it returns writes it, and asks the trainer for its state
before it awaits anything else."""


class Loop:
    """One run, from the first admission to the last update. Made once, run once."""

    def __init__(
        self,
        controller: Controller,
        *,
        engines: Pool | Mapping[int, Engine],
        trainer: TrainerBackend,
        tasks: Tasks,
        prompts: Prompts,
        decode: Decode,
        evaluator: Evaluator | None,
        journal: Journal,
        tally: Tally,
        observer: Observer,
        settings: Settings,
        weights: Mapping[int, Weights | WeightsRef],
        rollouts: Mapping[int, Rollout],
        kept: Mapping[int, Rollout] | None = None,
        versions: VersionStore | None = None,
        checkpointing: Checkpointing | None = None,
        control: Control | None = None,
        first_reward: FirstReward | None = None,
        scoring_wait: Callable[[], str] = lambda: "",
    ) -> None:
        """`engines` are a pool, or instances that the caller made and that are not replaced.

        `tasks`: how episodes are played, by the labels of the prompts' tasks.

        `rollouts` are in progress. `kept` are trained, and may be trained again. If there are `versions`, weights are
        on disk in them before an engine loads them. `first_reward` is shared with the evaluations before the run.
        `scoring_wait` returns what scoring waits for, or an empty text.
        """
        self.controller = controller
        # The weights of each version that is still needed.
        self.weights: dict[int, Weights | WeightsRef] = dict(weights)
        self._journal = journal
        self._tally = tally
        self._observer = observer
        self._settings = settings
        self._versions = versions
        self._control = control

        self._events: deque[core.Event] = deque()
        self._wake = asyncio.Event()
        self._tasks = TaskGroup(self._wake.set)
        self._drops: set[asyncio.Task[None]] = set()  # those of the tasks that record dropped trajectories
        self._finish: core.Finish | None = None
        self._stop_requested = False
        self._scoring_wait = scoring_wait
        self.halted: ScoringHaltedError | None = None  # why the run stops although nobody asked for it

        self._retention = VersionRetention(
            self.weights,
            ages=settings.sampled_ages,
            retired=filter(controller.is_retired, self.weights),
            journal=journal,
            versions=versions,
            spawn=self._spawn,
        )
        tail = Tail()
        self.instances = self._make_instances(engines)
        self._version_loader = VersionLoader(self.instances, journal=journal, post=self.post, versions=versions)
        self._admissions = Admissions(prompts, seed=settings.seed, journal=journal, tail=tail)
        self._rollouts = Rollouts(
            rollouts,
            instances=self.instances,
            version_loader=self._version_loader,
            tasks=tasks,
            decode=decode,
            settings=settings,
            pinned=controller.plan.paradigm.pinned,
            journal=journal,
            tally=tally,
            tail=tail,
            first_reward=first_reward or FirstReward(),
            post=self.post,
            halt=self.halt,
        )
        self._updates = self._make_updates(trainer, kept, tail)
        self._evaluations = Evaluations(
            evaluator, instances=self.instances, journal=journal, tally=tally, observer=observer, post=self.post,
            halt=self.halt,
        )  # fmt: skip
        self._terminations = Terminations(controller.plan, self._rollouts, journal=journal, tally=tally, tail=tail)
        self._stall_watchdog = StallWatchdog(
            controller, self._rollouts, evaluator,
            stall_s=settings.stall_s, reward_s=settings.reward_s, scoring_wait=scoring_wait,
        )  # fmt: skip
        capture = None if checkpointing is None else partial(checkpointing, self)
        self.checkpoints = CheckpointSchedule(
            capture, every_s=settings.checkpoint_s, journal=journal, observer=observer
        )

    def _make_instances(self, engines: Pool | Mapping[int, Engine]) -> Instances:
        return Instances(
            FixedPool(engines) if isinstance(engines, Mapping) else engines,
            journal=self._journal,
            tally=self._tally,
            post=self.post,
            spawn=self._tasks.spawn,
            deadline_s=self._settings.instance_s,
            replacements=0 if isinstance(engines, Mapping) else self._settings.replacements,
        )

    def _make_updates(self, trainer: TrainerBackend, kept: Mapping[int, Rollout] | None, tail: Tail) -> Updates:
        return Updates(
            trainer,
            self._rollouts,
            self.weights,
            kept=(kept or {}) if self.controller.plan.replay_groups else None,
            journal=self._journal,
            tally=self._tally,
            tail=tail,
            observer=self._observer,
            post=self.post,
            versions=self._versions,
            brings_versions=self._settings.sampled_ages > 0,
            records_tokens=self._settings.records_tokens,
        )

    @property
    def rollouts(self) -> dict[int, Rollout]:
        """The rollouts in progress, by trajectory.

        After each event there is one for each trajectory of the core's ledger that has not failed, and no other. The
        ledger decides; a rollout holds the data.
        """
        return self._rollouts.in_progress

    @property
    def prompts(self) -> Prompts:
        """The stream that prompts are drawn from."""
        return self._admissions.prompts

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Runs to the last update, or to the update boundary after `stop`. Returns whether every update was done."""
        slots = sum(engine.capacity.slots for engine in self.instances.engines.values())
        if slots < self.controller.plan.slots:
            raise EngineError(
                f"the engines hold {slots} versions at once, and `rollout.staleness` {self.controller.plan.staleness} "
                f"needs {self.controller.plan.slots}: give them more slots, or lower it"
            )
        self.instances.announce()
        self._retention.begin()
        self._spawn(self._report_status(), "status")
        self._spawn(self.instances.watch(), "watch the instances")
        self._spawn(self._sample_load(), "sample the load")
        self._spawn(self._stall_watchdog.watch(), "watch for a stall")
        if self._control is not None:
            self._spawn(self._control.serve(self.instances), "control")
        self._updates.idle_since = clock.now()
        self.checkpoints.begin()
        try:
            while self._finish is None:
                await self._next_event()
                while self._events and self._tasks.failure is None and self._finish is None:
                    event = self._events.popleft()
                    if isinstance(event, core.Updated):
                        self._handle(self._rollouts.sample_load())  # a publish divides instances by the present load
                    self._handle(event)
                    if isinstance(event, core.Updated):
                        self._updates.note_wait(self.controller.waits())
                await self._journal.room()
                if self._tasks.failure is not None:
                    raise self._tasks.failure
            self.instances.run_is_ending = True
            await asyncio.gather(*self._drops)
            await self.checkpoints.written()  # the one that the run leaves comes after it
            if self._finish.stopped:
                await self._rollouts.suspensions.suspend_all()
            return not self._finish.stopped
        finally:
            stopped = self._finish is not None and self._finish.stopped
            self._tally.close_window(self.instances.reports(), clock.now(), stopped=stopped)
            await self._tasks.end()
            self._terminations.close()

    def _handle(self, event: core.Event) -> None:
        self._record(event)
        for command in self.controller.handle(event):
            self._execute(command)

    def post(self, event: core.Event) -> None:
        """Adds an event. From the loop's thread only."""
        if not isinstance(event, core.LoadSampled | core.Measured):  # these come from timers, whatever hangs
            self._stall_watchdog.note_event()
        self._events.append(event)
        self._wake.set()

    def _record(self, event: core.Event) -> None:
        """Records an event as the core counts it, so that a checkpoint and the files agree."""
        if isinstance(event, core.Scored) and (rollout := self.rollouts.get(event.trajectory)) is not None:
            self.prompts.scored(rollout.row_number, event.reward, rollout.prompt.task)
        elif isinstance(event, core.GenerationFailed | core.ScoringFailed) and event.trajectory in self.rollouts:
            where = None if isinstance(event, core.ScoringFailed) else event.instance
            if where is None or self._runs_on(event.trajectory, where):
                kind: Attempt = "generation" if isinstance(event, core.GenerationFailed) else "scoring"
                self._journal.attempt_failed(event.trajectory, kind, event.reason, at=clock.now())
        elif isinstance(event, core.Updated):
            self._updates.end()
        elif isinstance(event, core.Evaluated):
            counts = self.controller.evaluating is not None and self.controller.evaluating[1] == event.version
            self._evaluations.record(event.version, counts=counts)  # else its instance was lost as it ended

    def _runs_on(self, trajectory: int, instance: int) -> bool:
        """True if the core has a trajectory there: if it was suspended before it failed, the failure does not count."""
        known = self.controller.ledger.trajectories.get(trajectory)
        return known is not None and known.runs_on(instance)

    def stop(self, hint: str = "") -> None:
        """Ends the run at the next update boundary, and says so, with a hint. Safe to call twice."""
        if not self._stop_requested:
            self._stop_requested = True
            self._observer.message(f"stopping at the next update boundary{hint}")
            self.post(core.StopRequested())

    def halt(self, error: ScoringHaltedError) -> None:
        """Ends the run at the next update boundary, because scoring cannot go on. Safe to call twice.

        What has no reward stays to be scored, and is when the run is resumed. `halted` has the error.
        """
        if self.halted is None:
            self.halted = error
            self._journal.note("scoring halted", str(error), at=clock.now())
            log.error("scoring halted: %s", error)
            self.stop(": scoring cannot go on")

    async def _next_event(self) -> None:
        """Waits for an event or a failure. If nothing else comes, `run/stall_watchdog.py` fails."""
        while not self._events and self._tasks.failure is None:
            self._wake.clear()
            await self._wake.wait()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.spawn(work, name)

    # -- commands ------------------------------------------------------------------------------------------------------

    def _execute(self, command: core.Command) -> None:
        handler: Callable[[Loop, Any], None] = _HANDLERS[type(command)]
        handler(self, command)

    def _start(self, command: core.Start) -> None:
        admitted = self._admissions.admit(command)
        self._open_window(clock.now())
        for rollout, instance in zip(admitted, command.instances, strict=True):
            self.rollouts[rollout.id] = rollout
            work = self._rollouts.launch(rollout, command.version, instance)
            self._spawn(work, f"trajectory {rollout.id}")

    def _open_window(self, now: float) -> None:
        if not self._tally.is_open:
            self._tally.open_window(self.instances.reports(), now)

    def _resume(self, command: core.Resume) -> None:
        rollout = self.rollouts[command.trajectory]
        self._open_window(clock.now())
        if rollout.is_generated:
            return  # it had ended before it was suspended; that event is queued
        if command.reason:
            log.info("trajectory %d goes to instance %d: %s", rollout.id, command.instance, command.reason)
        work = self._rollouts.launch(rollout, command.version, command.instance, resumed=True, reason=command.reason)
        self._spawn(work, f"trajectory {rollout.id}")

    def _suspend(self, command: core.Suspend) -> None:
        log.info("%d trajectories leave instance %d: %s", len(command.trajectories), command.instance, command.reason)
        work = self._rollouts.suspensions.suspend(command.instance, command.trajectories, command.reason)
        self._spawn(work, f"suspend on instance {command.instance}")

    def _rescore(self, command: core.Rescore) -> None:
        self._spawn(self._rollouts.score(self.rollouts[command.trajectory]), f"score {command.trajectory}")

    def _fail(self, command: core.Fail) -> None:
        rollout = self.rollouts[command.trajectory]
        self._terminations.fail(command)
        if all(other.group != rollout.group for other in self.rollouts.values()):
            self._note_loss(rollout)

    def _filter(self, command: core.Filter) -> None:
        rollout = self.rollouts[command.trajectories[0]]
        self._terminations.filter(command)
        self._note_loss(rollout)

    def _note_loss(self, rollout: Rollout) -> None:
        """Notes that no trajectory of a rollout's group is trained: of several tasks, its own replaces it."""
        if isinstance(self.prompts, MixedPrompts):
            self.prompts.lost(rollout.group, rollout.prompt.task)
            self._journal.group_lost(rollout.group)

    def _drop(self, command: core.Drop) -> None:
        known = [self.rollouts[id] for id in command.trajectories if id in self.rollouts]
        if known and not command.surplus:
            self._note_loss(known[0])
        task = self._spawn(self._terminations.drop(command), f"drop {command.group}")
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    def _train(self, command: core.Train) -> None:
        self._open_window(clock.now())  # a resumed run may begin with an update
        self.prompts.settle(command.update)
        self._admissions.log_admitted()
        self._spawn(self._updates.begin(command), f"update {command.update}")

    # The weights are looked up when the command comes: the version may be retired before the journal is on disk.

    def _load(self, command: core.LoadVersion) -> None:
        work = self._version_loader.load(command.instance, self.weights[command.version])
        self._spawn(work, f"load version {command.version} on instance {command.instance}")

    def _swap(self, command: core.SwapVersion) -> None:
        work = self._version_loader.swap(command.instance, command.old, self.weights[command.version])
        self._spawn(work, f"swap version {command.old} for {command.version} on instance {command.instance}")

    def _unload(self, command: core.UnloadVersion) -> None:
        work = self._version_loader.unload(command.instance, command.version)
        self._spawn(work, f"unload version {command.version} on instance {command.instance}")

    def _publish(self, command: core.Publish) -> None:
        weights = self.weights[command.version]
        self._journal.version_published(command.version, weights.checksum, at=clock.now())
        log.info("version %d is published", command.version)
        self._retention.release(command.version)
        if self.checkpoints.is_due() and not (self.controller.finished or self.controller.stopping):
            self.checkpoints.write(self._spawn, command.version)

    def _retire(self, command: core.Retire) -> None:
        self._retention.retire(command.version, self.controller.newest)

    def _evaluate(self, command: core.Evaluate) -> None:
        work = self._evaluations.evaluate(command, self.weights[command.version].checksum)
        self._spawn(work, f"evaluate version {command.version} on instance {command.instance}")

    def _end_run(self, command: core.Finish) -> None:
        self._finish = command

    # -- timers --------------------------------------------------------------------------------------------------------

    async def _sample_load(self) -> None:
        while True:
            await asyncio.sleep(self._settings.rebalance_s)
            self.post(self._rollouts.sample_load())

    async def _report_status(self) -> None:
        recorded: Mapping[str, Any] = {}
        admission = AdmissionRecord(self._journal)
        while True:
            waits = self.controller.waits()
            admission.note(waits)
            self._updates.note_wait(waits)
            status = Status(
                update=self.controller.next_update,
                newest=self.controller.newest,
                staleness=self.controller.staleness,
                versions=self.controller.versions,
                loads=[engine.report() for engine in self.instances.engines.values()],
                waits=[f"{wait.owner}: {wait.reason}" for wait in waits] + self._scoring_waits(),
                instances=list(self.instances.engines),
                training=self.controller.training,
            )
            self._observer.status(status)
            if (record := status.record()) != recorded:
                self._journal.status(record, at=clock.now())
                recorded = record
            await asyncio.sleep(STATUS_EVERY_S)

    def _scoring_waits(self) -> list[str]:
        return [f"rewards: {text}"] if (text := self._scoring_wait()) else []


_HANDLERS: dict[type[Any], Callable[[Loop, Any], None]] = {
    core.Start: Loop._start,
    core.Suspend: Loop._suspend,
    core.Resume: Loop._resume,
    core.ReleaseInstance: lambda loop, command: loop.instances.release(command.instance),
    core.KeepInstance: lambda loop, command: loop.instances.cancel_removal(command.instance),
    core.Rescore: Loop._rescore,
    core.Fail: Loop._fail,
    core.Drop: Loop._drop,
    core.Filter: Loop._filter,
    core.SpareFromFilter: lambda loop, command: loop._terminations.spare(command),
    core.Train: Loop._train,
    core.EndReuse: lambda loop, command: loop._updates.forget(command.trajectories),
    core.LoadVersion: Loop._load,
    core.SwapVersion: Loop._swap,
    core.UnloadVersion: Loop._unload,
    core.Publish: Loop._publish,
    core.Retire: Loop._retire,
    core.Evaluate: Loop._evaluate,
    core.SkipEvaluation: lambda loop, command: loop._evaluations.skip(command),
    core.Finish: Loop._end_run,
}
