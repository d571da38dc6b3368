"""The actor of a trainer's rank: one trainer, whose calls are done one after the other.

This module is imported on the machine of the rank. The rank loads the model itself. It reads and writes the run folder,
which therefore has to lie on a file system that the machines of all ranks see.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from stretto.cluster.model_files import ModelSource
from stretto.cluster.weights import PackedWeights
from stretto.errors import RunError
from stretto.models.loading import load_model
from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_device, choose_dtype, prepare_device
from stretto.setup.factories import make_trainer
from stretto.store.version_files import write_file
from stretto.training.learning_rates import LearningRates
from stretto.training.parallel import Ranks, open_rendezvous
from stretto.training.protocol import Trainer
from stretto.types import Batch, UpdateReport

# Concurrency groups of Ray: calls in them run beside the calls that are done one after the other.
WRITING = "writing"  # of checkpoints
VERSIONS = "versions"  # of version files, which generation waits for


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """All of `Weights` but the tensors."""

    version: int
    kind: Literal["lora", "full"]
    checksum: str
    scale: float


HeaderAndWeights = tuple[WeightsHeader, PackedWeights] | tuple[None, None]
"""Two results of one call, an object each: the driver reads the first, and the second stays where it was made.

Rank 0 returns them; the other ranks return None twice.
"""


@dataclass(frozen=True, slots=True)
class RankTrainerFactory:
    """Makes the trainer of a rank on the machine where it is called."""

    recipe: Recipe
    source: ModelSource
    rates: LearningRates | None = None  # of all phases of the run; None: those of the recipe
    adapter: ModelSource | None = None  # that the policy begins with
    teachers: tuple[ModelSource, ...] = ()

    def __call__(self, ranks: Ranks) -> Trainer:
        transformers_logging.disable_progress_bar()
        path, device = self.source.here(), choose_device(self.recipe.runtime.device)
        prepare_device(self.recipe, device)
        model = load_model(path, choose_dtype(self.recipe.model.dtype, device), device)
        return make_trainer(
            self.recipe,
            model,
            path,
            base=self.source.path,
            ranks=ranks,
            rates=self.rates,
            adapter=None if self.adapter is None else self.adapter.here(),
            teachers=[teacher.here() for teacher in self.teachers],
        )


class TrainerRank:
    """One rank. The driver makes every call at all ranks, in the same order; the results of rank 0 count."""

    def __init__(self, make: Callable[[Ranks], Trainer], rank: int, count: int, threads: int) -> None:
        self._make = make
        self._rank = rank
        self._count = count
        self._threads = threads
        self._store: Any = None
        self._write: Callable[[Path], None] | None = None
        self._trainer: Trainer

    def ready(self) -> None:
        """Returns once the actor has a process."""

    def check_folder(self, folder: str) -> None:
        """Raises `RunError` if the run folder is not on this machine: the rank reads checkpoints from it."""
        if not (Path(folder) / "config.toml").is_file():
            raise RunError(
                f"the run folder `{folder}` is not on the machine `{os.uname().nodename}`, where rank {self._rank} of "
                "the trainer was placed: it has to lie on a file system that the machines of all ranks see; give it "
                "with `--out`, or make room for the ranks on this machine"
            )

    def open(self, timeout_s: float) -> tuple[str, int]:
        """Opens the port where the other ranks meet this one, rank 0. Returns host and port."""
        host = ray.util.get_node_ip_address()
        self._store = open_rendezvous(host, 0, count=self._count, timeout_s=timeout_s, first=True)
        return host, int(self._store.port)

    def start(self, host: str, port: int, timeout_s: float) -> tuple[int, int]:
        """Meets the other ranks and makes the trainer. Returns its version, and the process id."""
        torch.set_num_threads(self._threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranks = Ranks.join(
            host, port, rank=self._rank, count=self._count, device=device, timeout_s=timeout_s, store=self._store
        )
        self._trainer = self._make(ranks)
        return self._trainer.version, os.getpid()

    def update(self, batch: Batch) -> tuple[tuple[UpdateReport, WeightsHeader | None], PackedWeights | None]:
        report = self._trainer.update(batch)
        header, packed = self.weights(batch.update + 1)
        return (report, header), packed

    def weights(self, version: int) -> HeaderAndWeights:
        weights = self._trainer.weights(version)  # by every rank, because each may hold a part of them
        if self._rank:
            return None, None
        header = WeightsHeader(weights.version, weights.kind, weights.checksum, weights.scale)
        return header, PackedWeights.pack(weights)

    def base_checksum(self) -> str | None:
        return self._trainer.base_checksum()

    def capture(self) -> None:
        """Copies the trainer's state, for `write`."""
        self._write = self._trainer.capture()

    def write(self, folder: str) -> None:
        """Writes the state that was captured last. Called in the concurrency group `WRITING`."""
        assert self._write is not None, "`capture` comes first"
        try:
            self._write(Path(folder))
        except (OSError, SafetensorError) as error:
            raise RunError(f"the trainer's state cannot be written to `{folder}`: {error}") from error

    def store(self, packed: PackedWeights, folder: str) -> None:
        """Writes the file of a version. Called in the concurrency group `VERSIONS`."""
        write_file(Path(folder), packed.unpack(), f".{os.uname().nodename}-{os.getpid()}")

    def load(self, folder: str) -> int:
        self._trainer.load(Path(folder))
        return self._trainer.version

    def adopt(self, packed: PackedWeights) -> None:
        self._trainer.adopt(packed.unpack())

    def export(self, folder: str) -> None:
        try:
            self._trainer.export(Path(folder))
        except (OSError, SafetensorError) as error:
            raise RunError(f"the policy cannot be written to `{folder}`: {error}") from error
