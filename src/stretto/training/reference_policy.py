"""The reference policy that a divergence is measured against.

It is the policy that training begins with (the base without its adapters, or with those that the run was started from),
or a separate model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stretto.errors import ModelError
from stretto.models.lora import LoraLinear
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel
from stretto.training.parallel import Ranks


class Reference:
    """Runs packed micro-batches under the reference while `active`. Never trains it.

    With `adapters`, the reference is the policy's own model with other `values` in them: it needs no second model in
    memory and uses the modules that train. Without them, `packed` is a separate model.
    """

    def __init__(
        self, packed: PackedModel, adapters: Sequence[torch.Tensor] = (), values: Sequence[torch.Tensor] | None = None
    ) -> None:
        """`values` None: the adapters are zero."""
        self.packed = packed
        self.costs = Costs(packed.model, trains_weights=False)
        self._adapters = list(adapters)
        self._values = None if values is None else list(values)

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
    def first_policy(cls, packed: PackedModel) -> Reference:
        """The policy as it is now, at the beginning of a run that continues an adapter. Copies the adapters."""
        layers = [module for module in packed.model.modules() if isinstance(module, LoraLinear)]
        adapters = [part.detach() for layer in layers for part in (layer.lora_A, layer.lora_B)]
        return cls(packed, adapters, [each.clone() for each in adapters])

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
                if self._values is not None:
                    torch._foreach_copy_(self._adapters, self._values)
                elif self._adapters:
                    torch._foreach_zero_(self._adapters)
                yield self.packed
            finally:
                if self._adapters:
                    torch._foreach_copy_(self._adapters, kept)


def make_reference(
    policy: PackedModel, model: nn.Module | None, ranks: Ranks, *, starts_from_adapter: bool
) -> Reference:
    """Returns the reference of a policy that is about to be trained: `model`, or the policy that training begins with.

    That policy has no adapters, unless the run `starts_from_adapter`.
    """
    if model is None:
        return Reference.first_policy(policy) if starts_from_adapter else Reference.without_adapters(policy)
    ranks.check_same(dict(model.named_parameters()), "algorithm.kl.reference")
    return Reference.of_model(model, policy)
