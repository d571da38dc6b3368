"""The correction weight against its definition, a token at a time, in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.objectives.base import Tokens
from stretto.objectives.correction_options import CorrectionOptions
from stretto.training.correction import correction_weights

LEVELS: list[dict[str, Any]] = [
    {"level": "token"},
    {"level": "segment", "segment_tokens": 1},
    {"level": "segment", "segment_tokens": 3},
    {"level": "segment", "segment_tokens": 100},
    {"level": "geometric"},
    {"level": "sequence"},
]


def tokens_of(lengths: list[int], seed: int = 0, spread: float = 0.5) -> Tokens:
    draw = np.random.default_rng(seed)
    count = sum(lengths)
    proximal = torch.from_numpy(draw.normal(-2, 1, count))
    return Tokens(
        logprobs=proximal.clone().requires_grad_(True),
        behaviour=proximal + torch.from_numpy(draw.normal(0, spread, count)),
        proximal=proximal,
        advantages=torch.ones(count, dtype=torch.float64),
        rewards=torch.ones(count, dtype=torch.float64),
        sequences=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        num_sequences=len(lengths),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def definition(options: CorrectionOptions, lengths: list[int], tokens: Tokens) -> list[float]:
    """Straight from the words, in plain Python."""
    logs = (tokens.proximal - tokens.behaviour).tolist()
    weights: list[float] = []
    start = 0
    for length in lengths:
        own = logs[start : start + length]
        start += length
        for place in range(length):
            if options.level == "token":
                value = own[place]
            elif options.level == "segment":
                assert options.segment_tokens is not None
                first = place // options.segment_tokens * options.segment_tokens
                value = sum(own[first : first + options.segment_tokens])
            else:
                value = sum(own) / (length if options.level == "geometric" else 1)
            weight = math.exp(max(-20.0, min(20.0, value)))
            inside = options.low <= weight <= options.high
            weights.append(max(options.low, min(options.high, weight)) if options.mode == "cap" else float(inside))
    return weights


@pytest.mark.parametrize("mode", ["cap", "filter"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: "-".join(str(value) for value in level.values()))
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_weights_are_those_of_the_definition(level: dict[str, Any], mode: str, lengths: list[int], seed: int) -> None:
    options = CorrectionOptions(mode=mode, low=0.6, high=1.7, **level)  # type: ignore[arg-type]
    tokens = tokens_of(lengths, seed)
    got, diagnostics = correction_weights(options, tokens)
    assert not got.requires_grad
    np.testing.assert_allclose(got.numpy(), definition(options, lengths, tokens), rtol=1e-12)
    assert all(value.shape == got.shape for value in diagnostics.values())


@pytest.mark.parametrize("mode", ["cap", "filter"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: "-".join(str(value) for value in level.values()))
def test_what_is_on_policy_has_a_weight_of_exactly_one(level: dict[str, Any], mode: str) -> None:
    options = CorrectionOptions(mode=mode, low=1.0, high=1.1, **level)  # type: ignore[arg-type]
    weights, diagnostics = correction_weights(options, tokens_of([4, 0, 7], spread=0.0))
    assert weights.tolist() == [1.0] * 11
    assert diagnostics["correction_outside"].sum() == 0


def test_a_weight_beyond_all_numbers_is_capped_and_finite() -> None:
    weights, _ = correction_weights(CorrectionOptions(level="sequence"), tokens_of([400], spread=90.0))
    assert torch.isfinite(weights).all()
    assert weights.max() <= 2.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"level": "segment"}, "`algorithm.correction.segment_tokens` is missing"),
        ({"segment_tokens": 3}, "`algorithm.correction.segment_tokens = 3` has no effect"),
        ({"low": 1.5}, "low"),
        ({"high": 0.5}, "high"),
        ({"low": -0.1}, "low"),
        ({"mode": "filter", "low": 1.0, "high": 1.0}, "filter every token"),
        ({"mode": "filter", "high": 4.9e8}, "filter nothing"),
        ({"mode": "filter", "low": 1e-9, "high": 1e12}, "filter nothing"),
    ],
)
def test_a_correction_that_cannot_be_meant_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CorrectionOptions(**wrong)
