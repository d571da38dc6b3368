"""A trainer without a model, for tests and dry runs. It implements the whole `Trainer` protocol.

Its weights are a few numbers hashed from every batch so far (tokens, rewards, order), so two runs that trained on
different data have different checksums. The duration of an update and a failure can be chosen.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from stretto.errors import TrainerError
from stretto.models.checksums import checksum
from stretto.training.sequence_sizes import SequenceSizes
from stretto.types import Batch, UpdateReport, Weights, by_trajectory

STATE_FILE = "fake.safetensors"
BASE_CHECKSUM = 32 * "0"  # a placeholder: it has no base
SIZE = 8  # numbers in its weights


class FakeTrainer:
    """Takes `update_s` seconds an update; update `fail_at` raises `ValueError`, like a bug in an algorithm."""

    def __init__(self, *, update_s: float = 0.0, fail_at: int | None = None) -> None:
        self._update_s = update_s
        self._fail_at = fail_at
        self._version = 0
        self._values = torch.zeros(SIZE, dtype=torch.int64)
        self.batches: list[Batch] = []  # that it was given, in order

    @property
    def version(self) -> int:
        return self._version

    def update(self, batch: Batch) -> UpdateReport:
        if batch.update != self._version:
            raise TrainerError(f"update {batch.update} was asked for, but the trainer holds version {self._version}")
        if batch.update == self._fail_at:
            raise ValueError(f"the fake trainer was told to fail at update {self._fail_at}")
        time.sleep(self._update_s)
        digest = hashlib.blake2b(self._values.numpy().tobytes(), digest_size=8 * SIZE)
        for sample in batch.samples:
            ids = [sample.trajectory, sample.version, *([sample.lineage] if sample.lineage else [])]
            digest.update(np.asarray(ids, dtype="<i8").tobytes())
            digest.update(sample.completion.tokens.astype("<i4").tobytes())
            digest.update(np.asarray([sample.reward], dtype="<f8").tobytes())
        self._values = torch.from_numpy(np.frombuffer(digest.digest(), dtype="<i8").copy())
        self._version += 1
        self.batches.append(batch)
        trajectories = by_trajectory(batch.samples)
        rewards: dict[int, set[float]] = {}
        for sample in batch.samples:
            rewards.setdefault(sample.group, set()).add(sample.reward)
        metrics = {
            "reward_mean": sum(each[0].reward for each in trajectories) / len(trajectories),
            "num_sequences": float(len(batch.samples)),
            "groups_without_signal": float(sum(len(each) == 1 for each in rewards.values())),
        }
        return UpdateReport(batch.update, metrics, 0.0, 0, self._update_s)

    def weights(self, version: int) -> Weights:
        if version != self._version:
            raise TrainerError(f"the weights of version {version} were asked for: the trainer holds {self._version}")
        tensors = {"values": self._values.clone()}
        return Weights(version, "lora", tensors, checksum(tensors))

    def base_checksum(self) -> str | None:
        return BASE_CHECKSUM

    @property
    def micro_tokens(self) -> int | None:
        return None

    def smaller_micro_batches(self, batch: Batch) -> int | None:
        budget = batch.micro_tokens or self.micro_tokens
        return None if budget is None else SequenceSizes.of(batch.samples, shares_prompts=False).smaller(budget)

    def state(self) -> dict[str, torch.Tensor]:
        return {"values": self._values.clone(), "version": torch.tensor(self._version)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._values, self._version = state["values"].clone(), int(state["version"])

    def capture(self) -> Callable[[Path], None]:
        state = self.state()

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(state, folder / STATE_FILE)

        return write

    def save(self, folder: Path) -> None:
        self.capture()(folder)

    def load(self, folder: Path) -> None:
        self.restore(load_file(folder / STATE_FILE))

    def adopt(self, weights: Weights) -> None:
        if weights.version != self._version or weights.tensors.keys() != {"values"}:
            raise TrainerError(f"weights of version {weights.version} do not fit: the trainer holds {self._version}")
        self._values = weights.tensors["values"].clone()

    def export(self, folder: Path) -> None:
        self.save(folder)
