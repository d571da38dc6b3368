"""Trajectories from their admission to their end, over the instances that live.

Decides nothing: what happens to a trajectory, or to an instance under it, is posted to the core as an event.

A trajectory goes from instance to instance in *legs*. The core says `Suspend`, and from then on whatever the old leg
still brings counts only if it is the whole trajectory: it had ended there before. The next leg waits until the source
has answered, and goes on with what came out of it: with its KV where carrying that is cheaper than prefilling
(`core/migration.py`), without it elsewhere, and from the prompt where the source died. Version and seed stay, so the
tokens are the same in every case.

An episode may take several *turns*, each a request of its own. To the core it is one trajectory that runs where it is
from its first turn to its last, whether an engine or the environment is at it. A leg runs the episode from its
beginning: turns that are done are handed back, and the one that was under way goes on. What fails before the last turn
is a failed attempt to generate, which keeps the turns that are done. A trajectory has its last token when its turns or
its tokens are used up, or when its episode returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stretto import clock
from stretto.answers import refuse_answer
from stretto.core import messages as core
from stretto.core.migration import carries_kv
from stretto.engines.protocol import Engine
from stretto.environments.protocol import Environment, earned
from stretto.environments.reward_worker import last_line
from stretto.environments.single_turn import Decode
from stretto.episodes import Episode
from stretto.errors import (
    AbortedError,
    EngineError,
    RequestError,
    RewardError,
    StrettoError,
    SuspendedError,
    VersionNotResidentError,
)
from stretto.flight import Flight
from stretto.instances import Instances
from stretto.observe.metrics import Tally
from stretto.observe.tail import Tail
from stretto.residents import Residents
from stretto.seeds import turn_seed
from stretto.store.journal import Journal
from stretto.surveys import Surveys
from stretto.suspects import Suspects
from stretto.turns import Turns, other_tokens, token_ids
from stretto.types import Completion, Load, Request, Sampling, Suspended

log = logging.getLogger(__name__)


class Flights:
    """All trajectories that are under way, and what is asked of the instances for them. For the loop's thread only."""

    def __init__(
        self,
        under_way: Mapping[int, Flight],
        *,
        instances: Instances,
        residents: Residents,
        environment: Environment,
        decode: Decode,
        sampling: Sampling,
        journal: Journal,
        tally: Tally,
        tail: Tail,
        post: Callable[[core.Event], None],
        pinned: bool = True,
        vocabulary: int | None = None,
        episode_s: float | None = None,
        max_turns: int = 1,
    ) -> None:
        """`pinned`: a trajectory keeps its version for life. `max_turns`: of one episode.

        `episode_s`: an environment's deadline between tokens; None: what it waits for has its own.
        """
        self.under_way: dict[int, Flight] = dict(under_way)
        self.instances = instances
        instances.before_loss = self._count_losses
        self.failed_in_a_row = 0  # trajectories, for good
        self._residents = residents
        self._environment = environment
        self._decode = decode
        self._sampling = sampling
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._post = post
        self._pinned = pinned
        self._vocabulary = vocabulary
        self._episode_s = episode_s
        self._max_turns = max_turns
        self._surveys = Surveys(self.under_way, instances, sampling.max_tokens)
        self._episodes: set[_Policy] = set()  # those that an environment plays
        self._suspects = Suspects(self.under_way, post)

    def reports(self) -> list[Load]:
        """What every instance is doing and has done, those that are gone included."""
        return self.instances.reports()

    @property
    def scores(self) -> bool:
        """Whether an environment is at something else than to wait for tokens; that has a deadline of its own."""
        return any(policy.episode.works for policy in self._episodes)

    # -- one trajectory ------------------------------------------------------------------------------------------------

    def launch(
        self, flight: Flight, version: int, instance: int, *, resumed: bool = False, reason: str = ""
    ) -> Coroutine[Any, Any, None]:
        """Send a trajectory to an instance, at first or again: from now on this leg is the one that counts."""
        if flight.instance is not None:
            flight.source = flight.instance
        flight.instance = instance
        flight.leg += 1
        return self._fly(flight, _Policy(self, flight, version, instance, resumed, reason))

    def score(self, flight: Flight) -> Coroutine[Any, Any, None]:
        """Score a trajectory that has its last token."""
        return self._fly(flight, _Policy(self, flight, flight.version, None))

    async def _fly(self, flight: Flight, policy: _Policy) -> None:
        """Carry one trajectory from where it is to its reward; whatever goes wrong with it alone is an event."""
        await _all(flight.leaving)
        if policy.resumed:
            await self._journal.room()  # thousands may go on at once
        if policy.outdated:
            return
        if policy.resumed:
            self._journal.moved(flight.id, "running", at=clock.now(), reason=policy.reason, instance=policy.instance)
        self._episodes.add(policy)
        try:
            outcome = await policy.episode.play(self._environment, flight.prompt, policy)
            if 0 < policy.asked < (had := len(flight.turns.done)):
                raise RewardError(
                    f"the environment returned after {policy.asked} turns, and had asked for {had} the first time: an "
                    "episode that is run again must ask for the same"
                )
            reward, turn_rewards = earned(outcome, policy.asked)
        except (SuspendedError, AbortedError) as error:
            if policy.instance in self.instances.engines and not policy.outdated:
                # Else whoever took it out of the engine holds it.
                unasked = EngineError(f"it handed trajectory {flight.id} back, which nobody asked for: {error}")
                self.instances.failed(policy.instance, unasked)
            return
        except EngineError as error:
            assert policy.instance is not None, "without an instance there is no engine that could fail"
            self.instances.failed(policy.instance, error)
            return
        except Exception as error:
            ours = isinstance(error, StrettoError) and not isinstance(error, RewardError | RequestError)
            if ours or (isinstance(error, AssertionError) and error is policy.episode.fault):
                raise  # not of this trajectory: of the journal, of the reward pool itself, of this file
            self._failed(flight, policy, error)
            return
        finally:
            self._episodes.discard(policy)
        if not policy.counts:
            return  # dropped while it was scored, or its episode is run again elsewhere
        if flight.completion is None:
            self._complete(flight, policy)
        flight.reward, flight.turn_rewards = reward, turn_rewards
        flight.turns = Turns(flight.prompt.tokens)  # nobody asks for them again
        self.failed_in_a_row = 0
        self._tail.member_ended(flight.group, scored=True)
        self._journal.scored(flight.id, reward, at=clock.now(), turns=turn_rewards)
        self._post(core.Scored(flight.id, reward))

    def _failed(self, flight: Flight, policy: _Policy, error: Exception) -> None:
        reason = str(error) if isinstance(error, StrettoError) else last_line(error)
        if flight.id not in self.under_way:
            return
        if not policy.counts:
            log.info("trajectory %d failed as it left instance %s, and goes on: %s", flight.id, policy.instance, reason)
        elif flight.completion is not None:
            self._post(core.ScoringFailed(flight.id, reason))
        else:
            flight.source, flight.instance, flight.suspended = flight.instance, None, None
            self._post(core.GenerationFailed(flight.id, reason, policy.instance))

    def _count_losses(self, instance: int, error: EngineError) -> None:
        """An instance is lost; one of those that ran on it may be why."""
        on_it = [
            each
            for each in self.under_way.values()
            if each.instance == instance and each.completion is None and not each.between_turns
        ]
        self._suspects.lost(instance, error, self._surveys.contexts(on_it, self.instances.report_of(instance)))

    def failed_for_good(self, flight: Flight) -> None:
        """Count it."""
        self.failed_in_a_row += 1
        self._suspects.failed_for_good(flight)

    async def _turn(self, flight: Flight, policy: _Policy, number: int, tokens: Sequence[int]) -> Completion:
        """Turn `number` of its episode: handed back where it is done, generated where it is not."""
        if not policy.counts:
            raise AbortedError(f"trajectory {flight.id} goes on elsewhere, or not at all")
        turns = flight.turns
        if (done := turns.again(number, tokens)) is not None:
            return done
        room = turns.room(number, tokens, max_turns=self._max_turns, max_tokens=self._sampling.max_tokens)
        if flight.completion is not None:
            raise RewardError(
                f"the environment asked for turn {number}, and its episode had ended before: an episode that is run "
                "again must ask for the same"
            )
        return await self._generate(flight, policy, tokens, room)

    async def _generate(self, flight: Flight, policy: _Policy, tokens: Sequence[int], room: int) -> Completion:
        """Its tokens; what is suspected to kill instances waits until no other suspect runs."""
        async with self._suspects.alone(flight):
            try:
                return await self._generate_now(flight, policy, tokens, room)
            except EngineError as error:
                assert policy.instance is not None, "without an instance there is no engine that could fail"
                self.instances.failed(policy.instance, error)  # while it is still accused
                raise

    async def _generate_now(self, flight: Flight, policy: _Policy, tokens: Sequence[int], room: int) -> Completion:
        instance, version, number = policy.instance, policy.version, len(flight.turns.done)
        if number:
            await self._residents.swapped(instance)  # which version there will be is known then
        if policy.outdated or instance not in self.instances.engines:
            # It was called back, its instance is lost, or it was dropped: either way nobody waits for this one.
            raise AbortedError(f"trajectory {flight.id} has nowhere to run")
        assert instance is not None, "only what has its last token has no instance"
        if number and not self._pinned:  # between two turns it goes on under whatever its instance has come to
            version = max(version, self._residents.newest.get(instance, version))
        suspended = None if flight.suspended is None else _under(flight.suspended, version)
        sampling = self._sampling if room == self._sampling.max_tokens else replace(self._sampling, max_tokens=room)
        seed = turn_seed(flight.seed, number)
        keep = number + 1 < self._max_turns
        request = Request(flight.id, version, tuple(tokens), seed, sampling, group=flight.group, keep=keep)
        if suspended is not None:  # of a session with other options, perhaps
            if suspended.request.prompt != request.prompt:
                raise other_tokens(number)
            request = suspended.request
        self._count_move(flight, policy, suspended, instance, len(tokens))
        load = self.instances.report_of(instance)
        flight.context, flight.steps = len(tokens) + (0 if suspended is None else len(suspended.tokens)), load.steps
        if suspended is not None:  # should this instance die too, it goes on from there, prefilled again
            flight.suspended = replace(suspended, kv=None)
        flight.request, flight.called = request, instance
        flight.call = call = asyncio.get_running_loop().create_future()
        try:
            completion = await self.instances.follow(
                instance, lambda engine: engine.generate(request) if suspended is None else engine.resume(suspended)
            )
        except VersionNotResidentError as error:
            if not self._pinned:
                raise
            raise EngineError(f"it had confirmed version {version}, and says now: {error}") from error
        finally:
            call.set_result(None)
        try:
            self._check(completion, request)
        except EngineError:
            flight.suspended = None  # what it went on from may be why: it begins again
            raise
        return self._ended(flight, policy, completion, tokens)

    def _ended(self, flight: Flight, policy: _Policy, completion: Completion, tokens: Sequence[int]) -> Completion:
        """A turn is done; the whole trajectory, where no other can follow."""
        if completion.version != flight.version and completion.token_versions is None:
            # Begun anew where the paradigm continues under newer weights: all of its tokens are of another version.
            versions = np.full(len(completion.tokens), completion.version, dtype=np.int32)
            completion = replace(completion, token_versions=versions)
        flight.turns.add(tokens, completion)
        flight.suspended, flight.request, flight.context = None, None, len(tokens) + len(completion.tokens)
        if len(flight.turns.done) == self._max_turns or completion.finish == "length":
            self._complete(flight, policy)
        elif policy.outdated:
            raise AbortedError(f"trajectory {flight.id} goes on elsewhere")
        return completion

    def _complete(self, flight: Flight, policy: _Policy) -> None:
        """It has its last token."""
        completion = flight.completion = flight.turns.whole()
        policy.completed, flight.instance = True, None
        if flight.id not in self.under_way:
            raise AbortedError(f"trajectory {flight.id} was dropped as it ended")
        text = self._decode(completion.tokens.tolist())
        self._journal.generated(flight.id, completion, text, at=clock.now())
        self._post(core.Generated(flight.id, completion.num_sampled))

    def _check(self, answer: Completion | Suspended, request: Request) -> None:
        refuse_answer(
            answer,
            request,
            checksums=self._residents.checksums,
            vocabulary=self._vocabulary,
            continued=not self._pinned,
        )

    def _count_move(
        self, flight: Flight, policy: _Policy, suspended: Suspended | None, target: int, num_prompt: int
    ) -> None:
        """Record that it goes on elsewhere, and what that takes."""
        if suspended is None and flight.source in (None, target):
            return  # it begins here, or begins again where it was
        made = 0 if suspended is None else len(suspended.tokens)
        kv: Any = None if suspended is None else suspended.kv
        num_bytes = 0 if kv is None else int(kv.nbytes)
        prefilled = num_prompt + made if kv is None else 0
        self._tally.moved(num_bytes, prefilled)
        self._journal.carried(
            flight.id,
            version=policy.version,
            source=flight.source,
            target=target,
            context=num_prompt + made,
            num_bytes=num_bytes,
            prefilled=prefilled,
            reason=policy.reason,
            at=clock.now(),
        )
        flight.source = None

    def _received(self, expected: dict[int, Flight], suspended: Suspended) -> Flight:
        """Whose trajectory it is that an instance hands over; taken out of those that it was asked for.

        Raises `EngineError` where it is none of them, or not what the instance was asked to generate.
        """
        flight = expected.pop(suspended.request.id, None)
        if flight is None or flight.request is None:
            raise EngineError(f"it handed trajectory {suspended.request.id} over, which nobody asked for")
        request = flight.request
        if not self._pinned:
            request = replace(request, version=suspended.request.version)
        self._check(suspended, request)
        if suspended.request != request:
            raise EngineError(f"it handed trajectory {flight.id} over with another prompt, seed or sampling")
        return flight

    # -- leaving an instance -------------------------------------------------------------------------------------------

    def suspend(self, instance: int, ids: Sequence[int], reason: str) -> Coroutine[Any, Any, None]:
        """Call trajectories back from an instance; what is returned takes them out of it, with their KV or without."""
        found = [self.under_way[id] for id in ids if id in self.under_way]
        flights = [flight for flight in found if flight.completion is None]  # else the core is about to hear of it
        left = asyncio.get_running_loop().create_future()
        for flight in flights:
            flight.leg += 1
            flight.source, flight.instance = instance, None
            # Where it never got there, it still leaves the one before.
            flight.leaving = [*(each for each in flight.leaving if not each.done()), left]
        return self._suspend(instance, flights, reason, left)

    async def _suspend(self, instance: int, flights: Sequence[Flight], reason: str, left: asyncio.Future[None]) -> None:
        try:
            await self.instances.on(instance, self._take_out(instance, flights, reason))
        finally:
            left.set_result(None)

    async def _take_out(self, instance: int, flights: Sequence[Flight], reason: str) -> None:
        here = {flight.id: flight for flight in flights if flight.called == instance and flight.completion is None}
        calls = [flight.call for flight in here.values()]

        async def suspend(engine: Engine) -> list[Suspended]:
            per_token = engine.capacity.kv_bytes_per_token if self._pinned else 0
            contexts = self._surveys.contexts(here.values(), engine.report())
            with_kv = [id for id, context in contexts.items() if carries_kv(context, per_token, self._surveys.rates)]
            without = [id for id in here if id not in set(with_kv)]
            found: list[Suspended] = []
            if with_kv:
                began = time.perf_counter()
                found += await engine.suspend(with_kv, kv=True)
                num_bytes = sum(int(each.kv.nbytes) for each in found if each.kv is not None)
                # Into the other instance it takes about as long as out of this one.
                self._surveys.rates = self._surveys.rates.moved(num_bytes, 2 * (time.perf_counter() - began))
            if without:
                found += await engine.suspend(without, kv=False)
            # What had ended there before has its last word on the way.
            await _all(calls)
            return found

        for suspended in await self.instances.ask(instance, "suspend", suspend) if here else ():
            flight = self._received(here, suspended)
            flight.suspended = suspended if len(suspended.tokens) else None
            await self._journal.room()
            self._journal.moved(flight.id, "suspended", at=clock.now(), reason=reason)

    def survey(self) -> core.Surveyed:
        """How far what runs is, and who is short of KV memory."""
        surveyed = self._surveys.survey()
        self._suspects.seen(surveyed.tokens)
        return surveyed

    def discard(self, flights: Sequence[Flight]) -> Coroutine[Any, Any, None]:
        """Throw trajectories away: they are called back at once, and what is returned records how far each had come."""
        return self._discard(flights, self._call_back(flights))

    async def _discard(self, flights: Sequence[Flight], calls: Sequence[asyncio.Task[None]]) -> None:
        await self._called_back(flights, calls)
        for flight in flights:
            await self._journal.room()
            num_tokens = flight.num_sampled
            self._tally.dropped(num_tokens)
            self._journal.dropped(flight.id, "past its age limit", at=clock.now(), num_tokens=num_tokens)

    async def suspend_all(self) -> None:
        """Take what is running out of the engines, so that a resumed run goes on with it."""
        running = [flight for flight in self.under_way.values() if flight.instance is not None]
        flights = list(self.under_way.values())
        await self._called_back(flights, self._call_back(flights))
        for flight in running:
            if flight.completion is None:
                await self._journal.room()
                self._journal.moved(flight.id, "suspended", at=clock.now(), reason="the run was stopped")

    def _call_back(self, flights: Sequence[Flight]) -> list[asyncio.Task[None]]:
        """Take trajectories out of wherever they are, without KV, before whatever their instances are told next."""
        by_instance: dict[int, list[Flight]] = {}
        for flight in flights:
            if flight.instance is not None and flight.completion is None:
                by_instance.setdefault(flight.instance, []).append(flight)
                flight.leg += 1  # one that still waits for its source to let it go goes nowhere
                flight.instance = None
        return [
            self.instances.spawn(
                self.instances.on(instance, self._take_back(instance, own)), f"call back from {instance}"
            )
            for instance, own in by_instance.items()
        ]

    async def _called_back(self, flights: Sequence[Flight], calls: Sequence[asyncio.Task[None]]) -> None:
        """Wait for those calls, and for whatever called one of the trajectories back before."""
        await _all([*calls, *(future for flight in flights for future in flight.leaving)])
        for call in calls:
            call.result()

    async def _take_back(self, instance: int, flights: Sequence[Flight]) -> None:
        if instance not in self.instances.engines:
            return
        known = {flight.id: flight for flight in flights}
        ids = list(known)
        for suspended in await self.instances.ask(instance, "suspend", lambda engine: engine.suspend(ids, kv=False)):
            self._received(known, suspended).suspended = suspended


async def _all(futures: Iterable[asyncio.Future[None] | None]) -> None:
    """Wait for all of them; a wait that is cancelled cancels none."""
    if pending := {future for future in futures if future is not None and not future.done()}:
        await asyncio.wait(pending)


def _under(suspended: Suspended, version: int) -> Suspended:
    """The same trajectory going on under `version`: its own, or where the paradigm continues it, the newest."""
    if suspended.request.version == version:
        return suspended
    versions = suspended.token_versions
    if versions is None:
        versions = np.full(len(suspended.tokens), suspended.request.version, dtype=np.int32)
    return replace(suspended, request=replace(suspended.request, version=version), token_versions=versions, kv=None)


class _Policy:
    """What one run of an episode asks for tokens: it gets the turns that are done back, and then new ones."""

    __slots__ = (
        "_flight", "_flights", "_leg",
        "asked", "completed", "episode", "instance", "reason", "resumed", "version",
    )  # fmt: skip

    def __init__(
        self,
        flights: Flights,
        flight: Flight,
        version: int,
        instance: int | None,
        resumed: bool = False,
        reason: str = "",
    ) -> None:
        self._flights = flights
        self._flight = flight
        self._leg = flight.leg
        self.version = version
        self.instance = instance  # None: it has its last token
        self.resumed = resumed
        self.reason = reason
        self.episode = Episode(flights._episode_s)
        self.completed = False  # the trajectory had its last token in this run of its episode
        self.asked = 0  # turns

    @property
    def outdated(self) -> bool:
        """Whether the trajectory was sent elsewhere since, has ended, or is not wanted any more."""
        flight = self._flight
        if flight.id not in self._flights.under_way:
            return True
        return self.instance is not None and (flight.leg != self._leg or flight.completion is not None)

    @property
    def counts(self) -> bool:
        """Whether what its episode comes to is what becomes of the trajectory."""
        if self._flight.id not in self._flights.under_way:
            return False
        return self.instance is None or self.completed or not self.outdated

    @property
    def left(self) -> int:
        turns = self._flight.turns
        if self.asked < len(turns.done):  # it is run again, and has not come as far
            turns = Turns(turns.prompt, turns.done[: self.asked])
        return max(0, self._flights._sampling.max_tokens - turns.num_tokens)

    async def generate(self, tokens: Sequence[int]) -> Completion:
        context = token_ids(tokens)
        completion = await self.episode.ask(lambda: self._flights._turn(self._flight, self, self.asked, context))
        self.asked += 1
        return completion
