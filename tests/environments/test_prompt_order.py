"""Rows by their pass rate: what is solved comes less often, and a draw follows from the history alone."""

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments.prompt_order import FLOOR, PassRates
from stretto.errors import RecipeError

histories = st.lists(
    st.one_of(st.sampled_from(["draw", "settle"]), st.tuples(st.integers(0, 5), st.floats(-2, 2, allow_nan=False))),
    max_size=60,
)


def replay(rates, history):
    """Let a history happen; what was drawn."""
    drawn = []
    for number, event in enumerate(history):
        if event == "draw":
            drawn.append(rates.draw(len(drawn)))
        elif event == "settle":
            rates.settle(number)
        else:
            rates.scored(*event)
    return drawn


@settings(max_examples=100, deadline=None)
@given(history=histories)
def test_a_draw_follows_from_the_history(history):
    assert replay(PassRates(6, seed=3), history) == replay(PassRates(6, seed=3), history)


def test_members_may_be_scored_in_any_order():
    one, other = PassRates(4, seed=0), PassRates(4, seed=0)
    rewards = [(0, 1.0), (1, 0.1), (0, 0.2), (1, 0.7), (2, 0.0), (1, 0.3)]
    for rates, order in ((one, rewards), (other, rewards[::-1])):
        for row, reward in order:
            rates.scored(row, reward)
            rates.draw(0)  # what was scored in between counts from the next batch on
        rates.settle(0)
    assert [one.draw(i) for i in range(50)] == [other.draw(i) for i in range(50)]


def test_a_batch_that_is_taken_again_after_a_restore_settles_nothing():
    rates = PassRates(1, seed=0)
    rates.settle(3)
    rates.scored(0, 1.0)
    rates.settle(3)
    assert rates.draw(0).reason.startswith("not scored yet")
    rates.settle(4)
    assert rates.draw(1).reason.startswith("pass rate 1.0000")


def test_the_odds_are_one_minus_the_rate_above_a_floor():
    num = 20_000
    rates = PassRates(3, seed=0)
    weights = {0: FLOOR, 1: FLOOR + 0.5, 2: FLOOR + 1.0}
    count = Counter()
    for row, reward in ((0, 1.0), (1, 0.5), (2, 0.0)):
        rates.scored(row, reward)
    rates.settle(0)
    for index in range(num):
        count[deepcopy(rates).draw(index).row_number] += 1
    for row, weight in weights.items():
        assert count[row] / num == pytest.approx(weight / sum(weights.values()), abs=0.01)


def test_what_a_row_was_scored_long_ago_counts_for_less():
    rates = PassRates(1, seed=0)
    for _ in range(4):
        rates.scored(0, 1.0)
    rates.settle(0)
    assert rates.draw(0).reason == "pass rate 1.0000, drawn with probability 1"
    for _ in range(4):
        rates.scored(0, 0.0)
    rates.settle(1)
    assert rates.draw(1).reason.startswith("pass rate 0.3333")  # two that are left of four, and four


def test_rewards_are_shares_of_the_one_that_counts_as_solved():
    rates = PassRates(1, seed=0, pass_reward=10.0)
    for reward in (-5.0, 5.0, 30.0):
        rates.scored(0, reward)
    rates.settle(0)
    assert rates.draw(0).reason.startswith("pass rate 0.5000")
    with pytest.raises(RecipeError, match=r"`task.pass_reward = 0.0` must be a number above 0"):
        PassRates(1, seed=0, pass_reward=0.0)


def test_a_row_that_was_never_scored_counts_as_never_solved():
    rates = PassRates(2, seed=0)
    rates.scored(0, 0.0)
    rates.settle(0)
    draws = [rates.draw(index) for index in range(40)]
    assert {draw.reason.split(",")[0] for draw in draws} == {"pass rate 0.0000", "not scored yet"}
    assert {draw.reason.split()[-1] for draw in draws} == {"0.5"}
    assert {draw.epoch for draw in draws} == {None}
