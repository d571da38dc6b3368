"""A trajectory that goes on elsewhere: which versions its tokens are of, and what is written of it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.core import messages as core
from stretto.engines.fake import FakeSteppedEngine
from stretto.engines.threaded import ThreadedEngine
from stretto.environments.protocol import Policy
from stretto.environments.single_turn import SingleTurn
from stretto.errors import (
    EngineError,
    JournalError,
    RequestError,
    RewardError,
    StrettoError,
    SuspendedError,
    TransitionError,
)
from stretto.run import rollout_runner
from stretto.run.first_reward import FirstReward
from stretto.run.instance_membership import Instances
from stretto.run.output_checks import refuse_output
from stretto.run.protocols import FixedPool
from stretto.run.rollout import Placement, Rollout, RolloutState
from stretto.run.rollout_runner import Rollouts
from stretto.run.seeds import turn_seed
from stretto.run.settings import Settings
from stretto.run.task_play import TaskPlay
from stretto.run.turns import Turn
from stretto.run.version_loader import VersionLoader
from stretto.training.fake import FakeTrainer
from stretto.types import Capacity, Completion, EngineStats, Lineage, Prompt, Request, Sampling, Suspended, Weights

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

    def report(self) -> EngineStats:
        return EngineStats(running=1, queued=0, kv_tokens=0, versions={})

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


def rollouts(
    rollout: Rollout,
    engines: Mapping[int, Any],
    outcome: float | Exception = 1.0,
    *,
    pinned: bool = True,
    environment: Any = None,
    max_turns: int = 1,
) -> tuple[Rollouts, Recorder, list[Any]]:
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
    made = Rollouts(
        {rollout.id: rollout},
        instances=instances,
        version_loader=VersionLoader(instances, journal=recorder, post=events.append),  # type: ignore[arg-type]
        tasks=TaskPlay(environment or Environment(outcome), Sampling(8), max_turns=max_turns),
        decode=lambda tokens: "text",
        settings=Settings(seed=0, stall_s=5.0),
        pinned=pinned,
        journal=recorder,  # type: ignore[arg-type]
        tally=recorder,  # type: ignore[arg-type]
        tail=recorder,  # type: ignore[arg-type]
        first_reward=FirstReward(),
        post=events.append,
        halt=lambda error: pytest.fail(str(error)),
    )
    return made, recorder, events


async def run_episode(made: Rollouts, rollout: Rollout, version: int, instance: int) -> None:
    await made.launch(rollout, version, instance)


def test_a_rollout_goes_from_its_prompt_to_its_reward() -> None:
    rollout, engine = Rollout(0, 7, 2, 9, PROMPT, 0), Engine(completion(2))
    made, recorder, events = rollouts(rollout, {0: engine}, outcome=0.5)
    asyncio.run(run_episode(made, rollout, 2, 0))
    assert engine.generated == [replace(request(0, 2), group=7)]
    assert (rollout.lineages[0].completion, rollout.reward, rollout.instance) == (engine.done, 0.5, None)
    assert [name for name, _ in recorder.told] == ["generated", "episode_limited", "member_ended", "scored"]
    assert events == [core.Generated(0, 4), core.Scored(0, 0.5)]


def test_few_calls_lie_between_a_single_turn_rollout_and_the_queue_of_its_engine() -> None:
    stacks: list[list[str]] = []

    class Counting(ThreadedEngine):
        def _begin(self, apply: Any, trajectory: int | None = None) -> Any:
            if trajectory is not None:
                frame, names = sys._getframe(), list[str]()
                while frame is not None and not frame.f_code.co_filename.endswith("asyncio/events.py"):
                    names.append(frame.f_code.co_name)
                    frame = frame.f_back  # type: ignore[assignment]
                stacks.append(names[::-1])
                assert asyncio.current_task() is task, "the whole way is in one task"
            return super()._begin(apply, trajectory)

    class Scores:
        async def score(self, prompt: str, completion: str, row: Mapping[str, Any], details: object = None) -> float:
            return 0.5

    rollout = Rollout(0, 7, 0, 9, PROMPT, 0)

    async def story() -> None:
        nonlocal task
        engine = Counting(FakeSteppedEngine)
        await engine.load(FakeTrainer().weights(0))
        made, _, events = rollouts(rollout, {0: engine}, environment=SingleTurn(Scores(), str))
        task = asyncio.create_task(made.launch(rollout, 0, 0))
        await task
        await engine.close()
        assert isinstance(events[-1], core.Scored)

    task: asyncio.Task[None]
    asyncio.run(story())
    assert len(stacks) == 1
    assert len(stacks[0]) <= 7, stacks[0]
    assert stacks[0][-3:] == ["generate", "_follow", "_begin"], "those of the engine itself"


def test_a_load_sample_says_how_far_what_runs_is_and_what_is_about_to_end() -> None:
    async def sample(context: int) -> core.LoadSampled:
        rollout = Rollout(0, 7, 2, 9, PROMPT, 0)
        made, _, _ = rollouts(rollout, {0: Engine(completion(2))})
        rollout.place(Placement(0, 2))
        rollout.ask(request(0, 2), context=context, engine_steps=0)
        return made.sample_load()

    assert asyncio.run(sample(10)) == core.LoadSampled({0: 10})
    assert asyncio.run(sample(11)) == core.LoadSampled(
        {0: 11}, ending=frozenset({0})
    )  # three of the prompt, and all of 8


@pytest.mark.parametrize(
    ("before", "version", "after"),
    [(None, 1, None), (None, 3, [1, 1]), ([0, 1], 3, [0, 1])],
    ids=["its own", "a newer one", "a newer one again"],
)
def test_a_suspended_trajectory_goes_on_and_says_which_versions_its_tokens_are_of(
    before: list[int] | None, version: int, after: list[int] | None
) -> None:
    rollout, engine = Rollout(0, 0, 1, 9, PROMPT, 0, suspended=suspended(1, before)), Engine(completion(version))
    made, _, _ = rollouts(rollout, {0: engine}, pinned=version == 1)
    asyncio.run(run_episode(made, rollout, version, 0))
    (asked,) = engine.resumed
    assert asked.request.version == version
    assert (None if asked.token_versions is None else asked.token_versions.tolist()) == after
    assert rollout.suspended is None
    assert not engine.generated


def test_one_that_began_anew_under_newer_weights_says_so_of_every_token() -> None:
    rollout, engine = Rollout(0, 0, 1, 9, PROMPT, 0), Engine(completion(3))
    made, _, _ = rollouts(rollout, {0: engine}, pinned=False)
    asyncio.run(run_episode(made, rollout, 3, 0))
    assert rollout.is_generated
    assert rollout.lineages[0].completion.token_versions is not None
    assert rollout.lineages[0].completion.token_versions.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("turns", [0, 1], ids=["of the turn under way", "of a turn that is done"])
def test_nothing_goes_on_under_an_older_version_than_that_of_its_newest_token(turns: int) -> None:
    async def story(version: int) -> Engine:
        rollout, engine = Rollout(0, 0, 1, 9, PROMPT, 0), Engine(completion(version))
        if turns:
            rollout.turns.add(PROMPT.tokens, completion(1, [1, 1, 1, 4]))
            engine.done = replace(completion(version), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, "f4"))
        else:
            rollout.suspended = suspended(4, [1, 4])
        environment = Asks() if turns else None
        made, _, _ = rollouts(rollout, {0: engine}, pinned=False, environment=environment, max_turns=1 + turns)
        try:
            await run_episode(made, rollout, version, 0)
        finally:
            assert bool(engine.generated or engine.resumed) == (version >= 4), "no instance is asked for it"
        return engine

    asyncio.run(story(version=4))
    with pytest.raises(TransitionError, match="has tokens of version 4 and was to go on under version 3 on instance 0"):
        asyncio.run(story(version=3))


@pytest.mark.parametrize(
    ("done", "outcome", "event"),
    [
        (RequestError("too long"), 1.0, core.GenerationFailed(0, "too long", 0)),
        (completion(1), RewardError("no idea"), core.ScoringFailed(0, "no idea")),
    ],
)
def test_what_goes_wrong_with_one_trajectory_is_an_event(done: Any, outcome: Any, event: core.Event) -> None:
    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, _, events = rollouts(rollout, {0: Engine(done)}, outcome)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert events[-1] == event


def test_what_goes_wrong_with_the_run_is_raised() -> None:
    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, _, _ = rollouts(rollout, {0: Engine(completion(1))}, JournalError("full"))
    with pytest.raises(JournalError, match="full"):
        asyncio.run(run_episode(made, rollout, 1, 0))


def test_a_lost_instance_is_told_once_and_the_last_one_ends_the_run() -> None:
    rollout, error = Rollout(0, 0, 1, 9, PROMPT, 0), EngineError("gone")
    made, recorder, events = rollouts(rollout, {0: Engine(error), 1: Engine(error)})

    async def story() -> None:
        await run_episode(made, rollout, 1, 0)
        made.instances.lose(0, error)
        assert events == [core.Lost(0)]
        assert recorder.told == [("instance_left", 0), ("note", "instance lost"), ("instance_lost", {})]
        with pytest.raises(EngineError, match="gone"):
            await run_episode(made, rollout, 1, 1)

    asyncio.run(story())


def test_what_is_thrown_away_is_recorded_with_the_tokens_that_it_had() -> None:
    running = Rollout(0, 0, 1, 9, PROMPT, 0)
    done = Rollout(1, 0, 1, 9, PROMPT, 0, lineages=(Lineage(PROMPT.tokens, completion(1)),))
    waiting = Rollout(2, 0, 1, 9, PROMPT, 0)
    made, recorder, _ = rollouts(running, {0: Engine(completion(1))})

    async def discard() -> None:
        running.place(Placement(0, 1))
        running.ask(request(0, version=1), context=3, engine_steps=0)
        await made.suspensions.discard([running, done, waiting], "past its age limit")

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

    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, recorder, _ = rollouts(rollout, {0: Lies(completion(1)), 1: Engine(completion(1))})

    async def story() -> None:
        await made._version_loader.load(0, Weights(1, "full", {}, "sum"))
        rollout.place(Placement(0, 1))
        rollout.ask(request(0, version=1), context=3, engine_steps=0).answered.set_result(None)
        leaving = made.suspensions
        await (leaving.suspend(0, [0], "moves") if how == "move" else leaving.suspend_all())

    asyncio.run(story())
    assert rollout.suspended is None
    assert list(made.instances.engines) == [1]
    assert ("instance_left", 0) in recorder.told
    assert wrong in str(made.instances._known[0].error)


def test_what_was_suspended_before_its_first_token_may_say_so_of_its_versions_too() -> None:
    none = np.zeros(0, dtype=np.int32)
    answer = replace(suspended(1), tokens=none, logprobs=np.zeros(0, dtype=np.float32), token_versions=none)
    refuse_output(answer, request(0, 1), checksums={1: "sum"}, vocabulary=None, continued=False)


def test_tokens_of_a_version_after_those_of_a_newer_one_are_refused_also_where_versions_change() -> None:
    checksums = {1: "sum", 2: "sum"}
    refuse_output(suspended(2, [1, 2]), request(0, 1), checksums=checksums, vocabulary=None, continued=True)
    with pytest.raises(EngineError, match="answered with a token of version 1 after one of version 2"):
        refuse_output(suspended(2, [2, 1]), request(0, 1), checksums=checksums, vocabulary=None, continued=True)


def test_what_an_instance_goes_on_from_and_then_answers_wrongly_begins_again_elsewhere() -> None:
    rollout = Rollout(0, 0, 1, 9, PROMPT, 0, suspended=suspended(1))
    made, _, events = rollouts(rollout, {0: Engine(completion(2)), 1: Engine(completion(1))})
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert events == [core.Lost(0)]
    assert rollout.suspended is None


def test_an_instance_that_hands_a_trajectory_back_unasked_is_lost() -> None:
    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, _, events = rollouts(rollout, {0: Engine(SuspendedError("as I like")), 1: Engine(completion(1))})
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert events == [core.Lost(0)]


@pytest.mark.parametrize("error", [RequestError("no slot"), KeyError("what"), StrettoError("no")])
def test_an_instance_that_refuses_what_it_is_told_is_lost_and_the_run_goes_on(error: Exception) -> None:
    class Refuses(Engine):
        async def load(self, weights: Weights) -> None:
            raise error

    made, _, events = rollouts(Rollout(0, 0, 1, 9, PROMPT, 0), {0: Refuses(error), 1: Engine(completion(1))})
    asyncio.run(made._version_loader.load(0, Weights(1, "full", {}, "sum")))
    assert events == [core.Lost(0)]


def test_a_move_does_not_wait_for_a_call_on_another_instance() -> None:
    async def story() -> None:
        rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
        made, _, events = rollouts(rollout, {0: Engine(completion(1)), 1: Engine(completion(1))})
        rollout.place(Placement(0, 1))
        rollout.ask(request(0, 1), context=3, engine_steps=0)
        rollout.leave(handed_over := asyncio.Future[None]())  # on the way from 0 to 1
        rollout.place(Placement(1, 1))
        await asyncio.wait_for(made.suspensions.suspend(1, [0], "moves on"), 1.0)
        assert rollout.state is RolloutState.SUSPENDING, "instance 0 has not handed it over"
        handed_over.set_result(None)
        rollout.handed_over()
        assert rollout.state is RolloutState.WAITING
        assert not events

    asyncio.run(story())


def test_instances_are_called_back_at_once_and_one_that_is_lost_meanwhile_ends_nothing() -> None:
    class Slow(Engine):
        async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
            await both.wait()  # until the other was called back too
            raise EngineError("gone")

    both = asyncio.Barrier(2)
    first, second = Rollout(0, 0, 1, 9, PROMPT, 0), Rollout(1, 0, 1, 9, PROMPT, 0)
    made, recorder, events = rollouts(first, {0: Slow(completion(1)), 1: Slow(completion(1))})
    made.in_progress[1] = second
    made.instances.run_is_ending = True

    async def story() -> None:
        for rollout in (first, second):
            rollout.place(Placement(rollout.id, 1))
            rollout.ask(request(rollout.id, 1), context=3, engine_steps=0)
        await asyncio.wait_for(made.suspensions.suspend_all(), 30)

    asyncio.run(story())
    assert not events
    assert [told for name, told in recorder.told if name == "state_changed"] == [0, 1]


def test_when_a_quarantined_rollout_fails_for_good_those_beside_it_are_cleared() -> None:
    guilty, beside = Rollout(0, 0, 1, 9, PROMPT, 0, losses=6), Rollout(1, 0, 1, 9, PROMPT, 0, losses=4)
    made, _, _ = rollouts(beside, {0: Engine(completion(1))})
    made.note_failure(Rollout(2, 0, 1, 9, PROMPT, 0))
    assert beside.losses == 4
    made.note_failure(guilty)
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


def first_turn_done(rollout: Rollout) -> Rollout:
    rollout.turns.done.append(Turn(PROMPT.tokens, completion(1)))
    return rollout


def second(version: int = 1) -> Request:
    return Request(0, version, CONTEXT, seed=turn_seed(9, 1), sampling=Sampling(3), group=7)


def test_two_turns_are_one_trajectory_that_ends_when_the_last_is_done() -> None:
    rollout, engine, asks = Rollout(0, 7, 1, 9, PROMPT, 0), Engine(completion(1)), Asks()
    engine.done = replace(engine.done, tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))  # type: ignore[type-var]
    made, recorder, events = rollouts(rollout, {0: engine}, environment=asks, max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert [each.sampling.max_tokens for each in engine.generated] == [8, 4]
    assert asks.left == [5]
    assert rollout.is_generated
    assert rollout.lineages[0].completion.tokens.tolist() == [0, 1, 2, 9, 0, 1, 2]
    assert events == [core.Generated(0, 6), core.Scored(0, 0.5)]
    told = ["generated", "episode_limited", "episode_limited", "member_ended", "scored"]  # the limit twice: metrics too
    assert [name for name, _ in recorder.told] == told


def test_a_turn_that_was_suspended_goes_on_behind_those_that_are_done() -> None:
    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    rollout.suspended = replace(suspended(1), request=second())
    engine = Engine(replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32)))
    made, _, events = rollouts(rollout, {0: engine}, environment=Asks(), max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert not engine.generated
    assert [each.request for each in engine.resumed] == [second()]
    assert rollout.is_generated
    assert rollout.lineages[0].completion.turns is not None
    assert rollout.lineages[0].completion.turns.tolist() == [[0, 4], [5, 8]]
    assert events == [core.Generated(0, 7), core.Scored(0, 0.5)]


@pytest.mark.parametrize("observed", [(8,), (9, 9)])
def test_an_episode_that_asks_for_something_else_when_it_is_run_again_fails_by_name(observed: tuple[int, ...]) -> None:
    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    rollout.suspended = replace(suspended(1), request=second())
    made, _, events = rollouts(rollout, {0: Engine(completion(1))}, environment=Asks(*observed), max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    (failed,) = events
    assert isinstance(failed, core.GenerationFailed)
    assert "asked for turn 1 with other tokens than the first time" in failed.reason
    assert len(rollout.turns.done) == 1


def test_an_episode_that_asks_for_less_when_it_is_run_again_fails_by_name() -> None:
    class Once(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await policy.generate(prompt.tokens)
            return 1.0

    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    rollout.turns.done.append(Turn(CONTEXT, completion(1)))
    made, _, events = rollouts(rollout, {0: Engine(completion(1))}, environment=Once(), max_turns=3)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert [type(event) for event in events] == [core.GenerationFailed]
    assert "returned after 1 turns, and had asked for 2 the first time" in events[0].reason


class AsksAnew(Asks):
    """May ask for something else when it is run again, as agents may."""

    deterministic = False


@pytest.mark.parametrize("unfinished", [False, True])
def test_an_agent_that_asks_for_something_else_when_it_is_run_again_discards_what_followed(unfinished: bool) -> None:
    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    if unfinished:
        rollout.suspended = replace(suspended(1), request=second())
    else:
        rollout.turns.done.append(Turn(CONTEXT, completion(1)))
    engine = Engine(replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32)))
    made, _, events = rollouts(rollout, {0: engine}, environment=AsksAnew(8), max_turns=3)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert not engine.resumed
    assert [each.prompt for each in engine.generated] == [(*CONTEXT[:-1], 8)]
    assert engine.generated[0].seed == turn_seed(9, 1)
    assert rollout.lineages[0].completion.tokens.tolist() == [0, 1, 2, 3, 8, 0, 1, 2]
    assert events == [core.Generated(0, 7), core.Scored(0, 0.5)]


def test_an_agent_that_asks_for_less_when_it_is_run_again_ends_there() -> None:
    class Once(AsksAnew):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await policy.generate(prompt.tokens)
            return 1.0

    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    rollout.turns.done.append(Turn(CONTEXT, completion(1)))
    made, _, events = rollouts(rollout, {0: Engine(completion(1))}, environment=Once(), max_turns=3)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert rollout.lineages[0].completion.tokens.tolist() == [0, 1, 2, 3]
    assert events == [core.Generated(0, 4), core.Scored(0, 1.0)]


def test_an_agent_that_has_its_last_token_cannot_ask_for_something_else() -> None:
    before = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    before.turns.add(CONTEXT, replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3)))
    rollout = Rollout(0, 7, 1, 9, PROMPT, 0, lineages=before.turns.lineages())
    made, _, events = rollouts(rollout, {}, environment=AsksAnew(8), max_turns=2)

    async def scored() -> None:
        await made.score(rollout)

    asyncio.run(scored())
    (failed,) = events
    assert isinstance(failed, core.ScoringFailed)
    assert "asked for turn 1 with other tokens than the first time" in failed.reason
    assert len(rollout.turns.done) == 2


def test_one_that_is_called_back_between_two_turns_goes_on_elsewhere_and_ends_once() -> None:
    async def story() -> None:
        rollout, asks = Rollout(0, 7, 1, 9, PROMPT, 0), Asks()
        asks.pauses = [asyncio.Event()]
        done = replace(completion(1), tokens=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))
        one, other = Engine(done), Engine(done)

        async def suspend(ids: Sequence[int], *, kv: bool) -> list[Suspended]:
            return []  # it has nothing of it between two turns

        one.suspend = suspend  # type: ignore[method-assign]
        made, _, events = rollouts(rollout, {0: one, 1: other}, environment=asks, max_turns=2)
        first = asyncio.create_task(made.launch(rollout, 1, 0))
        while not rollout.turns.done:
            await asyncio.sleep(0)
        await made.suspensions.suspend(0, [0], "moves")
        again = asyncio.create_task(made.launch(rollout, 1, 1, resumed=True, reason="moves"))
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
        rollout, asks, engine = Rollout(0, 7, 1, 9, PROMPT, 0), Asks(), Swaps(done)
        asks.pauses = [asyncio.Event()]
        made, _, _ = rollouts(rollout, {0: engine}, environment=asks, max_turns=2, pinned=False)
        playing = asyncio.create_task(made.launch(rollout, 1, 0))
        swaps = [asyncio.create_task(made._version_loader.swap(0, 1, Weights(2, "full", {}, "two")))]
        await asyncio.sleep(0.01)
        asks.pauses[0].set()
        await asyncio.sleep(0.01)  # the second turn waits for the first swap
        swaps.append(asyncio.create_task(made._version_loader.swap(0, 2, Weights(3, "full", {}, "three"))))
        await asyncio.sleep(0.01)
        engine.gates[0].set()
        await asyncio.sleep(0.01)
        assert len(engine.generated) == 1
        engine.gates[1].set()
        await asyncio.gather(playing, *swaps)
        assert [request.version for request in engine.generated] == [1, 3]

    asyncio.run(story())


def test_what_fails_after_a_turn_keeps_it_for_the_next_try() -> None:
    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    made, _, events = rollouts(rollout, {0: Engine(RequestError("no"))}, environment=Asks(), max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert events == [core.GenerationFailed(0, "no", 0)]
    assert (len(rollout.turns.done), rollout.num_sampled) == (1, 4)


def test_a_trajectory_that_has_its_last_token_is_scored_with_the_turns_that_it_had() -> None:
    made_before = Rollout(0, 7, 1, 9, PROMPT, 0)
    made_before.turns.add(PROMPT.tokens, completion(1))
    made_before.turns.add(CONTEXT, replace(completion(1), tokens=np.arange(3, dtype=np.int32)))
    whole = replace(made_before.turns.done[0].completion, tokens=np.array([0, 1, 2, 3, 9, 0, 1, 2], np.int32))
    whole = replace(whole, logprobs=np.zeros(8, np.float32), turns=np.array([[0, 4], [5, 8]], np.int32))
    rollout = Rollout(0, 7, 1, 9, PROMPT, 0, lineages=(Lineage(PROMPT.tokens, whole),))
    made, recorder, events = rollouts(rollout, {}, environment=Asks(), max_turns=3)

    async def scored() -> None:
        await made.score(rollout)

    asyncio.run(scored())
    assert events == [core.Scored(0, 0.5)]
    assert [name for name, _ in recorder.told] == ["episode_limited", "member_ended", "scored"]


@pytest.mark.parametrize("fault", [EngineError("gone"), SuspendedError("out"), RequestError("no")])
def test_what_keeps_an_episode_from_its_tokens_is_not_the_environments_to_hide(fault: Exception) -> None:
    class Hides(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            try:
                return await super().episode(prompt, policy)
            except Exception:
                return 1.0

    rollout = first_turn_done(Rollout(0, 7, 1, 9, PROMPT, 0))
    made, _, events = rollouts(rollout, {0: Engine(fault), 1: Engine(fault)}, environment=Hides(), max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert events == [core.GenerationFailed(0, "no", 0) if isinstance(fault, RequestError) else core.Lost(0)]


def test_an_environment_that_breaks_an_assertion_of_its_own_fails_its_trajectory() -> None:
    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, _, events = rollouts(rollout, {0: Engine(completion(1))}, AssertionError("two is three"))
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert isinstance(events[-1], core.ScoringFailed)
    assert re.fullmatch(r"AssertionError: two is three \(test_rollout_runner\.py:\d+\)", events[-1].reason)


def test_two_turns_at_once_are_refused() -> None:
    class AtOnce(Asks):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await asyncio.gather(policy.generate(prompt.tokens), policy.generate(prompt.tokens))
            return 1.0

    class Takes(Engine):
        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0.01)
            return await super().generate(request)

    rollout = Rollout(0, 0, 1, 9, PROMPT, 0)
    made, _, events = rollouts(rollout, {0: Takes(completion(1))}, environment=AtOnce(), max_turns=2)
    asyncio.run(run_episode(made, rollout, 1, 0))
    assert "before the last one was done" in events[-1].reason


def test_a_row_is_freed_even_if_its_time_comes_while_an_earlier_turn_is_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_runner, "WORLD_S", 0.0)

    async def world() -> None:
        rollout = Rollout(0, 7, 1, 9, PROMPT, 0)
        made, _, events = rollouts(rollout, {0: Engine(completion(1))}, max_turns=3)
        rollout.place(placement := Placement(0, 1))
        run = rollout_runner._EpisodeRun(rollout, placement)
        run.episode = episode = SimpleNamespace(environment_works=False)  # type: ignore[assignment]
        made._free_row(run)
        assert events == []
        episode.environment_works = True
        while not events:
            await asyncio.sleep(0)
        assert events == [core.TurnEnded(0)]
        rollout.interrupt()
        made._free_row(run)
        assert (len(events), run.row_timer) == (1, None)

    asyncio.run(world())
