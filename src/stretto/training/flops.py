"""Counts the operations of an update and computes the model FLOPs utilization (MFU).

Counted are the operations that the mathematics requires:

- products with weights: twice their elements a token in the forward pass, the same for the gradient of the input, and
  with full-parameter training again for the gradient of the weight;
- attention: by the squares of the lengths, halved by causality, and twice that in the backward pass;
- of a prompt that several samples share, all of this once;
- the head, for the tokens that it is applied to;
- passes that the algorithm needs before its first step.

Not counted are recomputation, padding, adapters, a critic's head, and everything that is not a matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stretto.models.routing import expert_elements
from stretto.training.packing import sampled_lengths
from stretto.training.sequence_sizes import SequenceSizes
from stretto.types import Batch

# Dense bfloat16 and float16 FLOP/s, by a part of the device's name; the first match counts. ("GH200" has "H200".)
HALF_PEAKS = (("H200", 989e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("A100", 312e12))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of the device in this type; None if unknown."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in HALF_PEAKS if part in name), None)


class Costs:
    """Counts the operations of one model."""

    def __init__(self, model: Any, *, trains_weights: bool, shares_prompts: bool = False) -> None:
        head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.head_elements = head.weight.numel()
        self.elements = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        self.elements += expert_elements(model)
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.attention_width = config.num_hidden_layers * heads * head_size
        self.shares_prompts = shares_prompts
        self.passes = 3 if trains_weights else 2  # forward, gradient of the input, gradient of the weight

    def forward(self, batch: Batch, *, head: bool = True) -> float:
        """Operations of one forward pass over a batch; a multiplication and an addition count as two."""
        sizes = SequenceSizes.of(batch.samples, shares_prompts=self.shares_prompts)
        return self._products(batch, sizes, head=head) + self._attention(sizes)

    def update(self, batch: Batch) -> float:
        """Operations of all optimizer steps of an update: every token goes forward and backward once."""
        sizes = SequenceSizes.of(batch.samples, shares_prompts=self.shares_prompts)
        # Attention has two products forward and four backward, whatever is trained.
        return self.passes * self._products(batch, sizes, head=True) + 3.0 * self._attention(sizes)

    def _products(self, batch: Batch, sizes: SequenceSizes, *, head: bool) -> float:
        targets = int(sampled_lengths(batch.samples).sum()) if head else 0
        return float(2.0 * (self.elements * sizes.total + self.head_elements * targets))

    def _attention(self, sizes: SequenceSizes) -> float:
        """Two products of `length ** 2 / 2` pairs, and of each own token with each of its prefix."""
        squares = np.square(sizes.alone, dtype=np.float64) - np.square(sizes.prefix, dtype=np.float64)
        shared = np.square(sizes.family_prefixes, dtype=np.float64)
        return float(2.0 * self.attention_width * (squares.sum() + shared.sum()))


def update_flops(
    costs: Costs,
    batch: Batch,
    computed: Sequence[int],  # the samples that are trained on
    *,
    num_steps: int,
    critic: bool,
    reference: Costs | None,
    scored: Sequence[Sequence[int]] = (),  # the samples that were scored under each older version
) -> float:
    """Operations of an update over the samples that are computed, with the passes before its first step.

    Several steps need the log-probabilities under the policy before the update, and a critic needs its values: one pass
    computes both. A divergence needs a pass under the reference, and samples may be scored under their own versions.
    """
    trained = _part(batch, computed)
    total = costs.update(trained)
    if num_steps > 1 or critic:
        total += costs.forward(trained, head=num_steps > 1)
    if reference is not None:
        total += reference.forward(trained)
    return total + sum(costs.forward(_part(batch, samples)) for samples in scored)


def _part(batch: Batch, samples: Sequence[int]) -> Batch:
    return replace(batch, samples=[batch.samples[index] for index in samples])


def utilization(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """The metrics `flops` and, if the device's peak is known, `mfu`."""
    return {"flops": flops} if peak is None else {"flops": flops, "mfu": flops / seconds / peak}
