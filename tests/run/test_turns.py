"""The turns of an episode: what may be asked for, and the one trajectory that they become."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stretto.environments.protocol import Outcome, earned, token_ids
from stretto.errors import RewardError, RoomError
from stretto.run.turns import Turns
from stretto.types import Completion, FinishReason, Lineage, Sample, Supports

PROMPT = (1, 2)
LIMITS = {"max_turns": 3, "max_tokens": 8}


def turn(*tokens: int, version: int = 0, finish: FinishReason = "stop", supports: bool = False) -> Completion:
    return Completion(
        id=5,
        version=version,
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-0.1 * token for token in tokens], dtype=np.float32),
        finish=finish,
        checksum=f"sum{version}",
        started_at=float(tokens[0]),
        finished_at=float(tokens[0]) + 1,
        prefilled=3,
        supports=Supports(np.full(len(tokens), 2, np.int32), np.array([[t, t + 50] for t in tokens], np.int32).ravel())
        if supports
        else None,
    )


def three() -> Turns:
    turns = Turns(PROMPT)
    turns.add((1, 2), turn(10, 11, supports=True))
    turns.add((1, 2, 10, 11, 90), turn(12, supports=True))
    turns.add((1, 2, 10, 11, 90, 12, 91, 92), turn(13, 14, supports=True, finish="length"))
    return turns


def test_turns_become_one_trajectory_that_says_which_tokens_were_sampled() -> None:
    made = three().whole()
    assert made.tokens.tolist() == [10, 11, 90, 12, 91, 92, 13, 14]
    assert made.turns is not None
    assert made.turns.tolist() == [[0, 2], [3, 4], [6, 8]]
    assert made.sampled.tolist() == [0, 1, 3, 6, 7]
    assert (made.num_sampled, made.turn_lengths) == (5, (2, 1, 2))
    assert made.logprobs == pytest.approx([-1.0, -1.1, 0.0, -1.2, 0.0, 0.0, -1.3, -1.4])
    assert made.logprobs[[2, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    assert (made.finish, made.prefilled, made.started_at, made.finished_at) == ("length", 9, 10.0, 14.0)
    assert made.token_versions is None
    assert made.supports is not None
    assert made.supports.counts.tolist() == [2, 2, 1, 2, 1, 1, 2, 2]
    assert made.supports.tokens.tolist() == [10, 60, 11, 61, 90, 12, 62, 91, 92, 13, 63, 14, 64]
    assert made.supports.at(made.sampled).tokens.tolist() == [10, 60, 11, 61, 12, 62, 13, 63, 14, 64]


def test_the_turns_of_a_trajectory_are_found_again_in_it() -> None:
    before = three()
    after = Turns.of(PROMPT, before.lineages())
    assert [each.context for each in after.done] == [each.context for each in before.done]
    for one, other in zip(before.done, after.done, strict=True):
        assert other.completion.tokens.tolist() == one.completion.tokens.tolist()
        assert other.completion.logprobs.tolist() == one.completion.logprobs.tolist()
        assert other.completion.finish == one.completion.finish
        assert other.completion.supports is not None
        assert one.completion.supports is not None
        assert other.completion.supports.tokens.tolist() == one.completion.supports.tokens.tolist()
    assert after.num_tokens_after(3) == before.num_tokens_after(3) == 8
    assert after.num_sampled == before.num_sampled == 5


def test_a_single_turn_behind_its_prompt_is_what_the_engine_made_of_it() -> None:
    made, turns = turn(10, 11), Turns(PROMPT)
    turns.add(PROMPT, made)
    assert turns.whole() is made
    (again,) = Turns.of(PROMPT, [Lineage(PROMPT, made)]).done
    assert again.completion is made
    observed = Turns(PROMPT)
    observed.add((*PROMPT, 90), made)
    spans = observed.whole().turns
    assert spans is not None
    assert spans.tolist() == [[1, 3]]


def test_turns_of_several_versions_say_so_of_every_token() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    turns.add((*PROMPT, 10, 11, 90), turn(12, version=1))
    made = turns.whole()
    assert made.token_versions is not None
    assert made.token_versions.tolist() == [0, 0, 1, 1]
    assert (made.version, made.checksum) == (1, "sum1")


def test_a_turn_may_have_as_many_tokens_as_are_left() -> None:
    turns = Turns(PROMPT)
    assert turns.room(0, PROMPT, **LIMITS) == 8
    assert turns.room(0, (*PROMPT, 7), **LIMITS) == 7
    turns.add(PROMPT, turn(10, 11))
    assert turns.room(1, (*PROMPT, 10, 11, 90), **LIMITS) == 5
    assert not turns.cut


@pytest.mark.parametrize("context", [PROMPT, (1, 2, 10), (1, 2, 10, 99, 90), (9, 2, 10, 11, 90), ()])
def test_a_context_that_is_not_what_was_said_so_far_is_refused(context: tuple[int, ...]) -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    with pytest.raises(RewardError, match="turn 1 with a context that does not begin with the 4 tokens of the prompt"):
        turns.room(1, context, **LIMITS)


def test_where_there_is_no_room_the_episode_is_told_and_the_trajectory_is_cut() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    with pytest.raises(
        RoomError, match=r"no room for turn 1: 2 tokens follow the prompt, 6 more .* limit is 8 \(`rollout.max_tokens`"
    ):
        turns.room(1, (*PROMPT, 10, 11, *range(6)), **LIMITS)
    made = turns.whole()
    assert (made.finish, made.tokens.tolist(), made.turns) == ("length", [10, 11], None)
    turns.add((*PROMPT, 10, 11, 90), turn(12))  # it asked for less instead
    assert turns.whole().finish == "stop"


def test_more_turns_than_the_task_has_are_refused() -> None:
    with pytest.raises(RewardError, match=r"asked for turn 3.* 3 at most.*`task.turns`"):
        three().room(3, (), **LIMITS)


def test_a_turn_is_handed_back_for_the_same_question_alone() -> None:
    turns = three()
    again = turns.get(1, [1, 2, 10, 11, 90])
    assert again is turns.done[1].completion
    assert turns.get(1, (1, 2, 10, 11, 91)) is None
    assert turns.get(3, PROMPT) is None


def test_turns_that_are_discarded_leave_the_ones_before_as_they_were() -> None:
    turns = three()
    turns.cut.update({0, 1})
    assert turns.room(1, (1, 2, 10, 11, 91), **LIMITS) == 5, "as if those after it were not there"
    turns.discard(1)
    assert [turn.completion.tokens.tolist() for turn in turns.done] == [[10, 11]]
    assert turns.cut == {0}, "there is no other lineage any more"
    turns.discard(0)
    assert (turns.num_lineages, turns.cut) == (0, set())


# -- what was earned ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["text", [1, 2, "again"], [1, 2.0], None, 7])
def test_a_context_that_is_not_all_token_ids_is_refused(context: Any) -> None:
    with pytest.raises(RewardError, match=r"not all token ids: .*`tokenizer.encode`"):
        token_ids(context)


def test_a_context_may_come_as_any_sequence_of_integers() -> None:
    assert token_ids(np.array([1, 2])) == token_ids([1, 2]) == (1, 2)  # type: ignore[arg-type]
    assert all(type(token) is int for token in token_ids(np.array([1, 2])))  # type: ignore[arg-type]


def test_an_episode_that_never_asked_earns_nothing() -> None:
    with pytest.raises(RewardError, match="without asking for a token"):
        earned(1.0, 0)


def test_an_outcome_earns_the_sum_of_its_turns() -> None:
    assert earned(0.5, 3) == (0.5, None, None)
    assert earned(Outcome((0.1, 0.2, 0.3)), 3) == (pytest.approx(0.6), (0.1, 0.2, 0.3), None)


@pytest.mark.parametrize("outcome", [None, "1", float("nan"), Outcome((float("inf"),)), [1.0]])
def test_what_is_no_reward_is_refused_with_what_it_was(outcome: object) -> None:
    with pytest.raises(RewardError, match=r"the environment returned .* for a reward: return a finite number"):
        earned(outcome, 1)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (1e200, r"the environment returned 1e\+200 for a reward, beyond 1e\+09, the largest .*: scale the rewards"),
        (-1.5e9, r"the environment returned -1.5e\+09 for a reward, beyond"),
        (10**400, r"the environment returned a number \(int\) for a reward that is beyond"),
        (10**5000, r"beyond 1e\+09"),
        (Outcome((1e10, -1e10)), r"the environment returned 1e\+10 for a reward, beyond"),
        (Outcome((9e8, 9e8)), r"the rewards of the environment's 2 turns add up to 1.8e\+09, beyond 1e\+09"),
    ],
    ids=["float", "negative", "integer", "unprintable", "turn", "sum"],
)
def test_a_reward_that_cannot_be_trained_on_is_refused_with_the_bound(outcome: object, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        earned(outcome, 2)


def test_the_largest_rewards_are_rewards() -> None:
    assert earned(-1e9, 1) == (-1e9, None, None)
    assert earned(Outcome((1e9, -1e9, 1e9)), 3) == (1e9, (1e9, -1e9, 1e9), None)


def test_an_outcome_of_another_number_of_turns_is_refused() -> None:
    with pytest.raises(RewardError, match="an outcome of 2 turns, but the episode had 3"):
        earned(Outcome((0.0, 1.0)), 3)


def test_one_reward_is_that_of_the_last_turn() -> None:
    sample = Sample(0, 0, 0, PROMPT, three().whole(), 2.0)
    assert sample.rewards_by_turn == (0.0, 0.0, 2.0)
    assert Sample(0, 0, 0, PROMPT, three().whole(), 2.0, turn_rewards=(1.0, 1.0, 0.0)).rewards_by_turn == (1, 1, 0)


# -- lineages ----------------------------------------------------------------------------------------------------------

SEVERAL = {"max_turns": 9, "max_tokens": 8, "max_lineages": 3, "max_context": 11}


def branched() -> Turns:
    """The prompt, a sub-agent with two turns around the second turn of the first lineage, and an untrained title."""
    turns = Turns(PROMPT)
    turns.add((1, 2), turn(10, 11, supports=True))
    turns.add((70, 71), turn(20, supports=True), 1)
    turns.add((1, 2, 10, 11, 90), turn(12, supports=True))
    turns.add((70, 71, 20, 95), turn(21, 22, supports=True, finish="length"), 1)
    turns.add((80,), turn(30, supports=True), 2, train=False)
    return turns


def test_turns_of_several_lineages_become_a_row_each() -> None:
    first, agent, title = branched().lineages()
    assert (first.context, agent.context, title.context) == (PROMPT, (70, 71), (80,))
    assert [each.train for each in (first, agent, title)] == [True, True, False]
    assert [each.turn_numbers for each in (first, agent, title)] == [(0, 2), (1, 3), (4,)]
    assert first.completion.tokens.tolist() == [10, 11, 90, 12]
    assert agent.completion.tokens.tolist() == [20, 95, 21, 22]
    assert agent.completion.turns is not None
    assert agent.completion.turns.tolist() == [[0, 1], [2, 4]]
    assert agent.completion.logprobs == pytest.approx([-2.0, 0.0, -2.1, -2.2])
    assert agent.completion.supports is not None
    assert agent.completion.supports.tokens.tolist() == [20, 70, 95, 21, 71, 22, 72]
    assert (first.completion.finish, agent.completion.finish) == ("stop", "length")
    assert (title.completion.tokens.tolist(), title.completion.turns) == ([30], None)


def test_the_turns_of_several_lineages_are_found_again_in_their_order() -> None:
    before = branched()
    after = Turns.of(PROMPT, before.lineages())
    for name in ("context", "lineage", "train"):
        assert [getattr(each, name) for each in after.done] == [getattr(each, name) for each in before.done]
    assert [t.completion.tokens.tolist() for t in after.done] == [t.completion.tokens.tolist() for t in before.done]
    assert after.num_sampled == before.num_sampled == 7
    assert after.num_tokens_after(5) == 4


def test_one_lineage_is_what_it_was_without_lineages() -> None:
    (only,) = three().lineages()
    assert (only.context, only.train, only.turn_numbers) == (PROMPT, True, None)


def test_the_first_lineage_may_begin_with_another_context_than_the_prompt() -> None:
    turns, own = Turns(PROMPT), (50, 51, 52)
    assert turns.room(0, own, **LIMITS) == 8
    turns.add(own, made := turn(10, 11))
    (only,) = turns.lineages()
    assert only.context == own
    assert only.completion is made
    assert Turns.of(PROMPT, [only]).done[0].context == own
    assert turns.room(1, (*own, 10, 11, 90), **LIMITS) == 5
    assert turns.left(1, max_tokens=8) == 6
    assert turns.left(1, max_tokens=8, max_context=6) == 1
    with pytest.raises(RewardError, match="does not begin with the 5 tokens"):
        turns.room(1, (*PROMPT, 10, 11), **LIMITS)


def test_a_lineage_is_continued_with_its_own_tokens_and_opened_with_any() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    assert turns.room(1, (70, 71), 1, **SEVERAL) == 8
    assert turns.room(1, (7,) * 10, 1, **SEVERAL) == 1
    turns.add((70, 71), turn(20), 1)
    assert turns.room(2, (70, 71, 20, 95), 1, **SEVERAL) == 6
    assert turns.room(2, (*PROMPT, 10, 11), **SEVERAL) == 6
    with pytest.raises(RewardError, match="turn 2 of lineage 1 with a context that does not begin with the 3 tokens"):
        turns.room(2, (*PROMPT, 10, 11), 1, **SEVERAL)


@pytest.mark.parametrize("lineage", [2, 5, -1, None])
def test_lineages_are_numbered_one_after_the_other(lineage: Any) -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    with pytest.raises(RewardError, match=rf"turn 1 in lineage {lineage}, and its episode has 1 .*`lineage=1`"):
        turns.room(1, (70,), lineage, **SEVERAL)


def test_more_lineages_than_the_task_has_and_empty_ones_are_refused() -> None:
    turns = branched()
    with pytest.raises(RewardError, match=r"opened lineage 3, .* have 3 at most: .*`task.lineages`"):
        turns.room(5, (70,), 3, **SEVERAL)
    with pytest.raises(RewardError, match="opened lineage 0 with an empty context"):
        Turns(PROMPT).room(0, (), **SEVERAL)


def test_a_lineage_stays_trained_or_not() -> None:
    with pytest.raises(RewardError, match=r"turn 5 with `train=True` in lineage 2, which it opened with `train=False`"):
        branched().room(5, (80, 30, 31), 2, **SEVERAL)
    assert branched().room(5, (80, 30, 31), 2, train=False, **SEVERAL) == 6


def test_a_context_that_is_too_long_for_a_lineage_opens_none_and_cuts_none() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    begins = "no room for turn 1: 0 tokens follow the 12 tokens that lineage 1 begins with"
    with pytest.raises(RoomError, match=f"{begins}, .* the limit is 11 in all"):
        turns.room(1, (7,) * 12, 1, **SEVERAL)
    assert (turns.num_lineages, turns.cut) == (1, set())


def test_only_the_lineage_without_room_is_cut() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, 11))
    with pytest.raises(RoomError):
        turns.room(1, (*PROMPT, 10, 11, *range(6)), **SEVERAL)
    turns.add((70,), turn(20), 1)
    assert [each.completion.finish for each in turns.lineages()] == ["length", "stop"]
    assert [each.completion.finish for each in Turns.of(PROMPT, turns.lineages()).done] == ["length", "stop"]
    # The episode is run again, and asks for what had no room once more.
    assert turns.get(1, (*PROMPT, 10, 11, *range(6))) is None
    with pytest.raises(RoomError):
        turns.room(1, (*PROMPT, 10, 11, *range(6)), **SEVERAL)


def test_a_turn_is_handed_back_for_the_same_lineage_alone() -> None:
    turns = branched()
    assert turns.get(1, (70, 71), 1) is turns.done[1].completion
    assert turns.get(1, (70, 71)) is None
    assert turns.get(4, (80,), 2) is None
    assert turns.get(4, (80,), 2, train=False) is turns.done[4].completion


def test_an_episode_is_full_when_nothing_can_follow() -> None:
    turns = Turns(PROMPT)
    turns.add(PROMPT, turn(10, finish="length"))
    assert turns.is_full(max_turns=9, max_lineages=1)
    assert turns.is_full(max_turns=1, max_lineages=3)
    assert not turns.is_full(max_turns=9, max_lineages=2)
    turns.add((70,), turn(20), 1)
    assert not turns.is_full(max_turns=9, max_lineages=2)
    turns.add((70, 20), turn(21, finish="length"), 1)
    assert turns.is_full(max_turns=9, max_lineages=2)


def test_a_lineage_earns_what_was_earned_from_each_of_its_turns_to_its_next() -> None:
    first, agent, title = branched().lineages()
    rewards = (1.0, 2.0, 4.0, 8.0, 16.0)

    def earned_by(lineage: Lineage) -> tuple[float, ...]:
        sample = Sample(
            0, 0, 0, lineage.context, lineage.completion, 31.0, turn_rewards=rewards, turn_numbers=lineage.turn_numbers
        )
        return sample.rewards_by_turn

    assert earned_by(first) == (3.0, 28.0)
    assert earned_by(agent) == (6.0, 24.0)
    assert earned_by(title) == (16.0,)
    whole = Sample(0, 0, 0, agent.context, agent.completion, 31.0, turn_numbers=agent.turn_numbers)
    assert whole.rewards_by_turn == (0.0, 31.0)


def test_the_experts_of_a_token_are_those_of_the_turn_that_computed_it_first() -> None:
    def routed(completion: Completion, context: int, expert: int) -> Completion:
        record = np.full((context + len(completion.tokens) - 1, 2, 1), expert, dtype=np.uint8)
        return replace(completion, routing=record)

    turns = Turns(PROMPT)
    turns.add((1, 2), routed(turn(10, 11), 2, 0))
    turns.add((1, 2, 10, 11, 90), routed(turn(12), 5, 1))
    turns.add((1, 2, 10, 11, 90, 12, 91, 92), routed(turn(13, 14), 8, 2))
    made = turns.whole()
    assert made.routing is not None
    assert made.routing[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    again = Turns.of(PROMPT, [Lineage(PROMPT, made)])
    assert [len(each.completion.routing) for each in again.done if each.completion.routing is not None] == [3, 5, 9]
    assert np.array_equal(again.whole().routing, made.routing)
