"""Ends whole runs before their time: as if they were killed, by Ctrl-C, or by killing their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_cases import Heard, assert_verifies, run, story

from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, UpdateReport


class Dies(Heard):
    """Ends the process with a `KeyError`, as far as the run can tell, as an update ends."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == self.at:
            raise KeyError("as if it were killed here")


class Stops(Silent):
    """Presses Ctrl-C as an update ends."""

    def __init__(self, at: int) -> None:
        self.at = at

    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def interrupt_during(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """Presses Ctrl-C while that update trains."""
    original = LocalTrainer.update

    def interrupted(self: LocalTrainer, batch: Batch) -> UpdateReport:
        if batch.update == update:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # until the loop has heard of it
        return original(self, batch)

    monkeypatch.setattr(LocalTrainer, "update", interrupted)


def assert_same_bits_after_a_kill(made: Recipe, folder: Path, at: int) -> None:
    """Runs the recipe twice: killed as an update ends and resumed (`run`), and without that (`whole`)."""
    with pytest.raises(KeyError):
        run(made, folder / "run", observer=Dies(at))
    run(made, folder / "run", resume=True)
    assert_verifies(folder / "run")
    run(made, folder / "whole")
    assert story(folder / "run") == story(folder / "whole")


def train_and_kill(folder: Path, overrides: Sequence[str], *, num_updates: int, resume: bool = False) -> None:
    """Runs `recipe.toml` of the working directory in a process, which is killed after so many updates in all."""
    command = [sys.executable, "-m", "stretto", "train", "recipe.toml", "--out", str(folder)]
    command += [word for each in overrides for word in ("--set", each)] + (["--resume"] if resume else [])
    metrics = folder / "metrics.jsonl"
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not metrics.exists() or metrics.read_text().count('"kind": "update"') < num_updates:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
