"""Values and gradients of the objectives, against plain references and under what must not change them."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import CASES, VARIANTS, Data, gradient, on_policy, options_of, random_data
from objective_reference import reference

from stretto.objectives import OBJECTIVES
from stretto.objectives.base import MAX_LOG_RATIO, Anchor, ObjectiveOptions, sequence_mean, sequence_sum
from stretto.training.advantages import outcome_advantages
from stretto.training.loss_averaging import token_weights

every_case = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)


def shares_of(options, data):
    return token_weights(np.array(data.lengths), options.average, options.average_tokens)[data.owner]


def test_the_cases_use_every_option_of_every_objective():
    assert set(VARIANTS) == set(OBJECTIVES)
    common = set(ObjectiveOptions.model_fields)
    for name, kind in OBJECTIVES.items():
        used = {key for options in VARIANTS[name] for key in options}
        own = set(kind.model_fields) - common - {"critic"}  # which is no part of the loss
        if "anchor" in own and kind.model_fields["anchor"].annotation != Anchor:
            own.remove("anchor")  # it has one value
        assert own <= used, name


@every_case
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.02, 0.4, 1.5]), sequences=st.integers(1, 7))
def test_loss_and_gradient_are_those_of_the_formula(name, options, seed, spread, sequences):
    options = options_of(name, options)
    data = random_data(seed, spread=spread, sequences=sequences)
    shares = shares_of(options, data)
    losses, _, slopes = gradient(options, data, shares)
    expected_losses, expected_slopes = reference(options, data, shares)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-10, atol=1e-13)


ANCHORED = [name for name, kind in OBJECTIVES.items() if getattr(kind, "model_fields", {}).get("anchor") is not None]
FREE = [name for name in ANCHORED if OBJECTIVES[name].model_fields["anchor"].annotation == Anchor]


def test_most_objectives_have_a_choice_of_anchor():
    assert {"grpo", "dapo", "gspo", "cispo", "tis", "topr", "kimi", "reinforce", "dora", "ppo"} <= set(FREE)
    assert set(ANCHORED) - set(FREE) == {"decoupled-ppo", "hispo"}


@pytest.mark.parametrize("anchor", get_args(Anchor))
@pytest.mark.parametrize("name", FREE)
def test_every_anchor_of_every_objective_is_the_denominator_of_its_ratio(name, anchor):
    constant = OBJECTIVES[name].model_fields["average"].default == "constant"
    options = options_of(name, {"anchor": anchor, **({"average_tokens": 9} if constant else {})})
    for seed, spread in ((31, 0.1), (32, 0.6)):
        data = random_data(seed, spread=spread)
        shares = shares_of(options, data)
        losses, _, slopes = gradient(options, data, shares)
        expected_losses, expected_slopes = reference(options, data, shares)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-10, atol=1e-13)


def by_hand(name, options, *, behaviour, sampled, proximal, current, advantages, rewards=None, lengths=None):
    """Losses and slopes of tokens that are given by their probabilities."""
    logs = [np.log(np.array(each, dtype=np.float64)) for each in (current, behaviour, proximal, sampled)]
    rewards = [0.0] * len(current) if rewards is None else rewards
    data = Data(*logs, np.array(advantages, dtype=np.float64), np.array(rewards), lengths or [len(current)])
    losses, diagnostics, slopes = gradient(options_of(name, options), data, np.ones(len(current)))
    return losses, slopes, {key: values.tolist() for key, values in diagnostics.items()}


def test_dora_weighs_by_the_discrepancy_and_clips_by_the_staleness():
    """Discrepancies 1.2, 2, 1 and 1.25; stalenesses 1.1, 1.1, 1.5 and 1.5, with advantages that clip the third."""
    tokens = {
        "behaviour": [0.1, 0.1, 0.1, 0.08],
        "sampled": [0.12, 0.2, 0.1, 0.1],
        "proximal": [0.5, 0.6, 0.7, 0.8],
        "current": [0.132, 0.22, 0.15, 0.15],
        "advantages": [1.0, 1.0, 1.0, -1.0],
    }
    options = {"weight_cap": 1.5, "clip_low": 0.2, "clip_high": 0.3}
    losses, slopes, said = by_hand("dora", options, **tokens)
    np.testing.assert_allclose(losses, [-1.2 * 1.1, -1.5 * 1.1, -1.3, 1.25 * 1.5], rtol=1e-12)
    np.testing.assert_allclose(slopes, [-1.2 * 1.1, -1.5 * 1.1, 0.0, 1.25 * 1.5], rtol=1e-12, atol=1e-15)
    assert said["weight_capped_fraction"] == [0.0, 1.0, 0.0, 0.0]
    losses, slopes, said = by_hand("dora", {**options, "dual_clip": 1.4}, **tokens)
    np.testing.assert_allclose(losses, [-1.2 * 1.1, -1.5 * 1.1, -1.3, 1.25 * 1.4], rtol=1e-12)
    np.testing.assert_allclose(slopes, [-1.2 * 1.1, -1.5 * 1.1, 0.0, 0.0], rtol=1e-12, atol=1e-15)


def test_hispo_masks_by_the_discrepancy_alone_however_stale_a_token_is():
    """The last sequence is 5 times as likely as when it was sampled, and was recorded as the trainer computes it."""
    losses, slopes, said = by_hand(
        "hispo",
        {"sequence_bound": 0.1, "token_bound": 0.3, "clip_high": 0.25, "dual_clip": 4.0},
        behaviour=[0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1],
        sampled=[0.2, 0.28, 0.17, 0.24, 0.24, 0.1, 0.1],  # 1, 1.4, 0.85; 1.2, 1.2; 1, 1
        proximal=[0.9] * 7,
        current=[0.2, 0.28, 0.187, 0.24, 0.24, 0.5, 0.5],
        advantages=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0],
        lengths=[3, 2, 2],
    )
    np.testing.assert_allclose(losses, [-1.0, 0.0, -0.85 * 1.1, 0.0, 0.0, -1.25, 4.0], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(slopes, [-1.0, 0.0, -0.85 * 1.1, 0.0, 0.0, 0.0, 0.0], rtol=1e-12, atol=1e-15)
    assert said["masked_sequence_fraction"] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert said["masked_fraction"] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_topr_weighs_a_bad_answer_by_the_ratio_of_all_of_it():
    losses, slopes, _ = by_hand(
        "topr",
        {"level": "sequence", "anchor": "sampled", "cap": 1.5, "positive_weight": 2.0, "negative_weight": 3.0},
        behaviour=[0.9] * 6,
        sampled=[0.2, 0.4, 0.1, 0.2, 0.3, 0.3],
        proximal=[0.9] * 6,
        current=[0.1, 0.6, 0.2, 0.3, 0.6, 0.6],  # the products are 0.75, 3 and 4
        advantages=[-1.0, -1.0, -0.5, -0.5, 1.0, 1.0],
        rewards=[0.0, 0.0, -1.0, -1.0, 1.0, 1.0],
        lengths=[2, 2, 2],
    )
    factors = np.array([3 * 0.75, 3 * 0.75, 3 * 1.5, 3 * 1.5, 2.0, 2.0]) * [-1.0, -1.0, -0.5, -0.5, 1.0, 1.0]
    np.testing.assert_allclose(slopes, -factors, rtol=1e-12)
    np.testing.assert_allclose(losses, -factors * np.log([0.1, 0.6, 0.2, 0.3, 0.6, 0.6]), rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gspo"])
def test_advantages_may_differ_between_the_tokens_of_a_sequence(name):
    options = options_of(name, VARIANTS[name][0])
    data = random_data(3, by_token=True)
    shares = shares_of(options, data)
    losses, _, slopes = gradient(options, data, shares)
    expected_losses, expected_slopes = reference(options, data, shares)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-10, atol=1e-13)


def test_gspo_gives_each_token_its_own_advantage_under_the_ratio_of_its_sequence():
    options = options_of("gspo", {"clip_low": 0.3, "clip_high": 0.3})
    data = random_data(4, by_token=True, spread=0.1)
    losses, _, slopes = gradient(options, data, np.ones(len(data.current)))
    logs = data.current - data.behaviour
    means = np.array([logs[data.owner == i].mean() for i in range(len(data.lengths))])
    ratio = np.exp(means)[data.owner]
    assert (np.abs(ratio - 1) < 0.3).all()
    np.testing.assert_allclose(losses, -ratio * data.advantages, rtol=1e-12)
    np.testing.assert_allclose(slopes, -ratio * data.advantages, rtol=1e-12)


SMOOTH = [
    "grpo",
    "ppo",
    "dapo",
    "dr-grpo",
    "reinforce-plus-plus",
    "gspo",
    "decoupled-ppo",
    "kimi",
    "dora",
    "hispo",
    "naive",
]


@pytest.mark.parametrize("name", SMOOTH)
def test_autograd_agrees_with_finite_differences_where_nothing_is_stopped(name):
    """Objectives with a stopped gradient inside are none of these: a finite difference sees through the stop."""
    for options in VARIANTS[name]:
        options = options_of(name, options)
        tokens = random_data(11, spread=0.5).tokens()
        shares = torch.tensor(shares_of(options, random_data(11, spread=0.5)))

        def total(logprobs, options=options, tokens=tokens, shares=shares):
            parts = {key: getattr(tokens, key) for key in type(tokens).__dataclass_fields__}
            return torch.dot(options.loss(type(tokens)(**{**parts, "logprobs": logprobs}))[0], shares)

        assert torch.autograd.gradcheck(total, (tokens.logprobs,), eps=1e-7, atol=1e-6)


PLAIN = {**VARIANTS, "topr": [{}, {"cap": 1.3, "threshold": 0.5}]}  # both of its weights 1
del PLAIN["distill"]  # no reward trains it


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, variants in PLAIN.items() for each in variants])
def test_on_policy_the_gradient_is_that_of_plain_policy_gradient(name, options):
    """Shares of tokens are equal inside a sequence, as every `average` makes them: GSPO's gradient needs that."""
    options = options_of(name, options)
    data = on_policy(random_data(5))
    shares = shares_of(options, data)
    _, diagnostics, slopes = gradient(options, data, shares)
    np.testing.assert_allclose(slopes, -shares * data.advantages, rtol=1e-12)
    for key, values in diagnostics.items():
        if key != "positive_fraction":
            assert not values.any(), key


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
def test_scaled_and_shifted_rewards_leave_the_gradient_of_group_advantages_as_it_is(name):
    """Beyond the epsilon beside the standard deviation, here 1e-6 beside 0.3 or more."""
    options = options_of(name, {})
    assert options.advantage == "group"
    data = random_data(12, sequences=6)
    rewards = np.array([0.0, 1.0, 0.25, 1.0, 0.0, 0.5])

    def slopes(rewards):
        data.advantages = outcome_advantages(options.advantage, rewards, [0, 0, 0, 1, 1, 1]).values[data.owner]
        return gradient(options, data, shares_of(options, data))[2]

    plain = slopes(rewards)
    assert np.abs(plain).max() > 0.01
    np.testing.assert_allclose(slopes(10 * rewards), plain, rtol=1e-5)
    np.testing.assert_allclose(slopes(rewards + 3), plain, rtol=1e-9)


@every_case
def test_the_order_of_sequences_and_cuts_between_them_change_nothing(name, options):
    options = options_of(name, options)
    data = random_data(6, sequences=7)
    shares = shares_of(options, data)
    losses, diagnostics, slopes = gradient(options, data, shares)
    for parts in ([[3, 0, 6, 1, 5, 2, 4]], [[5, 1], [0], [6, 3, 2, 4]], [[i] for i in range(7)]):
        for part in parts:
            piece, chosen = data.of_sequences(part)
            piece_losses, piece_diagnostics, piece_slopes = gradient(options, piece, shares[chosen])
            np.testing.assert_allclose(piece_losses, losses[chosen], rtol=1e-12)
            np.testing.assert_allclose(piece_slopes, slopes[chosen], rtol=1e-12, atol=1e-15)
            assert piece_diagnostics.keys() == diagnostics.keys()
            for key, values in diagnostics.items():
                np.testing.assert_allclose(piece_diagnostics[key], values[chosen], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"anchor": "sampled"}),
        ("topr", {"level": "sequence", "cap": 1e12, "anchor": "sampled"}),
        ("dora", {"average": "token", "weight_cap": 1e12}),
        ("dora", {"average": "token", "anchor": "proximal", "weight_cap": 1e12}),
        ("hispo", {"average": "token", "sequence_bound": 1e12, "token_bound": 1e12}),
    ],
)
def test_ratios_and_weights_out_of_range_are_those_of_the_bound(name, options):
    options = options_of(name, options)
    data = random_data(7, sequences=40)
    rng = np.random.default_rng(7)
    for each in (data.behaviour, data.proximal, data.sampled):
        each += rng.choice([-30.0, 0.0, 30.0], size=len(each))
    shares = np.ones(len(data.current))
    losses, _, slopes = gradient(options, data, shares)
    expected_losses, expected_slopes = reference(options, data, shares)
    assert np.abs(losses).max() > 1e8
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-10, atol=1e-13)


@every_case
def test_ratios_out_of_range_leave_loss_and_gradient_finite_in_single_precision(name, options):
    options = options_of(name, options)
    data = random_data(7)
    rng = np.random.default_rng(7)
    data.behaviour = data.current + rng.choice([-500.0, 0.0, 500.0], size=len(data.current))
    data.proximal = data.current + rng.choice([-500.0, 0.0, 500.0], size=len(data.current))
    data.sampled = data.current + rng.choice([-500.0, 0.0, 500.0], size=len(data.current))
    tokens = data.tokens(torch.float32)
    losses, diagnostics = options.loss(tokens)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert torch.isfinite(losses).all()
    assert torch.isfinite(tokens.logprobs.grad).all()
    for values in diagnostics.values():
        assert values.shape == losses.shape
        assert not values.requires_grad
        assert torch.isfinite(values).all()


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "custom"])
def test_no_gradient_reaches_anything_but_the_current_log_probabilities(name):
    options = options_of(name, VARIANTS[name][0])
    tokens = random_data(8).tokens()
    for other in (tokens.behaviour, tokens.proximal, tokens.sampled, tokens.advantages):
        assert not other.requires_grad
    options.loss(tokens)[0].sum().backward()
    assert tokens.logprobs.grad is not None


def test_the_ratio_is_taken_against_the_policy_that_the_anchor_names():
    tokens = random_data(9).tokens()
    for anchor in get_args(Anchor):
        assert tokens.anchor_logprobs(anchor) is getattr(tokens, anchor)
        options = options_of("grpo", {"anchor": anchor})
        expected = (tokens.logprobs - getattr(tokens, anchor)).exp()
        torch.testing.assert_close(options.ratio(tokens), expected)


def test_sums_and_means_over_sequences_come_back_to_their_tokens():
    data = random_data(10)
    tokens = data.tokens()
    values = torch.arange(float(len(data.current)))
    sums, means = sequence_sum(values, tokens), sequence_mean(values, tokens)
    for index, length in enumerate(data.lengths):
        own = torch.from_numpy(data.owner == index)
        assert sums[own].tolist() == [values[own].sum()] * length
        torch.testing.assert_close(means[own], values[own].mean().expand(length))


def test_a_ratio_stops_growing_at_its_bound():
    data = random_data(1, sequences=1)
    data.current = data.behaviour + 100.0
    ratio = options_of("grpo", {}).ratio(data.tokens())
    assert ratio.tolist() == pytest.approx([np.exp(MAX_LOG_RATIO)] * len(data.current))
