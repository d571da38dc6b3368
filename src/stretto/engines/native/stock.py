"""The forward of any architecture on a device: transformers' own modules over the paged kernels.

For what is not a plain decoder (mixtures of experts among them). More launches than the fused forward, the same cache,
slots, graphs and draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.engines.native.attention import Attend, Attention, DeviceStep
from stretto.engines.native.lora import SlotMask, SlottedLinear
from stretto.engines.native.versions import Slots


class StockDecoder:
    """The forward of one tree over tokens that know their place in the cache; called like `FusedDecoder`."""

    def __init__(self, tree: Any, attention: Attention, slots: Slots) -> None:
        self._tree, self._attention, self._slots = tree, attention, slots
        adapted = [module for module in tree.modules() if isinstance(module, SlottedLinear)]
        self._mask: SlotMask | None = adapted[0].mask if adapted else None
        self.vocabulary = int(tree.get_output_embeddings().weight.shape[0])

    @property
    def scale(self) -> float:
        """Of the adapters: what a captured step has built in."""
        return 1.0 if self._mask is None else self._mask.scale

    def __call__(
        self, tokens: Tensor, positions: Tensor, write_slots: Tensor, slots: Tensor, attend: Attend, keep: Tensor | None
    ) -> Tensor:
        """Logits [kept tokens, vocabulary], float32."""
        self._attention.step = DeviceStep(write_slots.to(torch.int64), attend)
        self._slots.choose(slots)
        logits: Tensor = self._tree(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        ).logits[0]
        return logits.float()
