"""The rollout instances of a run: who is there, who joins and leaves, who is lost, and who takes a lost one's place.

Decides nothing about trajectories: that an instance joined, is asked to go or is lost is posted to the core. What
counts as lost:

| what an instance does                                       | how it is seen                         | after        |
|-------------------------------------------------------------|----------------------------------------|--------------|
| it raises `EngineError` from a call, or all of them         | whoever called it                      | at once      |
| it does not answer `load`, `swap`, `unload` or `suspend`    | `ask`                                  | `deadline_s` |
| it has work, and no step, token or prefill is counted       | `watch`                                | `deadline_s` |
| it answers for something else than it was asked, or garbage | `answers.py`, by whoever called it     | at once      |

A lost instance never reports anything again, whatever it still does. The pool ends it, and makes another in its place,
at most `replacements` times over a run. The run ends with an error only where none is left and none can be made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from stretto import clock
from stretto.core import messages as core
from stretto.engines.protocol import Engine
from stretto.errors import ChecksumError, EngineError, LostObjectError, RunError, VersionNotResidentError
from stretto.observe.metrics import Tally
from stretto.runtime.pool import Pool
from stretto.store.journal import Journal
from stretto.types import Load

log = logging.getLogger(__name__)

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

END_S = 5.0  # for a lost instance to end before another is made: most give their memory back by then
AGAIN_S = (1.0, 30.0)  # between attempts to make an instance, from the first to the longest
LOOK_S = 1.0  # between looks at who makes progress, at most


@dataclass(slots=True, eq=False)
class _Member:
    """One instance that took part."""

    engine: Engine | None  # None once it is gone
    joined_at: float
    last: Load | None = None  # what it had done by then
    left_at: float = math.inf
    error: EngineError | None = None  # once it is lost
    leaving: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # it was released, or is lost
    told: asyncio.Event = field(default_factory=asyncio.Event)  # what became of it once it was asked to go
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # what it is told in order
    limits: set[asyncio.Timeout] = field(default_factory=set)  # of calls that have not come back
    working: int = 0  # those of them that end with a trajectory
    done: tuple[int, int, int] = (0, 0, 0)  # what it had done at the last look
    done_at: float = 0.0  # when that last changed, or it had nothing to do

    def report(self) -> Load:
        """What it is doing and has done, and from when to when it took part."""
        load = self.last if self.engine is None else self.engine.report()
        assert load is not None, "an instance that is gone has left its last report"
        return replace(load, since=self.joined_at, until=self.left_at)

    def go(self, at: float) -> None:
        """It takes part no more: its engine is let go, and with it what that holds."""
        self.left_at = at
        self.last, self.engine = self.report(), None
        self.gone.set()
        self.told.set()


class Instances:
    """All instances of a run. For the loop's thread only."""

    def __init__(
        self,
        pool: Pool,
        *,
        journal: Journal,
        tally: Tally,
        post: Callable[[core.Event], None],
        spawn: Spawn,
        deadline_s: float,
        replacements: int,
    ) -> None:
        self.engines: dict[int, Engine] = {}  # those that live
        self._pool = pool
        self._members: dict[int, _Member] = {}  # all that ever were: what a lost one did still counts
        self._journal = journal
        self._tally = tally
        self._post = post
        self.spawn = spawn
        self._deadline_s = deadline_s
        self._replacements = replacements
        self._replaced = self._coming = 0
        self._last_error: EngineError | None = None  # of the last one, where none follows
        self.ending = False  # nothing runs any more: who is lost is neither missed nor replaced
        self.before_loss: Callable[[int, EngineError], None] = lambda instance, error: None  # is told first
        for instance, engine in pool.engines.items():
            self._take_in(instance, engine)

    # -- who is there --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell the core and the journal of those that are there from the start."""
        for instance, engine in self.engines.items():
            self._joined(instance, engine)

    def reports(self) -> list[Load]:
        """What every instance is doing and has done, those that are gone included."""
        return [member.report() for member in self._members.values()]

    def report_of(self, instance: int) -> Load:
        """What an instance is doing, or did until it was gone."""
        return self._members[instance].report()

    @property
    def coming(self) -> bool:
        """Whether one is being made in the place of a lost one, within the deadlines of the pool."""
        return self._coming > 0

    @property
    def leaving(self) -> frozenset[int]:
        """Those that live and were asked to go."""
        return frozenset(instance for instance in self.engines if self._members[instance].leaving)

    def _take_in(self, instance: int, engine: Engine) -> None:
        self.engines[instance] = engine
        self._members[instance] = _Member(engine, clock.now(), done_at=time.monotonic())

    def _joined(self, instance: int, engine: Engine) -> None:
        self._journal.instance_joined(instance, engine.capacity.slots, at=clock.now())
        self._post(core.Joined(instance, engine.capacity.slots))

    async def add(self) -> int:
        """Make another instance; its id. Raises `EngineError` where none can be made."""
        instance, engine = await self._pool.add()
        self._take_in(instance, engine)
        self._joined(instance, engine)
        return instance

    async def leave(self, instance: int) -> EngineError | None:
        """Ask an instance to go, and return once it is gone; the error, if it was lost before it had handed all over.

        Raises `RunError` where there is no such instance, or none would be left, then or when it has handed all over.
        """
        if instance not in self.engines:
            there = ", ".join(map(str, self.engines))
            raise RunError(f"there is no instance {instance}; there are: {there}")
        if not set(self.engines) - self.leaving - {instance}:
            raise RunError(f"instance {instance} is the last one: add another before it goes")
        member = self._members[instance]
        if not member.leaving:
            member.leaving = True
            self._post(core.Leaving(instance))
        await member.told.wait()
        if not member.gone.is_set():
            raise RunError(f"instance {instance} stays, as all others were lost: add another before it goes")
        return member.error

    def keep(self, instance: int) -> None:
        """The core needs an instance that was asked to go."""
        if instance in self.engines:
            log.warning("instance %d stays although it was asked to go: all others are lost", instance)
            member = self._members[instance]
            member.leaving, told, member.told = False, member.told, asyncio.Event()
            told.set()

    def release(self, instance: int) -> None:
        """The core needs an instance no more: it ends once it has done what it was told before.

        Where all others are lost, of which the core has not heard yet, and none follows, it comes back empty instead.
        """
        if instance in self.engines:
            engine, member = self.engines.pop(instance), self._members[instance]
            if not (self.engines or self._coming):
                self._coming += 1
                self.spawn(self._return(instance, engine), f"return of instance {instance}")
                return
            self.spawn(self._release(instance, member), f"release instance {instance}")

    async def _return(self, instance: int, engine: Engine) -> None:
        """Have an instance that was released take part again as one that joins: with no version."""

        async def unload(engine: Engine) -> None:
            for version in engine.report().versions:
                with contextlib.suppress(VersionNotResidentError):  # it was told so, and has not reported since
                    await engine.unload(version)

        await self.ask(instance, "unload", unload)
        self._coming -= 1
        self.engines[instance] = engine
        self.keep(instance)
        self._post(core.Joined(instance, engine.capacity.slots))

    async def _release(self, instance: int, member: _Member) -> None:
        async with member.turn:
            member.go(clock.now())
            self._journal.instance_left(instance, "removed", "it was asked to go", at=member.left_at)
        await self._pool.remove(instance)

    # -- what it is asked ----------------------------------------------------------------------------------------------

    async def follow(self, instance: int, work: Callable[[Engine], Awaitable[T]], *, working: bool = True) -> T:
        """Have an instance do something that takes as long as it takes. Raises `EngineError` once it is lost."""
        member = self._reach(instance)
        engine = member.engine
        assert engine is not None, "one that is not gone has its engine"
        if working and not member.working:
            member.done_at = time.monotonic()
        limit = asyncio.timeout(None)
        member.working += working
        try:
            async with limit:
                member.limits.add(limit)
                result = await work(engine)
        except TimeoutError:
            if member.error is None:
                raise
        finally:
            member.working -= working
            member.limits.discard(limit)
        if member.error is not None:
            raise member.error  # it may have answered in the meantime: too late
        return result

    async def ask(self, instance: int, what: str, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Have an instance do something at once, after what it was told before. It answers in time, or is lost.

        Raises `ChecksumError` where what it was sent arrived damaged, `LostObjectError` where nobody has that any more,
        and for whatever else it raises `EngineError`.
        """
        async with self._reach(instance).turn:
            limit = asyncio.timeout(self._deadline_s)
            try:
                async with limit:
                    return await self.follow(instance, work, working=False)
            except (EngineError, ChecksumError, LostObjectError):
                raise
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    late = f"it has not answered `{what}` for {self._deadline_s:g} s (`runtime.instance_seconds`)"
                    lost = EngineError(late)
                    self.failed(instance, lost)
                    raise lost from None
                # It was told what it could do: one that refuses is not in the state that it reported.
                raise EngineError(f"it answered `{what}` with {type(error).__name__}: {error}") from error

    def _reach(self, instance: int) -> _Member:
        member = self._members[instance]
        if member.gone.is_set():
            raise member.error or EngineError(f"instance {instance} has been released")
        return member

    # -- who is lost ---------------------------------------------------------------------------------------------------

    async def on(self, instance: int, work: Coroutine[Any, Any, None]) -> None:
        """Do something with an instance. One that is lost does nothing: the core hears of that by itself."""
        try:
            await work
        except EngineError as error:
            self.failed(instance, error)

    def failed(self, instance: int, error: EngineError) -> None:
        """An instance is lost. Counted once, whoever comes first; raises where it was the last and none follows."""
        now, member = clock.now(), self._members[instance]
        if member.gone.is_set():
            if member.error is not None and member.error is self._last_error:
                raise member.error  # whoever heard of it first may not be whom the run listens to
            return  # known already
        member.error = error
        member.go(now)
        for limit in member.limits:
            limit.reschedule(asyncio.get_running_loop().time())
        if self.engines.pop(instance, None) is None:
            log.warning("instance %d is lost as it leaves: %s", instance, error)
            return  # it has been released: nobody waits for anything else of it
        if self.ending:
            log.warning("instance %d is lost as the run ends: %s", instance, error)
            self._journal.instance_left(instance, "lost", str(error), at=now)
            self._tally.instance_lost()
            return
        follows = self._replaced < self._replacements
        if not (follows or self.engines or self._coming):
            self._last_error = error
            raise error
        log.error("instance %d is lost: %s", instance, error)
        self._journal.instance_left(instance, "lost", str(error), at=now)
        self._journal.note("instance lost", f"{instance}: {error}", at=now)
        self._tally.instance_lost()
        self.before_loss(instance, error)
        self._post(core.Lost(instance))
        if follows:
            self._replaced += 1
            self._coming += 1
            self.spawn(self._replace(instance), f"replace instance {instance}")
        else:
            log.error("instance %d is not replaced: `runtime.replacements` is %d", instance, self._replacements)
            self.spawn(self._pool.remove(instance), f"end instance {instance}")

    async def _replace(self, lost: int) -> None:
        """End a lost instance and make another, again and again while the run's bound allows it."""
        ending = self.spawn(self._pool.remove(lost), f"end instance {lost}")
        await asyncio.wait({ending}, timeout=END_S)
        pause, longest = AGAIN_S
        while True:
            try:
                instance = await self.add()
                break
            except EngineError as error:
                log.error("instance %d is not replaced yet: %s", lost, error)
                self._journal.note("instance not made", f"in the place of {lost}: {error}", at=clock.now())
                if self._replaced >= self._replacements:
                    self._coming -= 1
                    if not (self.engines or self._coming):
                        raise EngineError(f"no instance is left, and none can be made: {error}") from error
                    return
            self._replaced += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        self._coming -= 1
        self._tally.instance_replaced()
        log.warning("instance %d takes the place of instance %d", instance, lost)
        self._journal.note("instance replaced", f"{lost} by {instance}", at=clock.now())

    async def watch(self) -> None:
        """Find those that have work and make no progress."""
        pause = min(LOOK_S, self._deadline_s / 4)
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            late_s, looked_at = max(0.0, now - looked_at - 2 * pause), now
            for instance in list(self.engines):
                self._look(instance, now, late_s)

    def _look(self, instance: int, now: float, late_s: float) -> None:
        """One look. Time in which this thread itself was held up is nobody else's."""
        member = self._members[instance]
        load = member.report()
        done = (load.steps, load.tokens, load.prefilled)
        if done != member.done or not (member.working or load.running or load.queued):
            member.done, member.done_at = done, now
            return
        member.done_at += late_s
        if now - member.done_at > self._deadline_s:
            error = EngineError(
                f"it has {max(member.working, load.running + load.queued)} trajectories and has made no progress for "
                f"{self._deadline_s:g} s (`runtime.instance_seconds`)"
            )
            self.failed(instance, error)

    def describe(self) -> list[Mapping[str, Any]]:
        """What every live instance is doing, for people."""
        found: list[Mapping[str, Any]] = []
        for instance, engine in self.engines.items():
            load, member = engine.report(), self._members[instance]
            found.append(
                {
                    "instance": instance,
                    "slots": engine.capacity.slots,
                    "versions": {str(version): count for version, count in sorted(load.versions.items())},
                    "running": load.running,
                    "queued": load.queued,
                    "kv_share": load.kv_tokens / max(1, engine.capacity.kv_tokens),
                    "tokens": load.tokens,
                    "seconds": clock.now() - member.joined_at,
                    "leaving": member.leaving,
                }
            )
        return found
