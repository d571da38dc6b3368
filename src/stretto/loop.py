"""The loop: what happened becomes an event, the core answers with commands, and this file carries them out.

```
   prompts --Start--> flight (one task a leg): generate --> score --Scored--> core --Train--> trainer
                        ^       | an instance       environment               |  |              |
                        |       +--GenerationFailed / ScoringFailed--> core   |  |              | Updated
                        +------------ Suspend, Resume / Rescore --------------+  |       Publish, Load, Retire
                                                                                 |
   pool --Joined / Lost--> core          `stretto pool` --Leaving--> core --Release--> pool
```

Every decision is the core's; nothing here chooses. The loop's own thread never blocks: instances and the trainer have
threads or processes, rewards have processes, the journal has a writer.

| who waits                | for what                                    | who ends it       | deadline                |
|--------------------------|---------------------------------------------|-------------------|-------------------------|
| the loop                 | an event, but of a timer                    | any task below    | `stall_s`, by name      |
| a new group              | rows, in_flight, deadlines, a slot, a drain | core, at an event | named by `brain.waits`  |
| the trainer              | unfinished groups, named by the batch rule  | their flights     | named by `brain.waits`  |
| a batch before it trains | its members durable in the journal          | journal's writer  | the journal's own       |
| a version's first token  | checksum and weights, durable on the disk   | writers of both   | the writers' own        |
| the loop                 | an update, or the trainer's state           | the trainer       | `update_s`, by name     |
| an update                | the trainer's state, while it is saved      | the trainer       | the update's own        |
| a flight                 | its tokens                                  | its instance      | `instance_s`, no token  |
| a flight that moves      | its source, to hand it over                 | the source        | `instance_s`, then lost |
| a trajectory between two | an instance that holds its version          | core, at an event | named by `brain.waits`  |
| load, swap, unload       | the instance, and what it was told before   | the instance      | `instance_s`, then lost |
| a damaged version        | to be sent again                            | the instance      | three times, then lost  |
| a lost instance's place  | another one                                 | the pool          | `replacements` tries    |
| an instance that leaves  | what it was told before, an evaluation      | it, then the core | `instance_s`, then lost |
| an instance's maker      | its model                                   | the pool          | the pool's, by name     |
| a checkpoint, a stop     | its last files                              | the disk          | `COMPLETE_S`, a warning |
| `stretto pool`           | that it is done                             | a task of its own | its own, by name        |
| a flight, an evaluation  | its reward, behind those asked for before   | reward pool       | `task.reward_seconds`   |
| a flight, an evaluation  | an environment of the task's own            | the environment   | `stall_s`               |

`stall_s` is `runtime.stall_seconds`, kept in `stalls.py`; `update_s` is `runtime.update_seconds`, kept in
`runtime/roles.py`; `instance_s` is `runtime.instance_seconds`, kept in `instances.py`.

A failure of a request, a reward or an environment is data and goes to the core, and so is the loss of an instance while
there is another or one can be made. A failure of the trainer, the journal, the reward pool itself or of this file is
stored once, wakes the loop, and ends the run with that error; one `finally` leaves no task behind. How a trajectory
flies is in `flights.py`, who is there to fly on in `instances.py`, how a batch is trained on in `updates.py`, what
becomes of what is not trained on in `endings.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from stretto import clock
from stretto.checkpoints import Checkpoints
from stretto.core import messages as core
from stretto.core.brain import Brain
from stretto.endings import Endings
from stretto.engines.protocol import Engine
from stretto.environments.data import PromptStream
from stretto.environments.protocol import Environment
from stretto.environments.single_turn import Decode
from stretto.errors import EngineError
from stretto.evaluation import EvaluationResult, Evaluator
from stretto.flight import Flight
from stretto.flights import Flights
from stretto.instances import Instances
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer, Status
from stretto.observe.tail import Tail
from stretto.residents import Residents
from stretto.runtime.control import Control
from stretto.runtime.pool import FixedPool, Pool
from stretto.runtime.roles import TrainerSeat
from stretto.seeds import trajectory_seed
from stretto.stalls import Stalls
from stretto.store.journal import Journal
from stretto.store.schema import Attempt
from stretto.store.versions import VersionFiles
from stretto.tasks import Tasks
from stretto.types import Sampling, Weights
from stretto.updates import Updates

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop needs to know besides its parts."""

    seed: int
    sampling: Sampling
    stall_s: float
    reward_s: float = 0.0  # beyond `stall_s`, for a reward that has a deadline of its own
    episode_s: float | None = None  # for an environment between tokens; None: what it waits for has its own deadline
    checkpoint_s: float = math.inf  # between checkpoints, which are made when a version is published
    instance_s: float = 120.0  # an instance that has work and makes no progress for so long is lost
    replacements: int = 0  # of lost instances, at most
    rebalance_s: float = 5.0  # between two looks at how far what runs is
    vocabulary: int | None = None  # tokens that an instance may answer with; None: any
    max_turns: int = 1  # of one episode


Checkpointing = Callable[["Loop"], Coroutine[Any, Any, None]]
"""Takes what a run is at this moment; what it returns writes that, and asks the trainer for its state first of all."""


class Loop:
    """One run, from the first admission to the last update. Made once, run once."""

    def __init__(
        self,
        brain: Brain,
        *,
        engines: Pool | Mapping[int, Engine],
        trainer: TrainerSeat,
        environment: Environment,
        prompts: PromptStream,
        decode: Decode,
        evaluator: Evaluator | None,
        journal: Journal,
        tally: Tally,
        observer: Observer,
        settings: Settings,
        weights: Mapping[int, Weights],
        flights: Mapping[int, Flight],
        kept: Mapping[int, Flight] | None = None,
        versions: VersionFiles | None = None,
        checkpointing: Checkpointing | None = None,
        control: Control | None = None,
    ) -> None:
        """`engines` are a pool, or instances that somebody else made and that nobody replaces.

        `flights` are under way, and `kept` were trained and may be used again, as a checkpoint has it.

        Where there are `versions`, weights are durable in them before an engine loads them.
        """
        self.brain = brain
        self.weights: dict[int, Weights] = dict(weights)  # the weight store: a version lives here while anyone needs it
        self._trainer = trainer
        self._prompts = prompts
        self._evaluator = evaluator
        self._journal = journal
        self._tally = tally
        self._observer = observer
        self._settings = settings
        self._versions = versions
        self._control = control

        self._events: deque[core.Event] = deque()
        self._wake = asyncio.Event()
        self._tasks = Tasks(self._wake.set)
        self._discards: set[asyncio.Task[None]] = set()  # those of the tasks that end a trajectory
        self._finish: core.Finish | None = None
        self._stop_asked = False
        self._tail = Tail()
        self.instances = Instances(
            FixedPool(engines) if isinstance(engines, Mapping) else engines,
            journal=journal,
            tally=tally,
            post=self.post,
            spawn=self._tasks.spawn,
            deadline_s=settings.instance_s,
            replacements=0 if isinstance(engines, Mapping) else settings.replacements,
        )
        self._residents = Residents(self.instances, journal=journal, post=self.post, versions=versions)
        self._flights = Flights(
            flights,
            instances=self.instances,
            residents=self._residents,
            environment=environment,
            decode=decode,
            sampling=settings.sampling,
            journal=journal,
            tally=tally,
            tail=self._tail,
            post=self.post,
            pinned=brain.plan.paradigm.pinned,
            vocabulary=settings.vocabulary,
            episode_s=settings.episode_s,
            max_turns=settings.max_turns,
        )
        self._updates = Updates(
            trainer,
            self._flights,
            self.weights,
            kept=(kept or {}) if brain.plan.replay_groups else None,
            journal=journal,
            tally=tally,
            tail=self._tail,
            observer=observer,
            post=self.post,
            versions=versions,
        )
        self._endings = Endings(brain.plan, self._flights, journal=journal, tally=tally, tail=self._tail)
        self._stalls = Stalls(brain, self._flights, evaluator, stall_s=settings.stall_s, reward_s=settings.reward_s)
        self.checkpoints = Checkpoints(
            None if checkpointing is None else lambda: checkpointing(self),
            every_s=settings.checkpoint_s,
            journal=journal,
            observer=observer,
        )
        self._evaluations: dict[int, EvaluationResult] = {}  # ended, and not yet counted

    @property
    def flights(self) -> dict[int, Flight]:
        """The trajectories that are under way."""
        return self._flights.under_way

    @property
    def prompts(self) -> PromptStream:
        """Where prompts are drawn from."""
        return self._prompts

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Run to the last update, or to the update boundary after `stop`. True if every update was done."""
        slots = sum(engine.capacity.slots for engine in self.instances.engines.values())
        if slots < self.brain.plan.slots:
            raise EngineError(
                f"the engines hold {slots} versions at once, and `rollout.staleness` {self.brain.plan.staleness} "
                f"needs {self.brain.plan.slots}: give them more slots, or lower it"
            )
        self.instances.begin()
        self._spawn(self._report_status(), "status")
        self._spawn(self.instances.watch(), "watch the instances")
        self._spawn(self._survey(), "survey the instances")
        self._spawn(self._stalls.watch(), "watch for a stall")
        if self._control is not None:
            self._spawn(self._control.serve(self.instances), "control")
        self._updates.free_at = clock.now()
        self.checkpoints.begin()
        try:
            while self._finish is None:
                await self._next_event()
                while self._events and self._tasks.failure is None and self._finish is None:
                    event = self._events.popleft()
                    if isinstance(event, core.Updated):
                        self._handle(self._flights.survey())  # a publish places versions by where they run now
                    self._handle(event)
                    if isinstance(event, core.Updated):
                        self._updates.note_wait(self.brain.waits())
                await self._journal.room()
                if self._tasks.failure is not None:
                    raise self._tasks.failure
            self.instances.ending = True
            await asyncio.gather(*self._discards)
            if self._finish.stopped:
                await self.checkpoints.written()  # the last one comes after it
                await self._flights.suspend_all()
            return not self._finish.stopped
        finally:
            stopped = self._finish is not None and self._finish.stopped
            self._tally.close_window(self._flights.reports(), clock.now(), stopped=stopped)
            await self._tasks.end()
            self._endings.close()

    def _handle(self, event: core.Event) -> None:
        self._record(event)
        for command in self.brain.handle(event):
            self._execute(command)

    def post(self, event: core.Event) -> None:
        """Something happened. From the loop's thread only."""
        if not isinstance(event, core.Surveyed | core.Measured):  # these come by themselves, whatever hangs
            self._stalls.moved()
        self._events.append(event)
        self._wake.set()

    def _record(self, event: core.Event) -> None:
        """Record what the core counts as it counts it, so that a checkpoint and the files agree."""
        if isinstance(event, core.Scored) and (flight := self.flights.get(event.trajectory)) is not None:
            self._prompts.scored(flight.row_number, event.reward)
        elif isinstance(event, core.GenerationFailed | core.ScoringFailed) and event.trajectory in self.flights:
            where = None if isinstance(event, core.ScoringFailed) else event.instance
            if where is None or self._runs_on(event.trajectory, where):
                kind: Attempt = "generation" if isinstance(event, core.GenerationFailed) else "scoring"
                self._journal.attempt_failed(event.trajectory, kind, event.reason, at=clock.now())
        elif isinstance(event, core.Evaluated):
            result = self._evaluations.pop(event.version)
            if self.brain.evaluating is None or self.brain.evaluating[1] != event.version:
                return  # its instance was lost as it ended, and the core counted it as skipped
            assert self._evaluator is not None, "an evaluation is planned only where there is an evaluator"
            self._evaluator.record(result, self._tally.evaluated(result))
            self._observer.evaluated(result)

    def _runs_on(self, trajectory: int, instance: int) -> bool:
        """Whether the core has a trajectory there: one that failed as it left goes on, and has not failed."""
        known = self.brain.ledger.trajectories.get(trajectory)
        return known is not None and known.runs_on(instance)

    def stop(self) -> None:
        """End at the next update boundary. Safe to call twice."""
        if not self._stop_asked:
            self._stop_asked = True
            self._observer.message("stopping at the next update boundary; once more ends the process at once")
            self.post(core.StopRequested())

    async def _next_event(self) -> None:
        """Wait until there is an event or a failure, which `stalls.py` brings where nothing else comes."""
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
        now = clock.now()
        draw = self._prompts.draw(command.group)
        prompt = self._prompts.prompt(command.group, draw.row_number)
        seeds = [trajectory_seed(self._settings.seed, id) for id in command.trajectories]
        self._journal.group_admitted(
            command.group,
            version=command.version,
            deadline=command.deadline,
            staleness=command.deadline - command.version,
            prompt=prompt,
            epoch=draw.epoch,
            row_number=draw.row_number,
            draw=draw.reason,
            trajectories=command.trajectories,
            seeds=seeds,
            instance=command.instance,
            at=now,
        )
        self._open_window(now)
        self._tail.admitted(command.group, len(command.trajectories))
        for id, seed in zip(command.trajectories, seeds, strict=True):
            flight = self.flights[id] = Flight(id, command.group, command.version, seed, prompt, draw.row_number)
            self._spawn(self._flights.launch(flight, command.version, command.instance), f"trajectory {id}")

    def _open_window(self, now: float) -> None:
        if not self._tally.is_open:
            self._tally.open_window(self._flights.reports(), now)

    def _resume(self, command: core.Resume) -> None:
        flight = self.flights[command.trajectory]
        self._open_window(clock.now())
        if flight.completion is not None:
            return  # it had ended before it was suspended, and the core is about to hear of it
        if command.reason:
            log.info("trajectory %d goes to instance %d: %s", flight.id, command.instance, command.reason)
        work = self._flights.launch(flight, command.version, command.instance, resumed=True, reason=command.reason)
        self._spawn(work, f"trajectory {flight.id}")

    def _suspend(self, command: core.Suspend) -> None:
        log.info("%d trajectories leave instance %d: %s", len(command.trajectories), command.instance, command.reason)
        work = self._flights.suspend(command.instance, command.trajectories, command.reason)
        self._spawn(work, f"suspend on instance {command.instance}")

    def _rescore(self, command: core.Rescore) -> None:
        self._spawn(self._flights.score(self.flights[command.trajectory]), f"score {command.trajectory}")

    def _drop(self, command: core.Drop) -> None:
        task = self._spawn(self._endings.drop(command), f"drop {command.group}")
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    def _train(self, command: core.Train) -> None:
        self._open_window(clock.now())  # a resumed run may begin with an update
        self._prompts.settle(command.update)
        self._spawn(self._updates.begin(command), f"update {command.update}")

    # The weights of a version are taken at its command: by the time that the journal is durable it may be retired.

    def _load(self, command: core.Load) -> None:
        work = self._residents.load(command.instance, self.weights[command.version])
        self._spawn(work, f"load version {command.version} on instance {command.instance}")

    def _swap(self, command: core.Swap) -> None:
        work = self._residents.swap(command.instance, command.old, self.weights[command.version])
        self._spawn(work, f"swap version {command.old} for {command.version} on instance {command.instance}")

    def _unload(self, command: core.Unload) -> None:
        work = self._residents.unload(command.instance, command.version)
        self._spawn(work, f"unload version {command.version} on instance {command.instance}")

    def _publish(self, command: core.Publish) -> None:
        weights = self.weights[command.version]
        self._journal.version_published(command.version, weights.checksum, at=clock.now())
        if self.checkpoints.due() and not (self.brain.finished or self.brain.stopping):
            self.checkpoints.write(self._spawn, command.version)

    def _retire(self, command: core.Retire) -> None:
        self.weights.pop(command.version, None)
        if self._versions is not None:
            self._spawn(self._remove(self._versions, command.version), f"remove version {command.version}")

    async def _remove(self, versions: VersionFiles, version: int) -> None:
        await self._journal.durable()  # what says that nothing needs it
        versions.remove(version)

    def _evaluate(self, command: core.Evaluate) -> None:
        assert self._evaluator is not None, "an evaluation is planned only where there is an evaluator"
        evaluator, checksum = self._evaluator, self.weights[command.version].checksum

        async def evaluate() -> None:
            self._evaluations[command.version] = await self.instances.follow(
                command.instance,
                lambda engine: evaluator.evaluate(engine, command.version, "during", checksum),
                working=False,
            )
            self.post(core.Evaluated(command.version))

        work = self.instances.on(command.instance, evaluate())
        self._spawn(work, f"evaluate version {command.version} on instance {command.instance}")

    def _skip_evaluation(self, command: core.SkipEvaluation) -> None:
        now = clock.now()
        self._journal.evaluation(command.version, "skipped", now)
        self._journal.note("evaluation skipped", f"version {command.version}: {command.reason}", at=now)
        log.info("evaluation of version %d skipped: %s", command.version, command.reason)

    def _end(self, command: core.Finish) -> None:
        self._finish = command

    # -- what is going on ----------------------------------------------------------------------------------------------

    async def _survey(self) -> None:
        while True:
            await asyncio.sleep(self._settings.rebalance_s)
            self.post(self._flights.survey())

    async def _report_status(self) -> None:
        while True:
            waits = self.brain.waits()
            self._updates.note_wait(waits)
            self._observer.status(
                Status(
                    update=self.brain.next_update,
                    newest=self.brain.newest,
                    staleness=self.brain.staleness,
                    versions=self.brain.versions,
                    loads=[engine.report() for engine in self.instances.engines.values()],
                    waits=[f"{wait.owner}: {wait.reason}" for wait in waits],
                )
            )
            await asyncio.sleep(STATUS_EVERY_S)


_HANDLERS: dict[type[Any], Callable[[Loop, Any], None]] = {
    core.Start: Loop._start,
    core.Suspend: Loop._suspend,
    core.Resume: Loop._resume,
    core.Release: lambda loop, command: loop.instances.release(command.instance),
    core.Keep: lambda loop, command: loop.instances.keep(command.instance),
    core.Rescore: Loop._rescore,
    core.Fail: lambda loop, command: loop._endings.fail(command),
    core.Drop: Loop._drop,
    core.Filter: lambda loop, command: loop._endings.filter(command),
    core.Spare: lambda loop, command: loop._endings.spare(command),
    core.Train: Loop._train,
    core.Forget: lambda loop, command: loop._updates.forget(command.trajectories),
    core.Load: Loop._load,
    core.Swap: Loop._swap,
    core.Unload: Loop._unload,
    core.Publish: Loop._publish,
    core.Retire: Loop._retire,
    core.Evaluate: Loop._evaluate,
    core.SkipEvaluation: Loop._skip_evaluation,
    core.Finish: Loop._end,
}
