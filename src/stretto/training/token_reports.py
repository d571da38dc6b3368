"""The numbers of an update for each token, sample by sample, for people who look at a run (`observe.tokens`)."""

from __future__ import annotations

import numpy as np

from stretto.objectives.base import MAX_LOG_RATIO
from stretto.training.advantages import Advantages
from stretto.training.packing import sampled_lengths
from stretto.training.update_metrics import TokenValues
from stretto.types import Batch, TokenReport


def token_reports(batch: Batch, tokens: TokenValues, advantages: Advantages, scale: float | None) -> list[TokenReport]:
    """Returns the values of the tokens of each sample that was computed, in the order of the batch.

    `tokens` has every sample once, its tokens one after the other. `scale` is the loss scale that their gradients
    have, if any.
    """
    lengths = sampled_lengths(batch.samples)
    of_tokens = np.split(advantages.of_tokens(lengths), np.cumsum(lengths)[:-1])
    log_ratios = tokens.anchor_log_ratios if len(tokens.anchor_log_ratios) else tokens.log_ratios
    ratios = np.exp(np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    gradients = tokens.gradients / (scale or 1.0) if len(tokens.gradients) else np.zeros_like(ratios)
    starts = np.flatnonzero(np.diff(tokens.samples, prepend=-1))
    found = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens.samples)], strict=True):
        position = int(tokens.samples[start])
        completion = batch.samples[position].completion
        engine = np.asarray(completion.logprobs, dtype=np.float64)[completion.sampled]
        found.append(
            TokenReport(
                position,
                logprobs=(engine + tokens.log_ratios[start:end]).astype(np.float32),
                ratios=ratios[start:end].astype(np.float32),
                advantages=of_tokens[position].astype(np.float32),
                gradients=gradients[start:end].astype(np.float32),
            )
        )
    return sorted(found, key=lambda report: report.position)
