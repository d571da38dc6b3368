"""The probe of a policy: a fixed sequence with its log-probabilities, for engines that give receipts.

An engine that cannot read back its weights scores the same sequence after it has loaded a version. So the sequence is
the same for all versions of all runs with one vocabulary. Its tokens are drawn evenly from the vocabulary, so that many
rows of the embedding and of the output layer take part.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from stretto.training.packing import micro_batch
from stretto.types import Completion, Probe, Sample

NUM_TOKENS = 64


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Returns the tokens of the probe."""
    digests = (hashlib.blake2b(f"probe {place}".encode(), digest_size=8).digest() for place in range(NUM_TOKENS))
    return tuple(int.from_bytes(digest, "little") % vocabulary for digest in digests)


def score_probe(packed: Any, device: torch.device) -> Probe:
    """Returns the probe with its log-probabilities under the policy in `packed`, by the forward pass of training.

    With several ranks, all of them call it.
    """
    weight = packed.head.weight
    tokens = probe_tokens(int(weight.shape[0]))
    rest, zeros = np.array(tokens[1:], dtype=np.int32), np.zeros(1)
    made = Completion(0, 0, rest, np.zeros(len(rest), dtype=np.float32), "length", "")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    micro = micro_batch(
        [Sample(0, 0, 0, tokens[:1], made, 0.0)], [0], zeros, zeros,
        device=device, dtype=dtype, flash=packed.flash, multiple=packed.multiple,
    )  # fmt: skip
    with torch.inference_mode(False):
        return Probe(tokens, packed.scores(micro, 1.0).float().cpu().numpy())
