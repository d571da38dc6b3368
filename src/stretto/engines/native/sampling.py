"""Draws of tokens, with the log-probability of each under the distribution that it was really drawn from.

Rows are independent: the draw of a row does not depend on how its neighbours sample. A draw has no state; it is keyed
by (seed, position), so a suspended trajectory continues anywhere as if it had never been interrupted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def mix_seed(seed: int) -> int:
    """Spreads a seed over 64 bits (the finalizer of splitmix64); returns a signed integer that a tensor can hold."""
    z = (seed + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
    return _signed(z ^ (z >> 31))


_STEP, _FIRST, _SECOND = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    # A logical shift: the arithmetic one would smear the sign over the top bits.
    return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))


def uniforms(mixed_seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns a uniform number in [0, 1) for each row, float64, from `mix_seed(seed)` and the index of the token."""
    z = mixed_seeds + (positions + 1) * _STEP
    z = _xor_shift(z, 30) * _FIRST
    z = _xor_shift(z, 27) * _SECOND
    z = _xor_shift(z, 31)
    return ((z >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def host_uniforms(mixed_seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the numbers of `uniforms`, bit for bit, from numpy, whose calls take a third of the time for few rows."""
    z: NDArray[Any] = (mixed_seeds + (positions + 1) * _STEP).view(np.uint64)
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return np.asarray((z >> 11) * 2.0**-53, dtype=np.float64)


class Truncation(NamedTuple):
    """The truncation of each row's distribution. All are [rows]."""

    top_k: Tensor  # int64; 0: off
    top_p: Tensor  # 1: off
    min_p: Tensor  # 0: off

    @property
    def uses(self) -> Tensor:
        """The rows that are truncated at all, [rows] bool."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


class Candidates(NamedTuple):
    """The tokens of each row that truncation left to draw from: the first `counts` of `order`."""

    counts: Tensor  # [rows] int64, at least 1
    order: Tensor  # [rows, vocabulary] int64, likely tokens first


def truncate(logprobs: Tensor, how: Truncation) -> tuple[Tensor, Candidates]:
    """Returns log-probabilities [rows, vocabulary] cut to top-k, then top-p, then min-p, and renormalized.

    A row that uses none of them comes back bit for bit as it was, so it draws the same beside a row that does.
    """
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top_k, top_p, min_p = (values[:, None] for values in how)
    keep = (rank < top_k) | (top_k <= 0)
    mass = ranked.exp().to(torch.float64).masked_fill(~keep, 0.0)
    # A token stays if the tokens above it have not reached `top_p` of the mass: the first one always stays.
    keep &= (mass.cumsum(-1) - mass < top_p * mass.sum(-1, keepdim=True)) | (top_p >= 1.0)
    keep &= (ranked >= ranked[:, :1] + min_p.log()) | (min_p <= 0.0)
    # Each condition keeps the first of the ranking, except for rounding in the sum of the mass.
    counts = keep.sum(-1).clamp_min_(1)
    chosen = torch.zeros_like(keep).scatter_(1, order, rank < counts[:, None])
    cut = logprobs.masked_fill(~chosen, -torch.inf)
    cut = cut - cut.logsumexp(-1, keepdim=True)
    return torch.where(how.uses[:, None], cut, logprobs), Candidates(counts, order)


def sample(
    logits: Tensor,  # [rows, vocabulary]
    uniform: Tensor,  # [rows], float64
    temperature: Tensor | None,  # [rows]; 0: greedy; None: 1 for all, which gives the same bits
    truncation: Truncation | None,  # None: no row is truncated
    any_greedy: bool,
) -> tuple[Tensor, Tensor, Candidates | None]:
    """Returns tokens [rows] int64, their log-probabilities [rows] float32, and the candidates that truncation left.

    The log-probability is NaN if the logits of a row contain a NaN.
    """
    logits = logits.float()
    scaled = logits
    if temperature is not None:
        divisor = torch.where(temperature > 0, temperature, 1.0) if any_greedy else temperature
        scaled = logits / divisor[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    candidates = None
    if truncation is not None:
        logprobs, candidates = truncate(logprobs, truncation)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the threshold has mass of its own, so it was not cut off.
    places = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(logits.shape[-1] - 1)
    tokens, drawn = places.squeeze(1), logprobs.gather(1, places).squeeze(1)
    if any_greedy and temperature is not None:
        greedy = temperature <= 0
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        drawn = torch.where(greedy, drawn - drawn, drawn)  # 0, or NaN if the logits contain one
    return tokens, drawn, candidates
