"""The policy that a divergence is measured against: the base without its adapters, or a model of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stretto.errors import ModelError
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel
from stretto.training.lora import LoraLinear


class Reference:
    """Runs packed micro-batches under the reference while `active`, and never trains it.

    With `adapters` it is the policy's own model while their `B` is zero: no second model in memory, and the very
    modules that train. Without, `packed` is a model of its own.
    """

    def __init__(self, packed: PackedModel, adapters: Sequence[torch.Tensor] = ()) -> None:
        self.packed = packed
        self.costs = Costs(packed.model, trains_weights=False)
        self._adapters = list(adapters)

    @classmethod
    def without_adapters(cls, packed: PackedModel) -> Reference:
        """The policy with its LoRA adapters switched off."""
        layers = [module for module in packed.model.modules() if isinstance(module, LoraLinear)]
        if not layers:
            raise ModelError(
                "the policy has no adapters to switch off: name the model to stay near in `algorithm.kl.reference`"
            )
        return cls(packed, [layer.lora_B.detach() for layer in layers])

    @classmethod
    def of_model(cls, model: nn.Module, policy: PackedModel) -> Reference:
        """A model of its own, whose tree belongs to the reference from now on."""
        model.requires_grad_(False)
        model.eval()
        packed = PackedModel(model)
        if packed.head.out_features != policy.head.out_features:
            raise ModelError(
                f"`algorithm.kl.reference` has a vocabulary of {packed.head.out_features:,}, and the policy one of "
                f"{policy.head.out_features:,}: their log-probabilities cannot be compared"
            )
        packed.prepare(compiled=None, checkpointing=False)
        return cls(packed)

    @contextlib.contextmanager
    def active(self) -> Iterator[PackedModel]:
        """The packed model of the reference, without gradients. The adapters come back bit for bit."""
        kept = [each.clone() for each in self._adapters]
        with torch.no_grad():
            try:
                if self._adapters:
                    torch._foreach_zero_(self._adapters)
                yield self.packed
            finally:
                if self._adapters:
                    torch._foreach_copy_(self._adapters, kept)
