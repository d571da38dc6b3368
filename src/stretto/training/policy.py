"""What is trained, as others get it: adapters or every parameter, whole even where each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.checksums import checksum
from stretto.training.lora import LoraOptions, lora_tensors, write_adapter
from stretto.training.parallel import Ranks
from stretto.training.sharding import Sharding
from stretto.types import Weights


@dataclass(frozen=True, slots=True)
class Policy:
    """The weights of a trainer's model. With several ranks, every method is called by all of them."""

    model: Any
    lora: LoraOptions | None
    adapted: tuple[str, ...]  # the modules that have adapters
    base: str  # what an adapter says that it belongs to
    ranks: Ranks
    sharding: Sharding | None

    @property
    def names(self) -> Collection[str]:
        """Of the tensors that its weights are."""
        if self.lora is None:
            return [name for name, _ in self.model.named_parameters()]
        return [f"{name}.{leaf}" for name in self.adapted for leaf in ("lora_A", "lora_B")]

    def base_checksum(self) -> str | None:
        """Of the frozen weights that adapters belong to; None: weights that are trained in full have no base."""
        if self.lora is None:
            return None
        return checksum({name: p for name, p in self.model.named_parameters() if not p.requires_grad})

    def weights(self, version: int) -> Weights:
        """A copy. Where the model is cut over the ranks, it is in rank 0's memory of the host; others have none."""
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

    def export(self, folder: Path, *beside: Callable[[Path], object]) -> None:
        """Have rank 0 write it for others to load, and what stands beside it: a critic, a tokenizer."""
        whole = None if self.sharding is None else self.sharding.parameters(self.model)
        with self.ranks.together():
            if self.ranks.rank:
                return
            if self.lora is not None:
                tensors = lora_tensors(self.model, self.adapted)
                write_adapter(folder, tensors, options=self.lora, base=self.base, names=self.adapted)
            else:
                self.model.save_pretrained(folder, state_dict=whole)
            for write in beside:
                write(folder)
