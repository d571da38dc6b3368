"""The correction weight: how much likelier what was sampled is under the policy before the update, `w = pi_old / mu`.

It multiplies the loss of each token and carries no gradient. `mu` is what the engine sampled from, so `w` holds both
how old a trajectory is and how differently engine and trainer compute. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stretto.objectives.correction_options import MAX_LOG_WEIGHT, CorrectionOptions

if TYPE_CHECKING:
    from stretto.objectives.base import Tokens


def correction_weights(options: CorrectionOptions, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight of each token's loss [C], detached, and diagnostics of each token [C].

    All tokens of a piece have the weight of the piece: a token, `segment_tokens` of a sequence from its start (the last
    piece is what is left), or the sequence. `filter` gives 1 inside of `[low, high]` and 0 outside.
    """
    with torch.no_grad():
        raw = (tokens.proximal - tokens.behaviour).detach()
        logs = _by_level(options, raw, tokens)
        weights = logs.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
        outside = (weights < options.low) | (weights > options.high)
        if options.mode == "cap":
            used = weights.clamp(options.low, options.high)
        else:
            used = torch.where(outside, torch.zeros_like(weights), torch.ones_like(weights))
        return used, {"correction_weight": used, "correction_outside": outside.to(used.dtype)}


def _by_level(options: CorrectionOptions, logs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """`log w` of each token's piece [C]."""
    if options.level == "token":
        return logs
    if options.level == "segment":
        assert options.segment_tokens is not None
        pieces, num_pieces = _segments(tokens, options.segment_tokens)
    else:
        pieces, num_pieces = tokens.sequences, tokens.num_sequences
    sums = logs.new_zeros(num_pieces).index_add_(0, pieces, logs)
    if options.level == "geometric":
        sums = sums / tokens.lengths.to(logs).clamp(min=1)
    return sums[pieces]


def _segments(tokens: Tokens, segment_tokens: int) -> tuple[torch.Tensor, int]:
    """Which piece each token belongs to [C], counted over all sequences, and how many there are at most."""
    lengths = tokens.lengths.to(tokens.sequences)
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(len(tokens.sequences), device=starts.device) - starts[tokens.sequences]
    counts = (lengths + segment_tokens - 1) // segment_tokens
    first = counts.cumsum(0) - counts
    # A bound that needs no wait for the device: no sequence has more pieces than tokens.
    return first[tokens.sequences] + within // segment_tokens, len(tokens.sequences)
