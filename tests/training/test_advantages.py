import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.training.advantages import (
    gae,
    gae_advantages,
    group_relative,
    outcome_advantages,
    penalized_advantages,
    token_rewards,
    turn_advantages,
)


def test_an_advantage_is_the_reward_against_its_group_in_units_of_the_groups_deviation():
    result = group_relative([0.0, 1.0, 5.0, 7.0], [4, 4, 9, 9], eps=0.0)
    assert result.values.tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert (result.num_groups, result.num_without_signal) == (2, 0)


def test_without_the_deviation_rewards_are_only_centred():
    assert group_relative([0.0, 1.0, 5.0, 7.0], [4, 4, 9, 9], normalize_std=False).values.tolist() == [-0.5, 0.5, -1, 1]


def test_a_group_of_one_and_a_group_of_equal_rewards_give_exact_zeros_and_are_counted():
    rewards = [0.1, 0.1, 0.1, 3.0, 0.0, 1.0]
    result = group_relative(rewards, [0, 0, 0, 1, 2, 2], eps=0.0)
    assert result.values[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert (result.num_groups, result.num_without_signal) == (3, 2)


def test_members_of_a_group_need_not_be_neighbours():
    together = group_relative([0, 1, 2, 9, 4], [0, 0, 0, 1, 1]).values
    apart = group_relative([0, 9, 1, 4, 2], [0, 1, 0, 1, 0]).values
    assert np.array_equal(together[[0, 3, 1, 4, 2]], apart)


def test_a_reward_that_is_not_finite_is_refused_with_its_place():
    with pytest.raises(ValueError, match="sample 1"):
        group_relative([0.0, float("nan")], [0, 0])


def test_groups_must_be_as_many_as_rewards():
    with pytest.raises(ValueError, match="`groups` has 1"):
        group_relative([0.0, 1.0], [0])


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e6, 1e6)), max_size=40), st.booleans())
def test_advantages_are_finite_and_sum_to_zero_in_every_group(samples, normalize):
    groups = np.array([group for group, _ in samples], dtype=np.int64)
    rewards = np.array([reward for _, reward in samples])
    result = group_relative(rewards, groups, normalize_std=normalize)
    assert np.isfinite(result.values).all()
    for group in set(groups.tolist()):
        assert abs(result.values[groups == group].sum()) <= 1e-6 * max(1.0, np.abs(rewards).max())


# -- by name -----------------------------------------------------------------------------------------------------------

NAMES = ("group", "group-mean", "leave-one-out", "whiten")
# Eighths: sums, and a constant added to them, are exact.
BATCHES = st.lists(st.tuples(st.integers(0, 4), st.integers(-40, 40).map(lambda n: n / 8)), min_size=1, max_size=30)


def split(samples):
    return np.array([reward for _, reward in samples]), np.array([group for group, _ in samples])


def test_leave_one_out_compares_a_reward_with_the_mean_of_the_others():
    result = outcome_advantages("leave-one-out", [1.0, 2.0, 6.0, 5.0], [0, 0, 0, 1])
    assert result.values == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0.0])
    assert (result.num_groups, result.num_without_signal) == (2, 1)


def test_whitening_is_over_the_whole_batch():
    rewards = np.array([1.0, 1.0, 0.0, 4.0])
    result = outcome_advantages("whiten", rewards, [0, 0, 1, 1])
    assert result.values == pytest.approx((rewards - rewards.mean()) / rewards.std(), rel=1e-5)
    assert (result.num_groups, result.num_without_signal) == (2, 0), "equal rewards differ from those of other prompts"
    equal = outcome_advantages("whiten", [0.1] * 6, [0, 0, 1, 1, 2, 2])
    assert equal.values.tolist() == [0.0] * 6
    assert (equal.num_groups, equal.num_without_signal) == (3, 3)


def test_gae_is_refused_where_there_are_only_rewards():
    with pytest.raises(ValueError, match="`advantage = 'gae'` needs more than rewards"):
        outcome_advantages("gae", [1.0], [0])


@pytest.mark.parametrize("name", NAMES)
def test_no_samples_have_no_advantages(name):
    result = outcome_advantages(name, [], [])
    assert (len(result.values), result.num_groups, result.num_without_signal) == (0, 0, 0)


@pytest.mark.parametrize("name", NAMES)
@given(samples=BATCHES, reward=st.floats(-1e90, 1e90))
def test_equal_rewards_and_groups_of_one_give_exact_zeros_and_are_counted(name, samples, reward):
    _, groups = split(samples)
    result = outcome_advantages(name, np.full(len(groups), reward), groups)
    assert not result.values.any()
    assert result.num_without_signal == result.num_groups == len(set(groups.tolist()))


@pytest.mark.parametrize("name", NAMES)
@given(samples=st.lists(st.tuples(st.integers(0, 4), st.floats(-1e90, 1e90)), max_size=20))
def test_advantages_are_finite_for_every_reward_that_is_taken(name, samples):
    rewards, groups = split(samples)
    assert np.isfinite(outcome_advantages(name, rewards, groups).values).all()


def test_a_reward_too_large_to_square_is_refused_with_its_place():
    with pytest.raises(ValueError, match="at sample 1"):
        outcome_advantages("group", [0.0, -1e300], [0, 0])


@pytest.mark.parametrize("name", ["group", "whiten"])
@given(samples=BATCHES, scale=st.floats(0.01, 1e6))
def test_scaling_rewards_changes_normalized_advantages_by_no_more_than_epsilon_does(name, samples, scale):
    rewards, groups = split(samples)
    plain = outcome_advantages(name, rewards, groups).values
    scaled = outcome_advantages(name, scale * rewards, groups).values
    # Rewards are eighths and groups have at most 30 members, so a deviation that is not 0 is at least 0.02.
    least = 0.02 * min(1.0, scale)
    assert np.allclose(scaled, plain, rtol=1e-6 / least + 1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["group-mean", "leave-one-out"])
@given(samples=BATCHES, scale=st.floats(0.01, 1e6))
def test_advantages_that_are_only_centred_scale_with_the_rewards(name, samples, scale):
    rewards, groups = split(samples)
    expected = scale * outcome_advantages(name, rewards, groups).values
    assert np.allclose(outcome_advantages(name, scale * rewards, groups).values, expected, atol=1e-9 * scale)


@pytest.mark.parametrize("name", NAMES)
@given(samples=BATCHES, constant=st.integers(-1_000, 1_000))
def test_adding_a_constant_changes_nothing(name, samples, constant):
    rewards, groups = split(samples)
    plain = outcome_advantages(name, rewards, groups)
    moved = outcome_advantages(name, rewards + constant, groups)
    assert np.allclose(moved.values, plain.values, rtol=1e-9, atol=1e-9)
    assert moved.num_without_signal == plain.num_without_signal


@pytest.mark.parametrize("name", NAMES)
@given(samples=BATCHES, random=st.randoms(use_true_random=False))
def test_a_permutation_of_the_samples_permutes_their_advantages(name, samples, random):
    rewards, groups = split(samples)
    order = list(range(len(samples)))
    random.shuffle(order)
    plain = outcome_advantages(name, rewards, groups).values
    assert np.allclose(outcome_advantages(name, rewards[order], groups[order]).values, plain[order], atol=1e-12)


# -- by token ----------------------------------------------------------------------------------------------------------


def plain_gae(rewards, values, gamma, lam):
    """Straight from the definition: A_t = sum over k of (gamma lam)^k d_(t+k)."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * f - v for r, f, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), max_size=7), max_size=5),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_is_the_sum_of_its_definition_in_every_sequence_by_itself(sequences, gamma, lam):
    rewards = np.array([reward for sequence in sequences for reward, _ in sequence])
    values = np.array([value for sequence in sequences for _, value in sequence])
    advantages, returns = gae(rewards, values, [len(s) for s in sequences], gamma=gamma, lam=lam)
    expected = [a for s in sequences for a in plain_gae([r for r, _ in s], [v for _, v in s], gamma, lam)]
    assert np.allclose(advantages, expected)
    assert np.allclose(returns, advantages + values)


def test_with_lambda_one_and_no_discount_an_advantage_is_the_outcome_minus_the_value():
    rewards = token_rewards([1.0, -1.0], [3, 2])
    values = np.array([0.5, 0.25, 0.75, 0.0, 1.0])
    advantages, returns = gae(rewards, values, [3, 2], gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.5, 0.75, 0.25, -1.0, -2.0]
    assert returns.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]


def test_gae_needs_a_reward_and_a_value_for_every_token():
    with pytest.raises(ValueError, match="one each"):
        gae(np.zeros(3), np.zeros(3), [2])


def test_a_reward_lies_at_the_last_token_and_a_turns_at_the_last_of_its_turn():
    assert token_rewards([2.0, 3.0, 5.0], [2, 0, 1]).tolist() == [0.0, 2.0, 5.0]
    by_turn = token_rewards([[1.0, 2.0, 4.0], [7.0]], [3, 2], [[2, 0, 1], [2]])
    assert by_turn.tolist() == [0.0, 3.0, 4.0, 0.0, 7.0], "a turn without tokens pays to the token before it"


@pytest.mark.parametrize(
    ("rewards", "turns", "match"),
    [
        ([[1.0]], [[1, 1]], "sample 0 has 2 turns and 1 rewards"),
        ([[1.0, 0.0]], [[1, 2]], r"have \[1, 2\] tokens, and the sample has 2"),
        ([[float("inf"), 0.0]], [[1, 1]], "not finite at sample 0"),
        ([[1.0], [1.0]], [[2]], "`rewards` has 2 samples"),
    ],
)
def test_turns_that_do_not_fit_their_sample_are_refused(rewards, turns, match):
    with pytest.raises(ValueError, match=match):
        token_rewards(rewards, [2], turns)


def test_gae_whitened_over_tokens_has_mean_zero_and_deviation_one():
    lengths = np.array([2, 3])
    result = gae_advantages(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), lengths, [0, 1], normalize=True)
    assert result.tokens is not None
    assert (result.tokens.mean(), result.tokens.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    assert result.values == pytest.approx([result.tokens[:2].mean(), result.tokens[2:].mean()])
    assert result.of_tokens(lengths) is result.tokens
    equal = gae_advantages(np.full(5, 0.1), lengths, [0, 1], normalize=True)
    assert (equal.of_tokens(lengths).tolist(), equal.num_without_signal) == ([0.0] * 5, 2)
    raw = gae_advantages(np.full(5, 0.1), lengths, [0, 1], normalize=False)
    assert (raw.of_tokens(lengths).tolist(), raw.num_without_signal) == ([0.1] * 5, 0)


@pytest.mark.parametrize("name", NAMES)
@given(samples=BATCHES)
def test_one_turn_a_sample_is_credited_by_its_outcome(name, samples):
    rewards, groups = split(samples)
    lengths = np.arange(len(rewards)) % 3 + 1
    outcome = outcome_advantages(name, rewards, groups)
    by_turn = turn_advantages(name, [[r] for r in rewards], [[n] for n in lengths.tolist()], groups)
    assert np.array_equal(by_turn.of_tokens(lengths), outcome.of_tokens(lengths))
    assert np.allclose(by_turn.values, outcome.values)
    assert by_turn.num_groups == outcome.num_groups


def test_a_turn_is_credited_with_what_came_after_it_and_not_with_what_came_before():
    result = turn_advantages("group-mean", [[1.0, 0.0], [0.0, 1.0]], [[2, 1], [1, 2]], [0, 0])
    assert result.tokens is not None
    # Both earn 1 from their first turn on; from the second on, the first member earns nothing more.
    assert result.tokens.tolist() == [0.0, 0.0, -0.5, 0.0, 0.5, 0.5]
    discounted = turn_advantages("group-mean", [[1.0, 0.0], [0.0, 1.0]], [[2, 1], [1, 2]], [0, 0], gamma=0.5)
    assert discounted.tokens is not None
    assert discounted.tokens.tolist() == [0.25, 0.25, -0.5, -0.25, 0.5, 0.5]


def test_a_turn_that_one_member_alone_reached_has_nothing_to_compare_with():
    result = turn_advantages("group", [[0.0, 5.0], [1.0]], [[1, 1], [2]], [3, 3])
    assert result.tokens is not None
    assert result.tokens[1] == 0.0
    assert result.tokens[0] > 0 > result.tokens[2]
    alone = turn_advantages("group", [[0.0, 5.0]], [[1, 1]], [3])
    assert (alone.values.tolist(), alone.num_without_signal) == ([0.0], 1)


# -- penalties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group-mean", "leave-one-out"])
def test_without_division_a_penalty_is_part_of_the_reward(name):
    rewards, penalties, groups = [1.0, 0.0, 0.5, 2.0], [0.1, 0.4, 0.2, 0.3], [0, 0, 1, 1]
    found = penalized_advantages(name, rewards, penalties, groups)
    expected = outcome_advantages(name, np.subtract(rewards, penalties), groups)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-12)


@pytest.mark.parametrize("name", ["group", "whiten"])
@pytest.mark.parametrize("coefficient", [1e-3, 1.0])
def test_a_penalty_keeps_its_scale_where_rewards_are_divided(name, coefficient):
    penalties = coefficient * np.array([1.0, 2.0, 3.0, 6.0])
    equal = penalized_advantages(name, [1.0] * 4, penalties, [0] * 4)
    np.testing.assert_allclose(equal.values, -(penalties - penalties.mean()), rtol=1e-12)
    assert equal.num_without_signal == 1
    rewards = [1.0, 0.0, 0.0, 1.0]
    mixed = penalized_advantages(name, rewards, penalties, [0] * 4)
    plain = outcome_advantages(name, rewards, [0] * 4)
    np.testing.assert_allclose(mixed.values - plain.values, equal.values, rtol=1e-9)


def test_penalties_are_compared_within_a_group_and_under_whitening_within_the_batch():
    rewards, penalties, groups = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1]
    within = penalized_advantages("group", rewards, penalties, groups)
    assert within.values.tolist() == outcome_advantages("group", rewards, groups).values.tolist()
    across = penalized_advantages("whiten", rewards, penalties, groups).values
    np.testing.assert_allclose(across - outcome_advantages("whiten", rewards, groups).values, [1, 1, -1, -1])
