"""The checkpoint of a trainer: one file with its state and, for adapters, the checksum of their base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stretto.errors import TrainerError

STATE_FILE = "trainer.safetensors"


def base_entry(checksum: str | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the entry of a checkpoint that has the checksum of the base, named by its type; for None no entry."""
    if checksum is None:
        return {}
    name = str(dtype).removeprefix("torch.")
    return {f"base/{name}": torch.tensor(list(bytes.fromhex(checksum)), dtype=torch.uint8)}


def write_state(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a state, which is in host memory, to a folder that may not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / STATE_FILE)


def read_state(folder: Path, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state that `write_state` wrote. `base` is the entry of the trainer that reads it.

    Raises `TrainerError` if the folder has none, or if it has adapters of another base.
    """
    if not (folder / STATE_FILE).exists():
        raise TrainerError(f"`{folder}` is no checkpoint of a trainer: it has no `{STATE_FILE}`")
    state: dict[str, torch.Tensor] = load_file(folder / STATE_FILE)
    for name, own in base.items():
        if name in state and state[name].tolist() != own.tolist():
            raise TrainerError(
                f"the checkpoint in `{folder}` has adapters of another base: give the original `model.path`, or start "
                "a new run"
            )
    return state
