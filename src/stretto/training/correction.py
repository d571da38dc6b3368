"""The correction weight `w = pi_n / mu`: the policy before the update over the policy that sampled. Pure.

It multiplies the loss of each token and carries no gradient. `mu` is the distribution that the engine sampled from, so
`w` covers both the age of a trajectory and the numerical difference between engine and trainer. With the trainer's own
log-probabilities under the version that sampled, it splits into these two: `w = (pi_w / mu) (pi_n / pi_w)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stretto.objectives.correction_options import MAX_LOG_WEIGHT, CorrectionOptions

if TYPE_CHECKING:
    from stretto.objectives.base import ObjectiveOptions, Tokens


def correction_weights(algorithm: ObjectiveOptions, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The product of the weights that the objective asks for [C], detached, and diagnostics of each token [C]."""
    product, diagnostics = torch.ones_like(tokens.behaviour), dict[str, torch.Tensor]()
    for name, options in (
        ("correction", algorithm.correction),
        ("discrepancy_correction", algorithm.discrepancy_correction),
        ("staleness_correction", algorithm.staleness_correction),
    ):
        if options is not None:
            above = tokens.scored if name == "discrepancy_correction" else tokens.proximal
            below = tokens.scored if name == "staleness_correction" else tokens.behaviour
            weights, outside = _weights(options, (above - below).detach(), tokens)
            product = product * weights
            diagnostics |= {f"{name}_weight": weights, f"{name}_outside": outside.to(weights.dtype)}
    return product, diagnostics


def _weights(options: CorrectionOptions, raw: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of each token's loss [C], and a mask of the tokens that are outside of the bounds [C].

    The weight is that of the token, of its segment (`segment_tokens` of the sequence, counted from its start; the last
    segment has the remainder), of its turn or of its sequence. `filter` gives 1 inside `[low, high]` and 0 outside.
    """
    with torch.no_grad():
        logs = _by_level(options, raw, tokens)
        weights = logs.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
        outside = (weights < options.low) | (weights > options.high)
        if options.mode == "cap":
            used = weights.clamp(options.low, options.high)
        else:
            used = torch.where(outside, torch.zeros_like(weights), torch.ones_like(weights))
        return used, outside


def _by_level(options: CorrectionOptions, logs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """`log w` of each token's segment, turn or sequence [C]."""
    if options.level == "token":
        return logs
    if options.level == "segment":
        assert options.segment_tokens is not None
        segments, num_segments = _segments(tokens, options.segment_tokens)
    elif options.level == "turn":
        assert tokens.turns is not None
        segments, num_segments = tokens.turns, len(tokens.sequences)  # no more turns than tokens
    else:
        segments, num_segments = tokens.sequences, tokens.num_sequences
    sums = logs.new_zeros(num_segments).index_add_(0, segments, logs)
    if options.level == "geometric":
        sums = sums / tokens.lengths.to(logs).clamp(min=1)
    return sums[segments]


def _segments(tokens: Tokens, segment_tokens: int) -> tuple[torch.Tensor, int]:
    """The segment of each token [C], numbered over all sequences, and an upper bound of their number."""
    lengths = tokens.lengths.to(tokens.sequences)
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(len(tokens.sequences), device=starts.device) - starts[tokens.sequences]
    counts = (lengths + segment_tokens - 1) // segment_tokens
    first = counts.cumsum(0) - counts
    # No sequence has more segments than tokens: a bound that does not wait for the device.
    return first[tokens.sequences] + within // segment_tokens, len(tokens.sequences)
