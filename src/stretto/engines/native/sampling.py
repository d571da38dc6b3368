"""Drawing tokens, and the log-probability of each under the distribution that it was really drawn from.

Everything is per row: what one row draws does not depend on how its neighbours sample. A draw has no state; it is keyed
by (seed, position), so that a trajectory goes on anywhere as if it had never been interrupted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def mix_seed(seed: int) -> int:
    """Spread a seed over 64 bits (the finalizer of splitmix64), as a signed integer that a tensor can hold."""
    z = (seed + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
    return _signed(z ^ (z >> 31))


_STEP, _FIRST, _SECOND = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    # A logical shift: the arithmetic one would smear the sign over the top bits.
    return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))


def uniforms(mixed_seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in [0, 1) a row, float64, from `mix_seed(seed)` and the index of the token drawn."""
    z = mixed_seeds + (positions + 1) * _STEP
    z = _xor_shift(z, 30) * _FIRST
    z = _xor_shift(z, 27) * _SECOND
    z = _xor_shift(z, 31)
    return ((z >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


class Truncation(NamedTuple):
    """How each row's distribution is cut. All are [rows]."""

    top_k: Tensor  # int64; 0: off
    top_p: Tensor  # 1: off
    min_p: Tensor  # 0: off

    @property
    def uses(self) -> Tensor:
        """Which rows are cut at all."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


class Kept(NamedTuple):
    """What truncation left of each row: the first `counts` of `order`."""

    counts: Tensor  # [rows] int64, at least 1
    order: Tensor  # [rows, vocabulary] int64, likely tokens first


def truncate(logprobs: Tensor, how: Truncation) -> tuple[Tensor, Kept]:
    """Log-probabilities [rows, vocabulary] cut to top-k, then top-p, then min-p, and renormalized; what was kept.

    A row that uses none of them comes back bit for bit as it was, so that it draws the same beside a row that does.
    """
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top_k, top_p, min_p = (values[:, None] for values in how)
    keep = (rank < top_k) | (top_k <= 0)
    mass = ranked.exp().to(torch.float64).masked_fill(~keep, 0.0)
    # A token stays while what lies above it has not reached `top_p` of the mass: the first always does.
    keep &= (mass.cumsum(-1) - mass < top_p * mass.sum(-1, keepdim=True)) | (top_p >= 1.0)
    keep &= (ranked >= ranked[:, :1] + min_p.log()) | (min_p <= 0.0)
    # Each condition keeps the first of the ranking, but for rounding in the sum of the mass.
    counts = keep.sum(-1).clamp_min_(1)
    kept = torch.zeros_like(keep).scatter_(1, order, rank < counts[:, None])
    cut = logprobs.masked_fill(~kept, -torch.inf)
    cut = cut - cut.logsumexp(-1, keepdim=True)
    return torch.where(how.uses[:, None], cut, logprobs), Kept(counts, order)


def sample(
    logits: Tensor,  # [rows, vocabulary]
    uniform: Tensor,  # [rows], float64
    temperature: Tensor | None,  # [rows]; 0: greedy; None: 1 for all, which gives the same bits
    truncation: Truncation | None,  # None: no row is cut
    any_greedy: bool,
) -> tuple[Tensor, Tensor, Kept | None]:
    """Tokens [rows] int64, their log-probabilities [rows] float32, and what truncation left to draw from.

    Log-probabilities are NaN where the logits of a row are no numbers.
    """
    logits = logits.float()
    heated = logits
    if temperature is not None:
        heat = torch.where(temperature > 0, temperature, 1.0) if any_greedy else temperature
        heated = logits / heat[:, None]
    logprobs = torch.log_softmax(heated, dim=-1)
    kept = None
    if truncation is not None:
        logprobs, kept = truncate(logprobs, truncation)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the threshold has mass of its own, so it is never a cut one.
    places = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(logits.shape[-1] - 1)
    tokens, drawn = places.squeeze(1), logprobs.gather(1, places).squeeze(1)
    if any_greedy and temperature is not None:
        greedy = temperature <= 0
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        drawn = torch.where(greedy, drawn - drawn, drawn)  # 0, or NaN where the logits are no numbers
    return tokens, drawn, kept
