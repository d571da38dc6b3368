"""A trajectory that goes on elsewhere: which versions its tokens are of, and what is written of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.answers import refuse_answer
from stretto.core import messages as core
from stretto.environments.protocol import Policy
from stretto.errors import EngineError, JournalError, RequestError, RewardError, StrettoError, SuspendedError
from stretto.flight import Flight
from stretto.flights import Flights
from stretto.instances import Instances
from stretto.residents import Residents
from stretto.runtime.pool import FixedPool
from stretto.seeds import turn_seed
from stretto.turns import Turn
from stretto.types import Capacity, Completion, Load, Prompt, Request, Sampling, Suspended, Weights

PROMPT = Prompt(0, "1+1=", (1, 2, 3), {})


def completion(version: int, token_versions: Sequence[int] | None = None) -> Completion:
    return Completion(
        id=0,
        version=version,
        tokens=np.arange(4, dtype=np.int32),
        logprobs=np.zeros(4, dtype=np.float32),
        finish="stop",
        checksum="sum",
        token_versions=None if token_versions is None else np.array(token_versions, dtype=np.int32),
    )


class Engine:
    """Answers with `done`, and keeps what it was asked for."""

    def __init__(self, done: Completion | Exception) -> None:
        self.done = done
        self.generated: list[Request] = []
        self.resumed: list[Suspended] = []

    async def generate(self, request: Request) -> Completion:
        self.generated.append(request)
        return self._end()

    async def resume(self, suspended: Suspended) -> Completion:
        self.resumed.append(suspended)
        return self._end()

    def report(self) -> Load:
        return Load(running=1, queued=0, kv_tokens=0, versions={})

    @property
    def capacity(self) -> Capacity:
        return Capacity(slots=1, rows=8, kv_tokens=1024, max_context=64)

    async def close(self) -> None:
        pass

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        return [replace(suspended(version=1), request=request(id, version=1)) for id in ids]

    def _end(self) -> Completion:
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


class Recorder:
    """A journal, a tally and a tail that keep the names of what they are told and the first argument."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    async def room(self) -> None:
        pass

    async def durable(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.told.append((name, args[0] if args else options))


class Environment:
    def __init__(self, outcome: float | Exception) -> None:
        self.outcome = outcome

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        await policy.generate(prompt.tokens)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def request(id: int, version: int) -> Request:
    return Request(id, version, PROMPT.tokens, seed=9, sampling=Sampling(8))


def suspended(version: int, token_versions: Sequence[int] | None = None) -> Suspended:
    versions = None if token_versions is None else np.array(token_versions, dtype=np.int32)
    tokens, logprobs = np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.float32)
    return Suspended(request(0, version), tokens, logprobs, "sum", token_versions=versions)


def flights(
    flight: Flight,
    engines: Mapping[int, Any],
    outcome: float | Exception = 1.0,
    *,
    pinned: bool = True,
    environment: Any = None,
    max_turns: int = 1,
) -> tuple[Flights, Recorder, list[Any]]:
    recorder, events = Recorder(), list[Any]()
    instances = Instances(
        FixedPool(engines),
        journal=recorder,  # type: ignore[arg-type]
        tally=recorder,  # type: ignore[arg-type]
        post=events.append,
        spawn=lambda work, name: asyncio.create_task(work, name=name),
        deadline_s=5.0,
        replacements=0,
    )
    made = Flights(
        {flight.id: flight},
        instances=instances,
        residents=Residents(instances, journal=recorder, post=events.append),  # type: ignore[arg-type]
        environment=environment or Environment(outcome),
        decode=lambda tokens: "text",
        sampling=Sampling(8),
        journal=recorder,  # type: ignore[arg-type]
        tally=recorder,  # type: ignore[arg-type]
        tail=recorder,  # type: ignore[arg-type]
        post=events.append,
        pinned=pinned,
        max_turns=max_turns,
    )
    return made, recorder, events


async def fly(made: Flights, flight: Flight, version: int, instance: int) -> None:
    await made.launch(flight, version, instance)


def test_a_trajectory_flies_from_its_prompt_to_its_reward() -> None:
    flight, engine = Flight(0, 7, 2, 9, PROMPT, 0), Engine(completion(2))
    made, recorder, events = flights(flight, {0: engine}, outcome=0.5)
    asyncio.run(fly(made, flight, 2, 0))
    assert engine.generated == [replace(request(0, 2), group=7)]
    assert (flight.completion, flight.reward, flight.instance) == (engine.done, 0.5, None)
    assert [name for name, _ in recorder.told] == ["generated", "member_ended", "scored"]
    assert events == [core.Generated(0, 4), core.Scored(0, 0.5)]


def test_a_survey_says_how_far_what_runs_is_and_what_is_about_to_end() -> None:
    async def survey(context: int) -> core.Surveyed:
        flight = Flight(0, 7, 2, 9, PROMPT, 0)
        made, _, _ = flights(flight, {0: Engine(completion(2))})
        flight.instance, flight.call, flight.context = 0, asyncio.Future(), context
        return made.survey()

    assert asyncio.run(survey(10)) == core.Surveyed({0: 10})
    assert asyncio.run(survey(11)) == core.Surveyed({0: 11}, ending=frozenset({0}))  # three of the prompt, and all of 8


@pytest.mark.parametrize(
    ("before", "version", "after"),
    [(None, 1, None), (None, 3, [1, 1]), ([0, 1], 3, [0, 1])],
    ids=["its own", "a newer one", "a newer one again"],
)
def test_a_suspended_trajectory_goes_on_and_says_which_versions_its_tokens_are_of(
    before: list[int] | None, version: int, after: list[int] | None
) -> None:
    flight, engine = Flight(0, 0, 1, 9, PROMPT, 0, suspended=suspended(1, before)), Engine(completion(version))
    made, _, _ = flights(flight, {0: engine}, pinned=version == 1)
    asyncio.run(fly(made, flight, version, 0))
    (asked,) = engine.resumed
    assert asked.request.version == version
    assert (None if asked.token_versions is None else asked.token_versions.tolist()) == after
    assert flight.suspended is None
    assert not engine.generated


def test_one_that_began_anew_under_newer_weights_says_so_of_every_token() -> None:
    flight, engine = Flight(0, 0, 1, 9, PROMPT, 0), Engine(completion(3))
    made, _, _ = flights(flight, {0: engine}, pinned=False)
    asyncio.run(fly(made, flight, 3, 0))
    assert flight.completion is not None
    assert flight.completion.token_versions is not None
    assert flight.completion.token_versions.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("done", "outcome", "event"),
    [
        (RequestError("too long"), 1.0, core.GenerationFailed(0, "too long", 0)),
        (completion(1), RewardError("no idea"), core.ScoringFailed(0, "no idea")),
    ],
)
def test_what_goes_wrong_with_one_trajectory_is_an_event(done: Any, outcome: Any, event: core.Event) -> None:
    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, _, events = flights(flight, {0: Engine(done)}, outcome)
    asyncio.run(fly(made, flight, 1, 0))
    assert events[-1] == event


def test_what_goes_wrong_with_the_run_is_raised() -> None:
    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, _, _ = flights(flight, {0: Engine(completion(1))}, JournalError("full"))
    with pytest.raises(JournalError, match="full"):
        asyncio.run(fly(made, flight, 1, 0))


def test_a_lost_instance_is_told_once_and_the_last_one_ends_the_run() -> None:
    flight, error = Flight(0, 0, 1, 9, PROMPT, 0), EngineError("gone")
    made, recorder, events = flights(flight, {0: Engine(error), 1: Engine(error)})

    async def story() -> None:
        await fly(made, flight, 1, 0)
        made.instances.failed(0, error)
        assert events == [core.Lost(0)]
        assert recorder.told == [("instance_left", 0), ("note", "instance lost"), ("instance_lost", {})]
        with pytest.raises(EngineError, match="gone"):
            await fly(made, flight, 1, 1)

    asyncio.run(story())


def test_what_is_thrown_away_is_recorded_with_the_tokens_that_it_had() -> None:
    running = Flight(0, 0, 1, 9, PROMPT, 0)
    done = Flight(1, 0, 1, 9, PROMPT, 0, completion=completion(1))
    waiting = Flight(2, 0, 1, 9, PROMPT, 0)
    made, recorder, _ = flights(running, {0: Engine(completion(1))})
    running.instance, running.request = 0, request(0, version=1)

    async def discard() -> None:
        await made.discard([running, done, waiting])

    asyncio.run(discard())
    counted = [told for name, told in recorder.told if name == "dropped"]
    assert counted == [2, 0, 4, 1, 0, 2], "the tally's tokens and the journal's trajectory, in turn"


# -- instances that hand over what they were not asked for -------------------------------------------------------------

WRONG: dict[str, Suspended] = {
    "with another prompt, seed or sampling": replace(suspended(1), request=replace(request(0, 1), seed=8)),
    "tokens of versions [2]": suspended(2),
    "weights `other`": replace(suspended(1), checksum="other"),
    "it handed trajectory 5 over, which nobody asked for": replace(suspended(1), request=request(5, 1)),
    "2 tokens and 1 log-probabilities": replace(suspended(1), logprobs=np.zeros(1, dtype=np.float32)),
    "2 tokens and 3 of `token_versions`": suspended(1, token_versions=[1, 1, 1]),
    "`tokens` as list": replace(suspended(1), tokens=[3, 4]),  # type: ignore[arg-type]
    "`logprobs` as float32[2, 1]": replace(suspended(1), logprobs=np.zeros((2, 1), dtype=np.float32)),
    "`token_versions` as float64[2]": replace(suspended(1), token_versions=np.ones(2)),
    "KV of (1, 2, 9, 1, 4)": replace(suspended(1), kv=torch.zeros(1, 2, 9, 1, 4)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("how", ["move", "stop"])
def test_what_is_handed_over_and_was_not_asked_for_is_refused_wherever_it_is_taken_back(wrong: str, how: str) -> None:
    class Lies(Engine):
        async def load(self, weights: Weights) -> None:
            pass

        async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
            return [WRONG[wrong]]

    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, recorder, _ = flights(flight, {0: Lies(completion(1)), 1: Engine(completion(1))})
    flight.instance = flight.called = 0
    flight.request = request(0, version=1)

    async def story() -> None:
        await made._residents.load(0, Weights(1, "full", {}, "sum"))
        await (made.suspend(0, [0], "moves") if how == "move" else made.suspend_all())

    asyncio.run(story())
    assert flight.suspended is None
    assert list(made.instances.engines) == [1]
    assert ("instance_left", 0) in recorder.told
    assert wrong in str(made.instances._members[0].error)


def test_what_was_suspended_before_its_first_token_may_say_so_of_its_versions_too() -> None:
    none = np.zeros(0, dtype=np.int32)
    answer = replace(suspended(1), tokens=none, logprobs=np.zeros(0, dtype=np.float32), token_versions=none)
    refuse_answer(answer, request(0, 1), checksums={1: "sum"}, vocabulary=None, continued=False)


def test_what_an_instance_goes_on_from_and_then_answers_wrongly_begins_again_elsewhere() -> None:
    flight = Flight(0, 0, 1, 9, PROMPT, 0, suspended=suspended(1))
    made, _, events = flights(flight, {0: Engine(completion(2)), 1: Engine(completion(1))})
    asyncio.run(fly(made, flight, 1, 0))
    assert events == [core.Lost(0)]
    assert flight.suspended is None


def test_an_instance_that_hands_a_trajectory_back_unasked_is_lost() -> None:
    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, _, events = flights(flight, {0: Engine(SuspendedError("as I like")), 1: Engine(completion(1))})
    asyncio.run(fly(made, flight, 1, 0))
    assert events == [core.Lost(0)]


@pytest.mark.parametrize("error", [RequestError("no slot"), KeyError("what"), StrettoError("no")])
def test_an_instance_that_refuses_what_it_is_told_is_lost_and_the_run_goes_on(error: Exception) -> None:
    class Refuses(Engine):
        async def load(self, weights: Weights) -> None:
            raise error

    made, _, events = flights(Flight(0, 0, 1, 9, PROMPT, 0), {0: Refuses(error), 1: Engine(completion(1))})
    asyncio.run(made._residents.load(0, Weights(1, "full", {}, "sum")))
    assert events == [core.Lost(0)]


def test_a_move_does_not_wait_for_a_call_on_another_instance() -> None:
    async def story() -> None:
        flight = Flight(0, 0, 1, 9, PROMPT, 0)
        made, _, events = flights(flight, {0: Engine(completion(1)), 1: Engine(completion(1))})
        flight.instance, flight.called, flight.call = 1, 0, asyncio.Future()  # on the way from 0 to 1
        await asyncio.wait_for(made.suspend(1, [0], "moves on"), 1.0)
        assert not events

    asyncio.run(story())


def test_instances_are_called_back_at_once_and_one_that_is_lost_meanwhile_ends_nothing() -> None:
    class Slow(Engine):
        async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
            await asyncio.sleep(0.2)
            raise EngineError("gone")

    first, second = Flight(0, 0, 1, 9, PROMPT, 0), Flight(1, 0, 1, 9, PROMPT, 0)
    made, recorder, events = flights(first, {0: Slow(completion(1)), 1: Slow(completion(1))})
    made.under_way[1] = second
    first.instance, second.instance = 0, 1
    made.instances.ending = True

    async def story() -> None:
        await asyncio.wait_for(made.suspend_all(), 0.35)

    asyncio.run(story())
    assert not events
    assert [told for name, told in recorder.told if name == "moved"] == [0, 1]


def test_when_a_suspect_fails_for_good_those_that_ran_beside_it_are_no_suspects_any_more() -> None:
    guilty, beside = Flight(0, 0, 1, 9, PROMPT, 0, losses=6), Flight(1, 0, 1, 9, PROMPT, 0, losses=4)
    made, _, _ = flights(beside, {0: Engine(completion(1))})
    made.failed_for_good(Flight(2, 0, 1, 9, PROMPT, 0))
    assert beside.losses == 4
    made.failed_for_good(guilty)
    assert (beside.losses, made.failed_in_a_row) == (0, 2)


# -- several turns -----------------------------------------------------------------------------------------------------

CONTEXT = (*PROMPT.tokens, 0, 1, 2, 3, 9)  # the prompt, the first turn, and what is observed behind it


class Asks:
    """Two turns, and a pause between them; then one reward."""

    def __init__(self, *observed: int) -> None:
        self.observed = observed or (9,)
        self.pauses: list[asyncio.Event] = []
        self.left: list[int] = []

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        first = await policy.generate(prompt.tokens)
        self.left.append(policy.left)
        for pause in self.pauses:
            await pause.wait()
        await policy.generate((*prompt.tokens, *first.tokens.tolist(), *self.observed))
        return 0.5


def first_turn_done(flight: Flight) -> Flight:
    flight.turns.done.append(Turn(PROMPT.tokens, completion(1)))
    return flight


def second(version: int = 1) -> Request:
    return Request(0, version, CONTEXT, seed=turn_seed(9, 1), sampling=Sampling(3), group=7)


def test_two_turns_are_one_trajectory_that_ends_when_the_last_is_done() -> None:
    flight, engine, asks = Flight(0, 7, 1, 9, PROMPT, 0), Engine(completion(1)), Asks()
    engine.done = replace(engine.done, tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))  # type: ignore[type-var]
    made, recorder, events = flights(flight, {0: engine}, environment=asks, max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    assert [each.sampling.max_tokens for each in engine.generated] == [8, 4]
    assert asks.left == [5]
    assert flight.completion is not None
    assert flight.completion.tokens.tolist() == [0, 1, 2, 9, 0, 1, 2]
    assert events == [core.Generated(0, 6), core.Scored(0, 0.5)]
    assert [name for name, _ in recorder.told] == ["generated", "member_ended", "scored"]


def test_a_turn_that_was_suspended_goes_on_behind_those_that_are_done() -> None:
    flight = first_turn_done(Flight(0, 7, 1, 9, PROMPT, 0))
    flight.suspended = replace(suspended(1), request=second())
    engine = Engine(replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32)))
    made, _, events = flights(flight, {0: engine}, environment=Asks(), max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    assert not engine.generated
    assert [each.request for each in engine.resumed] == [second()]
    assert flight.completion is not None
    assert flight.completion.turns is not None
    assert flight.completion.turns.tolist() == [[0, 4], [5, 8]]
    assert events == [core.Generated(0, 7), core.Scored(0, 0.5)]


@pytest.mark.parametrize("observed", [(8,), (9, 9)])
def test_an_episode_that_asks_for_something_else_when_it_is_run_again_fails_by_name(observed: tuple[int, ...]) -> None:
    flight = first_turn_done(Flight(0, 7, 1, 9, PROMPT, 0))
    flight.suspended = replace(suspended(1), request=second())
    made, _, events = flights(flight, {0: Engine(completion(1))}, environment=Asks(*observed), max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    (failed,) = events
    assert isinstance(failed, core.GenerationFailed)
    assert "asked for turn 1 with other tokens than the first time" in failed.reason
    assert len(flight.turns.done) == 1


def test_an_episode_that_asks_for_less_when_it_is_run_again_fails_by_name() -> None:
    class Once(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await policy.generate(prompt.tokens)
            return 1.0

    flight = first_turn_done(Flight(0, 7, 1, 9, PROMPT, 0))
    flight.turns.done.append(Turn(CONTEXT, completion(1)))
    made, _, events = flights(flight, {0: Engine(completion(1))}, environment=Once(), max_turns=3)
    asyncio.run(fly(made, flight, 1, 0))
    assert [type(event) for event in events] == [core.GenerationFailed]
    assert "returned after 1 turns, and had asked for 2 the first time" in events[0].reason


def test_one_that_is_called_back_between_two_turns_goes_on_elsewhere_and_ends_once() -> None:
    async def story() -> None:
        flight, asks = Flight(0, 7, 1, 9, PROMPT, 0), Asks()
        asks.pauses = [asyncio.Event()]
        done = replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))
        one, other = Engine(done), Engine(done)

        async def suspend(ids: Sequence[int], *, kv: bool) -> list[Suspended]:
            return []  # it has nothing of it between two turns

        one.suspend = suspend  # type: ignore[method-assign]
        made, _, events = flights(flight, {0: one, 1: other}, environment=asks, max_turns=2)
        first = asyncio.create_task(made.launch(flight, 1, 0))
        while not flight.turns.done:
            await asyncio.sleep(0)
        await made.suspend(0, [0], "moves")
        again = asyncio.create_task(made.launch(flight, 1, 1, resumed=True, reason="moves"))
        await asyncio.sleep(0.01)
        asks.pauses[0].set()
        await asyncio.gather(first, again)
        assert (len(one.generated), len(other.generated)) == (1, 1)
        assert other.generated[0].seed == turn_seed(9, 1)
        assert events == [core.Generated(0, 6), core.Scored(0, 0.5)]

    asyncio.run(story())


def test_a_turn_begins_under_what_its_instance_has_come_to_when_no_swap_is_left() -> None:
    class Swaps(Engine):
        gates = (asyncio.Event(), asyncio.Event())

        async def swap(self, old: int, weights: Weights) -> None:
            await self.gates[old - 1].wait()

    async def story() -> None:
        done = replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))
        flight, asks, engine = Flight(0, 7, 1, 9, PROMPT, 0), Asks(), Swaps(done)
        asks.pauses = [asyncio.Event()]
        made, _, _ = flights(flight, {0: engine}, environment=asks, max_turns=2, pinned=False)
        flying = asyncio.create_task(made.launch(flight, 1, 0))
        swaps = [asyncio.create_task(made._residents.swap(0, 1, Weights(2, "full", {}, "two")))]
        await asyncio.sleep(0.01)
        asks.pauses[0].set()
        await asyncio.sleep(0.01)  # the second turn waits for the first swap
        swaps.append(asyncio.create_task(made._residents.swap(0, 2, Weights(3, "full", {}, "three"))))
        await asyncio.sleep(0.01)
        engine.gates[0].set()
        await asyncio.sleep(0.01)
        assert len(engine.generated) == 1
        engine.gates[1].set()
        await asyncio.gather(flying, *swaps)
        assert [request.version for request in engine.generated] == [1, 3]

    asyncio.run(story())


def test_what_fails_after_a_turn_keeps_it_for_the_next_try() -> None:
    flight = first_turn_done(Flight(0, 7, 1, 9, PROMPT, 0))
    made, _, events = flights(flight, {0: Engine(RequestError("no"))}, environment=Asks(), max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    assert events == [core.GenerationFailed(0, "no", 0)]
    assert (len(flight.turns.done), flight.num_sampled) == (1, 4)


def test_a_trajectory_that_has_its_last_token_is_scored_with_the_turns_that_it_had() -> None:
    made_before = Flight(0, 7, 1, 9, PROMPT, 0)
    made_before.turns.add(PROMPT.tokens, completion(1))
    made_before.turns.add(CONTEXT, replace(completion(1), tokens=np.arange(3, dtype=np.int32)))
    whole = replace(made_before.turns.done[0].completion, tokens=np.array([0, 1, 2, 3, 9, 0, 1, 2], np.int32))
    whole = replace(whole, logprobs=np.zeros(8, np.float32), turns=np.array([[0, 4], [5, 8]], np.int32))
    flight = Flight(0, 7, 1, 9, PROMPT, 0, completion=whole)
    made, recorder, events = flights(flight, {}, environment=Asks(), max_turns=3)

    async def scored() -> None:
        await made.score(flight)

    asyncio.run(scored())
    assert events == [core.Scored(0, 0.5)]
    assert [name for name, _ in recorder.told] == ["member_ended", "scored"]


@pytest.mark.parametrize("fault", [EngineError("gone"), SuspendedError("out"), RequestError("no")])
def test_what_keeps_an_episode_from_its_tokens_is_not_the_environments_to_hide(fault: Exception) -> None:
    class Hides(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            try:
                return await super().episode(prompt, policy)
            except Exception:
                return 1.0

    flight = first_turn_done(Flight(0, 7, 1, 9, PROMPT, 0))
    made, _, events = flights(flight, {0: Engine(fault), 1: Engine(fault)}, environment=Hides(), max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    assert events == [core.GenerationFailed(0, "no", 0) if isinstance(fault, RequestError) else core.Lost(0)]


def test_an_environment_that_breaks_an_assertion_of_its_own_fails_its_trajectory() -> None:
    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, _, events = flights(flight, {0: Engine(completion(1))}, AssertionError("two is three"))
    asyncio.run(fly(made, flight, 1, 0))
    assert isinstance(events[-1], core.ScoringFailed)
    assert re.fullmatch(r"AssertionError: two is three \(test_flights\.py:\d+\)", events[-1].reason)


def test_two_turns_at_once_are_refused() -> None:
    class AtOnce(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await asyncio.gather(policy.generate(prompt.tokens), policy.generate(prompt.tokens))
            return 1.0

    class Takes(Engine):
        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0.01)
            return await super().generate(request)

    flight = Flight(0, 0, 1, 9, PROMPT, 0)
    made, _, events = flights(flight, {0: Takes(completion(1))}, environment=AtOnce(), max_turns=2)
    asyncio.run(fly(made, flight, 1, 0))
    assert "before the last one was done" in events[-1].reason
