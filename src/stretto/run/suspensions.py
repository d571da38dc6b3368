"""Suspending: taking rollouts out of the instances that they are on.

Three occasions: the core moves trajectories (`suspend`), drops them (`discard`), or the run stops (`suspend_all`).

From the moment of the call a rollout has left. An answer of its instance counts after that only if it is a whole turn:
then the turn had ended before the instance heard of the suspension. The rollout continues elsewhere once every instance
that it left has handed it over (`Rollout.departures`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stretto import clock
from stretto.core.migration import carries_kv
from stretto.engines.protocol import Engine
from stretto.errors import EngineError
from stretto.observe.metrics import Tally
from stretto.run.instance_membership import Instances
from stretto.run.load_sampler import LoadSampler
from stretto.run.rollout import Placement, Rollout
from stretto.store.journal import Journal
from stretto.types import Request, Suspended

Left = dict[int, tuple[Rollout, Placement]]
"""Rollouts by their ids, each with the placement that it left."""


class Suspensions:
    """Takes rollouts out of instances. For the loop's thread only."""

    def __init__(
        self,
        in_progress: Mapping[int, Rollout],
        *,
        instances: Instances,
        load_sampler: LoadSampler,
        journal: Journal,
        tally: Tally,
        check: Callable[[Suspended, Request], None],
        pinned: bool,
    ) -> None:
        """`check` raises `EngineError` for what cannot be a part of the answer to a request.

        `pinned`: a trajectory keeps its version for life.
        """
        self._in_progress = in_progress
        self._instances = instances
        self._load_sampler = load_sampler
        self._journal = journal
        self._tally = tally
        self._check = check
        self._pinned = pinned

    def suspend(self, instance: int, ids: Sequence[int], reason: str) -> Coroutine[Any, Any, None]:
        """Calls rollouts back from an instance; the coroutine that is returned takes them out of it.

        One that is not there any more has its last token, or has failed: the core is about to hear of that.
        """
        rollouts = [self._in_progress[id] for id in ids if id in self._in_progress]
        return self._leave(
            instance,
            [rollout for rollout in rollouts if rollout.instance == instance],
            lambda left: self._hand_over(instance, left, reason),
        )

    def discard(self, rollouts: Sequence[Rollout], reason: str) -> Coroutine[Any, Any, None]:
        """Calls back rollouts that were dropped; the coroutine that is returned records how far each had come."""
        return self._discard(rollouts, self._call_back(rollouts), reason)

    async def suspend_all(self) -> None:
        """Takes all rollouts out of their instances, so that a resumed run can continue them."""
        rollouts = list(self._in_progress.values())
        running = [rollout for rollout in rollouts if rollout.placement is not None]
        await self._called_back(rollouts, self._call_back(rollouts))
        for rollout in running:
            if not rollout.is_generated:
                await self._journal.room()
                self._journal.state_changed(rollout.id, "waiting", at=clock.now(), reason="the run was stopped")

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(
        self, instance: int, rollouts: Sequence[Rollout], work: Callable[[Left], Coroutine[Any, Any, None]]
    ) -> Coroutine[Any, Any, None]:
        """Calls rollouts back at once; the coroutine that is returned has `work` take them out of the instance."""
        departure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = {rollout.id: (rollout, rollout.leave(departure)) for rollout in rollouts}

        async def take_out() -> None:
            try:
                await self._instances.lose_on_error(instance, work(left))
            finally:
                departure.set_result(None)
                for rollout in rollouts:
                    rollout.handed_over()

        return take_out()

    async def _hand_over(self, instance: int, left: Left, reason: str) -> None:
        """Takes out what an instance still owes, with KV if carrying that is cheaper than prefilling again."""
        owed = _still_owed(left)
        if not owed:
            return
        for suspended in await self._instances.call_in_order(
            instance, "suspend", lambda engine: self._suspend_on(engine, owed)
        ):
            rollout = self._received(owed, suspended)
            rollout.suspended = suspended if len(suspended.tokens) else None
            await self._journal.room()
            self._journal.state_changed(rollout.id, "waiting", at=clock.now(), reason=reason)

    async def _suspend_on(self, engine: Engine, owed: Left) -> list[Suspended]:
        """Suspends rollouts on an engine; those whose turn had ended before have got it when this returns."""
        sampler, load = self._load_sampler, engine.report()
        per_token = engine.capacity.kv_bytes_per_token if self._pinned else 0
        answers = [placement.pending.answered for _, placement in owed.values() if placement.pending is not None]
        with_kv = [
            id
            for id, (rollout, placement) in owed.items()
            if carries_kv(sampler.context(rollout, placement, load), per_token, sampler.rates)
        ]
        carried = frozenset(with_kv)
        without = [id for id in owed if id not in carried]
        found: list[Suspended] = []
        if with_kv:
            began = time.perf_counter()
            found += await engine.suspend(with_kv, kv=True)
            num_bytes = sum(each.kv.nbytes for each in found if each.kv is not None)
            # Into the other instance it takes about as long as out of this one.
            sampler.rates = sampler.rates.moved(num_bytes, 2 * (time.perf_counter() - began))
        if without:
            found += await engine.suspend(without, kv=False)
        await all_done(answers)
        return found

    # -- calling back --------------------------------------------------------------------------------------------------

    async def _discard(self, rollouts: Sequence[Rollout], calls: Sequence[asyncio.Task[None]], reason: str) -> None:
        await self._called_back(rollouts, calls)
        for rollout in rollouts:
            await self._journal.room()
            num_tokens = rollout.num_sampled
            self._tally.dropped(num_tokens, complete=rollout.is_generated)
            self._journal.dropped(rollout.id, reason, at=clock.now(), num_tokens=num_tokens)

    def _call_back(self, rollouts: Sequence[Rollout]) -> list[asyncio.Task[None]]:
        """Takes rollouts out of their instances without KV, before whatever else these are asked to do from now on."""
        by_instance: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            if rollout.instance is not None:
                by_instance.setdefault(rollout.instance, []).append(rollout)
        return [
            self._instances.spawn(
                self._leave(instance, own, partial(self._take_back, instance)), f"call back from {instance}"
            )
            for instance, own in by_instance.items()
        ]

    async def _called_back(self, rollouts: Sequence[Rollout], calls: Sequence[asyncio.Task[None]]) -> None:
        """Waits for these calls, and for every earlier one that called a rollout back."""
        await all_done([*calls, *(departure for rollout in rollouts for departure in rollout.departures)])
        for call in calls:
            call.result()

    async def _take_back(self, instance: int, left: Left) -> None:
        """Takes out what an instance still owes, without KV."""
        owed = _still_owed(left)
        if not owed or instance not in self._instances.engines:
            return
        ids = list(owed)
        for suspended in await self._instances.call_in_order(
            instance, "suspend", lambda engine: engine.suspend(ids, kv=False)
        ):
            self._received(owed, suspended).suspended = suspended

    def _received(self, owed: Left, suspended: Suspended) -> Rollout:
        """Returns the rollout that an instance handed over, and takes it out of `owed`.

        Raises `EngineError` if the instance was not asked for it, or hands over something else than it was to generate.
        """
        rollout, placement = owed.pop(suspended.request.id, (None, None))
        if rollout is None or placement is None or placement.pending is None:
            raise EngineError(f"it handed trajectory {suspended.request.id} over, which nobody asked for")
        request = placement.pending.request
        if not self._pinned:
            request = replace(request, version=suspended.request.version)
        self._check(suspended, request)
        if suspended.request != request:
            raise EngineError(f"it handed trajectory {rollout.id} over with another prompt, seed or sampling")
        return rollout


def _still_owed(left: Left) -> Left:
    """Those that their instance has not answered for."""
    return {id: each for id, each in left.items() if each[1].pending is not None}


async def all_done(futures: Iterable[asyncio.Future[None]]) -> None:
    """Waits for all of them. If this wait is cancelled, they are not."""
    if pending := {future for future in futures if not future.done()}:
        await asyncio.wait(pending)
