"""The rollout instances of a run: which there are, which join and leave, which are lost, and which replace those.

Nothing is decided here about trajectories: that an instance joined, is asked to leave or is lost is posted to the core.
An instance counts as lost if:

| it                                                           | noticed by             | after        |
|--------------------------------------------------------------|------------------------|--------------|
| raises `EngineError` from a call, or from all of them        | the caller             | at once      |
| does not answer `load`, `swap`, `unload` or `suspend`        | `call_in_order`        | `deadline_s` |
| has work, and counts no step, token or prefill               | `watch`                | `deadline_s` |
| answers for something else than it was asked for, or garbage | `run/output_checks.py` | at once      |

Whatever a lost instance still does is ignored. The pool ends it and makes another in its place, at most `replacements`
times in a run. The run ends with an error only if no instance is left and none can be made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from stretto import clock
from stretto.core import messages as core
from stretto.engines.protocol import Engine
from stretto.errors import EngineError, RunError
from stretto.observe.metrics import Tally
from stretto.run.instance import Instance, unload_all, watch_progress
from stretto.run.protocols import Pool
from stretto.store.journal import Journal
from stretto.types import EngineStats

log = logging.getLogger(__name__)

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

END_S = 5.0  # for a lost instance to end before another is made: most give their memory back by then
RETRY_S = (1.0, 30.0)  # between attempts to make an instance: the first pause, and the longest


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
        self.engines: dict[int, Engine] = {}  # of those that take part now
        self._pool = pool
        self._known: dict[int, Instance] = {}  # all that ever took part: what a lost one did still counts
        self._journal = journal
        self._tally = tally
        self._post = post
        self.spawn = spawn
        self._deadline_s = deadline_s
        self._replacements = replacements
        self._num_replaced = 0
        self._num_expected = 0  # instances that are being made, or come back
        self._last_error: EngineError | None = None  # of the last instance, if none follows
        self.run_is_ending = False  # nothing runs any more: a lost instance is neither missed nor replaced
        self.on_loss: Callable[[int, EngineError], None] = lambda instance, error: None  # called before the core hears
        for id, engine in pool.engines.items():
            self._register(id, engine)

    # -- which there are -----------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Reports the instances that the run begins with to the core and the journal."""
        for id, engine in self.engines.items():
            self._announce(id, engine)

    def reports(self) -> list[EngineStats]:
        """Returns what every instance is doing and has done, those that are gone included."""
        return [instance.report() for instance in self._known.values()]

    def report_of(self, id: int) -> EngineStats:
        """Returns what an instance is doing, or did until it was gone."""
        return self._known[id].report()

    @property
    def is_expecting(self) -> bool:
        """True if an instance is being made in the place of a lost one, within the deadlines of the pool."""
        return self._num_expected > 0

    @property
    def leaving(self) -> frozenset[int]:
        """The instances that take part and were asked to leave."""
        return frozenset(id for id in self.engines if self._known[id].leaving)

    def _register(self, id: int, engine: Engine) -> None:
        self.engines[id] = engine
        self._known[id] = Instance(id, engine, deadline_s=self._deadline_s)

    def _announce(self, id: int, engine: Engine) -> None:
        self._journal.instance_joined(id, engine.capacity.slots, at=clock.now())
        self._post(core.Joined(id, engine.capacity.slots))

    async def add(self) -> int:
        """Makes another instance and returns its id. Raises `EngineError` if none can be made."""
        id, engine = await self._pool.add()
        self._register(id, engine)
        self._announce(id, engine)
        return id

    async def remove(self, id: int) -> EngineError | None:
        """Asks an instance to leave, and returns once it is gone; the error, if it was lost before it handed all over.

        Raises `RunError` if there is no such instance, or if no other would be left, now or when it may leave.
        """
        if id not in self.engines:
            there = ", ".join(map(str, self.engines))
            raise RunError(f"there is no instance {id}; there are: {there}")
        if not set(self.engines) - self.leaving - {id}:
            raise RunError(f"instance {id} is the last one: add another before it goes")
        instance = self._known[id]
        if not instance.leaving:
            instance.leaving = True
            self._post(core.Leaving(id))
        await instance.leaving_decided.wait()
        if not instance.is_gone:
            raise RunError(f"instance {id} stays, as all others were lost: add another before it goes")
        return instance.error

    def cancel_removal(self, id: int) -> None:
        """Keeps an instance that was asked to leave: the core needs it."""
        if id in self.engines:
            log.warning("instance %d stays although it was asked to go: all others are lost", id)
            instance = self._known[id]
            instance.leaving, decided = False, instance.leaving_decided
            instance.leaving_decided = asyncio.Event()
            decided.set()

    def release(self, id: int) -> None:
        """Lets an instance go that the core needs no more: it ends after whatever was called in order before.

        If all others are lost, of which the core has not heard yet, and none follows, it joins again, empty.
        """
        if id in self.engines:
            engine, instance = self.engines.pop(id), self._known[id]
            if not (self.engines or self.is_expecting):
                self._num_expected += 1
                self.spawn(self._rejoin(id, engine), f"return of instance {id}")
                return
            self.spawn(self._release(instance), f"release instance {id}")

    async def _rejoin(self, id: int, engine: Engine) -> None:
        """Has an instance that was released take part again as one that joins: with no version."""
        await self.call_in_order(id, "unload", unload_all)
        self._num_expected -= 1
        self.engines[id] = engine
        self.cancel_removal(id)
        self._post(core.Joined(id, engine.capacity.slots))

    async def _release(self, instance: Instance) -> None:
        await instance.release()
        self._journal.instance_left(instance.id, "removed", "it was asked to go", at=instance.left_at)
        await self._pool.remove(instance.id)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, id: int, work: Callable[[Engine], Awaitable[T]], *, generates: bool = True
    ) -> Coroutine[Any, Any, T]:
        """`Instance.call`: takes as long as it takes."""
        return self._known[id].call(work, generates=generates)

    def call_in_order(self, id: int, what: str, work: Callable[[Engine], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """`Instance.call_in_order`: one after the other, each within the deadline."""
        return self._known[id].call_in_order(what, work)

    async def lose_on_error(self, id: int, work: Coroutine[Any, Any, None]) -> None:
        """Awaits work with an instance. If that raises `EngineError`, the instance is lost, and nothing is raised."""
        try:
            await work
        except EngineError as error:
            self.lose(id, error)

    # -- losses --------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Loses instances that have work and make no progress, until it is cancelled."""

        def check(now: float, held_up_s: float) -> None:
            for id in list(self.engines):
                if (error := self._known[id].check_progress(now, held_up_s)) is not None:
                    self.lose(id, error)

        await watch_progress(check, self._deadline_s)

    def lose(self, id: int, error: EngineError) -> None:
        """Counts an instance as lost, once. Raises the error if it was the last instance and none follows."""
        instance = self._known[id]
        if instance.is_gone:
            if instance.error is not None and instance.error is self._last_error:
                raise instance.error  # the first caller that raised it may not be one that the run listens to
            return
        instance.end(error)
        if self.engines.pop(id, None) is None:
            log.warning("instance %d is lost as it leaves: %s", id, error)
            return  # it has been released: nothing else is expected of it
        if self.run_is_ending:
            log.warning("instance %d is lost as the run ends: %s", id, error)
            self._journal.instance_left(id, "lost", str(error), at=instance.left_at)
            self._tally.instance_lost()
            return
        is_replaced = self._num_replaced < self._replacements
        if not (is_replaced or self.engines or self.is_expecting):
            self._last_error = error
            raise error
        log.error("instance %d is lost: %s", id, error)
        self._journal.instance_left(id, "lost", str(error), at=instance.left_at)
        self._journal.note("instance lost", f"{id}: {error}", at=instance.left_at)
        self._tally.instance_lost()
        self.on_loss(id, error)
        self._post(core.Lost(id))
        if is_replaced:
            self._num_replaced += 1
            self._num_expected += 1
            self.spawn(self._replace(id), f"replace instance {id}")
        else:
            log.error("instance %d is not replaced: `runtime.replacements` is %d", id, self._replacements)
            self.spawn(self._pool.remove(id), f"end instance {id}")

    async def _replace(self, lost: int) -> None:
        """Ends a lost instance and makes another; tries again as long as the bound on replacements allows."""
        ending = self.spawn(self._pool.remove(lost), f"end instance {lost}")
        await asyncio.wait({ending}, timeout=END_S)
        pause, longest = RETRY_S
        while True:
            try:
                id = await self.add()
                break
            except EngineError as error:
                log.error("instance %d is not replaced yet: %s", lost, error)
                self._journal.note("instance not made", f"in the place of {lost}: {error}", at=clock.now())
                if self._num_replaced >= self._replacements:
                    self._num_expected -= 1
                    if not (self.engines or self.is_expecting):
                        raise EngineError(f"no instance is left, and none can be made: {error}") from error
                    return
            self._num_replaced += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        self._num_expected -= 1
        self._tally.instance_replaced()
        log.warning("instance %d takes the place of instance %d", id, lost)
        self._journal.note("instance replaced", f"{lost} by {id}", at=clock.now())

    # -- for people ----------------------------------------------------------------------------------------------------

    def describe(self) -> list[Mapping[str, Any]]:
        """Returns what every instance that takes part is doing, for `stretto pool`."""
        found: list[Mapping[str, Any]] = []
        for id, engine in self.engines.items():
            load, instance = engine.report(), self._known[id]
            found.append(
                {
                    "instance": id,
                    "slots": engine.capacity.slots,
                    "versions": {str(version): count for version, count in sorted(load.versions.items())},
                    "running": load.running,
                    "queued": load.queued,
                    "kv_share": load.kv_tokens / max(1, engine.capacity.kv_tokens),
                    "tokens": load.tokens,
                    "seconds": clock.now() - instance.joined_at,
                    "leaving": instance.leaving,
                }
            )
        return found
