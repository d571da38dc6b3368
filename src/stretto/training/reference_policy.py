"""Frozen policies that the trainer scores tokens under: the reference of a divergence, and teachers.

The reference is the policy that training begins with (the base without its adapters, or with those that the run was
started from), or a separate model. A teacher (`teachers.py`) is always a separate model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from stretto.errors import ModelError
from stretto.models.host_to_device import copied_to_device
from stretto.models.lora import ADAPTED
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel
from stretto.training.mini_batches import MicroBatchPlan
from stretto.training.packing import MicroBatch
from stretto.training.parallel import Ranks
from stretto.types import Batch


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
        self.costs = Costs(packed.model, trains_weights=False, shares_prompts=packed.shares_prompts)
        self._adapters = list(adapters)
        self._values = None if values is None else list(values)
        self._device = packed.head.weight.device
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and their values in host memory

    @classmethod
    def without_adapters(cls, packed: PackedModel) -> Reference:
        """The policy with its LoRA adapters switched off."""
        layers = [module for module in packed.model.modules() if isinstance(module, ADAPTED)]
        if not layers:
            raise ModelError(
                "the policy has no adapters to switch off: name the model to stay near in `algorithm.kl.reference`"
            )
        return cls(packed, [layer.lora_B.detach() for layer in layers])

    @classmethod
    def first_policy(cls, packed: PackedModel) -> Reference:
        """The policy as it is now, at the beginning of a run that continues an adapter. Copies the adapters."""
        layers = [module for module in packed.model.modules() if isinstance(module, ADAPTED)]
        adapters = [part.detach() for layer in layers for part in (layer.lora_A, layer.lora_B)]
        return cls(packed, adapters, [each.clone() for each in adapters])

    @classmethod
    def of_model(cls, model: nn.Module, *, on_host: bool = False, keeps_head: bool = True) -> Reference:
        """A separate model, which the reference owns from now on.

        With `on_host` its weights are on the device only while it is `active`; with `keeps_head` the head stays there.
        """
        model.requires_grad_(False)
        model.eval()
        packed = PackedModel(model)
        packed.prepare(compiled=None, checkpointing=False)
        reference = cls(packed)
        if on_host and packed.head.weight.is_cuda:
            kept = {packed.head.weight, packed.head.bias} if keeps_head else set()
            moved = {name: p for name, p in model.named_parameters() if p not in kept}
            reference._on_host = [(p, p.detach().cpu()) for p in moved.values()]
            reference._release()
        return reference

    def _release(self) -> None:
        """Gives back the device memory of weights that are in host memory."""
        for parameter, value in self._on_host:
            parameter.data = torch.empty(0, dtype=value.dtype, device=self._device)

    def _bring(self) -> None:
        """Copies weights from host memory to the device."""
        copies = copied_to_device({str(place): value for place, (_, value) in enumerate(self._on_host)}, self._device)
        for (parameter, _), value in zip(self._on_host, copies.values(), strict=True):
            parameter.data = value

    @contextlib.contextmanager
    def active(self) -> Iterator[PackedModel]:
        """Yields the packed model of the reference, without gradients. Restores the adapters bit for bit."""
        kept = [each.clone() for each in self._adapters]
        with torch.no_grad():
            if self._on_host:
                self._bring()
            try:
                if self._values is not None:
                    torch._foreach_copy_(self._adapters, self._values)
                elif self._adapters:
                    torch._foreach_zero_(self._adapters)
                yield self.packed
            finally:
                if self._adapters:
                    torch._foreach_copy_(self._adapters, kept)
                if self._on_host:
                    self._release()

    def score(
        self,
        batch: Batch,
        plans: Iterable[MicroBatchPlan],
        pack: Callable[[Batch, MicroBatchPlan, PackedModel], MicroBatch],
        temperature: float,
    ) -> None:
        """Sets `reference` of micro-batches."""
        with self.active() as packed:
            for plan in plans:
                plan.reference = packed.scores(pack(batch, plan, packed), temperature)


def make_reference(
    policy: PackedModel, model: nn.Module | None, ranks: Ranks, *, starts_from_adapter: bool
) -> Reference:
    """Returns the reference of a policy that is about to be trained: `model`, or the policy that training begins with.

    That policy has no adapters, unless the run `starts_from_adapter`.
    """
    if model is None:
        return Reference.first_policy(policy) if starts_from_adapter else Reference.without_adapters(policy)
    ranks.check_same(dict(model.named_parameters()), "algorithm.kl.reference")
    own, asked = policy.head.out_features, model.get_output_embeddings().out_features  # type: ignore[operator]
    if own != asked:
        raise ModelError(
            f"`algorithm.kl.reference` has a vocabulary of {asked:,}, and the policy one of {own:,}: their "
            "log-probabilities cannot be compared; choose a model with the policy's tokenizer"
        )
    return Reference.of_model(model)
