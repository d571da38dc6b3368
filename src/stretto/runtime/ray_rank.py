"""What runs in the actor of a trainer's rank: one trainer, whose calls are done one after the other.

Imported on the machine that the rank was placed on. It loads the model itself. Folders that it writes to and reads from
are the run's, so they lie on a file system that every machine of the trainer sees.
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

from stretto.config import Recipe
from stretto.errors import RunError
from stretto.models import load_model
from stretto.runtime.device import choose_device, choose_dtype
from stretto.runtime.parts import make_trainer
from stretto.runtime.ray_model import ModelSource
from stretto.runtime.ray_weights import PackedWeights
from stretto.store.versions import write_file
from stretto.training.parallel import Ranks, open_meeting
from stretto.training.protocol import Trainer
from stretto.types import Batch

WRITING = "writing"  # what is done beside the calls that come one after the other
VERSIONS = "versions"  # the same, for what generation waits for


@dataclass(frozen=True, slots=True)
class Facts:
    """What is said of weights beside where they are."""

    version: int
    kind: Literal["lora", "full"]
    checksum: str
    scale: float


Handed = tuple[Any, PackedWeights | None]
"""What is said, and an object of its own that stays where it was made; rank 0's alone is anything."""


@dataclass(frozen=True, slots=True)
class RankTrainer:
    """Makes the trainer of a rank on the machine where it is called."""

    recipe: Recipe
    source: ModelSource

    def __call__(self, ranks: Ranks) -> Trainer:
        transformers_logging.disable_progress_bar()
        path, device = self.source.here(), choose_device(self.recipe.runtime.device)
        model = load_model(path, choose_dtype(self.recipe.model.dtype, device), device)
        return make_trainer(self.recipe, model, path, base=self.source.path, ranks=ranks)


class TrainerRank:
    """One rank. Every rank is asked for everything, in the same order; rank 0 answers, the others say it is done."""

    def __init__(self, make: Callable[[Ranks], Trainer], rank: int, count: int, threads: int) -> None:
        self._make = make
        self._rank = rank
        self._count = count
        self._threads = threads
        self._store: Any = None
        self._write: Callable[[Path], None] | None = None
        self._trainer: Trainer

    def ready(self) -> None:
        """It has a process, on some machine."""

    def sees(self, folder: str) -> None:
        """Raise `RunError` unless the folder of the run is here, which this rank reads checkpoints from."""
        if not (Path(folder) / "config.toml").is_file():
            raise RunError(
                f"the run folder `{folder}` is not on the machine `{os.uname().nodename}`, where rank {self._rank} of "
                "the trainer was placed: it has to lie on a file system that the machines of all ranks see; give it "
                "with `--out`, or make room for the ranks on this machine"
            )

    def open(self, timeout_s: float) -> tuple[str, int]:
        """Where the others meet this one, which is the first."""
        host = ray.util.get_node_ip_address()
        self._store = open_meeting(host, 0, count=self._count, timeout_s=timeout_s, first=True)
        return host, int(self._store.port)

    def start(self, host: str, port: int, timeout_s: float) -> tuple[int, int]:
        """Meet the others and make the trainer: the version that it holds, and the process that it is in."""
        torch.set_num_threads(self._threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranks = Ranks.join(
            host, port, rank=self._rank, count=self._count, device=device, timeout_s=timeout_s, store=self._store
        )
        self._trainer = self._make(ranks)
        return self._trainer.version, os.getpid()

    def update(self, batch: Batch) -> Handed:
        report = self._trainer.update(batch)
        facts, packed = self._handed(batch.update + 1)
        return (report, facts), packed

    def weights(self, version: int) -> Handed:
        return self._handed(version)

    def base_checksum(self) -> str | None:
        return self._trainer.base_checksum()

    def capture(self) -> None:
        """Copy the trainer's state, for `write`."""
        self._write = self._trainer.capture()

    def write(self, folder: str) -> None:
        """Write what was captured last. Runs beside everything else, in the group `WRITING`."""
        assert self._write is not None, "`capture` comes first"
        try:
            self._write(Path(folder))
        except (OSError, SafetensorError) as error:
            raise RunError(f"the trainer's state cannot be written to `{folder}`: {error}") from error

    def store(self, packed: PackedWeights, folder: str) -> None:
        """Write the file of a version. Runs beside everything else, in the group `VERSIONS`."""
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

    def _handed(self, version: int) -> tuple[Facts | None, PackedWeights | None]:
        weights = self._trainer.weights(version)  # by every rank, because each may hold a part of them
        if self._rank:
            return None, None
        facts = Facts(weights.version, weights.kind, weights.checksum, weights.scale)
        return facts, PackedWeights.pack(weights)
