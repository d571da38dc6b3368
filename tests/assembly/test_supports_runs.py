"""Whole runs that sample by top-k and top-p: the trainer's distributions are those that the engine drew from."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from run_cases import assert_verifies, recipe, rows, run

from stretto.store.reader import JournalReader
from stretto.store.verify import verify
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, UpdateReport

TRUNCATED = ("rollout.top_k=5", "rollout.top_p=0.9", "rollout.temperature=0.8")


def drawn_from(folder: Path) -> list[int]:
    """How many tokens each token that was trained on was drawn from."""
    with JournalReader(folder) as reader:
        samples = [sample for update in reader.updates() for sample in reader.batch(update.update)]
    found: list[int] = []
    for sample in samples:
        supports = sample.completion.supports
        assert supports is not None
        assert len(supports) == len(sample.completion.tokens)
        found += supports.counts.tolist()
    return found


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("paradigm", ["synchronous", "multi-version"])
def test_engine_and_trainer_agree_to_rounding(model: Path, tmp_path: Path, lora: bool, paradigm: str) -> None:
    made = recipe(model, tmp_path, *TRUNCATED, f"rollout.paradigm={paradigm}", lora=lora)
    summary = run(made, tmp_path / "run")
    assert summary["mismatch_kl"] < 1e-9
    assert_verifies(tmp_path / "run")
    counts = drawn_from(tmp_path / "run")
    assert max(counts) <= 5
    assert min(counts) < 5  # top-p cuts deeper somewhere


def test_without_the_supports_the_mismatch_would_show(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.training.packing._supports", lambda *_: None)
    summary = run(recipe(model, tmp_path, *TRUNCATED), tmp_path / "run")
    assert summary["mismatch_kl"] > 1e-2


def test_a_stopped_run_goes_on_with_the_supports_of_what_was_under_way(model: Path, tmp_path: Path) -> None:
    overrides = (*TRUNCATED, "training.steps=4", "rollout.max_tokens=200", "rollout.staleness=3", "rollout.in_flight=9")
    original = LocalTrainer.update

    def interrupted(self: LocalTrainer, batch: Batch) -> UpdateReport:
        if batch.update == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # until the loop has heard of it
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTrainer, "update", interrupted)
        assert run(recipe(model, tmp_path, *overrides), tmp_path / "run")["stopped"]
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM trajectories WHERE state = 'waiting'") != [(0,)]
    summary = run(recipe(model, tmp_path, *overrides), tmp_path / "run", resume=True)
    assert summary["steps"] == 4
    assert summary["mismatch_kl"] < 1e-9
    assert_verifies(tmp_path / "run")
    assert drawn_from(tmp_path / "run")


def test_verify_finds_a_token_outside_of_what_it_was_drawn_from(model: Path, tmp_path: Path) -> None:
    run(recipe(model, tmp_path, *TRUNCATED, "training.steps=1"), tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:
        ((id, count, blob),) = db.execute("SELECT trajectory, num_tokens, supports FROM completions LIMIT 1")
        values = np.frombuffer(blob, "<i4").copy()
        values[count:] += 1
        db.execute("UPDATE completions SET supports = ? WHERE trajectory = ?", (values.tobytes(), id))
    broken = [sentence for finding in verify(tmp_path / "run") for sentence in finding.details]
    assert broken == [
        f"trajectory {id} has a token that is not among those it was drawn from",
        f"trajectory {id} is not what update 0 trained on: its rows were changed",
    ]
