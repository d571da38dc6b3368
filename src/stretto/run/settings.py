"""The options of a run loop, which come from the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a loop. Durations are in seconds."""

    seed: int
    stall_s: float  # without an event or a token, until the run ends with an error
    reward_s: float = 0.0  # beyond `stall_s`, for a reward that has a deadline of its own
    checkpoint_s: float = math.inf  # between checkpoints, which are written when a version is published
    instance_s: float = 120.0  # for an instance that has work and makes no progress; then it is lost
    replacements: int = 0  # of lost instances, at most
    rebalance_s: float = 5.0  # between two load samples
    vocabulary: int | None = None  # size: instances may answer with smaller token ids only; None: any
    records_tokens: bool = False  # the journal gets what the trainer computed for each token
    sampled_ages: int = 0  # an update gets the weights of versions up to so much older than its own; 0: of none
