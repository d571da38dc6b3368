"""The diagnostics of each token: which bounds act where."""

from math import exp

import numpy as np
import pytest
from objective_cases import options_of, random_data

CLIPS = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.3}


def reported(name, options, data):
    """Names and values, with those as lists of booleans where they are shares."""
    _, diagnostics = options_of(name, options).loss(data.tokens())
    return {key: values.tolist() for key, values in diagnostics.items()}


def each(data, function):
    """`function(r, a, w)` of every token, with the ratio against the behaviour policy, as 0 or 1."""
    zipped = zip(data.current, data.behaviour, data.proximal, data.advantages, strict=True)
    return [float(function(exp(c - b), a, exp(p - b))) for c, b, p, a in zipped]


@pytest.fixture
def data():
    found = random_data(21, sequences=30)
    assert min((found.advantages > 0).sum(), (found.advantages < 0).sum()) > 20
    return found


@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce-plus-plus", "ppo"])
def test_a_clip_is_counted_on_the_side_where_it_takes_the_gradient(name, data):
    said = reported(name, CLIPS, data)
    assert said == {
        "clip_fraction_low": each(data, lambda r, a, w: r < 0.9 and a < 0),
        "clip_fraction_high": each(data, lambda r, a, w: r > 1.2 and a > 0),
        "clip_fraction_dual": each(data, lambda r, a, w: r > 1.3 and a < 0),
    }
    assert all(0 < np.mean(values) < 1 for values in said.values())
    tokens = data.tokens()
    losses, _ = options_of(name, CLIPS).loss(tokens)
    losses.sum().backward()
    without_gradient = (tokens.logprobs.grad == 0).double().tolist()
    assert without_gradient == np.sum(list(said.values()), axis=0).tolist()


def test_no_dual_clip_is_counted_where_there_is_none(data):
    assert reported("grpo", {}, data).keys() == {"clip_fraction_low", "clip_fraction_high"}


def test_a_sequence_is_clipped_as_one(data):
    said = reported("gspo", {"clip_low": 0.05, "clip_high": 0.05}, data)
    logs = data.current - data.behaviour
    ratios = np.array([exp(logs[data.owner == i].mean()) for i in range(len(data.lengths))])[data.owner]
    assert said["clip_fraction_high"] == ((ratios > 1.05) & (data.advantages > 0)).astype(float).tolist()
    assert said["clip_fraction_low"] == ((ratios < 0.95) & (data.advantages < 0)).astype(float).tolist()


def test_clipped_weights_are_counted_whatever_the_advantage_and_masked_ones_apart(data):
    said = reported("cispo", {"clip_low": 0.1, "clip_high": 0.2, "mask": True}, data)
    assert said == {
        "clip_fraction_low": each(data, lambda r, a, w: r < 0.9),
        "clip_fraction_high": each(data, lambda r, a, w: r > 1.2),
        "masked_fraction": each(data, lambda r, a, w: (r < 0.9 and a < 0) or (r > 1.2 and a > 0)),
    }
    assert reported("tis", {}, data) == {"clip_fraction_high": each(data, lambda r, a, w: r > 1)}
    assert reported("reinforce", {"cap": 1.5}, data) == {"clip_fraction_high": each(data, lambda r, a, w: r > 1.5)}
    assert reported("reinforce", {}, data) == {}


def test_good_answers_have_no_bound(data):
    said = reported("topr", {}, data)
    assert said["positive_fraction"] == (data.rewards > 0).astype(float).tolist()
    bounded = np.array(each(data, lambda r, a, w: r > 1))
    assert said["clip_fraction_high"] == (bounded * (data.rewards <= 0)).tolist()


@pytest.mark.parametrize("name", ["decoupled-ppo", "dora"])
def test_a_capped_weight_is_counted_where_there_is_one(name, data):
    said = reported(name, {"weight_cap": 1.2, "anchor": "proximal"}, data)
    assert said["weight_capped_fraction"] == each(data, lambda r, a, w: w > 1.2)
    if name == "dora":
        said = reported(name, {"weight_cap": 1.2}, data)["weight_capped_fraction"]
        assert said == (np.exp(data.sampled - data.behaviour) > 1.2).astype(float).tolist()
        assert 0 < np.mean(said) < 1
        assert "weight_capped_fraction" not in reported(name, {"anchor": "behaviour"}, data)


def test_what_hispo_leaves_out_is_counted_by_sequence_and_in_all(data):
    said = reported("hispo", {"sequence_bound": 0.1, "token_bound": 0.3}, data)
    logs = data.sampled - data.behaviour
    far = np.array([abs(exp(logs[data.owner == i].mean()) - 1) >= 0.1 for i in range(len(data.lengths))])[data.owner]
    out = np.abs(np.exp(logs) - 1) >= 0.3
    assert 0 < far.mean() < (far | out).mean() < 1
    assert said["masked_sequence_fraction"] == far.astype(float).tolist()
    assert said["masked_fraction"] == (far | out).astype(float).tolist()


def test_the_pull_of_kimi_is_reported(data):
    expected = 0.05 * (data.current - data.behaviour) ** 2
    np.testing.assert_allclose(reported("kimi", {}, data)["pull"], expected, rtol=1e-12)
