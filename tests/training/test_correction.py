"""The correction weights against their definitions, a token at a time, in float64."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.objectives.base import Tokens
from stretto.objectives.correction_options import CorrectionOptions, DiscrepancyOptions, StalenessOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.training.correction import correction_weights

LEVELS: list[dict[str, Any]] = [
    {"level": "token"},
    {"level": "segment", "segment_tokens": 1},
    {"level": "segment", "segment_tokens": 3},
    {"level": "segment", "segment_tokens": 100},
    {"level": "turn"},
    {"level": "geometric"},
    {"level": "sequence"},
]
every_level = pytest.mark.parametrize(
    "level", LEVELS, ids=lambda level: "-".join(str(value) for value in level.values())
)
both_modes = pytest.mark.parametrize("mode", ["cap", "filter"])

TABLES = {  # numerator and denominator of each weight
    "correction": ("proximal", "behaviour"),
    "discrepancy_correction": ("sampled", "behaviour"),
    "staleness_correction": ("proximal", "sampled"),
}
every_table = pytest.mark.parametrize("table", TABLES)

Turns = list[list[int]]  # the lengths of the turns of each sequence


def tokens_of(turns: Turns, seed: int = 0, spread: float = 0.5) -> Tokens:
    draw = np.random.default_rng(seed)
    lengths = torch.tensor([sum(own) for own in turns], dtype=torch.int64)
    count = int(lengths.sum())
    proximal = torch.from_numpy(draw.normal(-2, 1, count))
    flat = torch.tensor([length for own in turns for length in own if length], dtype=torch.int64)
    return Tokens(
        logprobs=proximal.clone().requires_grad_(True),
        behaviour=proximal + torch.from_numpy(draw.normal(0, spread, count)),
        proximal=proximal,
        sampled=proximal + torch.from_numpy(draw.normal(0, spread, count)),
        advantages=torch.ones(count, dtype=torch.float64),
        rewards=torch.ones(count, dtype=torch.float64),
        sequences=torch.repeat_interleave(torch.arange(len(turns)), lengths),
        num_sequences=len(turns),
        lengths=lengths,
        turns=torch.repeat_interleave(torch.arange(len(flat)), flat),
    )


def logs_of(table: str, tokens: Tokens) -> list[float]:
    over, under = (getattr(tokens, name).tolist() for name in TABLES[table])
    return [a - b for a, b in zip(over, under, strict=True)]


def spans_of(options: CorrectionOptions, turns: Turns) -> list[range]:
    """The tokens that share each token's weight."""
    spans: list[range] = []
    start = 0
    for own in turns:
        length, first = sum(own), start
        for turn in own:
            for place in range(start, start + turn):
                if options.level == "token":
                    spans.append(range(place, place + 1))
                elif options.level == "turn":
                    spans.append(range(start, start + turn))
                elif options.level == "segment":
                    assert options.segment_tokens is not None
                    begin = first + (place - first) // options.segment_tokens * options.segment_tokens
                    spans.append(range(begin, min(begin + options.segment_tokens, first + length)))
                else:
                    spans.append(range(first, first + length))
            start += turn
    return spans


def definition(table: str, options: CorrectionOptions, turns: Turns, tokens: Tokens) -> tuple[list[float], list[float]]:
    """The weight of each token and whether its own is out of bounds, straight from the words, in plain Python."""
    logs = logs_of(table, tokens)
    weights: list[float] = []
    outside: list[float] = []
    for span in spans_of(options, turns):
        value = math.fsum(logs[place] for place in span) / (len(span) if options.level == "geometric" else 1)
        weight = math.exp(max(-20.0, min(20.0, value)))
        inside = options.low <= weight <= options.high
        weights.append(max(options.low, min(options.high, weight)) if options.mode == "cap" else float(inside))
        outside.append(float(not inside))
    return weights, outside


def weights_of(tables: Mapping[str, Any], tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return correction_weights(GrpoOptions(anchor="proximal", **tables), tokens)


some_turns = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6)


@every_table
@both_modes
@every_level
@settings(max_examples=10, deadline=None)
@given(turns=some_turns, seed=st.integers(0, 99))
def test_weights_are_those_of_the_definition(
    table: str, mode: str, level: dict[str, Any], turns: Turns, seed: int
) -> None:
    raw = {"mode": mode, "low": 0.6, "high": 1.7, **level}
    tokens = tokens_of(turns, seed)
    got, diagnostics = weights_of({table: raw}, tokens)
    assert not got.requires_grad
    weights, outside = definition(table, CorrectionOptions(**raw), turns, tokens)
    np.testing.assert_allclose(got.numpy(), weights, rtol=1e-12)
    assert diagnostics.keys() == {f"{table}_weight", f"{table}_outside"}
    np.testing.assert_allclose(diagnostics[f"{table}_weight"].numpy(), weights, rtol=1e-12)
    assert diagnostics[f"{table}_outside"].tolist() == outside


@pytest.mark.parametrize("first", [0, 3, 4])
@settings(max_examples=10, deadline=None)
@given(turns=some_turns, seed=st.integers(0, 99), second=st.sampled_from(range(len(LEVELS))))
def test_the_two_parts_are_weights_of_their_own_and_multiply(first: int, turns: Turns, seed: int, second: int) -> None:
    raw = {
        "discrepancy_correction": {"mode": "filter", "low": 0.3, "high": 2.5, **LEVELS[first]},
        "staleness_correction": {"low": 0.6, "high": 1.7, **LEVELS[second]},
    }
    tokens = tokens_of(turns, seed)
    got, diagnostics = weights_of(raw, tokens)
    expected = np.ones(len(got))
    for table, options in raw.items():
        weights, outside = definition(table, CorrectionOptions(**options), turns, tokens)
        expected = expected * weights
        np.testing.assert_allclose(diagnostics[f"{table}_weight"].numpy(), weights, rtol=1e-12)
        assert diagnostics[f"{table}_outside"].tolist() == outside
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)
    assert diagnostics.keys() == {f"{table}_{what}" for table in raw for what in ("weight", "outside")}


@every_level
def test_the_parts_that_nothing_bounds_are_the_whole(level: dict[str, Any]) -> None:
    wide = {"high": 1e9, **level}
    tokens = tokens_of([[4, 2], [1], [0], [3, 3, 1]], seed=5)
    whole, _ = weights_of({"correction": wide}, tokens)
    parts, _ = weights_of({"discrepancy_correction": wide, "staleness_correction": wide}, tokens)
    assert whole.std() > 0.1
    np.testing.assert_allclose(parts.numpy(), whole.numpy(), rtol=1e-12)


def test_a_turn_has_the_product_over_its_own_tokens() -> None:
    """Two sequences, of the turns (2, 1) and (1, 2), with weights of 2, 0.75, 3, 0.5, 1.1 and 1.2."""
    values = np.array([2.0, 0.75, 3.0, 0.5, 1.1, 1.2])
    tokens = tokens_of([[2, 1], [1, 2]], spread=0.0)
    tokens.behaviour.sub_(torch.from_numpy(np.log(values)))
    by_turn = [1.5, 1.5, 3.0, 0.5, 1.32, 1.32]
    got, _ = weights_of({"correction": {"level": "turn", "high": 100.0}}, tokens)
    np.testing.assert_allclose(got.numpy(), by_turn, rtol=1e-12)
    got, said = weights_of({"correction": {"level": "turn", "mode": "filter", "low": 0.6, "high": 1.4}}, tokens)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert said["correction_outside"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@every_table
@both_modes
@every_level
def test_what_is_on_policy_has_a_weight_of_exactly_one(table: str, mode: str, level: dict[str, Any]) -> None:
    raw = {"mode": mode, "low": 1.0, "high": 1.1, **level}
    weights, diagnostics = weights_of({table: raw}, tokens_of([[4], [0], [2, 5]], spread=0.0))
    assert weights.tolist() == [1.0] * 11
    assert diagnostics[f"{table}_outside"].sum() == 0


@every_table
@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_a_weight_beyond_all_numbers_is_capped_and_finite(table: str, level: str) -> None:
    weights, _ = weights_of({table: {"level": level}}, tokens_of([[400]], spread=90.0))
    assert torch.isfinite(weights).all()
    assert weights.max() <= 2.0
    weights, _ = weights_of({table: {"level": level, "high": 1e12}}, tokens_of([[400]], spread=90.0))
    assert all(abs(abs(math.log(weight)) - 20.0) < 1e-9 for weight in weights.tolist())


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
    for kind in (DiscrepancyOptions, StalenessOptions):
        with pytest.raises(ValueError, match=words.replace("algorithm.correction", kind.table)):
            kind(**wrong)
