"""What whole runs share: a model that costs nothing, and a working directory with a task in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_cases import write_task

from stretto.models.tiny import WarmStart, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", warm_start=WarmStart(steps=2))


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with prompts and rewards in it."""
    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(1)
