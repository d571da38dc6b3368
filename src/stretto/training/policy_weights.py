"""The weights of the policy as the trainer hands them out: adapters or every parameter, whole on rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.errors import TrainerError
from stretto.models.checksums import checksum
from stretto.models.host_to_device import copied_to_device
from stretto.models.lora import lora_tensors, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.training.parallel import Ranks, local
from stretto.training.sharding import Sharding
from stretto.types import Weights


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """The weights of a trainer's model. With several ranks, all of them call every method."""

    model: Any
    lora: LoraOptions | None
    adapted: tuple[str, ...]  # the modules that have adapters
    base: str  # the base model that an exported adapter names
    ranks: Ranks
    sharding: Sharding | None

    @property
    def names(self) -> Collection[str]:
        """The names of the weights' tensors."""
        if self.lora is None:
            return [name for name, _ in self.model.named_parameters()]
        return [f"{name}.{leaf}" for name in self.adapted for leaf in ("lora_A", "lora_B")]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def base_checksum(self) -> str | None:
        """The checksum of the frozen weights under the adapters; None if every weight is trained."""
        if self.lora is None:
            return None
        return checksum({name: p for name, p in self.model.named_parameters() if not p.requires_grad})

    def weights(self, version: int) -> Weights:
        """Returns a copy. If the model is sharded, it is in the host memory of rank 0, and other ranks get none."""
        if self.lora is not None:
            tensors = lora_tensors(self.model, self.adapted)
            return Weights(version, "lora", tensors, checksum(tensors, self.lora.scale), self.lora.scale)
        if self.sharding is not None:
            tensors = self.sharding.parameters(self.model)
            return Weights(version, "full", tensors, self.ranks.gathered(checksum(tensors))[0])
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        tensors = {name: torch.empty_like(p) for name, p in parameters.items()}
        torch._foreach_copy_(list(tensors.values()), list(parameters.values()))
        return Weights(version, "full", tensors, checksum(tensors))

    def check_names(self, weights: Weights) -> None:
        """Raises `TrainerError` if the weights are of another policy."""
        if wrong := set(self.names) ^ weights.tensors.keys():
            raise TrainerError(
                f"weights of version {weights.version} are of another policy: `{min(wrong)}` does not fit"
            )

    @contextlib.contextmanager
    def installed(self, weights: Weights) -> Iterator[None]:
        """Puts other weights into the model while the context is open, for passes that train nothing.

        Where device and type are the same, the parameters point at them and nothing is copied. Weights in host memory
        are first copied to the GPU, which needs memory for them. Shards and other types are copied in one parameter at
        a time, while the policy's own values wait. The policy is restored bit for bit.
        """
        self.check_names(weights)
        tensors = {f"value/{name}": tensor for name, tensor in weights.tensors.items()}
        if self.sharding is not None:
            tensors = self.sharding.scattered(tensors)
        elif self._device.type == "cuda" and any(tensor.device != self._device for tensor in tensors.values()):
            tensors = copied_to_device(tensors, self._device)
        own: list[tuple[torch.Tensor, torch.Tensor, bool]] = []  # parameter, its value, and whether it only points
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            try:
                for name in self.names:
                    parameter, tensor = parameters[name], tensors[f"value/{name}"]
                    points = self.sharding is None and (tensor.device, tensor.dtype) == (
                        parameter.device, parameter.dtype,
                    )  # fmt: skip
                    if points:
                        own.append((parameter, parameter.data, True))
                        parameter.data = tensor
                        continue
                    held = local(parameter.detach())
                    own.append((held, held.to(tensor.device, copy=True), False))
                    held.copy_(tensor)
                yield
            finally:
                for parameter, value, points in own:
                    if points:
                        parameter.data = value
                    else:
                        parameter.copy_(value)

    def export(self, folder: Path, *writers: Callable[[Path], object]) -> None:
        """Writes the weights for other programs, on rank 0; `writers` add further files: a critic, a tokenizer."""
        whole = None if self.sharding is None else self.sharding.parameters(self.model)
        with self.ranks.together():
            if self.ranks.rank:
                return
            if self.lora is not None:
                tensors = lora_tensors(self.model, self.adapted)
                dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
                write_adapter(
                    folder, tensors, options=self.lora, base=self.base, names=self.adapted,
                    base_checksums={dtype: self.base_checksum() or ""},
                )  # fmt: skip
            else:
                self.model.save_pretrained(folder, state_dict=whole)
            for write in writers:
                write(folder)
