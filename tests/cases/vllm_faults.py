"""Faults of a child process, injected between the check of a version's file and its use. In the child alone.

The file that the environment variable `STRETTO_TEST_FAULT` names says which fault the next loads have; empty: none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stretto.models.lora import WEIGHTS_FILE

VARIABLE = "STRETTO_TEST_FAULT"
ADAPTER_FAULTS = ("swapped", "zeroed", "truncated", "never loaded")


class Faulty:
    """Goes before a backend among the bases of a class."""

    _last: Path | None = None  # the adapter that was loaded before

    def fault(self) -> str:
        path = Path(os.environ.get(VARIABLE, ""))
        return path.read_text() if path.is_file() else ""

    async def load_adapter(self: Any, number: int, folder: Path) -> None:
        fault = self.fault()
        last, self._last = self._last, folder
        if fault == "never loaded":
            self._adapters[number] = None
            return
        if fault == "swapped":
            assert last is not None
            folder = last
        elif fault in ("zeroed", "truncated"):
            folder = _changed(folder, fault)
        await super().load_adapter(number, folder)  # type: ignore[misc]

    async def repack_head(self: Any) -> None:
        if self.fault() != "stale head":
            await super().repack_head()  # type: ignore[misc]

    async def held(self: Any) -> str | None:
        found: str | None = await super().held()  # type: ignore[misc]
        return "0" * 32 if self.fault() == "other bytes" else found


def _changed(folder: Path, fault: str) -> Path:
    copy = folder.with_name(f"{folder.name}-{fault}")
    shutil.copytree(folder, copy)
    file = copy / WEIGHTS_FILE
    if fault == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    else:
        tensors = {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return copy
