import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.training.advantages import group_relative


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
