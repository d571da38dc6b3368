"""Draws, and the distribution that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.engines.native.sampling import Truncation, host_uniforms, mix_seed, sample, truncate, uniforms


def closed_form(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Truncation in a loop over the ranked tokens."""
    probabilities = logits.double().softmax(-1)
    order = probabilities.argsort(descending=True, stable=True).tolist()
    kept = order[:top_k] if top_k else order
    total, mass, chosen = sum(probabilities[t] for t in kept), 0.0, []
    for token in kept:
        if top_p < 1.0 and mass >= top_p * total and chosen:
            break
        chosen.append(token)
        mass += float(probabilities[token])
    chosen = [t for t in chosen if probabilities[t] >= min_p * probabilities[order[0]]]
    out = torch.full_like(logits, -torch.inf)
    out[chosen] = (probabilities[chosen] / probabilities[chosen].sum()).log().float()
    return out


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (7, 0.8, 0.1), (1, 0.1, 0.9)],
)
def test_truncation_renormalizes_what_is_left(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3)) * 2
    rows = [torch.tensor([v] * 5, dtype=d) for v, d in ((top_k, torch.int64), (top_p, None), (min_p, None))]
    got, kept = truncate(logits.log_softmax(-1), Truncation(*rows))
    expected = torch.stack([closed_form(row, top_k, top_p, min_p) for row in logits])
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got.exp(), expected.exp(), rtol=1e-4, atol=1e-6)
    for row, count, order in zip(expected, kept.counts, kept.order, strict=True):
        assert sorted(order[:count].tolist()) == row.isfinite().nonzero()[:, 0].tolist()


def test_draws_follow_the_distribution_and_report_its_log_probability() -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 1.5
    count = 40_000
    seeds = torch.tensor([mix_seed(s) for s in range(count)])
    uniform = uniforms(seeds, torch.zeros(count, dtype=torch.int64))
    truncation = Truncation(torch.full((count,), 5), torch.full((count,), 0.9), torch.zeros(count))
    tokens, logprobs, _ = sample(logits.expand(count, -1), uniform, torch.full((count,), 0.8), truncation, False)
    expected = closed_form(logits / 0.8, 5, 0.9, 0.0)
    torch.testing.assert_close(logprobs, expected[tokens], rtol=0, atol=1e-5)
    found = torch.bincount(tokens, minlength=8) / count
    assert (found - expected.exp()).abs().max() < 0.01
    assert not found[expected.isinf()].any()


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    by_seed = uniforms(torch.tensor([mix_seed(s) for s in range(20_000)]), torch.full((20_000,), 7)).numpy()
    by_position = uniforms(torch.full((20_000,), mix_seed(3)), torch.arange(20_000)).numpy()
    for values in (by_seed, by_position):
        assert values.min() >= 0
        assert values.max() < 1
        histogram = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((histogram - 1000) ** 2 / 1000).sum() < 44  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert len(np.unique(np.concatenate([by_seed, by_position]))) > 39_990


def test_uniforms_on_the_host_are_the_same_bits() -> None:
    seeds = np.array([mix_seed(s) for s in (*range(500), 2**63, 2**64 - 1)], dtype=np.int64)
    positions = np.arange(len(seeds)) * 7919 + np.arange(3)[:, None]
    theirs = uniforms(torch.from_numpy(seeds), torch.from_numpy(positions))
    assert np.array_equal(host_uniforms(seeds, positions), theirs.numpy())


def test_greedy_rows_take_the_most_likely_token_with_certainty() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0])
    tokens, logprobs, _ = sample(logits, torch.full((4,), 0.3, dtype=torch.float64), temperature, None, True)
    assert torch.equal(tokens[[0, 2]], logits.argmax(-1)[[0, 2]])
    assert logprobs[[0, 2]].tolist() == [0.0, 0.0]
    assert (logprobs[[1, 3]] < 0).all()


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, uniform, torch.ones(2), None, False)
    assert tokens.tolist() == [1, 2]
    assert logprobs.isfinite().all()
