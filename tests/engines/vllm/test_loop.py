"""The loop with vLLM engines over fake children: receipts are recorded, and what breaks costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm_child import answer, digest_of
from loop_cases import Bench, broken, plan
from vllm_cases import PROBE, Children, options_of

from stretto.engines.vllm.engine import VllmEngine
from stretto.models.checksums import checksum
from stretto.store.verify import verify
from stretto.training.fake import FakeTrainer
from stretto.types import Probe, Weights


class ProbedTrainer(FakeTrainer):
    """Hands its numbers over as an adapter, with a probe."""

    def weights(self, version: int) -> Weights:
        (values,) = super().weights(version).tensors.values()
        tensors = {"layer.lora_A": values[None].clone(), "layer.lora_B": values[:, None].clone()}
        probe = Probe(PROBE, np.array(answer(digest_of(tensors), PROBE), dtype=np.float32))
        return replace(Weights(version, "lora", tensors, checksum(tensors)), probe=probe)


@pytest.fixture
def bench_of(fake_children: Children, tmp_path: Path) -> Any:
    cores: list[VllmEngine] = []

    def core(instance: int) -> VllmEngine:
        cores.append(fake_children.core(options_of("model", slots=3, rows=12, lora_rank=1)))
        return cores[-1]

    def make(**options: Any) -> Bench:
        bench = Bench(tmp_path, plan(updates=8), engines=(), trainer=ProbedTrainer(), make=core, **options)
        bench.cores = cores  # type: ignore[attr-defined]
        return bench

    return make


def rows(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        return journal.execute(query).fetchall()


def test_a_run_is_verified_by_its_receipts(bench_of: Any, tmp_path: Path) -> None:
    assert bench_of().run()
    assert broken(tmp_path) == []
    assert "96 of the completions by receipt" in verify(tmp_path)[0].counts
    found = rows(tmp_path, "SELECT r.version, v.checksum = r.checksum FROM receipts r JOIN versions v USING (version)")
    assert {version for version, _ in found} >= set(range(7))
    assert all(same for _, same in found)


def test_a_child_that_is_killed_in_the_middle_loses_nothing(bench_of: Any, tmp_path: Path) -> None:
    async def kill(bench: Bench) -> None:
        while bench.trainer.version < 2:
            await asyncio.sleep(0.005)
        os.kill(bench.cores[0]._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    assert bench_of(beside=kill, replacements=1).run()
    assert broken(tmp_path) == []
    (lost,) = rows(tmp_path, "SELECT reason FROM instances WHERE outcome = 'lost'")
    assert "signal 9" in lost[0]
    assert rows(tmp_path, "SELECT COUNT(*) FROM trajectories WHERE state = 'trained'") == [(96,)]


def test_a_receipt_that_fails_has_the_version_sent_again(
    bench_of: Any, fake_children: Children, tmp_path: Path
) -> None:
    async def once(bench: Bench) -> None:
        while bench.trainer.version < 1:
            await asyncio.sleep(0.001)
        with fake_children.fault("zeroed"):
            while not rows(tmp_path, "SELECT 1 FROM notes WHERE kind = 'damaged transfer'"):
                await asyncio.sleep(0.001)

    assert bench_of(beside=once, replacements=4).run()
    assert broken(tmp_path) == []
    (text,) = rows(tmp_path, "SELECT text FROM notes WHERE kind = 'damaged transfer' LIMIT 1")[0]
    assert "is not what the engine serves" in text
