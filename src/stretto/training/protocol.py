"""The protocol of a trainer, which the run needs and `training/trainer.py` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stretto.types import Batch, UpdateReport, Weights

if TYPE_CHECKING:
    import torch


class Trainer(Protocol):
    """Trains one policy. Called from one thread at a time; every method blocks until it is done.

    The trainer holds exactly one version. Update `n` turns version `n` into version `n + 1`.
    """

    @property
    def version(self) -> int:
        """The version it holds: the number of updates done."""
        ...

    @property
    def micro_tokens(self) -> int | None:
        """The most tokens of a micro-batch, unless a batch names another number; None if it makes none."""
        ...

    def smaller_micro_batches(self, batch: Batch) -> int | None:
        """The most tokens that micro-batches of half the size have; None if none would become smaller."""
        ...

    def update(self, batch: Batch) -> UpdateReport:
        """Runs update `batch.update`. Raises `TrainerError`, and then nothing has changed.

        Raises `LostObjectError`, with nothing changed, if weights of `batch.versions` that it needs cannot be read.
        """
        ...

    def weights(self, version: int) -> Weights:
        """Returns a copy of the weights with their checksum. On CUDA the copy runs on the current stream."""
        ...

    def base_checksum(self) -> str | None:
        """The checksum of the frozen weights under the adapters, which never change; None if it trains all weights."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Returns a copy of everything that later updates depend on."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores a `state()`: later updates are then the same, bit for bit.

        Raises `TrainerError`, with nothing changed, if the state is of another trainer.
        """
        ...

    def adopt(self, weights: Weights) -> None:
        """Replaces the policy by `weights`, which must be of the version it holds; the optimizer state stays.

        Does nothing if the weights are the same already. Raises `TrainerError` with nothing changed.
        """
        ...

    def capture(self) -> Callable[[Path], None]:
        """Copies the state and returns a function that writes the copy to a folder.

        The function may be called in any thread, while updates continue.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes the state to a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restores the state that `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Writes the policy for other programs: a Hugging Face model folder, or a PEFT adapter folder."""
        ...
