"""The life of a rollout: which change of state may follow which, and what each leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stretto.errors import TransitionError
from stretto.run.rollout import TRANSITIONS, Placement, Rollout, RolloutState
from stretto.types import Completion, Lineage, Prompt, Request, Sampling, Suspended

S = RolloutState
PROMPT = Prompt(0, "1+1=", (1, 2, 3), {})
REQUEST = Request(0, 1, PROMPT.tokens, seed=9, sampling=Sampling(8))
TURN = Completion(0, 1, np.arange(4, dtype=np.int32), np.zeros(4, np.float32), "stop", "sum")
WHOLE = (Lineage(PROMPT.tokens, TURN),)


def placed(rollout: Rollout) -> None:
    rollout.place(Placement(0, 1))


def asked(rollout: Rollout) -> None:
    rollout.ask(REQUEST, context=3, engine_steps=7)


def turn_ended(rollout: Rollout) -> None:
    assert rollout.placement is not None
    rollout.end_turn(rollout.placement, PROMPT.tokens, TURN)


def left(rollout: Rollout) -> asyncio.Future[None]:
    departure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rollout.leave(departure)
    return departure


def handed_over(rollout: Rollout) -> None:
    for departure in rollout.departures:
        departure.set_result(None)
    rollout.handed_over()


def scored(rollout: Rollout) -> None:
    rollout.score(0.5, None)


LIVES: dict[RolloutState, list[Callable[[Rollout], object]]] = {  # the shortest that lead to each state
    S.WAITING: [],
    S.PLACED: [placed],
    S.GENERATING: [placed, asked],
    S.BETWEEN_TURNS: [placed, asked, turn_ended],
    S.SUSPENDING: [placed, asked, left],
    S.SCORING: [placed, asked, turn_ended, Rollout.complete],
    S.SCORED: [placed, asked, turn_ended, Rollout.complete, scored],
    S.ENDED: [Rollout.end],
}


def in_state(state: RolloutState) -> Rollout:
    rollout = Rollout(0, 7, 1, 9, PROMPT, 0)
    for step in LIVES[state]:
        step(rollout)
    assert rollout.state is state
    return rollout


def with_instance(step: Callable[[Rollout], object]) -> Callable[[Rollout], object]:
    """For steps that need a placement, on rollouts that have none: the state alone must refuse them."""

    def take(rollout: Rollout) -> None:
        rollout.placement = rollout.placement or Placement(0, 1)
        step(rollout)

    return take


# Method by method: what each state becomes. A state that is not named refuses it.
STEPS: dict[str, tuple[Callable[[Rollout], object], dict[RolloutState, RolloutState]]] = {
    "place": (placed, {S.WAITING: S.PLACED, S.SUSPENDING: S.PLACED}),
    "ask": (with_instance(asked), {S.PLACED: S.GENERATING, S.BETWEEN_TURNS: S.GENERATING}),
    "end_turn": (with_instance(turn_ended), {S.GENERATING: S.BETWEEN_TURNS}),
    "interrupt": (
        with_instance(Rollout.interrupt),
        {S.PLACED: S.WAITING, S.GENERATING: S.WAITING, S.BETWEEN_TURNS: S.WAITING},
    ),
    "leave": (
        with_instance(left),
        {S.PLACED: S.SUSPENDING, S.GENERATING: S.SUSPENDING, S.BETWEEN_TURNS: S.SUSPENDING, S.ENDED: S.ENDED},
    ),
    "complete": (
        Rollout.complete,
        {S.PLACED: S.SCORING, S.BETWEEN_TURNS: S.SCORING, S.WAITING: S.SCORING, S.SUSPENDING: S.SCORING},
    ),
    "score": (scored, {S.SCORING: S.SCORED}),
    "end": (Rollout.end, {state: S.ENDED for state in S if state is not S.ENDED}),
}


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("name", STEPS)
def test_each_method_moves_a_rollout_as_the_table_says_and_refuses_the_rest_by_name(
    name: str, state: RolloutState
) -> None:
    async def story() -> None:
        step, becomes = STEPS[name]
        rollout = in_state(state)
        if name == "complete" and not rollout.turns.done:  # of a turn that came late, or was done before
            rollout.turns.add(PROMPT.tokens, TURN)
        if state in becomes:
            step(rollout)
            assert rollout.state is becomes[state]
            assert state is S.ENDED or becomes[state] in TRANSITIONS[state]
        else:
            with pytest.raises(TransitionError, match=rf"trajectory 0 is {state.value} and cannot become"):
                step(rollout)
            assert rollout.state is state

    asyncio.run(story())


def test_the_table_has_nothing_that_no_method_does() -> None:
    done = {(state, after) for _, becomes in STEPS.values() for state, after in becomes.items()}
    done |= {(S.SUSPENDING, S.WAITING)}  # handed over
    assert {(state, after) for state, afters in TRANSITIONS.items() for after in afters} == done - {(S.ENDED, S.ENDED)}
    assert set(TRANSITIONS) == set(S)


def test_what_the_journal_has_of_a_trajectory_says_its_state() -> None:
    assert Rollout(0, 7, 1, 9, PROMPT, 0).state is S.WAITING
    assert Rollout(0, 7, 1, 9, PROMPT, 0, lineages=WHOLE).state is S.SCORING
    assert Rollout(0, 7, 1, 9, PROMPT, 0, lineages=WHOLE, reward=0.0).state is S.SCORED


def test_a_rollout_waits_once_every_instance_that_it_left_has_handed_it_over() -> None:
    async def story() -> None:
        rollout = in_state(S.GENERATING)
        first = left(rollout)
        rollout.place(Placement(1, 1))
        second = left(rollout)
        assert (rollout.instance, rollout.source) == (None, 1)
        second.set_result(None)
        rollout.handed_over()
        assert rollout.state is S.SUSPENDING
        first.set_result(None)
        rollout.handed_over()
        assert rollout.state is S.WAITING

    asyncio.run(story())


def test_one_whose_next_instance_is_lost_before_the_last_one_answered_is_still_suspending() -> None:
    async def story() -> None:
        rollout = in_state(S.SUSPENDING)
        rollout.place(Placement(1, 1))
        rollout.interrupt()
        assert rollout.state is S.SUSPENDING
        handed_over(rollout)
        assert (rollout.state, rollout.source) == (S.WAITING, 1)

    asyncio.run(story())


def test_a_turn_that_comes_after_its_rollout_left_is_kept_and_changes_no_state() -> None:
    async def story() -> None:
        rollout = in_state(S.GENERATING)
        rollout.suspended = Suspended(REQUEST, TURN.tokens[:2], TURN.logprobs[:2], "sum")
        before = rollout.placement
        assert before is not None
        left(rollout)
        rollout.place(Placement(1, 1))
        rollout.end_turn(before, PROMPT.tokens, TURN)
        assert (rollout.state, rollout.instance) == (S.PLACED, 1)
        assert (rollout.num_sampled, rollout.context, rollout.suspended, before.pending) == (4, 7, None, None)
        rollout.complete()
        assert (rollout.state, rollout.instance, rollout.lineages) == (S.SCORING, None, WHOLE)

    asyncio.run(story())


def test_one_that_was_dropped_keeps_the_tokens_that_still_come() -> None:
    async def story() -> None:
        rollout = in_state(S.GENERATING)
        rollout.end()
        departure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        placement = rollout.leave(departure)
        rollout.end_turn(placement, PROMPT.tokens, replace(TURN, finish="length"))
        departure.set_result(None)
        rollout.handed_over()
        assert (rollout.state, rollout.num_sampled) == (S.ENDED, 4)

    asyncio.run(story())


def test_a_scored_rollout_has_its_completion_and_no_turns() -> None:
    async def story() -> None:
        rollout = in_state(S.SCORED)
        assert (rollout.reward, rollout.lineages, rollout.turns.done) == (0.5, WHOLE, [])

    asyncio.run(story())
