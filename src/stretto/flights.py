"""Trajectories from their admission to their end, over the engines that live.

Decides nothing: what happens to a trajectory, or to an instance under it, is posted to the core as an event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stretto.core import messages as core
from stretto.engines.protocol import Engine
from stretto.environments.protocol import Environment
from stretto.environments.single_turn import Decode
from stretto.errors import AbortedError, EngineError, RequestError, RewardError, StrettoError, SuspendedError
from stretto.observe.metrics import Tally
from stretto.observe.tail import Tail
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.types import Completion, Load, Prompt, Request, Sampling, Suspended, Weights

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A trajectory from its admission to its end."""

    id: int
    group: int
    version: int
    seed: int
    prompt: Prompt
    row_number: int  # of the data set, where the prompt was drawn from
    completion: Completion | None = None  # filled by the engine
    reward: float | None = None  # filled by the environment
    suspended: Suspended | None = None  # filled when it left an engine before its end
    instance: int | None = None  # where it runs


class Flights:
    """All trajectories that are under way, and the engines that they run on. For the loop's thread only."""

    def __init__(
        self,
        under_way: Mapping[int, Flight],
        *,
        engines: Mapping[int, Engine],
        environment: Environment,
        decode: Decode,
        sampling: Sampling,
        journal: Journal,
        tally: Tally,
        tail: Tail,
        post: Callable[[core.Event], None],
        versions: VersionFiles | None = None,
    ) -> None:
        self.under_way: dict[int, Flight] = dict(under_way)
        self.engines = dict(engines)  # those that live
        self.failed_in_a_row = 0  # trajectories, for good
        self._instances = dict(engines)  # all that ever were: what a lost one did still counts
        self._environment = environment
        self._decode = decode
        self._sampling = sampling
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._post = post
        self._versions = versions

    def reports(self) -> list[Load]:
        """What every instance is doing and has done, those that are lost included."""
        return [engine.report() for engine in self._instances.values()]

    @property
    def scores(self) -> bool:
        """Whether a reward is being computed."""
        return any(flight.completion is not None and flight.reward is None for flight in self.under_way.values())

    async def fly(self, flight: Flight, version: int, instance: int | None) -> None:
        """Carry one trajectory from where it is to its reward; whatever goes wrong with it alone is an event."""
        try:
            reward = await self._environment.episode(flight.prompt, _Policy(self, flight, version, instance))
        except (SuspendedError, AbortedError):
            return  # whoever took it out of the engine holds it
        except EngineError as error:
            self.instance_failed(instance, error)
            return
        except Exception as error:
            ours = isinstance(error, StrettoError) and not isinstance(error, RewardError | RequestError)
            if ours or isinstance(error, AssertionError):
                raise  # not of this trajectory: of the journal, of the reward pool itself, of this file
            if flight.id not in self.under_way:
                return
            reason = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
            kind = core.GenerationFailed if flight.completion is None else core.ScoringFailed
            self._post(kind(flight.id, reason))
            return
        if flight.id not in self.under_way:
            return  # dropped while it was scored
        flight.reward = reward
        self.failed_in_a_row = 0
        self._tail.member_ended(flight.group, scored=True)
        self._journal.scored(flight.id, reward, at=time.time())
        self._post(core.Scored(flight.id, reward))

    async def _generate(self, flight: Flight, version: int, instance: int | None, tokens: Sequence[int]) -> Completion:
        engine = None if instance is None else self.engines.get(instance)
        if engine is None or flight.id not in self.under_way:
            # The core hears of a lost instance, or told us to drop it: either way nobody waits for this one.
            raise AbortedError(f"trajectory {flight.id} has nowhere to run")
        if flight.suspended is not None:
            suspended, flight.suspended = flight.suspended, None
            completion = await engine.resume(_under(suspended, version))
        else:
            completion = await engine.generate(
                Request(flight.id, version, tuple(tokens), flight.seed, self._sampling, group=flight.group)
            )
        text = self._decode(completion.tokens.tolist())
        if completion.version != flight.version and completion.token_versions is None:
            # Begun anew where the paradigm continues under newer weights: all of its tokens are of another version.
            versions = np.full(len(completion.tokens), completion.version, dtype=np.int32)
            completion = replace(completion, token_versions=versions)
        flight.completion, flight.instance = completion, None
        if flight.id not in self.under_way:
            raise AbortedError(f"trajectory {flight.id} was dropped as it ended")
        self._journal.generated(flight.id, completion, text, at=time.time())
        self._post(core.Generated(flight.id, len(completion.tokens)))
        return completion

    async def load(self, instance: int, weights: Weights) -> None:
        """Have an instance hold a version besides those that it has."""

        async def load(engine: Engine) -> None:
            await self._durable(weights.version)
            await engine.load(weights)
            self._loaded(instance, weights)

        await self.on(instance, load)

    async def swap(self, instance: int, old: int, weights: Weights) -> None:
        """Have an instance go on under other weights with all that it runs under version `old`."""

        async def swap(engine: Engine) -> None:
            await self._durable(weights.version)
            await engine.swap(old, weights)
            self._loaded(instance, weights)

        await self.on(instance, swap)

    async def _durable(self, version: int) -> None:
        """The version's checksum, and where the run keeps them its weights, are on the disk before its first token."""
        await self._journal.durable()
        if self._versions is not None:
            await self._versions.durable(version)

    def _loaded(self, instance: int, weights: Weights) -> None:
        self._journal.version_loaded(weights.version, weights.checksum, at=time.time())
        self._post(core.Loaded(instance, weights.version))

    async def on(self, instance: int, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Have an instance do something. One that is lost does nothing: the core hears of that by itself."""
        engine = self.engines.get(instance)
        if engine is None:
            return
        try:
            await work(engine)
        except EngineError as error:
            self.instance_failed(instance, error)

    def instance_failed(self, instance: int | None, error: EngineError) -> None:
        if instance is None or instance not in self.engines:
            return  # known already
        del self.engines[instance]
        if not self.engines:
            raise error
        log.error("instance %d is lost: %s", instance, error)
        self._journal.note("instance lost", f"{instance}: {error}", at=time.time())
        self._post(core.Lost(instance))

    async def discard(self, flights: Sequence[Flight]) -> None:
        """Throw trajectories away, and record how far each had come."""
        by_instance: dict[int, list[int]] = {}
        for flight in flights:
            if flight.instance is not None:
                by_instance.setdefault(flight.instance, []).append(flight.id)
        reached: dict[int, int] = {}
        for instance, ids in by_instance.items():
            for suspended in await self._suspend(instance, ids):
                reached[suspended.request.id] = len(suspended.tokens)
        for flight in flights:
            completion = flight.completion
            num_tokens = reached.get(flight.id, 0) if completion is None else len(completion.tokens)
            self._tally.dropped(num_tokens)
            self._journal.dropped(flight.id, "past its age limit", at=time.time(), num_tokens=num_tokens)

    async def suspend_all(self) -> None:
        """Take what is running out of the engines, so that a resumed run goes on with it."""
        for instance in list(self.engines):
            ids = [flight.id for flight in self.under_way.values() if flight.instance == instance]
            for suspended in await self._suspend(instance, ids):
                flight = self.under_way[suspended.request.id]
                flight.suspended, flight.instance = suspended, None
                self._journal.moved(flight.id, "suspended", at=time.time(), reason="the run was stopped")

    async def _suspend(self, instance: int, ids: Sequence[int]) -> list[Suspended]:
        """Take trajectories out of an instance; a lost one has none."""
        engine = self.engines.get(instance)
        if engine is None:
            return []
        try:
            return await engine.suspend(ids, kv=False)
        except EngineError as error:
            self.instance_failed(instance, error)
            return []


def _under(suspended: Suspended, version: int) -> Suspended:
    """The same trajectory going on under `version`: its own, or where the paradigm continues it, the newest."""
    if suspended.request.version == version:
        return suspended
    versions = suspended.token_versions
    if versions is None:
        versions = np.full(len(suspended.tokens), suspended.request.version, dtype=np.int32)
    return replace(suspended, request=replace(suspended.request, version=version), token_versions=versions, kv=None)


class _Policy:
    """What an episode asks for tokens. Generates once: an episode that is run again gets the same completion back."""

    __slots__ = ("_flight", "_flights", "_instance", "_version")

    def __init__(self, flights: Flights, flight: Flight, version: int, instance: int | None) -> None:
        self._flights = flights
        self._flight = flight
        self._version = version
        self._instance = instance

    async def generate(self, tokens: Sequence[int]) -> Completion:
        if self._flight.completion is None:
            return await self._flights._generate(self._flight, self._version, self._instance, tokens)
        return self._flight.completion
