import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from training_cases import tiny

from stretto.errors import RecipeError
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.length_options import LengthOptions, OverlongOptions, RelativeOptions, length_refusals
from stretto.training.reward_shaping import overlong_penalty, relative_length_reward, shape_rewards
from stretto.training.trainer import LocalTrainer


def test_the_soft_punishment_begins_at_the_cache_and_is_full_at_the_longest():
    lengths = np.array([0, 60, 70, 80, 100, 120])
    assert overlong_penalty(lengths, max_tokens=100, cache=40).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_right_answers_are_shaped_both_ways_and_wrong_ones_only_down():
    lengths = np.array([10, 20, 30, 10, 20, 30])
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    shaped = relative_length_reward(rewards, [0] * 6, lengths)
    assert shaped.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5]


def test_lengths_are_compared_within_a_group_alone():
    shaped = relative_length_reward(np.ones(4), [7, 2, 7, 2], np.array([10, 1_000, 20, 3_000]))
    assert shaped.tolist() == [0.5, 0.5, -0.5, -0.5]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(-2, 2)), max_size=20))
def test_relative_shaping_is_finite_and_within_half_of_zero(samples):
    groups, lengths, rewards = (np.array([s[i] for s in samples]) for i in range(3))
    shaped = relative_length_reward(rewards, groups.astype(np.int64), lengths.astype(np.int64))
    assert np.isfinite(shaped).all()
    assert (np.abs(shaped) <= 0.5).all()
    for group in set(groups.tolist()):
        if len(set(lengths[groups == group].tolist())) == 1:
            assert not shaped[groups == group].any(), "one length alone is neither short nor long"


def test_without_options_rewards_are_what_they_were_and_nothing_is_counted():
    shaped = shape_rewards([1.0, 0.0], [0, 0], [5, 6], None, max_tokens=8)
    assert (shaped.rewards.tolist(), dict(shaped.metrics)) == ([1.0, 0.0], {})


def test_what_is_added_is_weighted_and_counted():
    options = OverlongOptions(cache=4, weight=2.0)
    shaped = shape_rewards([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [2, 4, 6, 8], options, max_tokens=8)
    assert shaped.rewards.tolist() == [1.0, 1.0, 0.0, -2.0]
    assert shaped.metrics == {"length_shaped": 2.0, "length_shaping": -0.75}
    named = shape_rewards([1.0, 0.0], [0, 0], [2, 4], OverlongOptions(max_tokens=4, cache=2), max_tokens=8)
    assert named.rewards.tolist() == [1.0, -1.0], "the length of the options, not that of the rollout"
    by_group = shape_rewards([1.0, 1.0], [0, 0], [2, 4], RelativeOptions(), max_tokens=8)
    assert by_group.rewards.tolist() == [1.5, 0.5]


def test_a_batch_without_samples_is_shaped_to_nothing():
    for options in (OverlongOptions(cache=1), RelativeOptions()):
        shaped = shape_rewards([], [], [], options, max_tokens=8)
        assert (len(shaped.rewards), shaped.metrics["length_shaping"]) == (0, 0.0)


def test_the_table_of_a_recipe_names_its_kind():
    adapter = TypeAdapter(LengthOptions)
    assert adapter.validate_python({"type": "overlong", "cache": 16}) == OverlongOptions(cache=16)
    assert adapter.validate_python({"type": "relative", "weight": 0.5}) == RelativeOptions(weight=0.5)
    for wrong in ({"type": "overlong"}, {"type": "relative", "cache": 3}, {"type": "relative", "weight": -1.0}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_shaping_that_cannot_act_is_refused_by_name():
    assert length_refusals(OverlongOptions(cache=64), max_tokens=256, group=1) == []
    assert "`algorithm.length.cache = 300`" in length_refusals(OverlongOptions(cache=300), max_tokens=256, group=8)[0]
    for options in (OverlongOptions(cache=256), OverlongOptions(max_tokens=64, cache=64)):
        assert "penalizes every length" in length_refusals(options, max_tokens=256, group=8)[0]
    late = length_refusals(OverlongOptions(max_tokens=512, cache=256), max_tokens=256, group=8)
    assert "`algorithm.length.max_tokens = 512` has no effect" in late[0]
    assert "`rollout.group = 1`" in length_refusals(RelativeOptions(), max_tokens=256, group=1)[0]
    assert length_refusals(RelativeOptions(), max_tokens=256, group=2) == []


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_trainer_that_is_not_told_a_longest_completion_above_the_cache_is_not_made(max_tokens):
    algorithm = GrpoOptions(length=OverlongOptions(cache=4))
    with pytest.raises(RecipeError, match=rf"`algorithm.length.cache = 4` penalizes .* full at {max_tokens} "):
        LocalTrainer(tiny(), algorithm=algorithm, max_tokens=max_tokens)
