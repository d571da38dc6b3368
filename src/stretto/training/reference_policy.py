"""The reference policy that a divergence is measured against: the base without its adapters, or a separate model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stretto.errors import ModelError
from stretto.models.lora import LoraLinear
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel


class Reference:
    """Runs packed micro-batches under the reference while `active`. Never trains it.

    With `adapters`, the reference is the policy's own model with their `B` set to zero: it needs no second model in
    memory and uses the modules that train. Without them, `packed` is a separate model.
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
        """A separate model, which the reference owns from now on."""
        model.requires_grad_(False)
        model.eval()
        packed = PackedModel(model)
        if packed.head.out_features != policy.head.out_features:
            raise ModelError(
                f"`algorithm.kl.reference` has a vocabulary of {packed.head.out_features:,}, and the policy one of "
                f"{policy.head.out_features:,}: their log-probabilities cannot be compared; choose a model with the "
                "policy's tokenizer"
            )
        packed.prepare(compiled=None, checkpointing=False)
        return cls(packed)

    @contextlib.contextmanager
    def active(self) -> Iterator[PackedModel]:
        """Yields the packed model of the reference, without gradients. Restores the adapters bit for bit."""
        kept = [each.clone() for each in self._adapters]
        with torch.no_grad():
            try:
                if self._adapters:
                    torch._foreach_zero_(self._adapters)
                yield self.packed
            finally:
                if self._adapters:
                    torch._foreach_copy_(self._adapters, kept)
