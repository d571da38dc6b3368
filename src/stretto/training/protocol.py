"""The seam between the loop and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stretto.types import Batch, UpdateReport, Weights

if TYPE_CHECKING:
    import torch


class Trainer(Protocol):
    """One policy in training. Called from one thread at a time; every method blocks until it is done.

    The trainer holds exactly one version. Update `n` turns version `n` into version `n + 1`.
    """

    @property
    def version(self) -> int:
        """The version that it holds: the number of updates done."""
        ...

    def update(self, batch: Batch) -> UpdateReport:
        """Make update `batch.update`. Raises `TrainerError`, by name, and then nothing has changed."""
        ...

    def weights(self, version: int) -> Weights:
        """A copy of the weights that it holds, with their checksum. On CUDA it is made on the current stream."""
        ...

    def base_checksum(self) -> str | None:
        """Of the frozen weights that its adapters belong to, which nothing changes; None: it trains every weight."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of everything that decides what later updates do."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave: later updates are then the same, bit for bit.

        Raises `TrainerError`, and then nothing has changed, where it is of another trainer.
        """
        ...

    def adopt(self, weights: Weights) -> None:
        """Make the policy the one that `weights` are, of the version that it is at; the optimizer stays as it is.

        Where it is that one already, nothing changes. Raises `TrainerError`, and then nothing has changed either.
        """
        ...

    def capture(self) -> Callable[[Path], None]:
        """Copy the state; what is returned writes the copy to a folder, in any thread and while updates go on."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state to a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the policy for others to load: a Hugging Face model folder, or a PEFT adapter folder."""
        ...
